"""The triton backend: MXFP8 products by `tl.dot_scaled`, one persistent kernel each, no host sync.

    forward  a (qdata as they come, gathered by their index inside the kernel) x w along K       -> out
    dgrad    dy (likewise)                                                     x w along N       -> da
    wgrad    dy, a requantized along tokens, one pass each                     x, group by group -> dw, or added to fp32

The exact MX product: qdata and scales as the recipe defines them, nothing folded, sums in fp32. On Blackwell (sm_100)
the tensor cores apply the scales; on other GPUs Triton upcasts to bf16, which is slow. On a CPU it runs
under Triton's interpreter, for tests. Not run on Blackwell or CDNA4 hardware.

Recipes with MX scales only. wgrad of unquantized operands (wgrad "bf16") is torch's grouped mm, as in `dequant`.
"""

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.backends.dequant import Dequant
from mxep.gemm.recipe import Recipe
from mxep.quant import BLOCK, MXTensor, requantize
from mxep.quant.checks import Axis

OLDEST = (8, 9)
"""The first compute capability whose E4M3 Triton converts."""


class Triton(Backend):
    """See the module's docstring; `Backend` has the contract.

    forward, dgrad and wgrad also write into a given contiguous `out`, and only if `run_if`, an int32 () on the device,
    is not 0 (without it: always). So a product can be computed again, exactly, without the host knowing whether.
    """

    name = "triton"

    def why_not(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            if torch.version.hip is None and (have := torch.cuda.get_device_capability(device)) < OLDEST:
                return f"got compute capability {have}, want {OLDEST} or newer for E4M3; use backend 'auto'"
            return None
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return (
            "want a CUDA device, or TRITON_INTERPRET=1 set before Triton is imported (slow, for tests); "
            "use backend 'reference' or 'dequant'"
        )

    def forward(
        self,
        a: Tensor,
        w: Tensor,
        offs: Tensor,
        *,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
        run_if: Tensor | None = None,
    ) -> Tensor:
        a, w = check_mx(self.name, "a", a, -1), check_mx(self.name, "w", w, -1, (-2, -1))
        args = a.qdata, a.scale, a.row_index, w.qdata, w.scale, offs, bias
        if out is None and run_if is None:
            result: Tensor = grouped_mm_dot_scaled(*args, out_dtype)
            return result
        if out is None:
            out = a.qdata.new_empty((a.shape[0], w.shape[1]), dtype=out_dtype)
        grouped_mm_dot_scaled_into(out, *args, run_if)
        return out

    def dgrad(
        self,
        dy: Tensor,
        w: Tensor,
        offs: Tensor,
        *,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
        run_if: Tensor | None = None,
    ) -> Tensor:
        return self.forward(dy, w.mT, offs, bias=None, out_dtype=out_dtype, out=out, run_if=run_if)

    def wgrad(
        self,
        dy: Tensor,
        a: Tensor,
        offs: Tensor,
        *,
        recipe: Recipe,
        out_dtype: torch.dtype,
        scale: float = 1.0,
        out: Tensor | None = None,
        run_if: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(dy, MXTensor) and not isinstance(a, MXTensor) and out is None and run_if is None:
            return Dequant().wgrad(dy, a, offs, recipe=recipe, out_dtype=out_dtype, scale=scale)
        if out is None and run_if is None:
            operands = _along_tokens(dy, a, offs, recipe)
            result: Tensor = grouped_wgrad_dot_scaled(*operands, offs, out_dtype, scale)
            return result
        if out is None:
            out = offs.new_empty((offs.shape[0], dy.shape[1], a.shape[1]), dtype=out_dtype)
        # No groups where nothing is to run, so that nothing is requantized either.
        ends = offs if run_if is None else offs * (run_if != 0)
        grouped_wgrad_dot_scaled_into(out, *_along_tokens(dy, a, ends, recipe), offs, False, run_if, scale)
        return out

    def add_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor, *, recipe: Recipe, to: Tensor, scale: float = 1.0) -> None:
        if to.is_contiguous() and (isinstance(dy, MXTensor) or isinstance(a, MXTensor)):
            grouped_wgrad_dot_scaled_into(to, *_along_tokens(dy, a, offs, recipe), offs, True, None, scale)
        else:
            super().add_wgrad(dy, a, offs, recipe=recipe, to=to, scale=scale)


def _along_tokens(dy: Tensor, a: Tensor, offs: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """Codes and scales of dy and of a, requantized along the tokens of each group."""
    operands = check_mx(Triton.name, "dy", dy, -1), check_mx(Triton.name, "a", a, -1)
    y, x = (requantize(each, mode=recipe.mode, offs=offs) for each in operands)
    return y.qdata, y.scale, x.qdata, x.scale


def check_mx(backend: str, name: str, x: Tensor, *axes: Axis) -> MXTensor:
    """`x`, an MXTensor in blocks of 32 along one of `axes`; ValueError if it is none."""
    if isinstance(x, MXTensor) and x.axis in axes and x.block_size == BLOCK:
        return x
    got = repr(x) if isinstance(x, MXTensor) else f"a plain tensor of {x.dtype}"
    raise ValueError(
        f"backend {backend!r}: {name}: got {got}, want an MXTensor in blocks of {BLOCK}: "
        "use a recipe 'mxfp8...', or for recipes 'bf16' and 'fp8' backend 'dequant' or 'reference'"
    )


@torch.library.custom_op("mxep::grouped_mm_dot_scaled", mutates_args=())
def grouped_mm_dot_scaled(
    a: Tensor,
    a_scale: Tensor,
    a_index: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`mxep.gemm.kernels.dot_scaled.grouped_mm`."""
    from mxep.gemm.kernels import dot_scaled

    with _on(a.device):
        return dot_scaled.grouped_mm(a, a_scale, a_index, w, w_scale, offs, bias, out_dtype)


@grouped_mm_dot_scaled.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    a_index: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(((a if a_index is None else a_index).shape[0], w.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxep::grouped_wgrad_dot_scaled", mutates_args=())
def grouped_wgrad_dot_scaled(
    x: Tensor,
    x_scale: Tensor,
    y: Tensor,
    y_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    """`mxep.gemm.kernels.dot_scaled.grouped_wgrad`."""
    from mxep.gemm.kernels import dot_scaled

    with _on(x.device):
        return dot_scaled.grouped_wgrad(x, x_scale, y, y_scale, offs, out_dtype, factor=scale)


@grouped_wgrad_dot_scaled.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    y: Tensor,
    y_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    return x.new_empty((offs.shape[0], x.shape[1], y.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxep::grouped_mm_dot_scaled_into", mutates_args=("out",))
def grouped_mm_dot_scaled_into(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_index: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    run_if: Tensor | None,
) -> None:
    """The same into out (M, N), unless run_if is 0."""
    from mxep.gemm.kernels import dot_scaled

    with _on(out.device):
        dot_scaled.grouped_mm(a, a_scale, a_index, w, w_scale, offs, bias, out.dtype, out=out, run_if=run_if)


@torch.library.custom_op("mxep::grouped_wgrad_dot_scaled_into", mutates_args=("out",))
def grouped_wgrad_dot_scaled_into(
    out: Tensor,
    x: Tensor,
    x_scale: Tensor,
    y: Tensor,
    y_scale: Tensor,
    offs: Tensor,
    add: bool,
    run_if: Tensor | None,
    scale: float = 1.0,
) -> None:
    """The same into out (G, N, K), or added to it, unless run_if is 0."""
    from mxep.gemm.kernels import dot_scaled

    with _on(out.device):
        options: dict[str, Any] = {"factor": scale, "out": out, "add": add, "run_if": run_if}
        dot_scaled.grouped_wgrad(x, x_scale, y, y_scale, offs, out.dtype, **options)


@grouped_mm_dot_scaled_into.register_fake
@grouped_wgrad_dot_scaled_into.register_fake
def _(*args: object) -> None:
    """`out` is all there is."""


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
