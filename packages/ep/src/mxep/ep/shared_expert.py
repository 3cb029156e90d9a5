"""The shared expert: a dense gated MLP in the layer's recipe, which every token takes.

    forward     x (T, D) quantized, gate_up = x gate_up_proj^T (T, 2F), h = SwiGLU quantized, out = h down_proj^T (T, D)
    backward    d_h = d_out down_proj, SwiGLU backward with h again, dx = d_gate_up gate_up_proj, weight gradients

The shared expert is one autograd function, and `mxep.runtime.replay` replays each of its passes. No MXTensor crosses
autograd, and torch.compile does not break the graph. With wgrad "bf16" it is composed of `mxep.gemm` functions instead.

T tokens (any number), D model dim, F hidden dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mxep.gemm import Recipe, linear
from mxep.gemm.backends import Backend, select
from mxep.gemm.functional import between_graphs
from mxep.gemm.product import is_wanted
from mxep.gemm.recipe import check_linear, check_weight
from mxep.quant import SwiGLU
from mxep.runtime.bundle import Bundle, Operands, build, take_apart
from mxep.runtime.replay import replayed

from .dtensors import init_normal_
from .formats import (
    PLAIN,
    ColwiseWeights,
    LayerConfig,
    RowwiseWeights,
    Saved,
    held_colwise,
    held_rowwise,
    quantize_rowwise,
    saved_columns,
    saved_gate_up,
    saved_weights,
    swiglu_backward,
    swiglu_forward,
)
from .functional import swiglu


class SharedExpert(nn.Module):
    """A dense gated MLP, which every token takes. Parameters: ``gate_up_proj`` (2F, D), ``down_proj`` (D, F).

    gate: True to multiply the output by sigmoid(x gate^T), with another parameter ``gate`` (1, D) (Qwen2-MoE). This is
    computed in x's dtype, whatever the recipe.

    If a weight has an attribute ``main_grad``, its gradient is added to main_grad, not to `.grad`. The gate ignores
    main_grad.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * hidden_dim, dim, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(dim, hidden_dim, device=device, dtype=dtype))
        self.gate = nn.Parameter(torch.empty(1, dim, device=device, dtype=dtype)) if gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj, self.gate):
            if weight is not None:
                init_normal_(weight, weight.shape[1] ** -0.5)

    def extra_repr(self) -> str:
        dim, hidden_dim = self.down_proj.shape
        gate = "" if self.gate is None else ", gate=True"
        return f"dim={dim}, hidden_dim={hidden_dim}{gate}, dtype={self.down_proj.dtype}"

    def forward(
        self, x: Tensor, *, recipe: Recipe | str, backend: str | Backend = "auto", activation: SwiGLU = PLAIN
    ) -> Tensor:
        """Compute the MLP of x (T, D) bf16 or fp32. Returns (T, D). Raises ValueError if sizes do not fit a recipe."""
        recipe, weights = Recipe.named(recipe), (self.gate_up_proj, self.down_proj)
        main_grads = tuple(getattr(weight, "main_grad", None) for weight in weights)
        chosen = select(backend, x.device)
        out: Tensor
        if recipe.wgrad == "bf16":
            out = between_graphs(_compose, x, *weights, *main_grads, recipe, chosen, activation)
        else:
            check_linear(x, weights[0], None, recipe=recipe, out_dtype=x.dtype, main_grad=main_grads[0])
            check_weight(weights[1], recipe=recipe, device=x.device, main_grad=main_grads[1], name="down_proj")
            config = LayerConfig(recipe, chosen, activation)
            out = _SharedMLP.apply(x, *weights, config, main_grads)  # type: ignore[no-untyped-call]
        return out if self.gate is None else out * torch.sigmoid(F.linear(x, self.gate.to(x.dtype)))


def _compose(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    main_grad13: Tensor | None,
    main_grad2: Tensor | None,
    recipe: Recipe,
    backend: Backend,
    activation: SwiGLU,
) -> Tensor:
    """Compute the shared expert, without its gate, with unquantized weight gradients (wgrad "bf16")."""
    gate_up = linear(x, gate_up_proj, recipe=recipe, backend=backend, main_grad=main_grad13)
    h = swiglu(gate_up, None, None, recipe=recipe, activation=activation)
    return linear(h, down_proj, recipe=recipe, backend=backend, main_grad=main_grad2)


