"""The shared expert, which every token takes: a dense gated MLP in the layer's recipe.

    forward                                    backward
    x (T, D)                                   d_out (T, D)
      quantize                                   quantize
    gate_up (T, 2F) = x w13^T                  d_h (T, F) = d_out w2
      SwiGLU, quantize                           SwiGLU backward, h again, quantize;  dw2 = d_out^T h
    out (T, D) = h w2^T                        dx (T, D) = d_gate_up w13;   dw13 = d_gate_up^T x

x is quantized once for gate and up, which are one product. One autograd function, so that no MXTensor crosses autograd
and torch.compile has it in one graph, but where wgrad is "bf16"; `mxep.runtime.replay` replays each half. T is any
number: products are `mxep.gemm.linear`'s.

With a gate (Qwen2-MoE) a token's out is multiplied by sigmoid(x gate^T), a number, in torch's own operations.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mxep.gemm import Recipe, linear
from mxep.gemm.backends import Backend, select
from mxep.gemm.checks import check_linear, check_weight
from mxep.gemm.functional import between_graphs, joined, taken_apart
from mxep.gemm.partial_backward import is_wanted
from mxep.gemm.quantize_once import SavedWeight, is_held
from mxep.quant import MXTensor, SwiGLU
from mxep.quant.parts import MXParts
from mxep.runtime.replay import Tensors, replayed

from .functional import PLAIN, saved_gate_up, swiglu, swiglu_backward, swiglu_forward
from .shares import init_normal_
from .steps import colwise_weights, rowwise_weights


class SharedExpert(nn.Module):
    """A dense gated MLP that every token takes: ``gate_up_proj`` (2F, D), ``down_proj`` (D, F).

    gate: what it returns is multiplied by the sigmoid of ``x`` times the parameter ``gate`` (1, D), which is None
    without. The product is in x's dtype, whatever the recipe.

    A weight with an attribute ``main_grad`` gets its gradient added there, and none itself; the gate's is ordinary.
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
        self, x: Tensor, *, recipe: Recipe, backend: str | Backend = "auto", activation: SwiGLU = PLAIN
    ) -> Tensor:
        """``x`` (T, D) bf16 or fp32 -> (T, D). ValueError for sizes that the recipe does not take."""
        weights = self.gate_up_proj, self.down_proj
        main_grads = tuple(getattr(weight, "main_grad", None) for weight in weights)
        chosen = select(backend, x.device)
        out: Tensor
        if recipe.wgrad == "bf16":
            out = between_graphs(_compose, x, *weights, *main_grads, recipe, chosen, activation)
        else:
            check_linear(x, weights[0], None, recipe=recipe, out_dtype=x.dtype, main_grad=main_grads[0])
            check_weight(weights[1], recipe=recipe, device=x.device, main_grad=main_grads[1], name="down_proj")
            out = _SharedMLP.apply(x, *weights, recipe, chosen, main_grads, activation)  # type: ignore[no-untyped-call]
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
    """Of a recipe whose weight gradients take unquantized operands."""
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
        recipe: Recipe,
        backend: Backend,
        main_grads: tuple[Tensor | None, Tensor | None],
        activation: SwiGLU,
    ) -> Tensor:
        needs, weights = ctx.needs_input_grad[:3], (gate_up_proj.unsqueeze(0), down_proj.unsqueeze(0))
        held = [None] * 4
        if is_held(weights[0], recipe):
            held = rowwise_weights.direct([weights[0], None, weights[1]], recipe, backend, any(needs))
        out, gate_up, rows, *later = _forward([x, *weights, *held], recipe, backend, needs, activation)
        later = [w if part is None else part for w, part in zip(weights, later[:2])] + later[2:]
        parts, ctx.rests = zip(*map(taken_apart, (gate_up, rows, *later[:2])))
        ctx.save_for_backward(*later[2:], *(part for three in parts for part in three))
        ctx.how, ctx.dtypes = (recipe, backend, main_grads, activation), (x.dtype, gate_up_proj.dtype, down_proj.dtype)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        recipe, backend, main_grads, activation = ctx.how
        wanted = tuple(need and is_wanted(ctx, i) for i, need in enumerate(ctx.needs_input_grad[:3]))
        amax13, amax2, *parts = ctx.saved_tensors
        gate_up, rows, w13, w2 = (joined(parts[3 * i : 3 * i + 3], rest) for i, rest in enumerate(ctx.rests))
        if isinstance(w13, Tensor) and not isinstance(w13, MXTensor) and is_held(w13, recipe):
            w2, w13 = colwise_weights.direct([w2, amax2, w13, None, amax13], recipe, backend)
        into = (None if main_grad is None else main_grad.unsqueeze(0) for main_grad in main_grads)
        tensors = [d_out, gate_up, rows, w13, amax13, w2, amax2, *into]
        tensors = [MXParts.of(x) if isinstance(x, MXTensor) else x for x in tensors]
        return *_backward(tensors, recipe, backend, wanted, ctx.dtypes, activation), *[None] * 4


