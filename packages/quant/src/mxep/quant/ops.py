"""The quantization ops in plain torch: reference and CPU kernel of each, and its fake. No autograd here.

    quantize_rows     x (..., N, K) -> qdata (..., N, K), scale (..., N, K/block)        blocks of 1 x block
    quantize_columns  x (..., N, K) -> qdata (..., K, N), scale (..., N/block, K)        blocks of block x 1, transposed
    quantize_both     both of one read, the scale of rows transposed: (..., K/block, N)
    quantize_rows_whole     one scale a row, and the largest magnitude of each column, which makes the scale of
    quantize_columns_whole  one scale a column
    quantize_tiles    x (..., N, K) -> qdata (..., N, K), scale (..., N/block, K/block)  blocks of block x block
    dequantize        qdata, scale -> values, of the rows an index picks if there is one
    materialize       qdata, scale, index -> qdata, scale of the picked rows, contiguous
    expand_scale      scale of tiles -> scale of rows
    (requantize       in `mxep.quant.requantize`, swizzle, fold and swiglu each in the file of their name)

Elements: code = cast_saturating(x * 2**(127 - byte)), the product in fp32 (exact, or far below the smallest code), the
cast round to nearest even; -0 keeps its sign. A block with NaN or Inf has scale byte 255 and every code 0x7f.
Example, E4M3, RCEIL, a block of 480 and 31 zeros: byte 128, so 480 * 2**-1 = 240, code 0x77.

Ops return what a kernel writes: contiguous tensors. Codes have the blocked axis last, `MXTensor` turns them back.
Scales of columns, and of rows beside columns, lie so that a tile's are neighbours: a byte for each of many lines of
memory costs an H200 as much as the 128 qdata of each (columns 0.94 -> 0.96 of copy speed, both 0.80 -> 0.91).
"""

import torch
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE, ScaleMode, format_of
from mxep.quant.kernels import on_cuda
from mxep.quant.scales import NAN_BYTE, power_of_two, reciprocal, scale_bytes

NAN_CODE = 0x7F


