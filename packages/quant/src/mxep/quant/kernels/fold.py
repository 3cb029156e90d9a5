"""Fold: picks rows and shifts their block scales into their qdata, in one read and one write.

    slot row_index[i] (or i)   D qdata, D / block_size scales, wherever the slot's row lies
      | max_scale = the largest scale of a block that is not all zero, shift = max_scale - scale, qdata * 2^-shift
      v
    row i                      D qdata, one scale

A row is BLOCKS blocks of SUB elements; PER_SCALE blocks have one scale. SUB is 32 for MX. For other blocks it is the
largest power of two, up to 32, that divides them. Programs stride over tiles of ROWS whole rows, held in registers:
7168 qdata are 14 loads of 16 bytes by each thread of one warp, which finds the largest scale without a barrier. Lengths
are constants of the kernel. So padding a row to a power of two costs no instruction if the row fills whole registers
(7168 qdata of 8192).

On an H200: 0.93 of copy speed at 7168, 5120 and 4096 columns, 0.90 at 2048 (65536 rows picked from slots), however far
the capacity exceeds the valid rows. Starting a program takes 0.6 ns even if it has nothing to do, so a large capacity
does not get one program per row.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, as_bytes, num_sms, rows_of, shifted, valid_rows
from mxep.quant.shapes import empty_rows, picked_shape
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_ELEMENTS = 2048
"""Elements that a program takes at a time: several short rows, or one longer row (padded to a power of two)."""
WARP_ELEMENTS = 8192
"""Elements of a tile per warp (half as many of E5M2)."""
PROGRAMS_PER_SM = 256
"""Most programs per SM. They take several tiles if there are more."""


@triton.jit
def _is_nonzero(qdata):
    """True where a block has a nonzero element (reduces the last of three axes). qdata: fp8, or int32 words of four."""
    if qdata.dtype != tl.int32:
        qdata = qdata.to(tl.uint8, bitcast=True).to(tl.int32)
    return tl.max(qdata & 0x7F7F7F7F, axis=2) > 0


@triton.jit(do_not_specialize=["rows", "num_groups"])
def fold_kernel(
    qdata_ptr, scale_ptr, index_ptr, offs_ptr, folded_ptr, folded_scale_ptr, stride, scale_stride, rows, num_groups,
    BLOCKS: tl.constexpr, SUB: tl.constexpr, PER_SCALE: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))[None, :]
    block_mask = block < BLOCKS
    element = block[:, :, None] * SUB + tl.arange(0, SUB)
    valid = valid_rows(offs_ptr, num_groups, rows)

    for tile in range(tl.program_id(0), tl.cdiv(valid, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        row_mask = row < valid
        source = row
        if index_ptr is not None:
            source = tl.load(index_ptr + row, mask=row_mask, other=-1)
        mask = (row_mask & (source >= 0))[:, None] & block_mask
        source = tl.maximum(source, 0).to(tl.int64)[:, None]
        scale = tl.load(scale_ptr + source * scale_stride + block // PER_SCALE, mask=mask, other=0).to(tl.int32)
        first = qdata_ptr + (source * stride)[:, :, None]
        qdata = tl.load(first + element, mask=mask[:, :, None], other=0.0)
        if WORDS:  # the second load finds the line in L1, or on its way there
            word = block[:, :, None] * (SUB // 4) + tl.arange(0, SUB // 4)
            words = tl.load(first.to(tl.pointer_type(tl.int32)) + word, mask=mask[:, :, None], other=0)
            nonzero = _is_nonzero(words)
        else:
            nonzero = _is_nonzero(qdata)
        max_scale = tl.max(tl.where(nonzero | (scale == NAN_SCALE), scale, 0), axis=1)
        shift = tl.maximum(max_scale[:, None] - scale, 0)[:, :, None]
        folded = shifted(qdata, shift, (max_scale == NAN_SCALE)[:, None, None]).to(dtype)

        mask = (row_mask[:, None] & block_mask)[:, :, None]
        first = row.to(tl.int64)
        tl.store(folded_ptr + (first * (BLOCKS * SUB))[:, None, None] + element, folded, mask=mask)
        tl.store(folded_scale_ptr + first, max_scale.to(tl.uint8), mask=row_mask)


def fold(qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """mxep::fold."""
    folded, folded_scale = empty_rows(qdata, qdata.dtype, 0, picked_shape(qdata, row_index))
    if folded.numel():
        sub = math.gcd(qdata.shape[-1] // scale.shape[-1], 32)
        per_scale = qdata.shape[-1] // scale.shape[-1] // sub
        qdata, scale = rows_of(qdata), rows_of(as_bytes(scale))
        blocks = qdata.shape[1] // sub
        padded = next_power_of_2(blocks) * sub
        rows = max(1, TILE_ELEMENTS // padded)
        share = 1 if qdata.dtype == torch.float8_e4m3fn else 2  # E5M2 takes more registers
        tiles = cdiv(folded_scale.numel(), rows)
        launch(fold_kernel, (min(tiles, PROGRAMS_PER_SM * num_sms(qdata.device)),),
            qdata, scale, row_index, offs, folded, as_bytes(folded_scale), qdata.stride(0), scale.stride(0),
            folded_scale.numel(), 0 if offs is None else offs.shape[0],
            BLOCKS=blocks, SUB=sub, PER_SCALE=per_scale,
            WORDS=all(n % 4 == 0 for n in (qdata.data_ptr(), qdata.stride(0), sub)), ROWS=rows,
            num_warps=min(32, max(1, rows * padded * (32 // sub) * share // WARP_ELEMENTS)),
        )  # fmt: skip
    return folded, folded_scale
