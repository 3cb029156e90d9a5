"""Recipe: how the operands of the three GEMMs are quantized. Every layer passes the same frozen Recipe down.

    forward  out = a  w^T     contracts K   a quantized along K (rows), w along K
    dgrad    da  = dy w       contracts N   dy quantized along N (rows), w along N
    wgrad    dw  = dy^T a     contracts M   by default the qdata of a and dy, requantized along tokens (`Recipe.wgrad`)

A recipe's scaling is one of three:

    "none"   operands are multiplied unquantized                         recipe "bf16"
    "row"    each row has one power-of-two scale                         recipe "fp8"
    "mx"     each 32 elements of a row have one power-of-two scale       recipe "mxfp8"

Contracted sizes (K, N, and each group's number of tokens) must be multiples of GROUP_ALIGNMENT[scaling].

M rows, N out features, K in features, G groups.

Recipe "auto" means MXFP8 if it pays, else bf16. Only the shape decides; nothing is measured at run time. A GEMM of T
rows saves time in proportion to T * K * N. Quantizing costs time in proportion to the number of elements,
T * K + T * N + K * N. Its launches take as long as FIXED more elements. So the gain should grow with

    size = T * K * N / (T * K + T * N + K * N + FIXED)

and the measured gains of docs/lab/linear.md do. LEAST has the sizes above which MXFP8 pays.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from mxep.gemm.frozen import FrozenWeight
from mxep.quant import BLOCK, E2M1, E4M3, E5M2, MXFormat, MXTensor, ScaleMode, quantize, requantize

Scaling = Literal["none", "row", "mx"]

GROUP_ALIGNMENT: Final[dict[str, int]] = {"none": 1, "row": 16, "mx": BLOCK}
"""For each scaling, the number of which K, N and every group's number of rows must be multiples."""

_BASES: Final[dict[str, Scaling]] = {"bf16": "none", "fp8": "row", "mxfp8": "mx"}
_CHANGES: Final[dict[str, tuple[str, Any]]] = {
    "e5m2": ("grad_fmt", E5M2),
    "32x32": ("weight_block", "32x32"),
    "mxfp4_weights": ("weight_rounding", "mxfp4"),
    "wgrad_bf16": ("wgrad", "bf16"),
    "gate_up_fp8": ("saved_gate_up", "fp8"),
    "floor": ("mode", ScaleMode.FLOOR),
}
"""Suffixes of recipes' names, in their order: the field that each sets, and its value."""


