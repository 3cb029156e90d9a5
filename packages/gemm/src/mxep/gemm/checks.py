"""Checks of arguments before anything is computed. Each ValueError names the value, the expected one and the cure."""

import torch
from torch import Tensor

from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor


def check_tensors(**operands: object) -> None:
    """Refuse operands that are not one tensor, such as qdata and scales."""
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            cure = "MXTensor.from_qdata_and_scales(qdata, scales) makes one tensor of qdata and scales"
            raise ValueError(f"{name}: got a {type(x).__name__}, want a tensor: {cure}")


def check_plain(**operands: object) -> None:
    """Refuse DTensors: these GEMMs run on this rank alone."""
    for name, x in operands.items():
        if hasattr(x, "device_mesh"):
            raise ValueError(
                f"{name}: got a DTensor, want a plain tensor: .to_local(), or for `linear` w as a DTensor on the same "
                "mesh, too"
            )


def check_operands(
    a: Tensor,
    w: Tensor | FrozenWeight,
    offs: Tensor,
    *,
    recipe: Recipe,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    main_grad: Tensor | None,
) -> None:
    """Check shapes, dtypes, devices and alignment; on CPU also the values of offs."""
    check_plain(a=a, offs=offs, **({} if isinstance(w, FrozenWeight) else {"w": w}))
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
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    *,
    recipe: Recipe,
    out_dtype: torch.dtype,
    main_grad: Tensor | None,
    rowwise: bool = False,
) -> None:
    """Check x (..., K), w (N, K), bias (N,) likewise. rowwise: x with MX scales may also have one scale per row."""
    if w.dim() != 2 or not x.dim() or x.shape[-1] != w.shape[1]:
        raise ValueError(f"shapes: got x {tuple(x.shape)}, w {tuple(w.shape)}, want x (..., K) and w (N, K)")
    if not (rowwise and isinstance(x, MXTensor) and recipe.scaling == "mx" and x.block_shape == (1, x.shape[-1])):
        _check_values("x", x, recipe, out_dtype)
    _check_parameters(x, w, bias, recipe, main_grad)


def _check_parameters(
    a: Tensor, w: Tensor | FrozenWeight, bias: Tensor | None, recipe: Recipe, main_grad: Tensor | None
) -> None:
    if isinstance(w, FrozenWeight):
        _check_frozen(w, recipe=recipe, device=a.device, main_grad=main_grad)
    else:
        check_weight(w, recipe=recipe, device=a.device, main_grad=main_grad)
    if bias is None:
        return
    if bias.shape != w.shape[:-1] or not bias.is_floating_point():
        wanted = f"{'(G, N)' if len(w.shape) == 3 else '(N,)'} = {tuple(w.shape[:-1])}"
        raise ValueError(f"bias: got {bias.dtype} {tuple(bias.shape)}, want floating point {wanted}")
    if bias.device != a.device:
        raise ValueError(f"bias: got device {bias.device}, want {a.device}, where the rows are")


def check_weight(w: Tensor, *, recipe: Recipe, device: torch.device, main_grad: Tensor | None, name: str = "w") -> None:
    """Check a weight (G, N, K) or (N, K) by itself, for GEMMs on `device`."""
    if w.numel() == 0:
        raise ValueError(f"{name}: got shape {tuple(w.shape)}, want (G, N, K), at least one group, output and input")
    floats = _floats(recipe)
    if isinstance(w, MXTensor) or w.dtype not in floats:
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


def _check_frozen(
    w: FrozenWeight, *, recipe: Recipe, device: torch.device, main_grad: Tensor | None, name: str = "w"
) -> None:
    if main_grad is not None:
        raise ValueError(f"main_grad: expected none for a frozen weight, got {tuple(main_grad.shape)}: leave it out")
    if w.device != device:
        raise ValueError(f"{name}: got device {w.device}, want {device}, where a is")
    if any(size % recipe.group_alignment for size in w.shape[1:]):
        raise ValueError(
            f"{name}: expected sizes in multiples of {recipe.group_alignment} for the recipe, got {tuple(w.shape[1:])}"
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
