"""One layer's problem over several ranks: all ranks draw the whole of it, each runs its share and knows the answer.

The answer comes from `mxep.integration.verify`, which shares no code with mxep.ep.
W ranks, T tokens of each, D model dim, F hidden dim, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.ep import MoE
from mxep.integration.verify import EXACT, Problem, Quantizers, Results, moe_layer


def share(x: Tensor) -> Tensor:
    """This rank's share."""
    return x.to_local() if isinstance(x, DTensor) else x


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
