"""The hopper backend: MX operands folded to one scale a row, then FP8 tensor cores of Hopper, sums promoted to fp32.

    forward  a MX (slots, index) --fold, gather--> qdata, a scale a row --\\
             w bf16 ----quantize, one scale a row------------------------- > wgmma, x scales, + bias -> out
    dgrad    dy in the same way                x w, one scale a column                               -> da
    wgrad    dy, a (as they came) --split fold: transposed, tokens contiguous-- > wgmma, x 2^e            -> dw, or +=
    fp32

Folding moves exponents into qdata (`mxep.quant.fold`): exact, but for elements 2^-14 or more below the largest of
their row. What is unquantized, weights in blocks or tiles too, is quantized to one scale a row at once, which is the
same but for these elements, where it rounds once instead of twice. A `Guard` watches where that could matter; operands
it watches are quantized to MX first.

Unquantized products (recipe "bf16", wgrad "bf16") are torch's grouped mm, as in `dequant`.
Sums leave the tensor cores, which add with 13 fraction bits, every 256 products. No host sync. Products and folds cost
nothing for rows past the last group; quantizing plain operands takes all rows there are.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.backends.dequant import Dequant
from mxep.gemm.backends.reference import grouped_mm_reference
from mxep.gemm.backends.triton import Triton
from mxep.gemm.guard import Guard
from mxep.gemm.recipe import Recipe
from mxep.gemm.weights import QuantizedWeight, quantize_weight, quantize_weight_cols, quantize_weight_rows
from mxep.quant import MXFormat, MXTensor, fold, fold_for_wgrad, fold_with_stats, quantize
from mxep.quant.kernels import on_cuda

STEP = 128
"""Elements of a contraction that the kernel multiplies at a time: along tokens its groups begin at multiples."""


class Hopper(Backend):
    """See the module's docstring; `Backend` has the contract.

    guard: watches forward and dgrad of MX recipes, and with action "exact" has failed ones computed again, exactly, by
        the triton backend's kernel. It costs MX weights folded at each call. None costs nothing.
    """

    name = "hopper"

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard
        if guard is not None:
            self.name = f"hopper, {guard.action}"

    @property
    def folds(self) -> bool:
        return self.guard is None  # which compares folded rows with what they were

    def why_not(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"got a {device.type} device, want a Hopper GPU; use backend 'reference'"
        if torch.version.hip is not None:
            return "got an AMD GPU, want a Hopper GPU; use backend 'auto'"
        if (have := torch.cuda.get_device_capability(device)) != (9, 0):
            return f"got compute capability {have}, want (9, 0), as wgmma is Hopper's alone; use backend 'auto'"
        if not _has_gluon():
            return "Triton has no Gluon, want Triton >= 3.6; use backend 'dequant'"
        return None

    def quantize_rows(self, x: Tensor, fmt: MXFormat, recipe: Recipe) -> Tensor:
        if recipe.scaling == "none" or self.guard is not None:
            return recipe.quantize_rows(x, fmt)
        return quantize(x, fmt=fmt, mode=recipe.mode, block_size=None)

    def quantize_weight(self, w: Tensor, recipe: Recipe, *, cols: bool) -> QuantizedWeight:
        return quantize_weight(w, recipe, cols=cols, whole=self.folds)

    def quantize_weight_rows(self, w: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
        return quantize_weight_rows(w, recipe, whole=self.folds)

    def quantize_weight_cols(self, w: Tensor, recipe: Recipe, amax: Tensor | None) -> Tensor:
        return quantize_weight_cols(w, recipe, amax, whole=self.folds)

    def forward(self, a: Tensor, w: Tensor, offs: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if not isinstance(a, MXTensor):
            return Dequant().forward(a, w, offs, bias=bias, out_dtype=out_dtype)
        return self._product("forward", a, w, offs, bias, out_dtype)

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        if not isinstance(dy, MXTensor):
            return Dequant().dgrad(dy, w, offs, out_dtype=out_dtype)
        return self._product("dgrad", dy, w.mT, offs, None, out_dtype)

    def wgrad(
        self,
        dy: Tensor,
        a: Tensor,
        offs: Tensor,
        *,
        recipe: Recipe,
        out_dtype: torch.dtype,
        scale: float = 1.0,
    ) -> Tensor:
        return cast(Tensor, self.start_wgrad(dy, a, offs, recipe=recipe, out_dtype=out_dtype, scale=scale)())

    def add_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor, *, recipe: Recipe, to: Tensor, scale: float = 1.0) -> None:
        self.start_wgrad(dy, a, offs, recipe=recipe, out_dtype=to.dtype, to=to, scale=scale)()

    def start_wgrad(
        self,
        dy: Tensor,
        a: Tensor,
        offs: Tensor,
        *,
        recipe: Recipe,
        out_dtype: torch.dtype,
        to: Tensor | None = None,
        scale: float = 1.0,
    ) -> Callable[[], Tensor | None]:
        if not isinstance(dy, MXTensor) or not isinstance(a, MXTensor):
            return Dequant().start_wgrad(dy, a, offs, recipe=recipe, out_dtype=out_dtype, to=to, scale=scale)
        split = fold_for_wgrad(a, dy, offs, align=STEP)
        transposed = split.y_t, split.x_t, split.exponent, split.ends
        if to is None:
            return lambda: fp8_grouped_wgrad(*transposed, out_dtype, scale)
        if not to.is_contiguous():
            return lambda: to.add_(fp8_grouped_wgrad(*transposed, to.dtype, scale))
        return lambda: fp8_grouped_wgrad_add(to, *transposed, scale)

    def _product(
        self, name: str, a: MXTensor, w: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """a (M, K) x w (G, N, K), both blocked along K or row-scaled."""
        assert isinstance(w, MXTensor)
        if self.guard is None or w.block_size == w.shape[-1]:
            return _multiply(_folded(a, offs), _folded(w), offs, bias, out_dtype)
        mx = w.along(-1) if w.axis != -1 else w
        a_folded, a_stats = fold_with_stats(a, offs=offs)
        w_folded, w_stats = fold_with_stats(mx)
        flag = self.guard.inspect(a, a_folded, a_stats.spread, mx, w_folded, w_stats.spread, offs, product=name)
        out = _multiply(a_folded, w_folded, offs, bias, out_dtype)
        if self.guard.action == "exact":
            Triton().forward(a, w, offs, bias=bias, out_dtype=out_dtype, out=out, run_if=flag)
        return out


@functools.cache
def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


def _folded(x: Tensor, offs: Tensor | None = None) -> MXTensor:
    """x, an MXTensor, with one scale a row, its rows dense and multiples of 16 bytes apart."""
    assert isinstance(x, MXTensor)
    if x.axis != -1:
        x = x.along(-1)
    aligned = x.qdata.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.qdata.stride()[:-1])
    if x.block_size == x.shape[-1] and x.row_index is None and aligned:
        return x
    return fold(x, offs=offs)


def _multiply(a: MXTensor, w: MXTensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    out: Tensor = fp8_grouped_mm(a.qdata, a.scale, w.qdata, w.scale, offs, bias, out_dtype)
    return out


@torch.library.custom_op("mxep::fp8_grouped_mm", mutates_args=())
def fp8_grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a (M, K) fp8, a_scale (M, 1) e8m0, w (G, N, K), w_scale (G, N, 1), bias (G, N) or None -> (M, N) out_dtype."""
    out: Tensor = grouped_mm_reference(a, a_scale, None, w, w_scale, offs, bias, out_dtype)
    return out


