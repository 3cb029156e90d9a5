"""The weights: routed experts (this rank's share) and the shared expert that every token takes.

e local experts of E, D model dim, F hidden dim. The first F rows of gate_up_proj are the gate, the next F the up part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from mxep.gemm import Recipe
from mxep.gemm.backends import Backend, select

from .compiled import compiled_layer
from .dispatchers.base import Routing, TokenDispatcher
from .functional import combine, dispatch, expert_mlp
from .layer import Setup, route_through_experts


class Experts(nn.Module):
    """Experts ``first_expert .. first_expert + num_local_experts - 1`` of ``num_experts``.

    Parameters: ``gate_up_proj`` (e, 2F, D), ``down_proj`` (e, D, F); normal with std 1/sqrt(fan-in). Every rank draws
    all E experts and keeps its own, so one seed makes one model, however many ranks share it.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        num_local_experts: int | None = None,
        first_expert: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        local = num_experts if num_local_experts is None else num_local_experts
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.gate_up_proj = nn.Parameter(torch.empty(local, 2 * hidden_dim, dim, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(local, dim, hidden_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            std = weight.shape[2] ** -0.5
            for expert in range(self.num_experts):
                drawn = torch.randn(weight.shape[1:], device=weight.device) * std
                if 0 <= (local := expert - self.first_expert) < len(weight):
                    weight[local] = drawn

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        *,
        dispatcher: TokenDispatcher,
        recipe: Recipe,
        backend: str | Backend = "auto",
    ) -> tuple[Tensor, Routing | None]:
        """``x`` (T, D), ``expert_ids``, ``weights`` (T, K) -> (T, D) summed over each token's experts, and the routing.

        A weight with an attribute ``main_grad``, fp32 of its shape, gets its gradient added there, and none itself.
        Under torch.compile it is an op of one graph, without a routing, where the dispatcher knows its sizes (the local
        one, the symmetric one with ``max_tokens``), the backend is a name and there is no main_grad; else a break.
        """
        proj, down = _local(self.gate_up_proj), _local(self.down_proj)
        main_grads = getattr(self.gate_up_proj, "main_grad", None), getattr(self.down_proj, "main_grad", None)
        static = dispatcher.static_tokens(0) is not None and isinstance(backend, str) and recipe.wgrad == "mx"
        if torch.compiler.is_compiling() and static and main_grads == (None, None):
            named: dict[str, Any] = {"dispatcher": dispatcher, "recipe": recipe, "backend": backend}
            return compiled_layer(x, expert_ids, weights, proj, down, **named), None
        how: dict[str, Any] = {"dispatcher": dispatcher, "recipe": recipe, "backend": backend}
        return _run(x, expert_ids, weights, proj, down, main_grads=main_grads, **how)


class SharedExpert(nn.Module):
    """A dense gated MLP that every token takes: ``gate_up_proj`` (2F, D), ``down_proj`` (D, F)."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * hidden_dim, dim, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(dim, hidden_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj.to(x.dtype)).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj.to(x.dtype))


# The private name is torch.compiler.disable without importing dynamo, for seconds, when this module is imported.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _run(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    proj: Tensor,
    down: Tensor,
    *,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    backend: str | Backend,
    main_grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Routing]:
    if recipe.wgrad == "mx":
        setup = Setup(dispatcher, recipe, select(backend, x.device), main_grads)
        return route_through_experts(x, expert_ids, weights, proj, down, setup=setup)
    rows, row_weight, routing = dispatch(x, expert_ids, weights, dispatcher=dispatcher, recipe=recipe)
    ends = routing.plan.group_ends
    options: dict[str, Any] = {"recipe": recipe, "backend": backend}
    y = expert_mlp(rows, proj, down, ends, row_weight=row_weight, main_grads=main_grads, **options)
    return combine(y, routing, dispatcher=dispatcher, recipe=recipe), routing


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
