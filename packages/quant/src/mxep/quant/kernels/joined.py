"""One scale per row of two or three matrices side by side, [x | y | z], which is never written unquantized.

    x (N, Kx), y (N, Ky), z (N, Kz)  ->  qdata (N, Kx + Ky + Kz), scale (N, 1)

A program takes one row of all, in registers: it moves 3 bytes per element of bf16. Joining first moves 7.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import abs_bits, as_bytes, reciprocal, scale_of_amax
from mxep.quant.kernels.rows import LONGEST, quantize_rows
from mxep.quant.shapes import empty_rows, joined_shape
from mxep.runtime.launch import launch, next_power_of_2


@triton.jit
def _load(x_ptr, row, K: tl.constexpr):
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    return tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _store(x, factor, qdata_ptr, K: tl.constexpr):
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    tl.store(qdata_ptr + column, (x * factor).to(qdata_ptr.dtype.element_ty), mask=column < K)


@triton.jit
def quantize_joined_rows_kernel(
    x_ptr, y_ptr, z_ptr, qdata_ptr, scale_ptr, KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """KZ 0: z is not read."""
    row = tl.program_id(0).to(tl.int64)
    x = _load(x_ptr, row, KX)
    y = _load(y_ptr, row, KY)
    bits = tl.maximum(tl.max(abs_bits(x), axis=1), tl.max(abs_bits(y), axis=1))
    if KZ:
        z = _load(z_ptr, row, KZ)
        bits = tl.maximum(bits, tl.max(abs_bits(z), axis=1))
    scale = scale_of_amax(bits, MODE, qdata_ptr.dtype.element_ty)
    factor = reciprocal(scale)[:, None]
    qdata_ptr += row * (KX + KY + KZ)
    _store(x, factor, qdata_ptr, KX)
    _store(y, factor, qdata_ptr + KX, KY)
    if KZ:
        _store(z, factor, qdata_ptr + KX + KY, KZ)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale.to(tl.uint8))


def quantize_joined_rows(
    x: Tensor, y: Tensor, z: Tensor | None, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_joined_rows. Rows longer than registers hold are joined first."""
    parts = [part.contiguous() for part in (x, y, z) if part is not None]
    widths = [part.shape[1] for part in parts] + [0] * (3 - len(parts))
    padded = sum(map(next_power_of_2, filter(None, widths)))
    if padded > LONGEST or 0 in widths[: len(parts)]:
        joined = torch.cat(parts, 1)
        return quantize_rows(joined, dtype, mode, joined.shape[1])
    qdata, scale = empty_rows(x, dtype, 0, joined_shape(*parts))
    if x.shape[0]:
        launch(quantize_joined_rows_kernel, (x.shape[0],),
            parts[0], parts[1], parts[-1], qdata, as_bytes(scale), KX=widths[0], KY=widths[1], KZ=widths[2], MODE=mode,
            num_warps=max(4, next_power_of_2(padded // 2048)),
        )  # fmt: skip
    return qdata, scale
