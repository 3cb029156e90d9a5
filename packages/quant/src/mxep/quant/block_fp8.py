"""Block FP8: E4M3 weights with one scale per block of rows x columns, as DeepSeek-V3 and Qwen3-FP8 ship them.

    qdata   (..., N, K)                          float8_e4m3fn
    scale   (..., ceil(N/rows), ceil(K/columns)) fp32, bf16, fp16 or e8m0;  a value is qdata * scale

Checkpoints call the scale `weight_scale_inv`, although a value is qdata times the scale, not divided by it. Blocks at
the bottom and right edges may be smaller: 576 rows in blocks of 128 rows are five blocks, and the last block has 64
rows. Block size (1, K) is row-scaled FP8. Block size (N, K) is one scale per matrix.

Plain torch on any device. `mxep.quant.to_mxfp8` converts block FP8 to an MXTensor if all scales are powers of two.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.quant.formats import E4M3, NAN_SCALE, SCALE_DTYPE, ScaleMode, power_of_two, scale_of_amax
from mxep.quant.ops import NAN_ELEMENT, values_of
from mxep.quant.shapes import VALUE_DTYPES, check_values

BlockShape = tuple[int, int]
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, SCALE_DTYPE)
_ONE = 127


@dataclass(frozen=True)
class BlockFP8:
    """A weight in block FP8, (..., N, K). Leading axes are optional; E experts are (E, N, K).

    Attributes:
        qdata, scale: shapes and dtypes as in the module's docstring.
        block_size: (rows, columns) per scale.
    Raises ValueError for other dtypes, and for a scale of another shape or on another device than qdata.
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
        """The values qdata * scale as a contiguous tensor (..., N, K).

        dtype: bf16, fp32 or fp16. Products are computed in fp32 and rounded once to `dtype`.
        """
        if dtype not in VALUE_DTYPES:
            raise ValueError(f"dequantize: expected dtype {VALUE_DTYPES}, got {dtype}")
        n, k = self.shape[-2:]
        scale = spread_scale(self.scale_values(), self.block_size, n, k)
        return (values_of(self.qdata) * scale).to(dtype).contiguous()

    @property
    def mT(self) -> "BlockFP8":
        """BlockFP8 (..., K, N) of transposed views of qdata and scale."""
        return BlockFP8(self.qdata.mT, self.scale.mT, self.block_size[::-1])

    def by_rows(self) -> "BlockFP8":
        """The same values with one fp32 scale per row, (..., N, 1). Blocks must span whole rows."""
        scale = spread_scale(self.scale_values(), (self.block_size[0], 1), self.shape[-2], 1)
        return BlockFP8(self.qdata, scale.contiguous(), (1, self.shape[-1]))

    def scale_values(self) -> Tensor:
        return _scale_values(self.scale)

    def scale_exponents(self) -> Tensor | None:
        """The scales as e8m0 if each is NaN or a power of two that e8m0 can represent, else None."""
        return exponents_of(self.scale)


def exponents_of(scale: Tensor) -> Tensor | None:
    """`BlockFP8.scale_exponents` of a tensor of scales."""
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

    block_size: (rows, columns) per scale. N and K need not be multiples of them.
    scale_dtype: with fp32, bf16 or fp16, the scale is amax / 448, but at least the dtype's smallest normal number. With
        float8_e8m0fnu (`ue8m0` in checkpoints), the scale is 2**ceil(log2(amax / 448)).

    A block of zeros gets scale 1. Elements are x / scale in fp32, rounded to nearest even. They saturate at 448,
    because a scale that was rounded down would give larger quotients.
    A block gets scale NaN and elements 0x7f if it has NaN or Inf, or if its scale exceeds fp16 with scale_dtype fp16.
    Raises ValueError for other dtypes and block sizes.
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
    """Quantize x a second time, in the same blocks, with power-of-two scales. Unlike x, the result can be folded.

    Use it only where a GEMM cannot apply x's scales to its partial sums: random weights have an SNR of 31.5 dB in x,
    and 28.5 dB in the result. If all scales of x are powers of two already, the elements do not change. No autograd.

    Returns:
        BlockFP8 with e8m0 scales.
        SNR of the result against x in dB, (...) fp64: one number per matrix (N, K), inf if no element changes.
    """
    if (exponents := x.scale_exponents()) is not None:
        exact = torch.full(x.shape[:-2], torch.inf, dtype=torch.float64, device=x.qdata.device)
        return BlockFP8(x.qdata, exponents, x.block_size), exact
    values = x.dequantize(torch.float32)
    rescaled = quantize_blocks(values, block_size=x.block_size, scale_dtype=SCALE_DTYPE)
    error = rescaled.dequantize(torch.float32).double() - values.double()
    signal, noise = (part.square().sum((-2, -1)) for part in (values.double(), error))
    return rescaled, torch.where(noise == 0, torch.inf, 10 * (signal / noise).log10())  # inf also if all are zeros


def spread_scale(scale: Tensor, block_size: BlockShape, rows: int, columns: int) -> Tensor:
    """Repeat one scale per block to one scale per element: (..., block rows, block columns) -> (..., rows, columns)."""
    high, wide = (min(size, whole) for size, whole in zip(block_size, (rows, columns)))
    scale = scale.repeat_interleave(high, -2)[..., :rows, :]
    return scale.repeat_interleave(wide, -1)[..., :columns]


def _scale_values(scale: Tensor) -> Tensor:
    return power_of_two(scale.view(torch.uint8)) if scale.dtype == SCALE_DTYPE else scale.float()


def _amax(x: Tensor, block_size: BlockShape) -> Tensor:
    """Maximum of each block of x (..., N, K), x >= 0. Returns (..., block rows, block columns)."""
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