def encode(blocks: Tensor, dims: tuple[int, ...], dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    """Quantize `blocks` (fp32), one scale over the axes `dims`: qdata like `blocks`, bytes (..., 1, ...)."""
    return encode_known(blocks, blocks.abs().amax(dims, keepdim=True), dtype, mode)


def encode_known(blocks: Tensor, largest: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    """:func:`encode`, of blocks whose largest magnitudes are known."""
    fmt = format_of(dtype)
    byte = scale_bytes(largest, fmt, ScaleMode(mode))
    qdata = (blocks * reciprocal(byte)).clamp_(-fmt.max, fmt.max).to(dtype)
    qdata.view(torch.uint8).masked_fill_(byte == NAN_BYTE, NAN_CODE)
    return qdata, byte


def encode_rows(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize x (..., K) in blocks along its last axis: qdata (..., K), scale (..., K/block) e8m0."""
    blocks = torch.unflatten(x.float().contiguous(), -1, (x.shape[-1] // block_size, block_size))
    qdata, byte = encode(blocks, (-1,), dtype, mode)
    return qdata.view(x.shape), byte.squeeze(-1).view(SCALE_DTYPE)


def encode_columns(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize x (..., N, K) in blocks along N: qdata transposed, (..., K, N), scale not, (..., N/block, K) e8m0."""
    blocks = torch.unflatten(x.float().contiguous(), -2, (x.shape[-2] // block_size, block_size))
    qdata, byte = encode(blocks, (-2,), dtype, mode)
    return qdata.view(x.shape).mT.contiguous(), byte.squeeze(-2).view(SCALE_DTYPE)


@torch.library.custom_op("mxep::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., K) bf16 | fp32 | fp16 -> qdata (..., K) `dtype`, scale (..., K/block) e8m0."""
    return encode_rows(x, dtype, mode, block_size)


@quantize_rows.register_fake
def _(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    *rest, k = x.shape
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*rest, k // block_size), dtype=SCALE_DTYPE)


@torch.library.custom_op("mxep::quantize_columns", mutates_args=())
def quantize_columns(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., N, K) bf16 | fp32 | fp16 -> qdata (..., K, N) `dtype`, scale (..., N/block, K) e8m0."""
    return encode_columns(x, dtype, mode, block_size)


@quantize_columns.register_fake
def _(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    *rest, n, k = x.shape
    return x.new_empty((*rest, k, n), dtype=dtype), x.new_empty((*rest, n // block_size, k), dtype=SCALE_DTYPE)


@torch.library.custom_op("mxep::quantize_both", mutates_args=())
def quantize_both(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (..., N, K) -> qdata of quantize_rows, their scale transposed, what quantize_columns gives."""
    x = x.float().contiguous()
    qdata, scale = encode_rows(x, dtype, mode, block_size)
    transposed = scale.view(torch.uint8).mT.contiguous().view(SCALE_DTYPE)
    return qdata, transposed, *encode_columns(x, dtype, mode, block_size)


@quantize_both.register_fake
def _(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rest, n, k = x.shape
    rows = x.new_empty(x.shape, dtype=dtype), x.new_empty((*rest, k // block_size, n), dtype=SCALE_DTYPE)
    columns = x.new_empty((*rest, k, n), dtype=dtype), x.new_empty((*rest, n // block_size, k), dtype=SCALE_DTYPE)
    return *rows, *columns


@torch.library.custom_op("mxep::quantize_rows_whole", mutates_args=())
def quantize_rows_whole(x: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., N, K) -> what quantize_rows gives for blocks of K; the largest |x| of each column, (..., K) fp32."""
    return *encode_rows(x, dtype, mode, x.shape[-1]), x.float().abs().amax(-2)


@quantize_rows_whole.register_fake
def _(x: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor, Tensor]:
    *rest, n, k = x.shape
    qdata, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty((*rest, n, 1), dtype=SCALE_DTYPE)
    return qdata, scale, x.new_empty((*rest, k), dtype=torch.float32)


@torch.library.custom_op("mxep::quantize_columns_whole", mutates_args=())
def quantize_columns_whole(x: Tensor, amax: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    """x (..., N, K), its columns' magnitudes (..., K) fp32 -> what quantize_columns gives for blocks of N."""
    qdata, byte = encode_known(x.float(), amax.unsqueeze(-2), dtype, mode)
    return qdata.mT.contiguous(), byte.view(SCALE_DTYPE)


@quantize_columns_whole.register_fake
def _(x: Tensor, amax: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    *rest, n, k = x.shape
    return x.new_empty((*rest, k, n), dtype=dtype), x.new_empty((*rest, 1, k), dtype=SCALE_DTYPE)


@torch.library.custom_op("mxep::quantize_tiles", mutates_args=())
def quantize_tiles(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., N, K) bf16 | fp32 | fp16 -> qdata (..., N, K) `dtype`, scale (..., N/block, K/block) e8m0."""
    n, k = x.shape[-2:]
    tiles = torch.unflatten(
        torch.unflatten(x.float().contiguous(), -1, (k // block_size, block_size)), -3, (n // block_size, block_size)
    )
    qdata, byte = encode(tiles, (-3, -1), dtype, mode)
    return qdata.view(x.shape), byte.squeeze((-3, -1)).view(SCALE_DTYPE)


@quantize_tiles.register_fake
def _(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    *rest, n, k = x.shape
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*rest, n // block_size, k // block_size), dtype=SCALE_DTYPE)


def pick_rows(x: Tensor, row_index: Tensor) -> Tensor:
    """Rows `row_index` (int32 (R,)) of x (S, ...); -1 gives a row of zeros. Contiguous (R, ...). Of 8-bit floats take
    the bytes: torch does not index those."""
    if x.shape[0] == 0:
        return x.new_zeros(row_index.shape[0], *x.shape[1:])
    # On a GPU nobody knows where the valid rows end: the index behind them, which may hold anything, is read, too.
    last = None if x.device.type == "cpu" else x.shape[0] - 1
    there = (row_index >= 0).view(-1, *[1] * (x.ndim - 1))
    return x.index_select(0, row_index.clamp(0, last)).masked_fill_(~there, 0)


def values_of(qdata: Tensor) -> Tensor:
    """The qdata' values in fp32, without scales. From a table on the CPU, where it takes a third of the cast's time."""
    if qdata.device.type != "cpu":
        return qdata.float()
    table = torch.arange(256, dtype=torch.uint8).view(qdata.dtype).float()
    return table.index_select(0, qdata.view(torch.uint8).flatten().int()).view(qdata.shape)


def decode(qdata: Tensor, scale: Tensor, blocks: tuple[int, int], row_index: Tensor | None) -> Tensor:
    """Values (..., N, K) in fp32 of qdata (..., N, K) with one scale per `blocks` = (rows, columns) elements.

    Exact, but for what lies past fp32's range (E4M3 from byte 247 on), which becomes Inf.
    """
    byte = scale.view(torch.uint8)
    if row_index is not None:
        qdata, byte = pick_rows(qdata.view(torch.uint8), row_index).view(qdata.dtype), pick_rows(byte, row_index)
    rows, columns = blocks
    n, k = byte.shape[-2:]
    tiles = torch.unflatten(torch.unflatten(values_of(qdata), -1, (k, columns)), -3, (n, rows))
    return (tiles * power_of_two(byte)[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


@torch.library.custom_op("mxep::dequantize", mutates_args=())
def dequantize(
    qdata: Tensor, scale: Tensor, block_rows: int, block_columns: int, row_index: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """qdata (..., N, K), scale (..., N/block_rows, K/block_columns) e8m0 -> (..., N, K) `dtype`, rounded once.

    row_index (int32 (R,)) or None: 2-D qdata only, result (R, K), -1 a row of zeros.
    """
    return decode(qdata, scale, (block_rows, block_columns), row_index).to(dtype).contiguous()


@dequantize.register_fake
def _(
    qdata: Tensor, scale: Tensor, block_rows: int, block_columns: int, row_index: Tensor | None, dtype: torch.dtype
) -> Tensor:
    shape = qdata.shape if row_index is None else (row_index.shape[0], qdata.shape[-1])
    return qdata.new_empty(shape, dtype=dtype)


@torch.library.custom_op("mxep::materialize", mutates_args=())
def materialize(qdata: Tensor, scale: Tensor, row_index: Tensor | None) -> tuple[Tensor, Tensor]:
    """qdata (S, K), scale (S, K/block), row_index int32 (R,) -> qdata (R, K), scale (R, K/block); -1: zero bytes.

    row_index None: qdata and scale of any shape, copied to contiguous ones.
    """

    def copy(part: Tensor) -> Tensor:
        byte = part.view(torch.uint8)
        if row_index is None:
            return byte.clone(memory_format=torch.contiguous_format).view(part.dtype)
        return pick_rows(byte, row_index).view(part.dtype)

    return copy(qdata), copy(scale)


@materialize.register_fake
def _(qdata: Tensor, scale: Tensor, row_index: Tensor | None) -> tuple[Tensor, Tensor]:
    if row_index is None:
        return qdata.new_empty(qdata.shape), scale.new_empty(scale.shape)
    rows = row_index.shape[0]
    return qdata.new_empty((rows, qdata.shape[1])), scale.new_empty((rows, scale.shape[1]))


@torch.library.custom_op("mxep::expand_scale", mutates_args=())
def expand_scale(scale: Tensor, block_size: int) -> Tensor:
    """scale (..., N/block, K/block) of tiles -> (..., N, K/block), each row repeated for the rows of its tile."""
    return scale.view(torch.uint8).repeat_interleave(block_size, -2).view(SCALE_DTYPE)


@expand_scale.register_fake
def _(scale: Tensor, block_size: int) -> Tensor:
    *rest, n, k = scale.shape
    return scale.new_empty((*rest, n * block_size, k))


on_cuda(quantize_rows, "rows", "quantize_rows")
on_cuda(quantize_tiles, "rows", "quantize_tiles")
on_cuda(quantize_columns, "columns", "quantize_columns")
on_cuda(quantize_both, "columns", "quantize_both")
on_cuda(quantize_rows_whole, "whole", "quantize_rows_whole")
on_cuda(quantize_columns_whole, "whole", "quantize_columns_whole")
on_cuda(materialize, "gather", "materialize")
