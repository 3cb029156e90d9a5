"""Top-k of rows of logits, with normalised scores of the chosen: one kernel forward and one backward.

    forward    logits, choice or None (T, E) -> ids, weights, chosen logits (T, K)    4 E, 8 E, + 12 K bytes a token
    backward   weights, their gradients, ids (, chosen) -> d_logits (T, E), mostly zeros

A logit and its place are one 64-bit integer in the order of numbers. NaN is the largest, and of equal logits the first.
K times the largest of a row is found and removed. Example: 2, 5, 5 become (2, 2), (5, 1), (5, 0).
With choice, the kernel takes the largest logit of those with the largest choice. A NaN logit makes its choice NaN.

T tokens, E experts, K experts per token. T = 8192, E = 128, K = 8 take 13 us forward and 3 backward on an H200.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.runtime.launch import cdiv, launch, next_power_of_2

ELEMENTS = 2048
"""Elements per program, in padded rows."""
TAKEN = tl.constexpr(-(2**63))
LEAST = tl.constexpr(-(2**31))
"""An order below that of -inf."""


@triton.jit
def _in_order(bits):
    """Map bits of fp32 to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _order(x):
    """Map fp32 to an int32 of the same order. 0 and -0 are equal, NaN is the largest."""
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
    """mxep::top_k."""
    T, E = logits.shape
    ids = torch.empty((T, k), dtype=torch.int32, device=logits.device)
    weights, chosen = (torch.empty((T, k), dtype=torch.float32, device=logits.device) for _ in range(2))
    if T:
        grid, blocks = _blocks(T, E, k)
        given = logits.contiguous(), None if choice is None else choice.contiguous()
        launch(top_k_kernel, grid, *given, ids, weights, chosen, T, E=E, K=k, SOFTMAX=softmax, **blocks)
    return ids, weights, chosen


def top_k_backward(d_weights: Tensor, weights: Tensor, ids: Tensor, chosen: Tensor, E: int, softmax: bool) -> Tensor:
    """mxep::top_k_backward."""
    T, k = ids.shape
    d_logits = torch.empty((T, E), dtype=torch.float32, device=ids.device)
    if T:
        grid, blocks = _blocks(T, E, k)
        given = d_weights.contiguous(), weights, ids, chosen, d_logits
        launch(top_k_backward_kernel, grid, *given, T, E=E, K=k, SOFTMAX=softmax, **blocks)
    return d_logits


def _blocks(T: int, E: int, k: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and block sizes."""
    width = next_power_of_2(E)
    rows = max(1, ELEMENTS // width)
    return (cdiv(T, rows),), {"BLOCK_T": rows, "BLOCK_E": width, "BLOCK_K": next_power_of_2(k), "num_warps": 4}
