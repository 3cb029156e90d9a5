"""FrozenWeight: a quantized weight that is never trained, read from a quantized checkpoint or frozen from bf16.

    format      stored                                          multiplied on Hopper in forward    in dgrad
    mxfp8       E4M3, e8m0 scales of 32 along K, 1.04 bytes     as stored, one scale per row       a copy, folded
    mxfp4       E2M1, e8m0 scales of 32 along K, 0.53 bytes     a copy, folded                     a copy, folded
    fp8_block   E4M3, fp32 scales of 128 x 128, 1.00 bytes      as stored, sums times scales       a transposed copy
    fp8_row     E4M3, fp32 scales of rows (N), 1.00 bytes       as stored, out times scales        dy times scales

Bytes are per element. A copy has a byte per element, and exists only during its GEMM.

By default mxfp8 is stored folded to one scale per row. Folding rounds the smallest elements of a row
(`mxep.quant.fold`): less than 1 in 10^4 of Gaussian weights, by at most 2^-18 of their row's amax. The original bytes
of these elements are kept separately, so `shipped` returns every byte of the checkpoint. With folded=False qdata are
stored as shipped, and forward folds them at each call.

qdata and scales are uint8, because `.to(torch.bfloat16)`, mixed precision and FSDP2 cast all floating-point tensors.

G groups (experts), N out features, K in features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mxep.quant import (
    BLOCK,
    E2M1,
    E4M3,
    BlockFP8,
    MXFormat,
    MXTensor,
    column_scales,
    fold,
    quantize,
    quantize_blocks,
    to_mxfp8,
)
from mxep.runtime.bundle import Bundle

FrozenFormat = Literal["mxfp8", "mxfp4", "fp8_block", "fp8_row"]
FORMATS: dict[str, MXFormat] = {"mxfp8": E4M3, "mxfp4": E2M1, "fp8_block": E4M3, "fp8_row": E4M3}
FP8_BLOCK = (128, 128)
"""Rows and columns of a block of "fp8_block"."""
FP32_SCALES = ("fp8_block", "fp8_row")
"""Formats with fp32 scales, which are BlockFP8. The others are MX formats."""
LOST = 1024
"""The original bytes of at most one element in LOST, per group, are kept separately."""
_SCALE = torch.float8_e8m0fnu


@dataclass(frozen=True, eq=False)
class FrozenWeight(Bundle):
    """A frozen weight (G, N, K).

    Attributes:
        qdata: uint8, (G, N, K) of E4M3 or (G, N, K/2) of E2M1, two per byte.
        scale: the checkpoint's scales. MX formats: uint8 (G, N, K / 32), e8m0. fp8_block: uint8
            (G, ceil(N / 128), 4 * ceil(K / 128)), each fp32 scale as 4 bytes. fp8_row: uint8 (G, N, 4), likewise.
        column_scale: uint8 (G, K / 32), scales for dgrad. fp8_block and fp8_row: None.
        row_scale: uint8 (G, N, 1) if qdata are folded to one scale per row; None if qdata are as shipped.
        lost_index: if folded, int32 (G, N * K / 1024): the positions within a group of the elements that unfolding does
            not restore. Unused entries are -1.
        lost_qdata: if folded, uint8 (G, N * K / 1024): the shipped bytes of these elements.
    """

    qdata: Tensor
    scale: Tensor
    column_scale: Tensor | None = None
    row_scale: Tensor | None = None
    lost_index: Tensor | None = None
    lost_qdata: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        if self.column_scale is None:
            return self.qdata.shape
        return torch.Size((*self.qdata.shape[:-1], BLOCK * self.scale.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that `dequantize` returns by default."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    @property
    def format(self) -> FrozenFormat:
        if self.column_scale is None:
            return "fp8_row" if self.scale.shape[-2:] == (self.qdata.shape[-2], 4) else "fp8_block"
        return "mxfp8" if self.qdata.shape[-1] == self.shape[-1] else "mxfp4"

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of which it consists, in order: 2 if scales are fp32, 3 for MX formats, 6 for folded MXFP8."""
        return [x for x in (getattr(self, name) for name in self.field_names) if x is not None]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def along_k(self) -> MXTensor | BlockFP8:
        """The quantized weight that GEMMs multiply. If folded, it has one scale per row, else one scale per block."""
        if self.column_scale is None:
            size = block_of(self.format, self.shape[-1])
            return BlockFP8(self.qdata.view(E4M3.dtype), self.scale.view(torch.float32), size)
        scale, block = (self.scale, BLOCK) if self.row_scale is None else (self.row_scale, self.shape[-1])
        qdata = self.qdata.view(FORMATS[self.format].dtype)
        return MXTensor(qdata, scale.view(_SCALE), None, -1, block, self.dtype, trusted=True)

    def shipped(self) -> MXTensor | BlockFP8:
        """The weight with the checkpoint's qdata and scales: blocks of 32 along K or of 128 x 128, or rows."""
        if self.row_scale is None or self.lost_index is None or self.lost_qdata is None:
            return self.along_k()
        qdata = _unfolded(self.qdata.view(E4M3.dtype), self.row_scale, self.scale)
        places, bytes_ = self.lost_index, qdata.flatten(1)
        groups, slots = torch.where(places >= 0)
        bytes_[groups, places[groups, slots].long()] = self.lost_qdata[groups, slots]
        return MXTensor(qdata.view(E4M3.dtype), self.scale.view(_SCALE), None, -1, BLOCK, self.dtype, trusted=True)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values (G, N, K) in `dtype`. The default, bf16, holds values of MX formats exactly."""
        return self.along_k().dequantize(dtype or self.dtype)

    def __getitem__(self, groups: slice) -> "FrozenWeight":
        """A FrozenWeight of the groups in this slice."""
        fields = (getattr(self, name) for name in self.field_names)
        return FrozenWeight(*(None if x is None else x[groups] for x in fields))  # type: ignore[arg-type]


def block_of(fmt: str, k: int) -> tuple[int, int]:
    """(rows, columns) per scale of a weight (N, k) in one of `FP32_SCALES`."""
    return FP8_BLOCK if fmt == "fp8_block" else (1, k)


def expanded(w: Any, expand: Callable[[FrozenWeight], Tensor]) -> Any:
    """Return expand(w) if w is a FrozenWeight, else w. The expansion is for one GEMM only."""
    return expand(w) if isinstance(w, FrozenWeight) else w


def _unfolded(qdata: Tensor, row_scale: Tensor, scale: Tensor) -> Tensor:
    """Undo folding: return qdata for blocks of 32 with the scales `scale`, as uint8. Elements lost bits by folding."""
    shift = (row_scale.int() - scale.int()).clamp(min=0).unsqueeze(-1)
    return torch.ldexp(qdata.float().unflatten(-1, (-1, BLOCK)), shift).flatten(-2).to(E4M3.dtype).view(torch.uint8)


def freeze(w: Tensor | BlockFP8, fmt: FrozenFormat = "mxfp8", *, folded: bool = True) -> FrozenWeight:
    """Freeze w (G, N, K).

    Args:
        w: bf16 or fp32, to be quantized along K to `fmt`. Or already quantized, with `fmt` its format: an MXTensor of
            E4M3 ("mxfp8") or E2M1 ("mxfp4") with blocks of 32 along K; BlockFP8 with power-of-two scales ("mxfp8");
            BlockFP8 in blocks of 128 x 128 ("fp8_block"), or with one scale per row or per matrix ("fp8_row").
        fmt: "mxfp8", "mxfp4", "fp8_block" or "fp8_row".
        folded: True to store "mxfp8" with one scale per row, as Hopper multiplies it. Other formats ignore it.

    If w is an MXTensor, the result shares its scales, and if not folded its qdata. Waits for the device.

    Raises ValueError for other formats and shapes. If folded, it also raises ValueError if more than one in 1024
    elements of a group do not fold exactly. This happens if norms within a row differ by 2^10. In formats with fp32
    scales, it raises ValueError if a scale is NaN or Inf.
    """
    if fmt not in FORMATS:
        raise ValueError(f"freeze: expected fmt {' or '.join(FORMATS)}, got {fmt!r}")
    if isinstance(w, BlockFP8) and fmt not in FP32_SCALES:
        w = to_mxfp8(w)
    if len(w.shape) != 3 or w.shape[-1] % BLOCK:
        raise ValueError(f"freeze: expected w (G, N, K) with K a multiple of {BLOCK}, got {tuple(w.shape)}")
    with torch.inference_mode(False), torch.no_grad():  # forward saves the parts for backward
        return _freeze(w, fmt, folded)


def _freeze(w: Tensor | BlockFP8, fmt: FrozenFormat, folded: bool) -> FrozenWeight:
    if fmt in FP32_SCALES:
        return _freeze_blocks(w, fmt)
    assert isinstance(w, Tensor)
    w = w.clone() if w.is_inference() else w
    mx = w if isinstance(w, MXTensor) else quantize(w.detach(), fmt=FORMATS[fmt])
    if mx.qdata.dtype != FORMATS[fmt].dtype or mx.axis != -1 or mx.block_size != BLOCK or mx.row_index is not None:
        raise ValueError(f"freeze: expected {fmt}, blocks of {BLOCK} along K, got {mx}")
    qdata, scale = mx.qdata.view(torch.uint8), mx.scale.view(torch.uint8)
    columns = column_scales(mx).view(torch.uint8)
    if fmt != "mxfp8" or not folded:
        return FrozenWeight(qdata, scale, columns)
    rowwise = fold(mx)
    row_scale = rowwise.scale.view(torch.uint8)
    lost = _lost(rowwise.qdata, row_scale, scale, qdata)
    return FrozenWeight(rowwise.qdata.view(torch.uint8), scale, columns, row_scale, *lost)


def _freeze_blocks(w: Tensor | BlockFP8, fmt: str) -> FrozenWeight:
    block = block_of(fmt, w.shape[-1])
    if isinstance(w, BlockFP8) and fmt == "fp8_row" and w.block_size[1] == w.shape[-1]:
        w = w.by_rows()
    if isinstance(w, MXTensor) or (isinstance(w, BlockFP8) and w.block_size != block):
        raise ValueError(f"freeze: expected {fmt}, blocks of {block}, got {w}")
    blocks = quantize_blocks(w, block_size=block) if isinstance(w, Tensor) else w
    scale = blocks.scale_values().contiguous()
    if not scale.is_meta and (bad := int((~scale.isfinite()).sum())):
        raise ValueError(f"freeze: expected finite weights and scales, got {bad} scales that are NaN or Inf")
    return FrozenWeight(blocks.qdata.contiguous().view(torch.uint8), scale.view(torch.uint8))


def _lost(folded: Tensor, row_scale: Tensor, scale: Tensor, shipped: Tensor) -> tuple[Tensor, Tensor]:
    """Return (lost_index, lost_qdata) for qdata (G, N, K). To save memory, one group at a time is unfolded."""
    groups, elements = len(shipped), shipped.shape[1:].numel()
    room = -(-elements // LOST)
    index = torch.full((groups, room), -1, dtype=torch.int32, device=shipped.device)
    bytes_ = torch.zeros((groups, room), dtype=torch.uint8, device=shipped.device)
    for g in range(0 if shipped.is_meta else groups):
        unfolded = _unfolded(folded[g], row_scale[g], scale[g])
        (places,) = torch.where((unfolded != shipped[g]).flatten())
        if len(places) > room:
            nan = int(row_scale[g].view(_SCALE).float().isnan().sum())
            why = f", in {nan} of its rows for a NaN or Inf" if nan else ""
            raise ValueError(
                f"freeze: expected at most {room} of {elements} elements of group {g} that do not fold exactly, got "
                f"{len(places)}{why}: pass folded=False"
            )
        index[g, : len(places)] = places.int()
        bytes_[g, : len(places)] = shipped[g].flatten()[places]
    return index, bytes_