@dataclass(frozen=True)
class Recipe:
    """How `grouped_mm` quantizes its operands.

    Attributes:
        scaling: "none", "row" or "mx", as above.
        fmt: element format of activations and weights.
        grad_fmt: element format of gradients.
        mode: rule that computes a scale from the largest magnitude of its block or row.
        weight_block: "1x32" or "32x32". "1x32" are blocks along the contracted axis, so a weight is quantized twice:
            along K for forward, along N for dgrad. "32x32" are square blocks, so one quantization serves both GEMMs. It
            needs scaling "mx".
        wgrad: "mx" or "bf16". "mx" computes the weight gradient from the qdata of both operands, and saves only qdata
            for backward. With scaling "mx" these qdata are requantized along tokens, without bf16 in between. With
            scaling "row" their dequantized values are multiplied. "bf16" multiplies unquantized operands, and therefore
            saves the unquantized activation, if the caller passed one.
        weight_rounding: "none" or "mxfp4". "mxfp4" is for quantization-aware training: it rounds weights to MXFP4 along
            K before they are quantized, for forward and dgrad alike. Gradients pass through unchanged. fp32 weights are
            first rounded to bf16, as in an export. FP8 holds the rounded values exactly if the scales within one block
            or row differ by a factor of at most 2^14. Each quantization allocates a bf16 copy of the weight. "mxfp4"
            needs scaling "mx" and weight_block "1x32".
        saved_gate_up: "unquantized" or "fp8". How a layer of `mxep.ep` saves gate and up for backward. "fp8" saves them
            in `fmt` with one scale per row, in half of the bytes, and backward computes all gradients from these. The
            results of forward do not depend on saved_gate_up. "fp8" does not go with scaling "none".

    Raises ValueError for other values and combinations.
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
        """Recipe without quantization: operands are multiplied as they are."""
        return cls("none")

    @classmethod
    def fp8(cls, **changes: Any) -> Self:
        """Row-scaled FP8 with power-of-two scales. `changes` sets fields, such as grad_fmt=E5M2."""
        return cls("row", **changes)

    @classmethod
    def mxfp8(cls, **changes: Any) -> Self:
        """MXFP8, with E4M3 for all operands. `changes` sets fields, such as grad_fmt=E5M2."""
        return cls("mx", **changes)

    @staticmethod
    def named(name: "Recipe | str") -> "Recipe":
        """Return the recipe called `name`, such as "mxfp8_e5m2_wgrad_bf16". A Recipe is returned as it is.

        A name is bf16, fp8 or mxfp8. After fp8 and mxfp8, e5m2, 32x32 or mxfp4_weights (mxfp8 only), wgrad_bf16,
        gate_up_fp8 and floor may follow, in this order.
        Raises ValueError for any other name. The message lists these suffixes.
        """
        if isinstance(name, Recipe):
            return name
        if not isinstance(name, str) or name not in _NAMED:
            words = sorted(str(name).split("_"))
            meant = "".join(f"; did you mean {each}?" for each in _NAMED if sorted(each.split("_")) == words)
            changes = ", ".join(f"_{change}" for change in _CHANGES)
            raise ValueError(
                f"recipe: got {name!r}, want {', '.join(_BASES)}; after fp8 and mxfp8 also {changes} (in this order, "
                f"one of 32x32 or mxfp4_weights after mxfp8 alone), as in 'mxfp8_e5m2'{meant}"
            )
        return _NAMED[name]

    @property
    def name(self) -> str:
        """The name by which `named` finds this recipe. It identifies the recipe only if fmt is E4M3."""
        base = next(base for base, scaling in _BASES.items() if scaling == self.scaling)
        return "_".join((base, *(c for c, (field, value) in _CHANGES.items() if getattr(self, field) == value)))

    @property
    def group_alignment(self) -> int:
        """The number of which K, N and every group's number of rows must be multiples."""
        return GROUP_ALIGNMENT[self.scaling]

    @property
    def block_size(self) -> int | None:
        """Elements of a row that share a scale: 32 with scaling "mx". None with "row" (all of them) and with "none"."""
        return BLOCK if self.scaling == "mx" else None

    def fits(self, x: MXTensor) -> bool:
        """True if x (M, K) has the blocks that this recipe gives to activations and gradients.

        E4M3 and E5M2 both fit, whatever fmt and grad_fmt are. E2M1 never fits.
        """
        if self.scaling == "none" or x.qdata.dtype == E2M1.dtype:
            return False
        return x.axis == -1 and x.block_size == (self.block_size or x.shape[-1])

    def along_tokens(self, x: Tensor, offs: Tensor | None) -> Tensor:
        """Requantize x (M, D), an operand of wgrad, from blocks along D to blocks along M, in its own element format.

        x may have a row index. If offs is None, there is one group of any number of rows, and its last block is filled
        up with zero rows. x is returned unchanged if it is plain, or if scaling is not "mx".
        """
        if self.scaling != "mx" or not isinstance(x, MXTensor):
            return x
        if offs is None and (missing := -x.shape[0] % BLOCK):
            index = x.row_index
            if index is None:
                index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
            # Index -1 stands for a row of zeros, so x is padded without a copy.
            x = x.with_parts(x.qdata, x.scale, torch.nn.functional.pad(index, (0, missing), value=-1))
        return requantize(x, mode=self.mode, offs=offs)

    def rounded_weight(self, w: Tensor) -> Tensor:
        """The weight values (G, N, K) to quantize: w itself, or w rounded to MXFP4, in bf16 (weight_rounding)."""
        if self.weight_rounding == "none":
            return w
        return quantize(w.bfloat16(), fmt=E2M1).dequantize(torch.bfloat16)

    def quantize_rows(self, x: Tensor, fmt: MXFormat | None = None, room: int | None = None) -> Tensor:
        """Quantize x (..., D) bf16 or fp32 along D. Returns x itself if scaling is "none". Gradients pass unchanged.

        fmt: default self.fmt. To quantize a gradient, pass self.grad_fmt. room: as for `mxep.quant.quantize`.
        """
        if self.scaling == "none":
            return x
        return quantize(x, fmt=fmt or self.fmt, mode=self.mode, block_size=self.block_size, room=room)


