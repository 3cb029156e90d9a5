"""Block FP8: E4M3 weights with one scale per block of rows x columns, as DeepSeek-V3 and Qwen3-FP8 ship them.

    qdata   (..., N, K)                          float8_e4m3fn
    scale   (..., ceil(N/rows), ceil(K/columns)) fp32, bf16, fp16 or e8m0;  a value is qdata * scale

Checkpoints call the scale `weight_scale_inv`, but it multiplies. Blocks at the edges are cut: 576 rows in blocks of 128
are five blocks, the last one 64 rows high. Blocks (1, K) are row-scaled FP8, (N, K) is one scale per matrix.

Plain torch on any device. `to_mxfp8` and `fold` take power-of-two scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.quant.checks import VALUE_DTYPES, check_values
from mxep.quant.formats import E4M3, NAN_SCALE, SCALE_DTYPE, ScaleMode, power_of_two, scale_of_amax
from mxep.quant.ops import NAN_ELEMENT, values_of

BlockShape = tuple[int, int]
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, SCALE_DTYPE)
_ONE = 127


@dataclass(frozen=True)
class BlockFP8:
    """A weight in block FP8, (..., N, K), with any leading axes, such as (E, N, K) for E experts.

    qdata, scale: see the module's docstring. block_size: (rows, columns) per scale.
    Raises ValueError for other dtypes and for a scale of another shape or device.
    """

    qdata: Tensor
    scale: Tensor
    block_size: BlockShape = (128, 128)

    def __post_init__(self) -> None:
        if self.qdata.dtype != E4M3.dtype:
            raise ValueError(f"BlockFP8: expected qdata of {E4M3.dtype}, got {self.qdata.dtype}")
        if self.scale.dtype not in SCALE_DTYPES:
            raise ValueError(f"BlockFP8: expected a scale of {SCALE_DTYPES}, got {self.scale.dtype}")
        if self.qdata.ndim < 2:
            raise ValueError(f"BlockFP8: expected qdata (..., N, K), got shape {tuple(self.qdata.shape)}")
        _check_block_shape(self.block_size)
        expected = (*self.qdata.shape[:-2], *_grid(self.qdata, self.block_size))
        if self.scale.shape != expected:
            raise ValueError(
                f"BlockFP8: expected a scale of shape {expected} for qdata {tuple(self.qdata.shape)} in blocks of "
                f"{self.block_size}, got {tuple(self.scale.shape)}"
            )
        if self.scale.device != self.qdata.device:
            raise ValueError(f"BlockFP8: expected a scale on {self.qdata.device}, got {self.scale.device}")

    @property
    def shape(self) -> torch.Size:
        return self.qdata.shape

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The values, (..., N, K) contiguous: qdata * scale in fp32, rounded once to `dtype`, bf16, fp32 or fp16."""
        if dtype not in VALUE_DTYPES:
            raise ValueError(f"dequantize: expected dtype {VALUE_DTYPES}, got {dtype}")
        n, k = self.shape[-2:]
        scale = spread_scale(self.scale_values(), self.block_size, n, k)
        return (values_of(self.qdata) * scale).to(dtype).contiguous()

    @property
    def mT(self) -> "BlockFP8":
        """The transposed matrices (..., K, N), views."""
        return BlockFP8(self.qdata.mT, self.scale.mT, self.block_size[::-1])

    def scale_values(self) -> Tensor:
        return _scale_values(self.scale)

    def scale_exponents(self) -> Tensor | None:
        """The scales as e8m0 if all are powers of two in its range, or NaN, in any dtype. Otherwise None."""
        return exponents_of(self.scale)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., "BlockFP8"], tuple[Any, ...]]:
        # Bytes, because torch cannot read its pickles of 8-bit floats.
        scale = self.scale.view(torch.uint8) if self.scale.dtype == SCALE_DTYPE else self.scale
        return rebuild_block_fp8, (self.qdata.view(torch.uint8), scale, self.block_size)


def rebuild_block_fp8(qdata: Tensor, scale: Tensor, block_size: BlockShape) -> BlockFP8:
    """Called by `torch.load(weights_only=True)`. Checks the parts."""
    scale = scale.view(SCALE_DTYPE) if scale.dtype == torch.uint8 else scale
    return BlockFP8(qdata.view(E4M3.dtype), scale, block_size)


torch.serialization.add_safe_globals([rebuild_block_fp8])


def exponents_of(scale: Tensor) -> Tensor | None:
    """`BlockFP8.scale_exponents` for a scale tensor."""
    if scale.dtype == SCALE_DTYPE:
        return scale
    mantissa, exponent = torch.frexp(scale.float())
    nan = scale.isnan()
    fits = nan | ((mantissa == 0.5) & (exponent >= -126))
    if not bool(fits.all()):
        return None
    return torch.where(nan, NAN_SCALE, exponent + _ONE - 1).to(torch.uint8).view(SCALE_DTYPE)


