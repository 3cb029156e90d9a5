"""Folding: block scales become one scale per row, so that an ordinary row-scaled FP8 GEMM computes the MX product.

Scales are powers of two, and an 8-bit float has exponents to spare. Per row (or per `block_size` elements of it):

    32-blocks    2^-3 * (1 .. 448)  |  2^0 * (1 .. 448)  |  0 ..                   bytes 124, 127, 0
    top          2^0, the largest scale of a block that is not all zero
    shift d      3                  |  0                 |  any
    row          qdata * 2^-3       |  qdata as they are |  0 ..                   one byte, 127

The element rule, for both formats: a code q becomes round_to_nearest_even(q * 2^-d) in that format, subnormals
included; -0 keeps its sign, NaN and Inf become 0x7f. Nothing overflows, as d >= 0. The result is exact while q * 2^-d
needs no bits below the smallest subnormal (E4M3 2^-9, E5M2 2^-16); that holds for any |q| >= 2^(d-6) in E4M3,
|q| >= 2^(d-14) in E5M2, which is every element within 13.8 (28.8) binades of the amax of its row when blocks were
quantized by RCEIL. Other elements err by at most half that subnormal, 2^-10 (2^-17) of the top scale: 2^-17.8
(2^-31.8) of the amax. From d = 19 (33) on nothing is left. So folding is lossless under that condition only;
`fold_with_stats` counts where it does not hold.

A block whose qdata are all zero does not count for the top, whatever its byte. A NaN block (byte 255) makes NaN of all
that shares its scale, as it does in the exact product: every code 0x7f, byte 255. If all is zero the byte is 0.

`fold_for_wgrad` is the same shift transposed by 90 degrees, for a wgrad, in `mxep.quant.fold_for_wgrad`.
R rows, D row length, S stored rows (slots) of an indexed tensor, G groups.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.quant.checks import TILES, check_block
from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.groups import check_group_ends, fill_rows, valid_rows
from mxep.quant.kernels import on_cuda
from mxep.quant.ops import NAN_CODE, pick_rows, values_of
from mxep.quant.scales import NAN_BYTE, power_of_two
from mxep.quant.tensor import MXTensor


@dataclass(frozen=True)
class FoldStats:
    """What a fold costs, all on the device. Elements that are NaN afterwards are in none of the counts.

    changed: () int64, elements whose value changes (those that flush are among them).
    flushed: () int64, elements other than zero that become zero.
    spread:  (..., R) int32, 0 to 254 binades: per row the largest exponent minus the smallest over the blocks that are
             not all zero (with `block_size`: the largest such difference among blocks that come to share a scale); 0
             where there is a NaN block. Above 8 is the cheap sign to look at the error of the product.
    """

    changed: Tensor
    flushed: Tensor
    spread: Tensor


def fold(mx: MXTensor, *, block_size: int | None = None, offs: Tensor | None = None) -> MXTensor:
    """`mx` with one scale over its whole blocked axis, or per `block_size` elements of it; see the module for the rule.

    mx: (..., R, D) blocked along -1 or -2, E4M3 or E5M2. A row index is applied (-1: a row of zeros, byte 0), so the
        result (R, D) is dense; its bytes are contiguous along the blocked axis, scale (..., R, 1) or (..., R, D/block).
    block_size: elements that share a scale, a multiple of mx.block_size that divides D, 128 say; None for all D.
    offs: int32 (G,) inclusive ends of the row groups of a 2-D `mx` over a capacity buffer, axis -1. Rows from
        offs[-1] on are not read; what the result holds there is unspecified.
    No autograd. ValueError for tiles (use `mx.along(axis)`), a block that does not fit, a wrong offs.
    """
    transposed, block_size = _check(mx, block_size, offs)
    qdata, scale = _fold(
        transposed.qdata, transposed.scale, transposed.row_index, offs, transposed.block_size, block_size
    )
    return _result(mx, qdata, scale, block_size)


def fold_with_stats(
    mx: MXTensor, *, block_size: int | None = None, offs: Tensor | None = None
) -> tuple[MXTensor, FoldStats]:
    """`fold`, and what it changed, counted in the same pass: elements changed, flushed to zero, spread of each row.

    Rows from offs[-1] on are not counted; their spread is unspecified. ValueError as for `fold`.
    """
    transposed, block_size = _check(mx, block_size, offs)
    qdata, scale, *stats = _fold_with_stats(
        transposed.qdata, transposed.scale, transposed.row_index, offs, transposed.block_size, block_size
    )
    return _result(mx, qdata, scale, block_size), FoldStats(*stats)


def _result(mx: MXTensor, qdata: Tensor, scale: Tensor, block_size: int) -> MXTensor:
    folded = MXTensor(qdata, scale, None, -1, block_size, mx.dtype, trusted=True)
    return folded if mx.axis == -1 else folded.mT  # type: ignore[return-value]


def flush_shift(dtype: torch.dtype) -> int:
    """The smallest d with max * 2^-d under half the smallest subnormal, so that no code is left: E4M3 19, E5M2 33."""
    info = torch.finfo(dtype)
    return math.frexp(info.max / (info.smallest_normal * info.eps))[1] + 1


def shift_codes(qdata: Tensor, shift: Tensor) -> Tensor:
    """qdata (fp8, any shape) times 2^-shift (int, broadcasts, 0 <= shift), rounded to nearest even in their format.

    The product is exact in fp32, so there is one rounding. NaN and Inf become 0x7f.
    Example, E4M3: 0x41 (2.25) by 1 is 0x39 (1.125), by 9 is 0x02 (2.25 subnormals become 2), by 19 is 0x00.
    """
    byte = 127 - shift.clamp(max=flush_shift(qdata.dtype))
    moved = values_of(qdata) * power_of_two(byte)
    shifted = moved.to(qdata.dtype)
    shifted.view(torch.uint8).masked_fill_(~moved.isfinite(), NAN_CODE)
    return shifted


def _check(mx: MXTensor, block_size: int | None, offs: Tensor | None) -> tuple[MXTensor, int]:
    """(`mx` transposed so that it is blocked along -1, detached; elements that will share a scale)."""
    if not isinstance(mx, MXTensor):
        raise ValueError(f"fold: got a {type(mx).__name__}, want an MXTensor: quantize it")
    if mx.axis == TILES:
        raise ValueError("fold: got tiles, want a tensor blocked along one axis: call .along(axis)")
    block_size = check_block(block_size, mx.axis, mx)
    if block_size % mx.block_size:
        raise ValueError(f"fold: got block {block_size}, want a multiple of the blocks there are, {mx.block_size}")
    check_group_ends(offs, mx)
    if offs is not None and mx.axis != -1:
        raise ValueError(f"fold: got offs for axis {mx.axis}, want axis -1: groups are of rows")
    transposed = mx.detach() if mx.axis == -1 else mx.detach().mT
    assert isinstance(transposed, MXTensor)
    return transposed, block_size


@dataclass(frozen=True)
class _Spans:
    """Live rows cut into spans (what will share a scale) of blocks of elements, and what a span decides.

    qdata (..., span, block, element) fp8; byte, counts (..., span, block, 1): scale and whether it counts for the top;
    top int32, nan bool (..., span, 1, 1).
    """

    qdata: Tensor
    byte: Tensor
    counts: Tensor
    top: Tensor
    nan: Tensor

    @property
    def shift(self) -> Tensor:
        """d of each block; a zero block above the top is not moved (a zero stays a zero)."""
        return (self.top - self.byte).clamp(min=0)


def _spans(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, block_size: int, to: int
) -> tuple[_Spans, int]:
    """The spans of the valid rows, and the rows of the result."""
    capacity = qdata.shape[-2] if row_index is None else row_index.shape[0]
    valid = valid_rows(offs, capacity)
    plain, byte = qdata.view(torch.uint8), scale.view(torch.uint8)
    if row_index is None:
        plain, byte = plain[..., :valid, :], byte[..., :valid, :]
    else:
        plain, byte = pick_rows(plain, row_index[:valid]), pick_rows(byte, row_index[:valid])
    sizes = qdata.shape[-1] // to, to // block_size
    blocks = torch.unflatten(plain, -1, (*sizes, block_size))
    exponent = torch.unflatten(byte, -1, (*sizes, 1)).int()
    nan_block = exponent == NAN_BYTE
    counts = (blocks & 0x7F).amax(-1, keepdim=True).ne(0) & ~nan_block
    top = torch.where(counts, exponent, 0).amax(-2, keepdim=True)
    nan = nan_block.any(-2, keepdim=True)
    return _Spans(blocks.view(qdata.dtype), exponent, counts, top, nan), capacity


def _folded(spans: _Spans, capacity: int) -> tuple[Tensor, Tensor]:
    folded = shift_codes(spans.qdata, spans.shift).view(torch.uint8).masked_fill_(spans.nan, NAN_CODE)
    byte = torch.where(spans.nan, NAN_BYTE, spans.top).to(torch.uint8)
    return (
        fill_rows(folded.flatten(-3), capacity).view(spans.qdata.dtype),
        fill_rows(byte.flatten(-3), capacity).view(SCALE_DTYPE),
    )


def _folded_like(qdata: Tensor, scale: Tensor, row_index: Tensor | None, to: int) -> tuple[Tensor, Tensor]:
    *rest, rows, d = qdata.shape
    rows = rows if row_index is None else row_index.shape[0]
    return qdata.new_empty((*rest, rows, d)), scale.new_empty((*rest, rows, d // to))


@torch.library.custom_op("mxep::fold", mutates_args=())
def _fold(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, block_size: int, to: int
) -> tuple[Tensor, Tensor]:
    """qdata (..., S, D) fp8, scale (..., S, D/block) e8m0 -> qdata (..., R, D), scale (..., R, D/to)."""
    return _folded(*_spans(qdata, scale, row_index, offs, block_size, to))


@_fold.register_fake
def _(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, block_size: int, to: int
) -> tuple[Tensor, Tensor]:
    return _folded_like(qdata, scale, row_index, to)


@torch.library.custom_op("mxep::fold_with_stats", mutates_args=())
def _fold_with_stats(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, block_size: int, to: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of mxep::fold -> its results, changed () int64, flushed () int64, spread (..., R) int32."""
    spans, capacity = _spans(qdata, scale, row_index, offs, block_size, to)
    shift = spans.shift.clamp(max=flush_shift(qdata.dtype))
    before, after = spans.qdata.float(), shift_codes(spans.qdata, shift).float()
    counted = ~spans.nan & ~after.isnan()
    if offs is not None:
        row = torch.arange(before.shape[0], device=qdata.device)
        counted &= (row < offs[-1]).view(-1, 1, 1, 1)
    changed = (counted & (after * power_of_two(127 + shift) != before)).sum()
    flushed = (counted & (after == 0) & (before != 0)).sum()
    lowest = torch.where(spans.counts, spans.byte, NAN_BYTE).amin(-2, keepdim=True)
    live_spread = torch.where(spans.nan, 0, spans.top - lowest).clamp(min=0).flatten(-3).amax(-1)
    spread = fill_rows(live_spread.unsqueeze(-1), capacity).squeeze(-1)
    return *_folded(spans, capacity), changed, flushed, spread


@_fold_with_stats.register_fake
def _(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, block_size: int, to: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    folded, folded_scale = _folded_like(qdata, scale, row_index, to)
    count = qdata.new_empty((), dtype=torch.int64)
    spread = qdata.new_empty(folded.shape[:-1], dtype=torch.int32)
    return folded, folded_scale, count, torch.empty_like(count), spread


on_cuda(_fold, "fold", "fold")
on_cuda(_fold_with_stats, "fold", "fold_with_stats")