def _all() -> Iterator[Recipe]:
    yield Recipe.bf16()
    scalings: tuple[Scaling, ...] = "row", "mx"
    for scaling, count in itertools.product(scalings, range(len(_CHANGES))):
        for changes in itertools.combinations(_CHANGES.values(), count):
            if sum(name in ("weight_block", "weight_rounding") for name, _ in changes) <= (scaling == "mx"):
                yield Recipe(scaling, **dict(changes))


_NAMED: Final = {recipe.name: recipe for recipe in _all()}  # made at import: code under torch.compile cannot make one


AUTO: Final = "auto"
LEAST: Final = {"linear": 470, "grouped_mm": 470, "experts": 290}
"""Sizes above which `auto_recipe` chooses MXFP8, from speedups measured on an H200.

A speedup is device time in bf16 / device time in MXFP8, of forward and backward, including all quantization.

linear: a GEMM with one weight, or with q, k and v together. Speedup 1.23 at size 535, 1.04 at 362, 0.70 at 209.
grouped_mm: T rows per group. Speedup 1.18 at size 473, the smallest measured.
experts: a layer of mxep.ep, T rows per expert, model dim K, hidden dim N. Speedup 1.11 at size 324, 1.06 at 299, 1 at
    267. bf16 is mxep's own GEMM here, and torch's in the others.
"""
FIXED: Final = {"linear": 26e6, "grouped_mm": 0.0, "experts": 0.0}
"""Number of elements that take as long to quantize as the launches. 0 where launches are shared by unknown many groups.
"""

_BF16, _MXFP8 = Recipe.bf16(), Recipe.mxfp8()  # made at import: code under torch.compile cannot make one


def auto_recipe(rows: float, in_features: int, out_features: int, *, of: str = "linear") -> Recipe:
    """Return recipe mxfp8 if it pays for the shape, else bf16. All devices get the same recipe.

    Args:
        rows: T, the number of rows. With groups or experts, their average number of rows.
        in_features: K. If it is no multiple of 32, the result is bf16.
        out_features: N. If it is no multiple of 32, the result is bf16.
        of: a key of LEAST. Any other raises ValueError.

    Example: with 4096 in features and 2048 out features, 4096 tokens have size 572, above 470: mxfp8. 2048 tokens have
    size 362: bf16.
    """
    return _MXFP8 if rows > least_rows(in_features, out_features, of=of) else _BF16


def least_rows(in_features: int, out_features: int, *, of: str) -> float:
    """Return the number of rows T that has size LEAST[of]. With more rows MXFP8 pays. inf: it never pays.

    Example: for experts with 2048 and 768 features, 290 * 2048 * 768 / (2048 * 768 - 290 * (2048 + 768)) = 603.1.
    """
    if of not in LEAST:
        raise ValueError(f"of: got {of!r}, want one of {', '.join(LEAST)}")
    saved = in_features * out_features - LEAST[of] * (in_features + out_features)  # > 0 if MXFP8 pays with enough rows
    if saved <= 0 or in_features % _MXFP8.group_alignment or out_features % _MXFP8.group_alignment:
        return math.inf
    return LEAST[of] * (in_features * out_features + FIXED[of]) / saved


def recipe_of_experts(rows: float, dim: int, hidden_dim: int) -> tuple[Recipe, str]:
    """(recipe, reason) for a layer's experts by `auto_recipe`. rows: average number per expert. reason: for a log."""
    recipe, least = auto_recipe(rows, dim, hidden_dim, of="experts"), least_rows(dim, hidden_dim, of="experts")
    pays = "never pays" if least == math.inf else f"pays from {math.floor(least) + 1} on"
    return recipe, f"{recipe.name}, as an expert gets {rows:.0f} rows: with D {dim} and F {hidden_dim} MXFP8 {pays}"


