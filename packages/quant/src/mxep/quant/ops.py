"""The quantization ops in plain torch. Each is the reference of its Triton kernel, and the CPU kernel. No autograd.

Only quantize_rows, dequantize and materialize support E2M1 (MXFP4). `widen` converts it to E4M3.

Elements are q = cast_saturating(x * 2**(127 - scale)). The product is computed in fp32. It is exact, or far below the
smallest q. The cast rounds to nearest even and keeps the sign of -0. A block with NaN or Inf gets scale 255, and every
element becomes 0x7f. Example for E4M3 and RCEIL: a block of 480 and 31 zeros has scale 128, so 480 becomes
480 * 2**-1 = 240, byte 0x77.

Results are contiguous, and the blocked axis of qdata is the last one. For blocks along columns qdata are therefore
transposed, and callers build the MXTensor from `qdata.mT`.

Scales of columns are (N/block_size, K), so that the scales of a kernel's tile are neighbours in memory. With
(K, N/block_size), a tile would write single bytes to many memory lines. A single byte costs as much as the 128 qdata of
a line (H200: 0.94 instead of 0.96 of copy speed).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mxep.quant.formats import (
    E2M1,
    E4M3,
    NAN_SCALE,
    SCALE_DTYPE,
    ScaleMode,
    decode_e2m1,
    encode_e2m1,
    format_of,
    pack,
    power_of_two,
    reciprocal,
    scale_of_amax,
    unpack,
)
from mxep.quant.shapes import empty_2d, empty_columns, empty_picked, empty_rows, empty_values, joined, joined_shape
from mxep.runtime.op import op

NAN_ELEMENT, NAN_CODE = 0x7F, 7
"""Elements of a NaN block, in fp8 and in E2M1."""
HEADROOM = 6
"""Largest s for which every E2M1 number * 2**s is an E4M3 number: 6 * 2**6 = 384, and E4M3's max is 448."""