def quantize_blocks(
    x: Tensor, *, block_size: BlockShape = (128, 128), scale_dtype: torch.dtype = torch.float32
) -> BlockFP8:
    """Quantize x (..., N, K) bf16 | fp32 | fp16 to block FP8, as DeepSeek-V3 does (inference/kernel.py). No autograd.

    block_size: (rows, columns) per scale; N and K need not be multiples.
    scale_dtype: fp32, bf16 or fp16: the scale is amax / 448, but at least the dtype's smallest normal number.
        float8_e8m0fnu (`ue8m0` in checkpoints): it is 2**ceil(log2(amax / 448)). A block of zeros has scale 1.
    Elements are x / scale in fp32, saturated at 448 (needed if the scale was rounded down), rounded to nearest even.
    A block with NaN or Inf, or too large for an fp16 scale, has scale NaN and every element 0x7f.
    Raises ValueError for other dtypes and blocks.
    """
    check_values("quantize_blocks", x)
    _check_block_shape(block_size)
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"quantize_blocks: expected scale_dtype {SCALE_DTYPES}, got {scale_dtype}")
    if x.ndim < 2:
        raise ValueError(f"quantize_blocks: expected x (..., N, K), got shape {tuple(x.shape)}")
    values = x.detach().float()
    n, k = x.shape[-2:]
    amax = _amax(values.abs(), block_size)
    if scale_dtype == SCALE_DTYPE:
        exponent = scale_of_amax(amax, E4M3, ScaleMode.RCEIL)
        scale = torch.where(amax == 0, _ONE, exponent).to(torch.uint8).view(SCALE_DTYPE)
    else:
        smallest = torch.finfo(scale_dtype).smallest_normal  # half of it would lose bits
        scale = torch.where(amax == 0, 1.0, (amax / E4M3.max).clamp(min=smallest)).to(scale_dtype)
        scale = torch.where(amax.isfinite() & scale.isfinite(), scale, torch.nan)
    divisor = spread_scale(_scale_values(scale), block_size, n, k)
    qdata = (values / divisor).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    qdata.view(torch.uint8).masked_fill_(divisor.isnan(), NAN_ELEMENT)
    return BlockFP8(qdata, scale, block_size)


def rescale_blocks(x: BlockFP8) -> tuple[BlockFP8, Tensor]:
    """x with power-of-two scales (e8m0), which can be folded, and its SNR against x in dB. No autograd.

    The values are quantized a second time, in the same blocks. Random weights have 31.5 dB against x. Against the
    weights that x was quantized from, x has 31.5 dB and the result 28.5. Use it only where a GEMM cannot rescale its
    sums. If the scales of x are powers of two, its elements stay.
    SNR: (...) fp64, one number per matrix (N, K), inf if no element changes.
    """
    if (exponents := x.scale_exponents()) is not None:
        exact = torch.full(x.shape[:-2], torch.inf, dtype=torch.float64, device=x.qdata.device)
        return BlockFP8(x.qdata, exponents, x.block_size), exact
    values = x.dequantize(torch.float32)
    rescaled = quantize_blocks(values, block_size=x.block_size, scale_dtype=SCALE_DTYPE)
    error = rescaled.dequantize(torch.float32).double() - values.double()
    signal, noise = (part.square().sum((-2, -1)) for part in (values.double(), error))
    return rescaled, torch.where(noise == 0, torch.inf, 10 * (signal / noise).log10())  # also of zeros alone


def spread_scale(scale: Tensor, block_size: BlockShape, rows: int, columns: int) -> Tensor:
    """scale (..., grid rows, grid columns) -> scale of each element (..., rows, columns)."""
    high, wide = (min(size, whole) for size, whole in zip(block_size, (rows, columns)))
    scale = scale.repeat_interleave(high, -2)[..., :rows, :]
    return scale.repeat_interleave(wide, -1)[..., :columns]


def _scale_values(scale: Tensor) -> Tensor:
    return power_of_two(scale.view(torch.uint8)) if scale.dtype == SCALE_DTYPE else scale.float()


def _amax(x: Tensor, block_size: BlockShape) -> Tensor:
    """Maximum of each block of x (..., N, K), x >= 0: (..., grid rows, grid columns)."""
    (rows, columns), (grid_rows, grid_columns) = block_size, _grid(x, block_size)
    padding = (0, grid_columns * columns - x.shape[-1], 0, grid_rows * rows - x.shape[-2])
    blocks = torch.nn.functional.pad(x, padding).unflatten(-1, (grid_columns, columns))
    amax: Tensor = blocks.unflatten(-3, (grid_rows, rows)).amax((-3, -1))
    return amax


def _grid(x: Tensor, block_size: BlockShape) -> tuple[int, int]:
    rows, columns = block_size
    return -(-x.shape[-2] // rows), -(-x.shape[-1] // columns)


def _check_block_shape(block_size: BlockShape) -> None:
    if len(block_size) != 2 or min(block_size) < 1:
        raise ValueError(f"block_size: expected (rows, columns), both positive, got {block_size}")