def recipe_of(recipe: Recipe | str) -> Recipe | str:
    """Return the Recipe of this name, but "auto" as it is, because it needs a shape. Raises ValueError if unknown."""
    return recipe if recipe == AUTO else Recipe.named(recipe)


def recipe_for(recipe: Recipe | str, x: Tensor, out_features: int) -> Recipe:
    """Return the Recipe for a linear of x (..., K). "auto" is decided by x's number of rows, K and out_features."""
    if recipe != AUTO:
        return Recipe.named(recipe)
    features = x.shape[-1] if x.dim() else 1
    return auto_recipe(x.numel() // max(features, 1), features, out_features)


def recipe_name(recipe: Recipe | str) -> str:
    """The recipe's name. A name, or "auto", is returned as it is."""
    return recipe if isinstance(recipe, str) else recipe.name


def check_tensors(**operands: object) -> None:
    """Raise ValueError for an operand that is not a tensor, such as a pair of qdata and scales."""
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            cure = "MXTensor.from_qdata_and_scales(qdata, scales) makes one tensor of qdata and scales"
            raise ValueError(f"{name}: got a {type(x).__name__}, want a tensor: {cure}")


def check_plain(**operands: object) -> None:
    """Raise ValueError for DTensors, because these GEMMs run on this rank alone."""
    for name, x in operands.items():
        if hasattr(x, "device_mesh"):
            raise ValueError(
                f"{name}: got a DTensor, want a plain tensor: .to_local(), or for `linear` w as a DTensor on the same "
                "mesh, too"
            )


def check_operands(
    a: Tensor, w: Tensor | FrozenWeight, offs: Tensor, *, recipe: Recipe, bias: Tensor | None, out_dtype: torch.dtype,
    main_grad: Tensor | None,
) -> None:  # fmt: skip
    """Check shapes, dtypes, devices and alignment of `grouped_mm`'s operands. On CPU also check the values of offs."""
    check_plain(a=a, offs=offs, w=w)
    if a.dim() != 2 or len(w.shape) != 3 or a.shape[1] != w.shape[2]:
        raise ValueError(f"shapes: got a {tuple(a.shape)}, w {tuple(w.shape)}, want a (M, K) and w (G, N, K)")
    _check_values("a", a, recipe, out_dtype)
    _check_parameters(a, w, bias, recipe, main_grad)
    if offs.device != a.device:
        raise ValueError(f"offs: got device {offs.device}, want {a.device}, where a is")
    alignment, num_groups = recipe.group_alignment, w.shape[0]
    if a.shape[0] % alignment:
        raise ValueError(
            f"M: got {a.shape[0]} rows, want a multiple of {alignment} for recipe {recipe.name}: pad the groups "
            f"(mxep.quant.pad_groups) or append unused rows"
        )
    if offs.dtype != torch.int32 or offs.shape != (num_groups,):
        raise ValueError(
            f"offs: got {offs.dtype} {tuple(offs.shape)}, want torch.int32 (G,) = ({num_groups},), "
            "the inclusive cumulative group sizes: sizes.cumsum(0, dtype=torch.int32)"
        )
    if type(offs) is Tensor and offs.is_cpu and not torch.compiler.is_compiling():  # a fake tensor has no sizes
        _check_offs(offs.tolist(), a.shape[0], recipe)


def check_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, recipe: Recipe, out_dtype: torch.dtype, main_grad: Tensor | None,
    rowwise: bool = False,
) -> None:  # fmt: skip
    """Check the operands of a linear: x (..., K), w (N, K), bias (N,).

    rowwise: True if x may also be an MXTensor with one scale per row, although the recipe has scaling "mx".
    """
    if w.dim() != 2 or not x.dim() or x.shape[-1] != w.shape[1]:
        raise ValueError(f"shapes: got x {tuple(x.shape)}, w {tuple(w.shape)}, want x (..., K) and w (N, K)")
    if not (rowwise and isinstance(x, MXTensor) and recipe.scaling == "mx" and x.block_shape == (1, x.shape[-1])):
        _check_values("x", x, recipe, out_dtype)
    _check_parameters(x, w, bias, recipe, main_grad)


