"""Recipe: how the operands of the three GEMMs are quantized, in one frozen description that every layer passes down.

    forward  out = a  w^T     contracts K   a quantized along K (rows), w along K
    dgrad    da  = dy w       contracts N   dy quantized along N (rows), w along N
    wgrad    dw  = dy^T a     contracts M   the rows' qdata again: requantized along tokens, or as `wgrad` says

Scaling "none" multiplies operands as they are ("bf16"), "row" has one power-of-two scale per row ("fp8"), "mx" one per
32 elements ("mxfp8"). A contraction axis, tokens of a group included, is a multiple of GROUP_ALIGNMENT[scaling].

M rows, N out features, K in features, G groups.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from mxep.quant import BLOCK, E2M1, E4M3, E5M2, MXFormat, MXTensor, ScaleMode, quantize, requantize

Scaling = Literal["none", "row", "mx"]

GROUP_ALIGNMENT: Final[dict[str, int]] = {"none": 1, "row": 16, "mx": BLOCK}
"""Multiple that the rows of every group are padded to. K and N are multiples of it, too."""

_BASES: Final[dict[str, Scaling]] = {"bf16": "none", "fp8": "row", "mxfp8": "mx"}
_CHANGES: Final[dict[str, dict[str, Any]]] = {
    "e5m2": {"grad_fmt": E5M2},
    "32x32": {"weight_block": "32x32"},
    "mxfp4_weights": {"weight_rounding": "mxfp4"},
    "wgrad_bf16": {"wgrad": "bf16"},
    "gate_up_fp8": {"saved_gate_up": "fp8"},
    **{str(mode): {"mode": mode} for mode in ScaleMode if mode != ScaleMode.RCEIL},
}


@dataclass(frozen=True)
class Recipe:
    """Settings of `grouped_mm`.

    scaling: "none", "row" or "mx".
    fmt: element format of activations and weights. grad_fmt: of gradients.
    mode: rule for a scale, given the largest magnitude that it covers.
    weight_block: "1x32", blocks along the contraction, which take two quantizations of a weight; "32x32", tiles: one
        quantization serves w and w^T (scaling "mx" only).
    wgrad: "mx" makes the weight gradient from the qdata of both operands, and saves only qdata for backward. Scaling
        "mx" requantizes them along tokens without bf16 in between; "row" multiplies their dequantized values. "bf16"
        saves the unquantized activation, if there is one, and multiplies unquantized operands.
    weight_rounding: "none", or "mxfp4": weights are rounded to MXFP4 along K first, in forward and dgrad alike, and
        their gradients pass unchanged: quantization-aware training (scaling "mx", blocks "1x32"). FP8 holds the rounded
        values exactly if the scales that meet in one block or row lie within 2^14. fp32 weights are rounded to bf16
        before, as they are exported. It takes a bf16 copy of the weight for each quantization.
    saved_gate_up: form of gate and up that a layer of `mxep.ep` saves for backward: "unquantized", or "fp8". "fp8" is
        `fmt` with one scale per row: half of the bytes. All gradients are made from it. Forward and GEMMs ignore it.

    Raises ValueError for other values, for tiles without MX scales, for rounding with tiles or without MX scales, and
    for saved_gate_up "fp8" with scaling "none".
    """

    scaling: Scaling
    fmt: MXFormat = E4M3
    grad_fmt: MXFormat = E4M3
    mode: ScaleMode = ScaleMode.RCEIL
    weight_block: Literal["1x32", "32x32"] = "1x32"
    wgrad: Literal["mx", "bf16"] = "mx"
    saved_gate_up: Literal["unquantized", "fp8"] = "unquantized"
    weight_rounding: Literal["none", "mxfp4"] = "none"

    def __post_init__(self) -> None:
        allowed = {"scaling": tuple(GROUP_ALIGNMENT), "weight_block": ("1x32", "32x32"), "wgrad": ("mx", "bf16")}
        allowed |= {"saved_gate_up": ("unquantized", "fp8"), "weight_rounding": ("none", "mxfp4")}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}: got {getattr(self, field)!r}, want one of {', '.join(values)}")
        if self.weight_block == "32x32" and self.scaling != "mx":
            raise ValueError(f"weight_block 32x32: got scaling {self.scaling!r}, want 'mx'")
        if self.weight_rounding == "mxfp4" and (self.scaling, self.weight_block) != ("mx", "1x32"):
            got = f"{self.scaling!r} and {self.weight_block!r}"
            raise ValueError(f"weight_rounding mxfp4: expected scaling 'mx' and weight_block '1x32', got {got}")
        if self.saved_gate_up == "fp8" and self.scaling == "none":
            raise ValueError("saved_gate_up fp8: got scaling 'none', want 'row' or 'mx'")

    @classmethod
    def bf16(cls) -> Self:
        """No quantization: operands are multiplied as they are."""
        return cls("none")

    @classmethod
    def fp8(cls, **changes: Any) -> Self:
        """Row-scaled FP8 with power-of-two scales; `changes` are fields, such as grad_fmt=E5M2."""
        return cls("row", **changes)

    @classmethod
    def mxfp8(cls, **changes: Any) -> Self:
        """MXFP8, E4M3 everywhere; `changes` are fields, such as grad_fmt=E5M2."""
        return cls("mx", **changes)

    @staticmethod
    def named(name: str) -> "Recipe":
        """The recipe called `name`: bf16, fp8 or mxfp8, with changes after it, as in "mxfp8_e5m2_wgrad_bf16".

        Changes, in this order: e5m2 (gradients), 32x32 (weight tiles) or mxfp4_weights (rounding), both of mxfp8 alone,
        wgrad_bf16, gate_up_fp8 (saved), and one of floor, ceil, even (scale mode). Raises ValueError, listing these,
        for any other name.
        """
        if name not in _NAMED:
            meant = "".join(f"; did you mean {each}?" for each in _NAMED if _words(each) == _words(name))
            changes = ", ".join(f"_{change}" for change in _CHANGES)
            raise ValueError(
                f"recipe: got {name!r}, want {', '.join(_BASES)}; after fp8 and mxfp8 also {changes} (in this order, "
                f"one of the last three, 32x32 or mxfp4_weights after mxfp8 alone), as in 'mxfp8_e5m2'{meant}"
            )
        return _NAMED[name]

    @property
    def name(self) -> str:
        """Name by which `named` finds this recipe. Recipes with activation formats other than E4M3 have none."""
        base = next(base for base, scaling in _BASES.items() if scaling == self.scaling)
        changes = (c for c, fields in _CHANGES.items() if all(getattr(self, f) == v for f, v in fields.items()))
        return "_".join((base, *changes))

    @property
    def group_alignment(self) -> int:
        """Multiple that the rows of every group are padded to."""
        return GROUP_ALIGNMENT[self.scaling]

    @property
    def block_size(self) -> int | None:
        """Elements per scale along a row: 32 for "mx", None (the whole row) for "row"; "none" has no scales."""
        return BLOCK if self.scaling == "mx" else None

    def fits(self, x: MXTensor) -> bool:
        """True if `x` has the blocks that this recipe gives an activation or a gradient (M, K).

        E4M3 and E5M2 both fit: qdata carry their own format. E2M1 does not.
        """
        if self.scaling == "none" or x.qdata.dtype == E2M1.dtype:
            return False
        return x.axis == -1 and x.block_size == (self.block_size or x.shape[-1])

    def along_tokens(self, x: Tensor, offs: Tensor | None) -> Tensor:
        """Block an operand of wgrad (M, D) along M instead of D, in its own format. It may have a row index.

        offs None: one group of any number of rows; the last block is filled up with zero rows.
        Only MXTensors with scaling "mx" are requantized. Anything else is returned as it is.
        """
        if self.scaling != "mx" or not isinstance(x, MXTensor):
            return x
        if offs is None and (missing := -x.shape[0] % BLOCK):
            index = x.row_index
            if index is None:
                index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
            # The index adds the zero rows: no byte of x moves.
            x = x.with_parts(x.qdata, x.scale, torch.nn.functional.pad(index, (0, missing), value=-1))
        return requantize(x, mode=self.mode, offs=offs)

    def rounded_weight(self, w: Tensor) -> Tensor:
        """The values (G, N, K) that GEMMs quantize: w, or with weight_rounding "mxfp4" its values in MXFP4, in bf16."""
        if self.weight_rounding == "none":
            return w
        return quantize(w.bfloat16(), fmt=E2M1).dequantize(torch.bfloat16)

    def quantize_rows(self, x: Tensor, fmt: MXFormat | None = None, room: int | None = None) -> Tensor:
        """Quantize x (..., D) bf16 or fp32 along D; x itself if scaling is "none". Gradients pass unchanged.

        fmt: default this recipe's; `grad_fmt` for a gradient. room: as for `mxep.quant.quantize`."""
        if self.scaling == "none":
            return x
        return quantize(x, fmt=fmt or self.fmt, mode=self.mode, block_size=self.block_size, room=room)


def _words(name: str) -> list[str]:
    return sorted(name.split("_"))


def _all() -> Iterator[Recipe]:
    yield Recipe.bf16()
    scalings: tuple[Scaling, ...] = "row", "mx"
    for scaling, count in itertools.product(scalings, range(6)):
        for changes in itertools.combinations(_CHANGES.items(), count):
            fields = [field for _, change in changes for field in change.items()]
            of_mx = sum(name in ("weight_block", "weight_rounding") for name, _ in fields)
            if len(dict(fields)) == len(fields) and of_mx <= (scaling == "mx"):
                yield Recipe(scaling, **dict(fields))


_NAMED: Final = {recipe.name: recipe for recipe in _all()}  # made here, because code under torch.compile makes none
