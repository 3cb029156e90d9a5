"""The kernels of a router: GEMMs of fp32 accuracy, and top-k.

A GEMM runs on bf16 tensor cores. Each fp32 number is split in registers into a sum of bf16 numbers, called its terms.

    forward  out (T, E) = x (T, D) w (E, D)^T    x is bf16, w is split into three terms
    dgrad    dx (T, D)  = dy (T, E) w (E, D)     dy and w are split into two terms each
    wgrad    dw (E, D)  = dy (T, E)^T x (T, D)   x is bf16, dy is split into three terms, or two if dw is bf16

A bf16 w is its own single term. A term has 8 of fp32's 24 significant bits, so three terms add up to the number
exactly. Two terms miss at most 2^-16 of it. Example: the terms of 1 + 2^-9 + 2^-23 are 1, 2^-9 and 2^-23.

The product of two terms is exact in fp32. dgrad omits three things: the third term of dy, the third term of w, and the
product of both second terms. Each omission costs at most 2^-16 * sum(|dy| * |w|), all of them 3 * 2^-16 * sum(|dy| *
|w|). Rounding dx to bf16 costs more, 2^-8 of dx, unless |dx| is below 1% of sum(|dy| * |w|).

Tensor cores drop the bits of an addend that lie below the last bit of the running sum. Dropping always rounds towards
zero, so errors pile up in the long sums of forward and wgrad. These two kernels sum only BLOCK_K products at a time on
tensor cores, smallest terms first. Ordinary fp32 additions add up the partial sums.

If a GEMM has few tiles, as most weight gradients do, several programs share a tile. Each contracts one part of the
contracted axis, and torch adds the parts in order.

The operand that is split is A of wgmma, which may lie in registers. x is B, which lies in shared memory. Only dgrad has
terms in shared memory, those of w. Reads from L2 limit the speed, and larger tiles need fewer reads. Example: at
T = 8192, D = 2048, E = 128 each kernel reads 130 MB, although its tensors have only 38 MB. On an H200 forward, dgrad
and wgrad take 34, 38 and 35 us. torch's fp32 GEMMs take 148, 143 and 94 us.

T tokens, D model dim, E experts.

Top-k chooses the K best logits of each row (token), and normalizes their scores:

    forward    logits, choice or None (T, E) -> ids, weights, chosen logits (T, K)    4 E, 8 E, + 12 K bytes a token
    backward   weights, their gradients, ids (, chosen) -> d_logits (T, E), mostly zeros

A logit and its expert id are packed into one 64-bit integer, the logit in the upper half. Integers sort as their logits
do. NaN sorts largest, and among equal logits the lower id sorts larger. Example: logits 2, 5, 5 become (2, 2), (5, 1),
(5, 0). The kernel finds and removes the row's largest integer K times.
If choice is given, the kernel finds the largest logit among the experts with the largest choice. A NaN logit makes its
choice NaN.
On an H200 T = 8192, E = 128, K = 8 take 13 us forward and 3 us backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import num_sms, on_hopper
from mxep.runtime.launch import cdiv, launch, next_power_of_2

BLOCK_E, BLOCK_T, BLOCK_D, BLOCK_K = 64, 128, 128, 64
"""Tile sizes: BLOCK_E x BLOCK_T in forward, BLOCK_E x BLOCK_D in wgrad. A program has 4 warps; two share an SM."""
DGRAD_BLOCK_T, DGRAD_BLOCK_K, DGRAD_WARPS, DGRAD_REGISTERS = 128, 32, 8, 128
"""dgrad would use 138 registers per thread. Limited to 128, two of its programs share an SM."""
LEAST_STEPS = 4
"""Minimum length of a part of a contraction, in steps of BLOCK_K elements."""


@triton.jit
def _terms(x, COUNT: tl.constexpr):
    """Split fp32 x into COUNT bf16 tensors that add up to x. Each is the remainder so far, rounded to nearest."""
    terms = ()
    for _ in tl.static_range(COUNT - 1):
        bits = (x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000  # integers are faster than conversions
        terms += ((bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True),)
        x -= bits.to(tl.float32, bitcast=True)
    terms += (x.to(tl.bfloat16),)
    return terms


@triton.jit
def _product(
    a_ptr, b_ptr, first_m, first_n, first_k, end_k, M, N, K,
    A_STRIDE_M: tl.constexpr, A_STRIDE_K: tl.constexpr, B_STRIDE_K: tl.constexpr, B_STRIDE_N: tl.constexpr,
    A_TERMS: tl.constexpr, B_TERMS: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of a (M, K) @ b (K, N), contracted from first_k to end_k. Returns (BLOCK_M, BLOCK_N) fp32.

    A_TERMS, B_TERMS: number of bf16 terms of a and b. PROMOTE: add up steps of BLOCK_K by ordinary fp32 additions.
    """
    TERMS: tl.constexpr = max(A_TERMS, B_TERMS)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    a_k = tl.arange(0, BLOCK_K)[None, :]
    b_k = tl.arange(0, BLOCK_K)[:, None]
    a_ptr += tl.cast(first_m, tl.int64) * A_STRIDE_M + tl.cast(first_k, tl.int64) * A_STRIDE_K
    b_ptr += tl.cast(first_n, tl.int64) * B_STRIDE_N + tl.cast(first_k, tl.int64) * B_STRIDE_K
    a_ptrs = a_ptr + m * A_STRIDE_M + a_k * A_STRIDE_K
    b_ptrs = b_ptr + b_k * B_STRIDE_K + n * B_STRIDE_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(first_k, end_k, BLOCK_K):
        a = _terms(tl.load(a_ptrs, mask=(first_m + m < M) & (k + a_k < K), other=0.0), A_TERMS)
        b = _terms(tl.load(b_ptrs, mask=(first_n + n < N) & (k + b_k < K), other=0.0), B_TERMS)
        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if PROMOTE else sums
        for i in tl.static_range(A_TERMS - 1, -1, -1):
            for j in tl.static_range(B_TERMS - 1, -1, -1):
                if i + j < TERMS:
                    part = tl.dot(a[i], b[j], part)
        sums = sums + part if PROMOTE else part
        a_ptrs += BLOCK_K * A_STRIDE_K
        b_ptrs += BLOCK_K * B_STRIDE_K
    return sums