class _SharedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        config: LayerConfig,
        main_grads: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        needs, weights = ctx.needs_input_grad[:3], (gate_up_proj.unsqueeze(0), down_proj.unsqueeze(0))
        rowwise = held_rowwise(*weights, config, dgrad=any(needs))
        made = _forward(x, *weights, rowwise, config=config, needs=needs)
        saved, ctx.form = take_apart(made.saved)
        ctx.save_for_backward(*weights, *saved)
        ctx.config, ctx.main_grads = config, main_grads
        result: Tensor = made.out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        config = ctx.config
        wanted = tuple(need and is_wanted(ctx, i) for i, need in enumerate(ctx.needs_input_grad[:3]))
        gate_up_proj, down_proj, *saved = ctx.saved_tensors
        into = (None if main_grad is None else main_grad.unsqueeze(0) for main_grad in ctx.main_grads)
        given = _BackwardInput(d_out, gate_up_proj, down_proj, build(ctx.form, iter(saved)), *into)
        del saved
        colwise = held_colwise(gate_up_proj, down_proj, given.saved, config)
        return *_backward(given, colwise, config=config, wanted=wanted), None, None


@dataclass(frozen=True)
class _ForwardOutput(Bundle):
    """out (T, D), and tensors to save for backward besides the weights."""

    out: Tensor
    saved: Saved


@dataclass(frozen=True)
class _BackwardInput(Operands):
    """d_out: (T, D). gate_up_proj: (1, 2F, D). down_proj: (1, D, F). main_grads: like the weights, or None."""

    d_out: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    saved: Saved
    gate_up_main_grad: Tensor | None
    down_main_grad: Tensor | None


@replayed
def _forward(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    rowwise: RowwiseWeights | None,
    *,
    config: LayerConfig,
    needs: tuple[bool, bool, bool],
) -> _ForwardOutput:
    """Forward without autograd. x: (T, D). gate_up_proj: (1, 2F, D). down_proj: (1, D, F).

    needs: for each of these three, True if it needs a gradient.
    """
    recipe, backend = config.recipe, config.backend
    if rowwise is None:
        rowwise = quantize_rowwise.function(gate_up_proj, down_proj, config=config, dgrad=any(needs))
    rows = backend.quantize_rows(x, recipe.fmt, recipe)
    gate_up = backend.forward(rows, rowwise.gate_up, None, bias=None, out_dtype=x.dtype)
    h = swiglu_forward(gate_up, None, None, recipe, config.activation, folded=backend.wants_rowwise)
    kept: Any = saved_gate_up(gate_up, recipe) if any(needs) else None
    del gate_up
    out = backend.forward(h, rowwise.down, None, bias=None, out_dtype=x.dtype)
    saved: Any = rows if needs[1] else None
    return _ForwardOutput(out, Saved(saved, kept, *saved_columns(rowwise)))


@replayed
def _backward(
    given: _BackwardInput, colwise: ColwiseWeights | None, *, config: LayerConfig, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x and of both weights. One is None if it is not wanted, or was added to a main_grad."""
    recipe, backend, d_out, saved = config.recipe, config.backend, given.d_out, given.saved
    gate_up_proj, down_proj = saved_weights(given.gate_up_proj, given.down_proj, saved)
    given.release("saved")
    rows, gate_up = saved.rows, saved.gate_up
    saved.release("rows", "gate_up")

    def wgrad(dy: Tensor, a: Any, w: Tensor, main_grad: Tensor | None) -> Tensor | None:
        operands = backend.prepare_wgrad(dy, a, None, recipe)
        dw = backend.wgrad(operands, None, out_dtype=w.dtype, accumulate_into=main_grad)
        return None if dw is None else dw.squeeze(0)

    d_y = backend.quantize_rows(d_out, recipe.grad_fmt, recipe)
    down = down_proj.colwise(recipe, backend) if colwise is None else colwise.down
    d_h = backend.dgrad(d_y, down, None, out_dtype=d_out.dtype)
    options: dict[str, Any] = {"folded": backend.wants_rowwise, "overwrite": True, "with_h": wanted[2]}
    d_gate_up, _, h = swiglu_backward(d_h, gate_up, None, None, recipe, config.activation, **options)
    dw2 = None if h is None else wgrad(d_y, h, given.down_proj, given.down_main_grad)
    dx = None
    if wanted[0]:
        gate_up_weight = gate_up_proj.colwise(recipe, backend) if colwise is None else colwise.gate_up
        dx = backend.dgrad(d_gate_up, gate_up_weight, None, out_dtype=d_out.dtype)
    dw13 = wgrad(d_gate_up, rows, given.gate_up_proj, given.gate_up_main_grad) if wanted[1] else None
    return dx, dw13, dw2
