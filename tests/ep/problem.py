"""One layer's problem over several ranks: all ranks draw the whole of it, each runs its share and knows the answer.

The answer comes from `mxep.integration.verify`, which shares no code with mxep.ep.
W ranks, T tokens of each, D model dim, F hidden dim, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.ep import MoE, combine, dispatch, expert_mlp, make_dispatcher, run_experts
from mxep.ep.dispatchers.base import Routing, TokenDispatcher
from mxep.integration.verify import EXACT, Problem, Quantizers, Results, moe_layer


def share(x: Tensor) -> Tensor:
    """This rank's share."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """All ranks' shares, detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


class FixedRouting(nn.Module):
    """A router with given results; ``weights`` is a leaf that collects its gradient."""

    def __init__(self, expert_ids: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.expert_ids = expert_ids
        self.weights = weights.clone().requires_grad_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.expert_ids, self.weights


@dataclass
class Ranks:
    """A problem of all ranks' tokens, in rank order, and how many tokens each rank has."""

    whole: Problem
    tokens: list[int]

    def router(self, ctx) -> FixedRouting:
        ids, weights = (t.split(self.tokens)[ctx.rank] for t in (self.whole.expert_ids, self.whole.weights))
        return FixedRouting(ids.to(ctx.device), weights.to(ctx.device))

    def tokens_of(self, ctx) -> Tensor:
        return self.whole.x.split(self.tokens)[ctx.rank].to(ctx.device, torch.bfloat16)

    def answer(self, ctx, q: Quantizers = EXACT) -> Results:
        """This rank's share of what the reference computes."""
        results = moe_layer(self.whole, q)
        per_token = [t.split(self.tokens)[ctx.rank] for t in (results.out, results.dx, results.d_weights)]
        per_expert = [t.chunk(ctx.world_size)[ctx.rank] for t in (results.d_gate_up_proj, results.d_down_proj)]
        return Results(*per_token, *per_expert)

    def run(self, ctx, **options) -> Results:
        """Forward and backward of an MoE layer on this rank's tokens."""
        p = self.whole
        dim, hidden = p.down_proj.shape[1:]
        moe = MoE(
            dim,
            hidden,
            len(p.down_proj),
            p.weights.shape[1],
            group=ctx.group,
            router=self.router(ctx),
            device=ctx.device,
            gradient_reduction="sum",
            **options,
        )
        with torch.no_grad():
            share(moe.experts.gate_up_proj).copy_(p.gate_up_proj.chunk(ctx.world_size)[ctx.rank])
            share(moe.experts.down_proj).copy_(p.down_proj.chunk(ctx.world_size)[ctx.rank])
        x = self.tokens_of(ctx).requires_grad_()
        out = moe(x)
        out.backward(p.d_out.split(self.tokens)[ctx.rank].to(out))
        moe.check()
        results = (out, x.grad, moe.router.weights.grad, *(share(weight.grad) for weight in moe.experts.parameters()))
        return Results(*(t.detach().float().cpu() for t in results))


def make_ranks(
    tokens: list[int], *, dim: int = 64, hidden: int = 96, experts: int = 12, top_k: int = 3, seed: int = 0
) -> Ranks:
    """Gaussian tokens and weights, rounded to bf16; distinct experts of uniform choice."""
    g = torch.Generator().manual_seed(seed)
    n = sum(tokens)

    def gaussian(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).bfloat16().float()

    scores, ids = torch.rand(n, experts, generator=g).topk(top_k)
    whole = Problem(
        gaussian(n, dim),
        gaussian(n, dim),
        ids.int(),
        scores / scores.sum(-1, keepdim=True),
        gaussian(experts, 2 * hidden, dim, scale=dim**-0.5),
        gaussian(experts, dim, hidden, scale=hidden**-0.5),
    )
    return Ranks(whole, tokens)


NAMES = ("out", "dx", "d_weights", "d_gate_up_proj", "d_down_proj")
"""What a layer's forward and backward give, in the order of `Results`."""


def inputs(ranks: Ranks, ctx) -> tuple[Tensor, ...]:
    """x, ids, weights, gate_up_proj, down_proj, d_out of this rank; those that have gradients want them."""
    p = ranks.whole
    mine = [t.split(ranks.tokens)[ctx.rank].to(ctx.device) for t in (p.x, p.expert_ids, p.weights, p.d_out)]
    proj, down = (
        w.chunk(ctx.world_size)[ctx.rank].to(ctx.device, torch.bfloat16) for w in (p.gate_up_proj, p.down_proj)
    )
    x, ids, weights, d_out = mine[0].bfloat16(), mine[1], mine[2].float(), mine[3].bfloat16()
    return *(x.requires_grad_(), ids, weights.requires_grad_(), proj.requires_grad_(), down.requires_grad_()), d_out


def composed(x, ids, weights, proj, down, *, dispatcher, recipe, main_grads=(None, None)) -> Tensor:
    """The layer by its three functions."""
    rows, row_weight, routing = dispatch(x, ids, weights, dispatcher=dispatcher, recipe=recipe)
    ends = routing.plan.offs
    y = expert_mlp(rows, proj, down, ends, row_weight=row_weight, recipe=recipe, main_grads=main_grads)
    return combine(y, routing, dispatcher=dispatcher, recipe=recipe)


def in_one(x, ids, weights, proj, down, *, dispatcher, recipe) -> Tensor:
    """The layer by its one autograd function."""
    return run_experts(x, ids, weights, proj, down, dispatcher=dispatcher, recipe=recipe)[0]


def symmetric(ctx, **options) -> TokenDispatcher:
    return make_dispatcher("symmetric", **{"num_experts": 4, "dim": 32, "group": ctx.group} | options)


def send(dispatcher: TokenDispatcher, ctx, ids: list[list[int]], dtype: torch.dtype = torch.int32) -> Routing:
    """A few bytes a token to the experts."""
    table = torch.tensor(ids, dtype=dtype, device=ctx.device).view(len(ids), len(ids[0]) if ids else 1)
    parts = (torch.zeros(len(ids), 16, dtype=torch.uint8, device=ctx.device),)
    return dispatcher.dispatch(parts, table, torch.ones(table.shape, device=ctx.device), alignment=1).wait()[1]