@fp8_grouped_mm.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], w.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxep::fp8_grouped_wgrad", mutates_args=())
def fp8_grouped_wgrad(
    y_t: Tensor, x_t: Tensor, exponent: Tensor, ends: Tensor, out_dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """y_t (N, C), x_t (K, C) fp8, exponent and ends (G,) int32, as a WgradOperands has them -> scale * (G, N, K)."""
    dw = torch.zeros((ends.shape[0], y_t.shape[0], x_t.shape[0]), dtype=torch.float32, device=y_t.device)
    _add_wgrad_reference(dw, y_t, x_t, exponent, ends, scale)
    return dw.to(out_dtype)


@fp8_grouped_wgrad.register_fake
def _(y_t: Tensor, x_t: Tensor, exponent: Tensor, ends: Tensor, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return y_t.new_empty((ends.shape[0], y_t.shape[0], x_t.shape[0]), dtype=out_dtype)


@torch.library.custom_op("mxep::fp8_grouped_wgrad_add", mutates_args=("to",))
def fp8_grouped_wgrad_add(
    to: Tensor, y_t: Tensor, x_t: Tensor, exponent: Tensor, ends: Tensor, scale: float = 1.0
) -> None:
    """The same added into `to`, (G, N, K) fp32, contiguous."""
    _add_wgrad_reference(to, y_t, x_t, exponent, ends, scale)


@fp8_grouped_wgrad_add.register_fake
def _(to: Tensor, y_t: Tensor, x_t: Tensor, exponent: Tensor, ends: Tensor, scale: float = 1.0) -> None:
    """`to` is all there is."""


def _add_wgrad_reference(to: Tensor, y_t: Tensor, x_t: Tensor, exponent: Tensor, ends: Tensor, scale: float) -> None:
    """Group by group, in fp32; 2^e in two steps, as it may lie outside fp32."""
    starts = [0, *ends.tolist()]
    for g, (start, end, e) in enumerate(zip(starts, starts[1:], exponent.tolist())):
        product = y_t[:, start:end].float() @ x_t[:, start:end].float().T
        to[g] += product * (2.0 ** (e // 2) * scale) * 2.0 ** (e - e // 2)


for _op, _launcher in (
    (fp8_grouped_mm, "grouped_mm"),
    (fp8_grouped_wgrad, "grouped_wgrad"),
    (fp8_grouped_wgrad_add, "add_grouped_wgrad"),
):
    on_cuda(_op, "hopper", _launcher, package="mxep.gemm.kernels")
