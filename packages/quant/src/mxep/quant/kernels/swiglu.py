"""SwiGLU forward and backward, with its result rounded, or quantized by blocks, by rows, or by blocks and folded.

    gate_up (R, 2F), row_weight                       read once          bytes an element of h, bf16: 4 in, 1 or 2 out
    d_h (R, F)                                        backward                                        6 in, 2 or 4 out
      | a row at a time, in chunks of 8 or 16 elements a thread: of gate, of up, of d_h; fp32 from here
      v
    h (R, F) | d_gate_up (R, 2F), d_row_weight        written once

Programs stride over rows; a warp takes 1024 or 2048 elements of one, so that few wait at a barrier. Chunks are
unrolled, and a chunk is loaded before the one before it is computed. A result that needs all of its row first, to scale
it, stays in registers: fp32 for one scale a row, but qdata, a quarter of that, if it is folded. 8 elements a thread are
what a load of bf16 brings; F is a constant of the kernel, so 768 or 14336 elements cost nothing for padding.

While these bytes move at full speed (an H200's 4.25 TB/s), an SM can issue 34 instructions for an element forward, 54
backward; folded it takes 38 and 57. Hence a sigmoid without a division, and a sum over a row that leaves a thread late.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.activation import SwiGLU
from mxep.quant.device import NAN_SCALE, abs_bits, as_bytes, num_sms, reciprocal, scale_of_amax, shifted, valid_rows
from mxep.quant.kernels.activation import glu, joined_pairs, split_pairs, unclamped
from mxep.quant.launch import cdiv, launch, next_power_of_2
from mxep.quant.shapes import empty_swiglu_scale

WARP_ELEMENTS = 2048
THREAD_ELEMENTS = 8
AHEAD = 1
PROGRAMS_PER_SM = 256


@triton.jit
def _neighbours(x):
    a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    return a + b


@triton.jit
def _sums_of_eight(x):
    """The first part of `mxep.quant.swiglu.tree_sum`. x: a power of two elements, 8 or more."""
    return _neighbours(_neighbours(_neighbours(x)))


@triton.jit
def _halves(x):
    """The second part. A sum of two numbers has but one order, so each level is a tl.sum."""
    if x.shape[0] <= 2:
        return tl.sum(x, axis=0)
    else:
        return _halves(tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0))


@triton.jit
def _tree_sum(chunks):
    """`mxep.quant.swiglu.tree_sum` of a row in chunks (a tuple) of a power of two elements, reduced to sums of eight.
    The upper levels are between chunks."""
    if len(chunks) > 1:
        half: tl.constexpr = triton.next_power_of_2(len(chunks)) // 2
        sums = ()
        for i in tl.static_range(half):
            if i + half < len(chunks):
                sums += (chunks[i] + chunks[i + half],)
            else:
                sums += (chunks[i] + 0.0,)
        return _tree_sum(sums)
    else:
        return _halves(chunks[0])


@triton.jit
def _joined(chunks):
    """Chunks (a tuple) as one tensor, padded to a power of two of them with anything. So one store serves them all."""
    if len(chunks) > 1:
        pairs = ()
        for i in tl.static_range(0, len(chunks), 2):
            pair = tl.join(chunks[i], chunks[i + 1 if i + 1 < len(chunks) else i])
            pairs += (tl.reshape(tl.trans(pair), (pair.numel,)),)
        return _joined(pairs)
    else:
        return chunks[0]


@triton.jit
def _load(ptr, c: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """Chunk c, of N elements, of a row of COUNT; zeros behind its end."""
    element = c * N + tl.arange(0, N)
    if (c + 1) * N <= COUNT:
        return tl.load(ptr + element)
    else:
        return tl.load(ptr + element, mask=element < COUNT, other=0.0)


@triton.jit
def _store(ptr, values, c: tl.constexpr, COUNT: tl.constexpr):
    """`values` as chunk c of a row of COUNT."""
    N: tl.constexpr = values.shape[0]
    element = c * N + tl.arange(0, N)
    values = values.to(ptr.dtype.element_ty)
    if (c + 1) * N <= COUNT:
        tl.store(ptr + element, values)
    else:
        tl.store(ptr + element, values, mask=element < COUNT)


@triton.jit(do_not_specialize=["rows", "num_groups"])
def swiglu_kernel(
    d_h_ptr,
    gate_up_ptr,
    weight_ptr,
    offs_ptr,
    out_ptr,
    scale_ptr,
    d_weight_ptr,
    rows,
    num_groups,
    F: tl.constexpr,
    CHUNK: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FOLDED: tl.constexpr,
    AHEAD: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Backward if there is a d_h_ptr; weight_ptr and offs_ptr may be None, too.

    MODE None: rounded to out_ptr's dtype. Else quantized with a scale for a row (BLOCK_SIZE 0) or for BLOCK_SIZE
    elements, which divide CHUNK; FOLDED: then folded to one for a row. AHEAD: chunks loaded ahead of the one computed.
    ALPHA .. INTERLEAVED: `mxep.quant.SwiGLU`.
    """
    BACKWARD: tl.constexpr = d_h_ptr is not None
    PARTS: tl.constexpr = 2 if BACKWARD and not INTERLEAVED else 1
    WIDTH: tl.constexpr = 2 * F if BACKWARD and INTERLEAVED else F  # of a part
    CHUNKS: tl.constexpr = (F + CHUNK - 1) // CHUNK
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    valid = valid_rows(offs_ptr, num_groups, rows)
    for row in range(tl.program_id(0), valid, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        gate_up = gate_up_ptr + row64 * (2 * F)
        out = out_ptr + row64 * (PARTS * WIDTH)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + row)
        gates, ups, d_hs = (), (), ()
        sums, saved, scales = (), (), ()
        for step in tl.static_range(CHUNKS + AHEAD):
            if step < CHUNKS:
                if INTERLEAVED:
                    gate, up = split_pairs(_load(gate_up, step, 2 * CHUNK, 2 * F))
                else:
                    gate, up = _load(gate_up, step, CHUNK, F), _load(gate_up + F, step, CHUNK, F)
                gates += (gate,)
                ups += (up,)
                if BACKWARD:
                    d_hs += (_load(d_h_ptr + row64 * F, step, CHUNK, F),)
            if step >= AHEAD:
                gate, raw_up = gates[step - AHEAD].to(tl.float32), ups[step - AHEAD].to(tl.float32)
                silu, up, x, s, one_minus_s = glu(gate, raw_up, ALPHA, LIMIT, SHIFT)
                if BACKWARD:
                    d = d_hs[step - AHEAD].to(tl.float32)
                    sums += (_sums_of_eight(d * (silu * up)),)
                    if weight_ptr is not None:
                        d *= weight
                    d_gate, d_up = d * up * ((x * one_minus_s + 1.0) * s), silu * d
                    d_gate, d_up = unclamped(d_gate, d_up, gate, raw_up, LIMIT)
                    parts = (joined_pairs(d_gate, d_up),) if INTERLEAVED else (d_gate, d_up)
                else:
                    h = silu * up
                    if weight_ptr is not None:
                        h *= weight
                    parts = (h,)
                for i in tl.static_range(PARTS):
                    if MODE is None:
                        _store(out + i * WIDTH, parts[i], step - AHEAD, WIDTH)
                    elif BLOCK_SIZE == 0:
                        saved += (parts[i],)
                    else:
                        blocks = tl.reshape(parts[i], (parts[i].shape[0] // BLOCK_SIZE, BLOCK_SIZE))
                        scale = scale_of_amax(tl.max(abs_bits(blocks), axis=1), MODE, dtype)
                        qdata = (blocks * reciprocal(scale)[:, None]).to(dtype)
                        scales += (scale,)
                        if FOLDED:
                            saved += (qdata,)
                        else:
                            _store(out + i * WIDTH, tl.reshape(qdata, (parts[i].shape[0],)), step - AHEAD, WIDTH)
        if FOLDED:
            # Blocks of zeros need no exception: their scale is 0, as it is if there are just values too small for it.
            max_scale = scales[0]
            for k in tl.static_range(1, len(saved)):
                max_scale = tl.maximum(max_scale, scales[k])
            max_scale = tl.max(max_scale, axis=0)
            for k in tl.static_range(len(saved)):
                qdata = shifted(saved[k], (max_scale - scales[k])[:, None], max_scale == NAN_SCALE).to(dtype)
                _store(out + k % PARTS * WIDTH, tl.reshape(qdata, (qdata.numel,)), k // PARTS, WIDTH)
            tl.store(scale_ptr + row, max_scale.to(tl.uint8))
        elif len(saved) > 0:
            bits = abs_bits(saved[0])
            for k in tl.static_range(1, len(saved)):
                bits = tl.maximum(bits, abs_bits(saved[k]))
            scale = scale_of_amax(tl.max(bits, axis=0), MODE, dtype)
            factor = reciprocal(scale)
            for k in tl.static_range(len(saved)):
                _store(out + k % PARTS * WIDTH, saved[k] * factor, k // PARTS, WIDTH)
            tl.store(scale_ptr + row, scale.to(tl.uint8))
        else:
            for i in tl.static_range(PARTS if len(scales) > 0 else 0):
                part_scales = ()
                for c in tl.static_range(CHUNKS):
                    part_scales += (scales[c * PARTS + i],)
                first = scale_ptr + row64 * (PARTS * WIDTH // BLOCK_SIZE) + i * (WIDTH // BLOCK_SIZE)
                _store(first, _joined(part_scales), 0, WIDTH // BLOCK_SIZE)
        if BACKWARD:
            tl.store(d_weight_ptr + row, _tree_sum(sums))


def swiglu(
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    activation: Sequence[float] | None = None,
    **tuning: Any,
) -> Tensor:
    """mxep::swiglu; tuning as for `_launch`."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    _launch(None, gate_up, row_weight, offs, out, activation=activation, **tuning)
    return out


def swiglu_quantize(
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    mode: str,
    block_size: int,
    folded: bool,
    activation: Sequence[float] | None = None,
    **tuning: Any,
) -> tuple[Tensor, Tensor]:
    """mxep::swiglu_quantize; tuning as for `_launch`, which says what blocks there may be."""
    qdata = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=dtype)
    scale = empty_swiglu_scale(gate_up, qdata.shape[1], block_size, folded)
    _launch(None, gate_up, row_weight, offs, qdata, scale, None, mode, block_size, folded, activation, **tuning)
    return qdata, scale


def swiglu_backward(
    d_h: Tensor,
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    activation: Sequence[float] | None = None,
    **tuning: Any,
) -> tuple[Tensor, Tensor]:
    """mxep::swiglu_backward; tuning as for `_launch`."""
    d_gate_up, d_row_weight = gate_up.new_empty(gate_up.shape), gate_up.new_empty(len(gate_up), dtype=torch.float32)
    _launch(d_h, gate_up, row_weight, offs, d_gate_up, None, d_row_weight, activation=activation, **tuning)
    return d_gate_up, d_row_weight


def swiglu_backward_quantize(
    d_h: Tensor,
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    out: Tensor,
    mode: str,
    block_size: int,
    folded: bool,
    activation: Sequence[float] | None = None,
    **tuning: Any,
) -> tuple[Tensor, Tensor]:
    """mxep::swiglu_backward_quantize; tuning as for `_launch`, which says what blocks there may be.

    out may be d_h's memory if a row has one scale: the row's maximum comes after its loads, before its stores.
    """
    scale = empty_swiglu_scale(gate_up, gate_up.shape[1], block_size, folded)
    d_row_weight = gate_up.new_empty(len(gate_up), dtype=torch.float32)
    how = mode, block_size, folded, activation
    _launch(d_h, gate_up, row_weight, offs, out, scale, d_row_weight, *how, **tuning)
    return scale, d_row_weight


def _launch(
    d_h: Tensor | None,
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    out: Tensor,
    scale: Tensor | None = None,
    d_row_weight: Tensor | None = None,
    mode: str | None = None,
    block_size: int = 0,
    folded: bool = False,
    activation: Sequence[float] | None = None,
    *,
    warp_elements: int | None = None,
    thread_elements: int | None = None,
    ahead: int = AHEAD,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> None:
    """Into out, into its scale if there is a mode, and backward (with d_h) into d_row_weight.

    warp_elements: elements of a row, padded to a power of two, for each warp of its program.
    thread_elements: elements of a chunk for each thread; by default 16 where that divides F, else 8, or 4.
    ahead: chunks loaded ahead of the one computed.
    programs_per_sm: as many as start; they take several rows if there are more.
    ValueError for a block that is neither the whole row nor a power of two that divides F.
    """
    rows, F, how = gate_up.shape[0], gate_up.shape[1] // 2, SwiGLU.unpacked(activation)
    width = out.shape[1]
    by_row = block_size == width or mode is None
    if not by_row and (block_size & (block_size - 1) or F % block_size):
        raise ValueError(
            f"block_size: got {block_size}, want the whole row, {width}, or a power of two that divides {F}, on CUDA"
        )
    if rows == 0:
        return

    padded = max(8, next_power_of_2(F))
    if warp_elements is None:
        warp_elements = WARP_ELEMENTS if padded > WARP_ELEMENTS else WARP_ELEMENTS // 2
        if d_h is not None and mode is not None and by_row:
            warp_elements //= 2  # two fp32 results an element to keep take registers
    num_warps = min(32, max(1, padded // warp_elements))
    chunk = 32 * num_warps * (thread_elements or 2 * THREAD_ELEMENTS)
    if thread_elements is None and F % chunk:
        chunk //= 2
        if cdiv(F, chunk) * chunk > 1.1 * F:
            chunk //= 2
    chunk = min(chunk, padded)
    launch(swiglu_kernel, (min(rows, programs_per_sm * num_sms(gate_up.device)),),
        None if d_h is None else d_h.contiguous(), gate_up.contiguous(), row_weight, offs,
        out, None if scale is None else as_bytes(scale), d_row_weight, rows, 0 if offs is None else offs.shape[0],
        F=F, CHUNK=chunk if by_row else max(chunk, block_size), MODE=mode, BLOCK_SIZE=0 if by_row else block_size,
        FOLDED=folded and not by_row, AHEAD=ahead, ALPHA=how.alpha, LIMIT=how.limit, SHIFT=how.shift,
        INTERLEAVED=how.interleaved, num_warps=num_warps, maxnreg=None, enable_fp_fusion=False,
    )  # fmt: skip