def _check_parameters(
    a: Tensor, w: Tensor | FrozenWeight, bias: Tensor | None, recipe: Recipe, main_grad: Tensor | None
) -> None:
    check_weight(w, recipe=recipe, device=a.device, main_grad=main_grad)
    if bias is not None and (bias.shape != w.shape[:-1] or not bias.is_floating_point()):
        wanted = f"{'(G, N)' if len(w.shape) == 3 else '(N,)'} = {tuple(w.shape[:-1])}"
        raise ValueError(f"bias: got {bias.dtype} {tuple(bias.shape)}, want floating point {wanted}")
    if bias is not None and bias.device != a.device:
        raise ValueError(f"bias: got device {bias.device}, want {a.device}, where the rows are")


def check_weight(
    w: Tensor | FrozenWeight, *, recipe: Recipe, device: torch.device, main_grad: Tensor | None, name: str = "w"
) -> None:
    """Check a weight (G, N, K) or (N, K), and its main_grad, by themselves. device: where the GEMM runs."""
    if w.shape.numel() == 0:
        raise ValueError(f"{name}: got shape {tuple(w.shape)}, want (G, N, K), at least one group, output and input")
    floats = _floats(recipe)
    if isinstance(w, FrozenWeight):
        if main_grad is not None:
            shape = tuple(main_grad.shape)
            raise ValueError(f"main_grad: expected none for a frozen weight, got {shape}: leave it out")
    elif isinstance(w, MXTensor) or w.dtype not in floats:
        raise ValueError(
            f"{name}: got {_describe(w)}, want one of {floats}, unquantized: the recipe quantizes it, once "
            "for several calls within quantize_weights_once()"
        )
    if main_grad is not None and (main_grad.shape != w.shape or main_grad.dtype != torch.float32):
        got = f"{main_grad.dtype} {tuple(main_grad.shape)}"
        raise ValueError(f"main_grad: got {got}, want torch.float32 {tuple(w.shape)}, the shape of {name}")
    for what, x in ((name, w), ("main_grad", main_grad)):
        if x is not None and x.device != device:
            raise ValueError(f"{what}: got device {x.device}, want {device}, where a is")
    for axis, size in (("K", w.shape[-1]), ("N", w.shape[-2])):
        if size % recipe.group_alignment:
            raise ValueError(
                f"{axis}: got {size}, want a multiple of {recipe.group_alignment} for recipe {recipe.name}: pad it or "
                "use recipe bf16"
            )


def _floats(recipe: Recipe) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float32, *([torch.float64] if recipe.scaling == "none" else [])]


def _check_values(name: str, a: Tensor, recipe: Recipe, out_dtype: torch.dtype) -> None:
    floats = _floats(recipe)
    if not isinstance(a, MXTensor):
        if a.dtype not in floats:
            raise ValueError(
                f"{name}: got {a.dtype}, want one of {floats} or an MXTensor "
                "(MXTensor.from_qdata_and_scales wraps qdata)"
            )
    elif recipe.scaling == "none":
        got = _describe(a)
        raise ValueError(f"{name}: got {got}, want a plain tensor for recipe {recipe.name}: call .dequantize()")
    elif not recipe.fits(a):
        wanted = f"one scale for each {recipe.block_size or 'row'}" + (" elements along K" if recipe.block_size else "")
        raise ValueError(
            f"{name}: got {_describe(a)}, want axis -1 and {wanted} for recipe {recipe.name}: "
            ".dequantize() and let the recipe quantize"
        )
    if out_dtype not in floats:
        raise ValueError(f"out_dtype: got {out_dtype}, want one of {floats}")


def _check_offs(ends: list[int], num_rows: int, recipe: Recipe) -> None:
    if any(end < start for start, end in zip([0, *ends], ends)):
        raise ValueError(f"offs: got {ends}, want ascending ends from 0 on")
    if ends[-1] > num_rows:
        raise ValueError(f"offs: got {ends}, past the {num_rows} rows of a: want ends up to {num_rows}")
    if any(end % recipe.group_alignment for end in ends):
        raise ValueError(
            f"offs: got {ends}, want multiples of {recipe.group_alignment} for recipe {recipe.name}: "
            "mxep.quant.pad_groups pads every group with zero rows"
        )


def _describe(x: Tensor) -> str:
    return repr(x) if isinstance(x, MXTensor) else str(x.dtype)
