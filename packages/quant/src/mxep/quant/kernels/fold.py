"""Fold: rows picked, their block scales shifted into their qdata, in one read and one write.

    slot row_index[i] (or i)   D qdata, D / block scale bytes, wherever the slot's row lies
      | top = the largest byte of a block that is not all zero, d = top - byte, qdata * 2^-d
      v
    row i                      D qdata, one byte per `to` elements

A row is SPANS spans that come to share a scale, of BLOCKS blocks of SUB elements; PER_SCALE blocks have one byte. SUB
is 32 for MX; of other blocks it is the largest power of two, up to 32, that divides them. Programs stride over tiles of
ROWS whole rows, held in registers: 7168 qdata are 14 loads of 16 bytes by each thread of one warp, which finds the top
without a barrier. Lengths are constants of the kernel, so what pads a row to a power of two costs no instruction where
it fills whole registers (7168 qdata of 8192).

On an H200: 0.93 of copy speed at 7168, 5120 and 4096 columns, 0.90 at 2048 (65536 rows picked from slots), however far
the capacity exceeds the valid rows: starting a program takes 0.6 ns even if it finds nothing to do, so there is not one
for each row of a large capacity.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels.bounds import valid_rows
from mxep.quant.kernels.numbers import NAN_BYTE, bytes_of

TILE_ELEMENTS = 2048
WARP_ELEMENTS = 8192
PROGRAMS_PER_SM = 256


def rows_of(x: Tensor) -> Tensor:
    """x (..., R, n) as (rows, n) with elements one after another, a copy only where strides ask for one."""
    x = x.flatten(0, -2)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def multiprocessors(device: torch.device) -> int:
    """How many the device has; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _power_of_two(exponent):
    """2**exponent in fp16, for exponents (int32) -24 to 15 (the cast makes subnormals), NaN for 128."""
    bits = tl.where(exponent == 128, 0x7FC00000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def shifted(qdata, shift, is_nan):
    """The values qdata * 2**-shift in fp16; cast to the qdata' format they are `mxep.quant.fold.shift_codes`.

    qdata: fp8. shift: int32, not negative; is_nan: where all becomes NaN; both broadcast to qdata.
    Exact wherever the cast leaves something of a value: half the smallest subnormal, 2**-10 in E4M3 and 2**-17 in E5M2,
    and 4 or 3 significant bits from there up are multiples of 2**-24. NaN and Inf become NaN.
    """
    values = qdata.to(tl.float16)
    if qdata.dtype == tl.float8e4nv:
        values *= _power_of_two(tl.where(is_nan, 128, -tl.minimum(shift, 19)))
    else:
        shift = tl.minimum(shift, 33)
        first = tl.minimum(shift, 9)  # 2**-33 is no fp16 number
        zero_or_nan = values * 0.0
        values *= _power_of_two(tl.where(is_nan, 128, -first))
        values = values * _power_of_two(first - shift) + zero_or_nan
    return values


@triton.jit
def _is_nonzero(qdata):
    """Whether any of the last axis, of four, is a code other than 0 and -0. qdata: fp8, or int32 words of four."""
    if qdata.dtype != tl.int32:
        qdata = qdata.to(tl.uint8, bitcast=True).to(tl.int32)
    return tl.max(qdata & 0x7F7F7F7F, axis=3) > 0


@triton.jit(do_not_specialize=["rows", "groups"])
def fold_kernel(
    codes_ptr,
    scale_ptr,
    index_ptr,
    ends_ptr,
    folded_ptr,
    folded_scale_ptr,
    changed_ptr,
    flushed_ptr,
    spread_ptr,
    stride,
    scale_stride,
    rows,
    groups,
    SPANS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SUB: tl.constexpr,
    PER_SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    span = tl.arange(0, triton.next_power_of_2(SPANS))[:, None]
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))[None, :]
    inside = (span < SPANS) & (block < BLOCKS)
    block = span * BLOCKS + block
    element = block[:, :, None] * SUB + tl.arange(0, SUB)
    valid = valid_rows(ends_ptr, groups, rows)
    changed = tl.full((), 0, tl.int64)
    flushed = tl.full((), 0, tl.int64)

    for tile in range(tl.program_id(0), tl.cdiv(valid, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < valid
        source = row
        if index_ptr is not None:
            source = tl.load(index_ptr + row, mask=there, other=-1)
        read = (there & (source >= 0))[:, None, None] & inside
        source = tl.maximum(source, 0).to(tl.int64)[:, None, None]
        byte = tl.load(scale_ptr + source * scale_stride + block // PER_SCALE, mask=read, other=0).to(tl.int32)
        first = codes_ptr + (source * stride)[:, :, :, None]
        qdata = tl.load(first + element, mask=read[:, :, :, None], other=0.0)
        if WORDS:  # the second load finds the line in L1, or on its way there
            word = block[:, :, None] * (SUB // 4) + tl.arange(0, SUB // 4)
            words = tl.load(first.to(tl.pointer_type(tl.int32)) + word, mask=read[:, :, :, None], other=0)
            nonzero = _is_nonzero(words)
        else:
            nonzero = _is_nonzero(qdata)
        top = tl.max(tl.where(nonzero | (byte == NAN_BYTE), byte, 0), axis=2)
        shift = tl.maximum(top[:, :, None] - byte, 0)[:, :, :, None]
        values = shifted(qdata, shift, (top == NAN_BYTE)[:, :, None, None])
        folded = values.to(dtype)

        wanted = there[:, None, None] & inside
        first = row.to(tl.int64)[:, None, None] * SPANS
        tl.store(folded_ptr + (first * (BLOCKS * SUB))[:, :, :, None] + element, folded, mask=wanted[:, :, :, None])
        tl.store(
            folded_scale_ptr + first + span,
            top[:, :, None].to(tl.uint8),
            mask=there[:, None, None] & (span < SPANS),
        )
        if spread_ptr is not None:
            after = folded.to(tl.float16)
            counted = wanted[:, :, :, None] & (after == after)
            flushes = counted & (after == 0) & (qdata.to(tl.float16) != 0)
            changes = flushes | (counted & (after != values))
            changed += tl.sum(changes.to(tl.int32))
            flushed += tl.sum(flushes.to(tl.int32))
            lowest = tl.min(tl.where(nonzero, byte, NAN_BYTE), axis=2)
            spread = tl.where(top == NAN_BYTE, 0, tl.maximum(top - lowest, 0))
            tl.store(spread_ptr + row, tl.max(spread, axis=1), mask=there)
    if spread_ptr is not None:
        tl.atomic_add(changed_ptr, changed, sem="relaxed")
        tl.atomic_add(flushed_ptr, flushed, sem="relaxed")


def fold(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    offs: Tensor | None,
    block_size: int,
    to: int,
    **tuning: int,
) -> tuple[Tensor, Tensor]:
    """mxep::fold; tuning as for `_launch`."""
    folded, folded_scale, *_ = _launch(qdata, scale, row_index, offs, block_size, to, stats=False, **tuning)
    return folded, folded_scale


def fold_with_stats(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    offs: Tensor | None,
    block_size: int,
    to: int,
    **tuning: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """mxep::fold_with_stats; tuning as for `_launch`."""
    folded, folded_scale, *counts = _launch(qdata, scale, row_index, offs, block_size, to, stats=True, **tuning)
    changed, flushed, spread = counts
    return folded, folded_scale, changed, flushed, spread


def _launch(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    offs: Tensor | None,
    block_size: int,
    to: int,
    *,
    stats: bool,
    tile_elements: int = TILE_ELEMENTS,
    warp_elements: int = WARP_ELEMENTS,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> list[Tensor]:
    """Codes, scale and, with `stats`, changed, flushed, spread.

    tile_elements: elements a program takes at a time: several short rows, or a longer one (padded to a power of two).
    warp_elements: elements of a tile for each of its warps (less with stats, or a scale for less than 32 elements).
    programs_per_sm: as many as start; they take several tiles if there are more.
    """
    shape = (*qdata.shape[:-1], qdata.shape[-1]) if row_index is None else (row_index.shape[0], qdata.shape[-1])
    folded = torch.empty(shape, dtype=qdata.dtype, device=qdata.device)
    folded_scale = torch.empty((*shape[:-1], shape[-1] // to), dtype=SCALE_DTYPE, device=qdata.device)
    counts = []
    if stats:
        counts += [torch.zeros((), dtype=torch.int64, device=qdata.device) for _ in range(2)]
        counts += [torch.zeros(shape[:-1], dtype=torch.int32, device=qdata.device)]
    if folded.numel():
        qdata, scale = rows_of(qdata), rows_of(bytes_of(scale))
        sub = math.gcd(block_size, 32)
        blocks = to // sub
        spans = shape[-1] // to
        padded = triton.next_power_of_2(spans) * triton.next_power_of_2(blocks) * sub
        rows = max(1, tile_elements // padded)
        share = 4 if stats or spans > 1 else 1 if qdata.dtype == torch.float8_e4m3fn else 2  # what takes registers
        tiles = triton.cdiv(folded_scale.numel() // spans, rows)
        fold_kernel[(min(tiles, programs_per_sm * multiprocessors(qdata.device)),)](
            qdata,
            scale,
            row_index,
            offs,
            folded,
            bytes_of(folded_scale),
            *(counts if stats else (None, None, None)),
            qdata.stride(0),
            scale.stride(0),
            folded_scale.numel() // spans,
            0 if offs is None else offs.shape[0],
            SPANS=spans,
            BLOCKS=blocks,
            SUB=sub,
            PER_SCALE=block_size // sub,
            WORDS=all(n % 4 == 0 for n in (qdata.data_ptr(), qdata.stride(0), sub)),
            ROWS=rows,
            num_warps=min(32, max(1, rows * padded * (32 // sub) * share // warp_elements)),
        )
    return [folded, folded_scale, *counts]