@triton.jit(do_not_specialize=["T", "steps"])
def fp32_linear_kernel(
    x_ptr, w_ptr, out_ptr, T, steps, D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program contracts one part of D. steps: a part's length, in BLOCK_K. out: (parts, T, E)."""
    TERMS: tl.constexpr = 3 if w_ptr.dtype.element_ty == tl.float32 else 1
    first_e = tl.program_id(0) * BLOCK_E
    first_t = tl.program_id(1) * BLOCK_T
    first = tl.program_id(2) * steps * BLOCK_K
    end = tl.minimum(first + steps * BLOCK_K, D)
    sums = _product(
        w_ptr, x_ptr, first_e, first_t, first, end, E, T, D, D, 1, 1, D, TERMS, 1, True, BLOCK_E, BLOCK_T, BLOCK_K
    )
    t = first_t + tl.arange(0, BLOCK_T)[:, None]
    e = first_e + tl.arange(0, BLOCK_E)[None, :]
    out_ptrs = out_ptr + (tl.program_id(2).to(tl.int64) * T + t) * E + e
    tl.store(out_ptrs, tl.trans(sums), mask=(t < T) & (e < E))


@triton.jit(do_not_specialize=["T"])
def fp32_dgrad_kernel(
    dy_ptr, w_ptr, dx_ptr, T, D: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    TERMS: tl.constexpr = 2 if w_ptr.dtype.element_ty == tl.float32 else 1
    first_d = tl.program_id(0) * BLOCK_D
    first_t = tl.program_id(1) * BLOCK_T
    sums = _product(
        dy_ptr, w_ptr, first_t, first_d, 0, E, T, D, E, E, 1, D, 1, 2, TERMS, False, BLOCK_T, BLOCK_D, BLOCK_K
    )
    t = first_t + tl.arange(0, BLOCK_T)[:, None]
    d = first_d + tl.arange(0, BLOCK_D)[None, :]
    tl.store(dx_ptr + t.to(tl.int64) * D + d, sums.to(dx_ptr.dtype.element_ty), mask=(t < T) & (d < D))


@triton.jit(do_not_specialize=["T", "steps"])
def fp32_wgrad_kernel(
    dy_ptr, x_ptr, dw_ptr, T, steps, D: tl.constexpr, E: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program contracts one part of T. steps: a part's length, in BLOCK_K. dw: (parts, E, D)."""
    first_e = tl.program_id(0) * BLOCK_E
    first_d = tl.program_id(1) * BLOCK_D
    first = tl.program_id(2) * steps * BLOCK_K
    end = tl.minimum(first + steps * BLOCK_K, T)
    sums = _product(
        dy_ptr, x_ptr, first_e, first_d, first, end, E, D, T, 1, E, D, 1, TERMS, 1, True, BLOCK_E, BLOCK_D, BLOCK_K
    )
    e = first_e + tl.arange(0, BLOCK_E)[:, None]
    d = first_d + tl.arange(0, BLOCK_D)[None, :]
    dw_ptrs = dw_ptr + (tl.program_id(2).to(tl.int64) * E + e) * D + d
    tl.store(dw_ptrs, sums.to(dw_ptr.dtype.element_ty), mask=(e < E) & (d < D))


def fp32_linear(x: Tensor, w: Tensor) -> Tensor:
    """Launcher of mxep::fp32_linear. Splits D for at most one program per SM, because parts must be added up."""
    (T, D), E = x.shape, w.shape[0]
    tiles = cdiv(E, BLOCK_E), cdiv(T, BLOCK_T)
    steps, parts = _parts(D, tiles, num_sms(x.device))
    out = torch.empty((parts, T, E) if parts > 1 else (T, E), dtype=torch.float32, device=x.device)
    if T:
        launch(fp32_linear_kernel, (*tiles, parts), x.contiguous(), w.contiguous(), out, T, steps,
            D=D, E=E, BLOCK_E=BLOCK_E, BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out if parts == 1 else out.sum(0)


def fp32_dgrad(dy: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    (T, E), D = dy.shape, w.shape[1]
    dx = torch.empty((T, D), dtype=dtype, device=dy.device)
    if T:
        tiles = cdiv(D, BLOCK_D), cdiv(T, DGRAD_BLOCK_T)
        launch(fp32_dgrad_kernel, tiles, dy.contiguous(), w.contiguous(), dx, T,
            D=D, E=E, BLOCK_T=DGRAD_BLOCK_T, BLOCK_D=BLOCK_D, BLOCK_K=min(DGRAD_BLOCK_K, max(16, next_power_of_2(E))),
            num_warps=DGRAD_WARPS, num_stages=3, **on_hopper(maxnreg=DGRAD_REGISTERS),
        )  # fmt: skip
    return dx


def fp32_wgrad(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Launcher of mxep::fp32_wgrad. Splits T for at most two programs per SM."""
    (T, E), D = dy.shape, x.shape[1]
    tiles = cdiv(E, BLOCK_E), cdiv(D, BLOCK_D)
    steps, parts = _parts(T, tiles, 2 * num_sms(x.device))
    shape, out_dtype = ((parts, E, D), torch.float32) if parts > 1 else ((E, D), dtype)
    dw = torch.empty(shape, dtype=out_dtype, device=x.device)
    launch(fp32_wgrad_kernel, (*tiles, parts), dy.contiguous(), x.contiguous(), dw, T, steps,
        D=D, E=E, TERMS=3 if dtype == torch.float32 else 2, BLOCK_E=BLOCK_E, BLOCK_D=BLOCK_D, BLOCK_K=BLOCK_K,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return dw if parts == 1 else dw.sum(0).to(dtype)


def _parts(length: int, tiles: tuple[int, int], programs: int) -> tuple[int, int]:
    """Split a contraction of `length` so that tiles * parts come to about `programs`.

    Returns (steps of BLOCK_K per part, number of parts). Example: 32 tiles, 264 programs and length 8192 give (16, 8).
    """
    steps = cdiv(length, BLOCK_K)
    parts = max(1, min(programs // max(1, tiles[0] * tiles[1]), steps // LEAST_STEPS))
    steps = max(1, cdiv(steps, parts))
    return steps, max(1, cdiv(length, steps * BLOCK_K))


ELEMENTS = 2048
"""Elements of logits per program, each row padded to a power of two."""
TAKEN = tl.constexpr(-(2**63))
LEAST = tl.constexpr(-(2**31))
"""For removed experts and for padding: TAKEN replaces the 64-bit integer, LEAST the choice. Both sort below -inf."""


@triton.jit
def _in_order(bits):
    """Map the bits of an fp32 number to an int32 that sorts as the number does. Applied twice, it restores the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _order(x):
    """Map fp32 x to an int32 that sorts as x does. 0 and -0 are equal, NaN is the largest."""
    order = tl.where(x == 0.0, 0, _in_order(x.to(tl.int32, bitcast=True)))
    return tl.where(x == x, order, 0x7FFFFFFF)


@triton.jit(do_not_specialize=["T"])
def top_k_kernel(
    logits_ptr, choice_ptr, ids_ptr, weights_ptr, chosen_ptr, T,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    logits = tl.load(logits_ptr + t * E + e, mask=(t < T) & (e < E), other=0.0)
    left = tl.where(e < E, (_order(logits).to(tl.int64) << 32) | (BLOCK_E - 1 - e), TAKEN)
    if choice_ptr is not None:
        choice = tl.load(choice_ptr + t * E + e, mask=(t < T) & (e < E), other=0.0)
        order = tl.where(logits == logits, _order(choice), 0x7FFFFFFF)
        order = tl.where(e < E, order, LEAST)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    chosen = tl.full((BLOCK_T, BLOCK_K), float("-inf"), tl.float32)
    for i in range(K):
        if choice_ptr is None:
            best = tl.max(left, axis=1)[:, None]
        else:
            most = tl.max(order, axis=1)[:, None]
            best = tl.max(tl.where(order == most, left, TAKEN), axis=1)[:, None]
            order = tl.where(left == best, LEAST, order)
        left = tl.where(left == best, TAKEN, left)
        place = BLOCK_E - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        logit = _in_order((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        ids = tl.where(k == i, place, ids)
        chosen = tl.where(k == i, logit, chosen)
    score = chosen if SOFTMAX else tl.minimum(chosen, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(chosen)))
    score = tl.exp(score - tl.max(score, axis=1)[:, None])
    weights = score / tl.sum(score, axis=1)[:, None]
    mask = (t < T) & (k < K)
    tl.store(ids_ptr + t * K + k, ids, mask=mask)
    tl.store(weights_ptr + t * K + k, weights, mask=mask)
    tl.store(chosen_ptr + t * K + k, chosen, mask=mask)


@triton.jit(do_not_specialize=["T"])
def top_k_backward_kernel(
    d_weights_ptr, weights_ptr, ids_ptr, chosen_ptr, d_logits_ptr, T,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (t < T) & (k < K)
    weights = tl.load(weights_ptr + t * K + k, mask=mask, other=0.0)
    d_weights = tl.load(d_weights_ptr + t * K + k, mask=mask, other=0.0)
    ids = tl.load(ids_ptr + t * K + k, mask=mask, other=0)
    d_chosen = weights * (d_weights - tl.sum(weights * d_weights, axis=1)[:, None])
    if not SOFTMAX:
        d_chosen *= tl.sigmoid(-tl.load(chosen_ptr + t * K + k, mask=mask, other=0.0))
    d_logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for i in range(K):
        at = tl.sum(tl.where(k == i, ids, 0), axis=1)[:, None]
        d_logits = tl.where(e == at, tl.sum(tl.where(k == i, d_chosen, 0.0), axis=1)[:, None], d_logits)
    tl.store(d_logits_ptr + t * E + e, d_logits, mask=(t < T) & (e < E))


def top_k(logits: Tensor, choice: Tensor | None, k: int, softmax: bool) -> tuple[Tensor, Tensor, Tensor]:
    T, E = logits.shape
    ids = torch.empty((T, k), dtype=torch.int32, device=logits.device)
    weights, chosen = (torch.empty((T, k), dtype=torch.float32, device=logits.device) for _ in range(2))
    if T:
        grid, blocks = _blocks(T, E, k)
        given = logits.contiguous(), None if choice is None else choice.contiguous()
        launch(top_k_kernel, grid, *given, ids, weights, chosen, T, E=E, K=k, SOFTMAX=softmax, **blocks)
    return ids, weights, chosen


def top_k_backward(d_weights: Tensor, weights: Tensor, ids: Tensor, chosen: Tensor, E: int, softmax: bool) -> Tensor:
    T, k = ids.shape
    d_logits = torch.empty((T, E), dtype=torch.float32, device=ids.device)
    if T:
        grid, blocks = _blocks(T, E, k)
        given = d_weights.contiguous(), weights, ids, chosen, d_logits
        launch(top_k_backward_kernel, grid, *given, T, E=E, K=k, SOFTMAX=softmax, **blocks)
    return d_logits


def _blocks(T: int, E: int, k: int) -> tuple[tuple[int], dict[str, int]]:
    width = next_power_of_2(E)
    rows = max(1, ELEMENTS // width)
    return (cdiv(T, rows),), {"BLOCK_T": rows, "BLOCK_E": width, "BLOCK_K": next_power_of_2(k), "num_warps": 4}