@replayed
def _forward(
    tensors: Tensors, recipe: Recipe, backend: Backend, needs: tuple[bool, bool, bool], activation: SwiGLU
) -> Tensors:
    """[x (T, D), gate_up_proj (1, 2F, D), down_proj (1, D, F), both rowwise and their amax, or None] ->
    [out (T, D), gate_up (T, 2F), rows, both weights in 2-D blocks, their amax]: of the last six what backward needs.
    """
    x, *weights, w13, amax13, w2, amax2 = tensors
    if w13 is None:
        w13, amax13, w2, amax2 = rowwise_weights.function([weights[0], None, weights[1]], recipe, backend, any(needs))
    rows = backend.quantize_rows(x, recipe.fmt, recipe)
    gate_up = backend.forward(rows, w13, None, bias=None, out_dtype=x.dtype)
    h = swiglu_forward(gate_up, None, None, recipe, activation, folded=backend.wants_rowwise)
    kept = saved_gate_up(gate_up, recipe) if any(needs) else None
    del gate_up
    out = backend.forward(h, w2, None, bias=None, out_dtype=x.dtype)
    blocks = (w if getattr(w, "axis", None) == (-2, -1) else None for w in (w13, w2))
    return [out, kept, rows if needs[1] else None, *blocks, amax13, amax2]


@partial(replayed, donated=range(1, 4))
def _backward(
    tensors: Tensors,
    recipe: Recipe,
    backend: Backend,
    wanted: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    activation: SwiGLU,
) -> Tensors:
    """[d_out (T, D), gate_up, rows, gate_up_proj or what is colwise of it, its amax, down_proj likewise, its amax,
    main_grads of both] -> gradients of x and of both weights: None of those that are not wanted or in main_grad."""
    d_out, gate_up, rows, w13, amax13, w2, amax2, *main_grads = tensors
    tensors.clear()

    def wgrad(i: int, dy: Tensor, a: Tensor) -> Tensor | None:
        operands = backend.prepare_wgrad(dy, a, None, recipe)
        dw = backend.wgrad(operands, None, out_dtype=dtypes[1 + i], accumulate_into=main_grads[i])
        return None if dw is None else dw.squeeze(0)

    d_y = backend.quantize_rows(d_out, recipe.grad_fmt, recipe)
    d_h = backend.dgrad(d_y, SavedWeight(w2, amax2).colwise(recipe, backend), None, out_dtype=dtypes[0])
    options = {"folded": backend.wants_rowwise, "overwrite": True, "with_h": wanted[2]}
    d_gate_up, _, h = swiglu_backward(d_h, gate_up, None, None, recipe, activation, **options)
    dw2 = None if h is None else wgrad(1, d_y, h)
    dx = None
    if wanted[0]:
        dx = backend.dgrad(d_gate_up, SavedWeight(w13, amax13).colwise(recipe, backend), None, out_dtype=dtypes[0])
    dw13 = wgrad(0, d_gate_up, rows) if wanted[1] else None
    return [dx, dw13, dw2]
