"""FrozenWeight: a quantized weight that is never trained, read from a quantized checkpoint or frozen from bf16.

    freeze(w, "mxfp8")       E4M3, 1.04 bytes an element      blocks of 32 along K, scales in e8m0
    freeze(w, "mxfp4")       E2M1, 0.53 bytes an element
    freeze(w, "fp8_block")   E4M3, 1.00 bytes an element      blocks of 128 x 128, scales in fp32

    forward   its qdata, one scale per row                   dgrad   the same qdata, one scale per column
              mxfp8: stored in this form, no copy                    (`mxep.quant.fold_for_dgrad`), a byte an element
              mxfp4: expanded, a byte an element

A scale in fp32 does not fold. Hopper's GEMM multiplies each sum over 128 elements by the block's scale, exactly.
Forward reads qdata in place, dgrad a transposed copy of them.

On Hopper no bf16 copy of the weight is made. The weight is expanded for one GEMM at a time; the expansion is then
freed. Folding MXFP8 to one scale per row rounds its smallest elements (`mxep.quant.fold`): below 1 in 10^4 of Gaussian
weights, by at most 2^-18 of their row's amax. Their original bytes are kept separately, so `shipped` returns every
byte of the checkpoint. With folded=False qdata are stored as shipped, and forward folds them at each call.

qdata and scales are uint8: `.to(torch.bfloat16)`, mixed precision and FSDP2 cast floating-point tensors only.
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

FrozenFormat = Literal["mxfp8", "mxfp4", "fp8_block"]
FORMATS: dict[str, MXFormat] = {"mxfp8": E4M3, "mxfp4": E2M1, "fp8_block": E4M3}
FP8_BLOCK = (128, 128)
"""Rows x columns of a block of "fp8_block", as the GEMM multiplies them."""
LOST = 1024
"""At most one element in LOST of a group may be kept separately."""
_SCALE = torch.float8_e8m0fnu


@dataclass(frozen=True, eq=False)
class FrozenWeight(Bundle):
    """A frozen weight (G, N, K).

    Attributes:
        qdata: uint8, (G, N, K) of E4M3 or (G, N, K/2) of E2M1, two per byte.
        scale: uint8 (G, N, K/32), e8m0 as shipped. fp8_block: fp32 in 4 bytes each, (G, ceil(N/128), 4 ceil(K/128)).
        column_scale: uint8 (G, K/32), scales for dgrad. fp8_block: None.
        row_scale: uint8 (G, N, 1) if qdata are folded to one scale per row; None if qdata are as shipped.
        lost_index, lost_qdata: int32 and uint8 (G, N K / 1024), if folded: positions within a group of the elements
            that unfolding does not restore (unused entries -1), and these elements' shipped bytes.
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
        """Outer dtype of the values."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    @property
    def format(self) -> FrozenFormat:
        if self.column_scale is None:
            return "fp8_block"
        return "mxfp8" if self.qdata.shape[-1] == self.shape[-1] else "mxfp4"

    @property
    def parts(self) -> list[Tensor]:
        """Its tensors in order: 2 for fp8_block, 3 for MX, 6 for folded MX."""
        return [x for x in (getattr(self, name) for name in self.field_names) if x is not None]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def along_k(self) -> MXTensor | BlockFP8:
        """The values that GEMMs multiply: qdata with one scale per row if folded, else one per block."""
        if self.column_scale is None:
            return BlockFP8(self.qdata.view(E4M3.dtype), self.scale.view(torch.float32), FP8_BLOCK)
        scale, block = (self.scale, BLOCK) if self.row_scale is None else (self.row_scale, self.shape[-1])
        qdata = self.qdata.view(FORMATS[self.format].dtype)
        return MXTensor(qdata, scale.view(_SCALE), None, -1, block, self.dtype, trusted=True)

    def shipped(self) -> MXTensor | BlockFP8:
        """The checkpoint's bytes: blocks of 32 along K, or of 128 x 128."""
        if self.row_scale is None or self.lost_index is None or self.lost_qdata is None:
            return self.along_k()
        qdata = _unfolded(self.qdata.view(E4M3.dtype), self.row_scale, self.scale)
        places, bytes_ = self.lost_index, qdata.flatten(1)
        groups, slots = torch.where(places >= 0)
        bytes_[groups, places[groups, slots].long()] = self.lost_qdata[groups, slots]
        return MXTensor(qdata.view(E4M3.dtype), self.scale.view(_SCALE), None, -1, BLOCK, self.dtype, trusted=True)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values (G, N, K) in `dtype`, default bf16, which holds values of MX formats exactly."""
        return self.along_k().dequantize(dtype or self.dtype)

    def __getitem__(self, groups: slice) -> "FrozenWeight":
        """Some of its groups."""
        fields = (getattr(self, name) for name in self.field_names)
        return FrozenWeight(*(None if x is None else x[groups] for x in fields))  # type: ignore[arg-type]


def expanded(w: Any, expand: Callable[[FrozenWeight], Tensor]) -> Any:
    """A weight as a GEMM multiplies it. A frozen one is expanded for this GEMM alone."""
    return expand(w) if isinstance(w, FrozenWeight) else w


def _unfolded(qdata: Tensor, row_scale: Tensor, scale: Tensor) -> Tensor:
    """uint8: the folded qdata in blocks of 32 with their scales again."""
    shift = (row_scale.int() - scale.int()).clamp(min=0).unsqueeze(-1)
    return torch.ldexp(qdata.float().unflatten(-1, (-1, BLOCK)), shift).flatten(-2).to(E4M3.dtype).view(torch.uint8)


def freeze(w: Tensor | BlockFP8, fmt: FrozenFormat = "mxfp8", *, folded: bool = True) -> FrozenWeight:
    """Freeze w (G, N, K). If w is an MXTensor, the result shares its scales, and unless folded its qdata.

    w: bf16 or fp32, quantized here along K to `fmt`. If it is quantized already, `fmt` must be its format. It is then
        an MXTensor of E4M3 or E2M1 with blocks of 32 along K, BlockFP8 with power-of-two scales ("mxfp8"), or BlockFP8
        in blocks of 128 x 128 ("fp8_block").
    folded: store MXFP8 with one scale per row, as Hopper multiplies it. Other formats never are.

    Waits for the device. Raises ValueError for other formats and shapes. With folded=True it also raises ValueError if
    more than one in 1024 elements of a group do not fold exactly, e.g. if norms within a row differ by 2^10.
    """
    if fmt not in FORMATS:
        raise ValueError(f"freeze: expected fmt {' or '.join(FORMATS)}, got {fmt!r}")
    if isinstance(w, BlockFP8) and fmt != "fp8_block":
        w = to_mxfp8(w)
    if len(w.shape) != 3 or w.shape[-1] % BLOCK:
        raise ValueError(f"freeze: expected w (G, N, K) with K a multiple of {BLOCK}, got {tuple(w.shape)}")
    with torch.inference_mode(False), torch.no_grad():  # forward saves the parts for backward
        return _freeze(w, fmt, folded)


def _freeze(w: Tensor | BlockFP8, fmt: FrozenFormat, folded: bool) -> FrozenWeight:
    if fmt == "fp8_block":
        return _freeze_blocks(w)
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


def _freeze_blocks(w: Tensor | BlockFP8) -> FrozenWeight:
    if isinstance(w, MXTensor) or (isinstance(w, BlockFP8) and w.block_size != FP8_BLOCK):
        raise ValueError(f"freeze: expected fp8_block, blocks of {FP8_BLOCK}, got {w}")
    blocks = quantize_blocks(w, block_size=FP8_BLOCK) if isinstance(w, Tensor) else w
    scale = blocks.scale_values().contiguous()
    return FrozenWeight(blocks.qdata.contiguous().view(torch.uint8), scale.view(torch.uint8))


def _lost(folded: Tensor, row_scale: Tensor, scale: Tensor, shipped: Tensor) -> tuple[Tensor, Tensor]:
    """`lost_index` and `lost_qdata` of bytes (G, N, K). One group is unfolded at a time."""
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
