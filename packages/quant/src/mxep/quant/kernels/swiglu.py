"""SwiGLU forward and backward, with its result rounded, or quantized by blocks, by rows, or by blocks and folded.

    gate_up (R, 2F), row_weight                       read once          bytes an element of h, bf16: 4 in, 1 or 2 out
    d_h (R, F)                                        backward                                        6 in, 2 or 4 out
      | a row in the registers of one program, fp32; one load covers gate, another up
      v
    h (R, F) | d_gate_up (R, 2F), d_row_weight        written once

Programs stride over rows; one of up to 2048 elements belongs to one warp, so that nothing waits at a barrier. F is a
constant of the kernel: what pads a row to a power of two costs no instruction where it fills whole registers, which
VECTOR sees to (1536 of 2048 elements are 6 of 8 registers of a thread if it holds 8 neighbours, as a load brings them,
not the 16 that a store of codes would like; 14336 of 16384 likewise).

What an SM can do beside moving these bytes at full speed are 34 instructions an element forward, 54 backward: hence the
sigmoid without a division, and sums and largest values that stay within a thread as long as they can.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant import sigmoid
from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels.fold import multiprocessors, shifted
from mxep.quant.kernels.numbers import NAN_BYTE, bytes_of, magnitude_bits, reciprocal, scale_byte

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 2048, 2048
"""Elements of a row for each warp of a program."""
VECTOR = 8
PROGRAMS_PER_SM = 32

_LIMIT = tl.constexpr(sigmoid.LIMIT)
_SCALE = tl.constexpr(sigmoid.SCALE)
_ROUND = tl.constexpr(sigmoid.ROUND)
_C0, _C1 = tl.constexpr(sigmoid.C0), tl.constexpr(sigmoid.C1)
_MAGIC = tl.constexpr(sigmoid.MAGIC)
_ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _sigmoid_pair(x):
    """`mxep.quant.sigmoid.sigmoid_pair` of x clamped to +- _LIMIT, fp32."""
    t = x * _SCALE
    u = t + _ROUND
    f = t - (u - _ROUND)
    even = f * f + _C0
    odd = f * _C1
    p = (even + odd).to(tl.int32, bitcast=True) + (u.to(tl.int32, bitcast=True) << 23)
    p = p.to(tl.float32, bitcast=True)
    q = even - odd
    d = p + q
    r = (_MAGIC - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    t = d * r
    r = r * (3.0 - t * (3.0 - t))
    r = r * (2.0 - d * r)
    return q * r, p * r


@triton.jit
def _silu(gate):
    """silu(gate) fp32, and what its slope is made of: gate clamped on both sides, sigmoid(gate), sigmoid(-gate)."""
    above = tl.maximum(gate, -_LIMIT, propagate_nan=_ALL_NAN)
    clamped = tl.minimum(above, _LIMIT, propagate_nan=_ALL_NAN)
    s, one_minus_s = _sigmoid_pair(clamped)
    return above * s, clamped, s, one_minus_s


@triton.jit
def _neighbours(x):
    a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    return a + b


@triton.jit
def _halves(x):
    if x.shape[0] <= 2:
        return tl.sum(x, axis=0)
    else:
        return _halves(tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0))


@triton.jit
def _tree_sum(x):
    """`mxep.quant.swiglu.tree_sum` of x, of a power of two elements, 8 or more. Sums of two have but one order."""
    return _halves(_neighbours(_neighbours(_neighbours(x))))


@triton.jit
def _put(
    parts, out_ptr, scale_ptr, element, F: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, FOLDED: tl.constexpr
):
    """Store a row's `parts` of F values (a tuple of one, or of two that lie side by side) at out_ptr, its first place.

    MODE None: rounded to out_ptr's dtype. Else quantized, scale bytes from scale_ptr on: a scale for all (BLOCK 0), or
    for every BLOCK elements, or (FOLDED) both, one after the other.
    """
    N: tl.constexpr = element.shape[0]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    there = tl.arange(0, N) < F
    if MODE is None:
        for i in tl.static_range(len(parts)):
            tl.store(out_ptr + i * F + element, parts[i].to(dtype), mask=there)
    elif BLOCK == 0:
        bits = tl.max(magnitude_bits(parts[0]), axis=0)
        for i in tl.static_range(1, len(parts)):
            bits = tl.maximum(bits, tl.max(magnitude_bits(parts[i]), axis=0))
        byte = scale_byte(bits, MODE, dtype)
        factor = reciprocal(byte)
        for i in tl.static_range(len(parts)):
            tl.store(out_ptr + i * F + element, (parts[i] * factor).to(dtype), mask=there)
        tl.store(scale_ptr, byte.to(tl.uint8))
    else:
        codes = ()
        bytes_ = ()
        for i in tl.static_range(len(parts)):
            blocks = tl.reshape(parts[i], (N // BLOCK, BLOCK))
            byte = scale_byte(tl.max(magnitude_bits(blocks), axis=1), MODE, dtype)
            codes += ((blocks * reciprocal(byte)[:, None]).to(dtype),)
            bytes_ += (byte,)
        if FOLDED:
            # Blocks of zeros need no exception here: they have byte 0, and so has every block with no code but zeros.
            top = tl.max(bytes_[0], axis=0)
            for i in tl.static_range(1, len(parts)):
                top = tl.maximum(top, tl.max(bytes_[i], axis=0))
            for i in tl.static_range(len(parts)):
                folded = shifted(codes[i], (top - bytes_[i])[:, None], top == NAN_BYTE).to(dtype)
                tl.store(out_ptr + i * F + element, tl.reshape(folded, (N,)), mask=there)
            tl.store(scale_ptr, top.to(tl.uint8))
        else:
            block = tl.arange(0, N // BLOCK)
            for i in tl.static_range(len(parts)):
                tl.store(out_ptr + i * F + element, tl.reshape(codes[i], (N,)), mask=there)
                place = scale_ptr + i * (F // BLOCK) + block
                tl.store(place, bytes_[i].to(tl.uint8), mask=block < F // BLOCK)


@triton.jit(do_not_specialize=["rows", "groups"])
def swiglu_kernel(
    d_h_ptr,
    gate_up_ptr,
    weight_ptr,
    ends_ptr,
    out_ptr,
    scale_ptr,
    d_weight_ptr,
    rows,
    groups,
    F: tl.constexpr,
    N: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLDED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Backward if there is a d_h_ptr. weight_ptr, ends_ptr may be None. N: F padded to a power of two, 8 or more."""
    PARTS: tl.constexpr = 1 if d_h_ptr is None else 2
    SCALES: tl.constexpr = 1 if BLOCK == 0 or FOLDED else PARTS * F // BLOCK
    element = tl.arange(0, N)
    there = element < F
    # A thread gets no more neighbours than these, whatever the widest access would like.
    element = tl.max_contiguous(tl.multiple_of(element, VECTOR), VECTOR)
    live = rows if ends_ptr is None else tl.load(ends_ptr + groups - 1)
    for row in range(tl.program_id(0), live, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        first = gate_up_ptr + row64 * (2 * F)
        gate = tl.load(first + element, mask=there, other=0.0).to(tl.float32)
        up = tl.load(first + F + element, mask=there, other=0.0).to(tl.float32)
        silu, gate, s, one_minus_s = _silu(gate)
        out = out_ptr + row64 * (PARTS * F)
        scale = scale_ptr if MODE is None else scale_ptr + row64 * SCALES
        if d_h_ptr is None:
            h = silu * up
            if weight_ptr is not None:
                h *= tl.load(weight_ptr + row)
            _put((h,), out, scale, element, F, MODE, BLOCK, FOLDED)
        else:
            d = tl.load(d_h_ptr + row64 * F + element, mask=there, other=0.0).to(tl.float32)
            tl.store(d_weight_ptr + row, _tree_sum(d * (silu * up)))
            if weight_ptr is not None:
                d *= tl.load(weight_ptr + row)
            slope = (gate * one_minus_s + 1.0) * s
            _put((d * up * slope, silu * d), out, scale, element, F, MODE, BLOCK, FOLDED)


def swiglu(
    gate_up: Tensor, row_weight: Tensor | None, group_ends: Tensor | None, **tuning: int
) -> Tensor:
    """mxep::swiglu; tuning as for `_launch`."""
    return _launch(None, gate_up, row_weight, group_ends, **tuning)[0]


def swiglu_quantize(
    gate_up: Tensor,
    row_weight: Tensor | None,
    group_ends: Tensor | None,
    dtype: torch.dtype,
    mode: str,
    block: int,
    folded: bool,
    **tuning: int,
) -> tuple[Tensor, Tensor]:
    """mxep::swiglu_quantize; tuning as for `_launch`, which says what blocks there may be."""
    codes, scale = _launch(None, gate_up, row_weight, group_ends, (dtype, mode, block, folded), **tuning)
    return codes, scale


def swiglu_backward(
    d_h: Tensor, gate_up: Tensor, row_weight: Tensor | None, group_ends: Tensor | None, **tuning: int
) -> tuple[Tensor, Tensor]:
    """mxep::swiglu_backward; tuning as for `_launch`."""
    d_gate_up, d_row_weight = _launch(d_h, gate_up, row_weight, group_ends, **tuning)
    return d_gate_up, d_row_weight


def swiglu_backward_quantize(
    d_h: Tensor,
    gate_up: Tensor,
    row_weight: Tensor | None,
    group_ends: Tensor | None,
    dtype: torch.dtype,
    mode: str,
    block: int,
    folded: bool,
    **tuning: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """mxep::swiglu_backward_quantize; tuning as for `_launch`, which says what blocks there may be."""
    codes, scale, d_row_weight = _launch(d_h, gate_up, row_weight, group_ends, (dtype, mode, block, folded), **tuning)
    return codes, scale, d_row_weight


def _launch(
    d_h: Tensor | None,
    gate_up: Tensor,
    row_weight: Tensor | None,
    group_ends: Tensor | None,
    quantized: tuple[torch.dtype, str, int, bool] | None = None,
    *,
    warp_elements: int | None = None,
    vector: int = VECTOR,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> list[Tensor]:
    """The result, its scale if it is `quantized` (dtype, mode, block, folded), and backward d_row_weight.

    warp_elements: elements of a row (padded to a power of two) for each warp of its program.
    vector: neighbours that a thread holds: 8, or 16 for one store of 16 codes but two loads of 8 bf16 each.
    programs_per_sm: as many as start; they take several rows if there are more.
    ValueError for a block that is neither the whole row nor a power of two that divides F.
    """
    rows, F = gate_up.shape[0], gate_up.shape[1] // 2
    width = F if d_h is None else 2 * F
    dtype, mode, block, folded = quantized or (gate_up.dtype, None, width, False)
    if block != width and (block & (block - 1) or F % block):
        raise ValueError(f"block: got {block}, want the whole row, {width}, or a power of two that divides {F}, on CUDA")
    out = torch.empty((rows, width), dtype=dtype, device=gate_up.device)
    results = [out]
    if quantized:
        scales = 1 if folded else width // block
        results.append(torch.empty((rows, scales), dtype=SCALE_DTYPE, device=gate_up.device))
    if d_h is not None:
        results.append(torch.empty(rows, dtype=torch.float32, device=gate_up.device))
    if rows:
        padded = max(8, triton.next_power_of_2(F))
        if warp_elements is None:
            warp_elements = FORWARD_ELEMENTS if d_h is None else BACKWARD_ELEMENTS
        swiglu_kernel[(min(rows, programs_per_sm * multiprocessors(gate_up.device)),)](
            None if d_h is None else d_h.contiguous(),
            gate_up.contiguous(),
            None if row_weight is None else row_weight.contiguous(),
            group_ends,
            out,
            bytes_of(results[1]) if quantized else None,
            None if d_h is None else results[-1],
            rows,
            0 if group_ends is None else group_ends.shape[0],
            F=F,
            N=padded,
            MODE=mode,
            BLOCK=0 if block == width else block,
            FOLDED=folded and block != width,
            VECTOR=vector,
            num_warps=min(32, max(1, padded // warp_elements)),
            enable_fp_fusion=False,
        )
    return results