def encode(
    blocks: Tensor, dims: tuple[int, ...], dtype: torch.dtype, mode: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize `blocks` (fp32) with one scale over the axes `dims`. amax: of each block; None: computed here.

    Returns qdata of blocks' shape (E2M1: half of the last axis), and uint8 scales with `dims` of length 1.
    """
    amax = blocks.abs().amax(dims, keepdim=True) if amax is None else amax
    fmt = format_of(dtype)
    scale = scale_of_amax(amax, fmt, ScaleMode(mode))
    scaled = blocks * reciprocal(scale)
    if fmt == E2M1:
        return pack(encode_e2m1(scaled).masked_fill_(scale == NAN_SCALE, NAN_CODE)), scale
    qdata = scaled.clamp_(-fmt.max, fmt.max).to(dtype)
    qdata.view(torch.uint8).masked_fill_(scale == NAN_SCALE, NAN_ELEMENT)
    return qdata, scale


@op(
    "mxep::quantize_rows",
    fake=lambda x, dtype, mode, block_size: empty_rows(x, dtype, block_size),
    launcher="mxep.quant.kernels.quantize:quantize_rows",
)
def quantize_rows(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., K) bf16 | fp32 | fp16 -> qdata (..., K), or (..., K/2) for E2M1, scale (..., K/block_size) e8m0."""
    blocks = torch.unflatten(x.float().contiguous(), -1, (x.shape[-1] // block_size, block_size))
    qdata, scale = encode(blocks, (-1,), dtype, mode)
    return qdata.flatten(-2), scale.squeeze(-1).view(SCALE_DTYPE)


@op(
    "mxep::quantize_into_room",
    fake=lambda x, room, dtype, mode, block_size: empty_rows(x, dtype, block_size, (room, x.shape[1])),
    launcher="mxep.quant.kernels.quantize:quantize_into_room",
)
def quantize_into_room(x: Tensor, room: int, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (T, K) -> qdata (room, K), scale (room, K/block_size). Rows from T on are unspecified."""
    found = empty_rows(x, dtype, block_size, (room, x.shape[1]))
    for whole, part in zip(found, quantize_rows.reference(x, dtype, mode, block_size)):
        whole.view(torch.uint8)[: len(x)] = part.view(torch.uint8)
    return found


@op(
    "mxep::quantize_joined_rows",
    fake=lambda x, y, z, dtype, mode: empty_rows(x, dtype, 0, joined_shape(-1, x, y, z)),
    launcher="mxep.quant.kernels.quantize:quantize_joined_rows",
)
def quantize_joined_rows(
    x: Tensor, y: Tensor, z: Tensor | None, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor]:
    """quantize_rows of [x | y | z], a matrix (N, Kx + Ky + Kz), with one scale per row."""
    x = joined(-1, x, y, z)
    qdata, scale = quantize_rows.reference(x, dtype, mode, x.shape[1])
    return qdata, scale


@op(
    "mxep::quantize_columns",
    fake=lambda x, dtype, mode, block_size: empty_columns(x, dtype, block_size),
    launcher="mxep.quant.kernels.quantize:quantize_columns",
)
def quantize_columns(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., N, K) bf16 | fp32 | fp16 -> qdata (..., K, N) `dtype`, scale (..., N/block_size, K) e8m0."""
    blocks = torch.unflatten(x.float().contiguous(), -2, (x.shape[-2] // block_size, block_size))
    qdata, scale = encode(blocks, (-2,), dtype, mode)
    return qdata.view(x.shape).mT.contiguous(), scale.squeeze(-2).view(SCALE_DTYPE)


@op(
    "mxep::quantize_per_row",
    fake=lambda x, y, z, dtype, mode: (
        *empty_rows(x, dtype, x.shape[-1], joined_shape(-2, x, y, z)),
        x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=torch.float32),
    ),
    launcher="mxep.quant.kernels.quantize:quantize_per_row",
)
def quantize_per_row(
    x: Tensor, y: Tensor | None, z: Tensor | None, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x, y, z: parts along N of a tensor (..., N, K) -> qdata (..., N, K), scale (..., N, 1), column amax (..., K)."""
    x = joined(-2, x, y, z)
    bits = x.float().abs().view(torch.int32)  # as integers, the largest of several NaNs is the same on all devices
    return *quantize_rows.reference(x, dtype, mode, x.shape[-1]), bits.amax(-2).view(torch.float32)


@op(
    "mxep::quantize_per_column",
    fake=lambda x, y, z, amax, dtype, mode: empty_columns(x, dtype, (shape := joined_shape(-2, x, y, z))[-2], shape),
    launcher="mxep.quant.kernels.quantize:quantize_per_column",
)
def quantize_per_column(
    x: Tensor, y: Tensor | None, z: Tensor | None, amax: Tensor, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor]:
    """x, y, z: as for `quantize_per_row`. amax: its result. -> qdata (..., K, N), scale (..., 1, K)."""
    qdata, scale = encode(joined(-2, x, y, z).float(), (-2,), dtype, mode, amax.unsqueeze(-2))
    return qdata.mT.contiguous(), scale.view(SCALE_DTYPE)


@op(
    "mxep::quantize_2d",
    fake=lambda x, dtype, mode, block_size: empty_2d(x, dtype, block_size),
    launcher="mxep.quant.kernels.quantize:quantize_2d",
)
def quantize_2d(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., N, K) bf16 | fp32 | fp16 -> qdata (..., N, K) `dtype`, scale (..., N/block_size, K/block_size) e8m0."""
    n, k = x.shape[-2:]
    by_column = torch.unflatten(x.float().contiguous(), -1, (k // block_size, block_size))
    blocks = torch.unflatten(by_column, -3, (n // block_size, block_size))
    qdata, scale = encode(blocks, (-3, -1), dtype, mode)
    return qdata.view(x.shape), scale.squeeze((-3, -1)).view(SCALE_DTYPE)


def bytewise(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """fn(x) for an fn that only moves elements. 8-bit floats are passed to fn as bytes, as torch lacks ops for them."""
    return fn(x.view(torch.uint8)).view(x.dtype) if x.element_size() == 1 else fn(x)


def pick_rows(x: Tensor, row_index: Tensor) -> Tensor:
    """Rows x[row_index], contiguous. x: (S, ...). row_index: (R,) int32, -1 gives a row of zeros."""
    if x.shape[0] == 0:
        return x.new_zeros(row_index.shape[0], *x.shape[1:])
    # On a GPU row_index is also read past the valid rows, where its values are arbitrary. So they are clamped.
    last = None if x.device.type == "cpu" else x.shape[0] - 1
    padding = (row_index < 0).view(-1, *[1] * (x.ndim - 1))
    return bytewise(lambda part: part.index_select(0, row_index.clamp(0, last)).masked_fill_(padding, 0), x)


def pick_mx(qdata: Tensor, scale: Tensor, row_index: Tensor | None, valid: int | None = None) -> tuple[Tensor, Tensor]:
    """Apply the row index to qdata (..., S, K) and scale (..., S, n), then keep the first `valid` rows (None: all).

    Returns qdata, and scales as uint8.
    """
    scale = scale.view(torch.uint8)
    if row_index is None:
        return qdata[..., :valid, :], scale[..., :valid, :]
    return pick_rows(qdata, row_index[:valid]), pick_rows(scale, row_index[:valid])


def values_of(qdata: Tensor) -> Tensor:
    """Elements of qdata in fp32, not multiplied by scales. For E2M1, (..., K/2) becomes (..., K)."""
    if qdata.dtype == E2M1.dtype:
        return decode_e2m1(unpack(qdata))
    # On the CPU a table of 256 values takes a third of a cast's time.
    if qdata.device.type != "cpu":
        return qdata.float()
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(qdata.dtype).float()
    return table.index_select(0, qdata.view(torch.uint8).flatten().int()).view(qdata.shape)


def decode(qdata: Tensor, scale: Tensor, block_shape: tuple[int, int], row_index: Tensor | None) -> Tensor:
    """Values (..., N, K) in fp32: qdata * 2**(scale - 127), exact, or Inf past fp32's range. Applies the row index.

    block_shape: (rows, columns) per scale.
    """
    qdata, scale = pick_mx(qdata, scale, row_index)
    rows, columns = block_shape
    n, k = scale.shape[-2:]
    blocks = torch.unflatten(torch.unflatten(values_of(qdata), -1, (k, columns)), -3, (n, rows))
    return (blocks * power_of_two(scale)[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


def widen(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert E2M1 qdata (..., K/2), scale (..., K/block) to E4M3 qdata (..., K) of exactly the same values.

    Elements are multiplied by 2**s and the scale is reduced by s, with s = min(6, scale). A block with scale 255 (NaN)
    keeps that scale and gets elements 0x7f.
    """
    bytes_, blocks = scale.view(torch.uint8).int().unsqueeze(-1), scale.shape[-1]
    nan = bytes_ == NAN_SCALE
    up = bytes_.clamp(max=HEADROOM)
    values = values_of(qdata)
    values = torch.unflatten(values, -1, (blocks, values.shape[-1] // max(1, blocks)))
    wide = (values * power_of_two(127 + up)).to(E4M3.dtype)
    wide.view(torch.uint8).masked_fill_(nan, NAN_ELEMENT)
    new_scale = torch.where(nan, NAN_SCALE, bytes_ - up).to(torch.uint8).squeeze(-1)
    return wide.flatten(-2), new_scale.view(SCALE_DTYPE)


@op(
    "mxep::dequantize",
    fake=lambda qdata, scale, rows, columns, index, dtype: empty_values(qdata, index, dtype),
    launcher="mxep.quant.kernels.requantize:dequantize",
)
def dequantize(
    qdata: Tensor, scale: Tensor, block_rows: int, block_columns: int, row_index: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """qdata (..., N, K), for E2M1 (..., N, K/2) -> values (..., N, K), rounded once to `dtype`.

    scale: (..., N/block_rows, K/block_columns). With a row index (R,), qdata is 2-D and the result (R, K).
    """
    return decode(qdata, scale, (block_rows, block_columns), row_index).to(dtype).contiguous()


@op(
    "mxep::materialize",
    fake=lambda qdata, scale, row_index: tuple(
        x.new_empty(x.shape) if row_index is None else empty_picked(x, row_index) for x in (qdata, scale)
    ),
    launcher="mxep.quant.kernels.groups:materialize",
)
def materialize(qdata: Tensor, scale: Tensor, row_index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Copy the rows `row_index` (R,) of qdata (S, K) and scale (S, n). Without a row index, copy all, of any shape."""
    picked, scale_bytes = pick_mx(qdata, scale, row_index)
    if row_index is None:
        picked, scale_bytes = (x.clone(memory_format=torch.contiguous_format) for x in (picked, scale_bytes))
    return picked, scale_bytes.view(SCALE_DTYPE)


@op(
    "mxep::expand_scale",
    fake=lambda scale, block_size: scale.new_empty((*scale.shape[:-2], scale.shape[-2] * block_size, scale.shape[-1])),
)
def expand_scale(scale: Tensor, block_size: int) -> Tensor:
    """scale (..., N/block_size, K/block_size) of 2-D blocks -> (..., N, K/block_size), each row repeated."""
    return scale.view(torch.uint8).repeat_interleave(block_size, -2).view(SCALE_DTYPE)
