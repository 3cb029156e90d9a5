"""A layer's inputs on every rank from one seed, and what a dense layer makes of them in one process.

Each rank draws the whole problem, runs its own share of it through mxep, and compares with its own share of the answer.
W ranks, T tokens of each, D model dim, F hidden dim, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxep.ep import MoE


@dataclass
class Problem:
    """x (N, D), ids (N, K), weights (N, K), d_out (N, D) of all ranks' tokens in rank order; tokens: of each rank."""

    tokens: list[int]
    x: Tensor
    ids: Tensor
    weights: Tensor
    d_out: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor

    def mine(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.split(self.tokens)[rank]

    def my_experts(self, weight: Tensor, rank: int) -> Tensor:
        return weight.chunk(len(self.tokens))[rank]


def make_problem(
    tokens: list[int], *, dim: int = 64, hidden: int = 32, experts: int = 12, top_k: int = 3, seed: int = 0
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    n = sum(tokens)

    def bf16(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).bfloat16()

    ids = torch.rand(n, experts, generator=g).argsort(-1)[:, :top_k].int() if n else torch.zeros(0, top_k).int()
    weights = torch.rand(n, top_k, generator=g)
    return Problem(
        tokens,
        bf16(n, dim),
        ids,
        weights / weights.sum(-1, keepdim=True),
        bf16(n, dim),
        bf16(experts, 2 * hidden, dim, scale=dim**-0.5),
        bf16(experts, dim, hidden, scale=hidden**-0.5),
    )


def dense_layer(x: Tensor, ids: Tensor, weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """Every token through its experts, one expert after the other, in the inputs' precision; -1 adds nothing."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up_proj)):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up_proj[expert].t()).chunk(2, -1)
        y = (F.silu(gate) * up * weights[token, k, None]) @ down_proj[expert].t()
        out = out.index_add(0, token, y)
    return out


@dataclass
class Answer:
    """out (T, D), dx (T, D), d_weights (T, K), d_gate_up (e, 2F, D), d_down (e, D, F): one rank's share."""

    out: Tensor
    dx: Tensor
    d_weights: Tensor
    d_gate_up: Tensor
    d_down: Tensor

    def items(self) -> list[tuple[str, Tensor]]:
        return list(vars(self).items())


def dense_answer(p: Problem, rank: int) -> Answer:
    leaves = [t.double().requires_grad_() for t in (p.x, p.weights, p.gate_up_proj, p.down_proj)]
    x, weights, gate_up, down = leaves
    out = dense_layer(x, p.ids, weights, gate_up, down)
    dx, d_weights, d_gate_up, d_down = torch.autograd.grad(out, leaves, p.d_out.double())
    return Answer(
        p.mine(out.detach(), rank),
        p.mine(dx, rank),
        p.mine(d_weights, rank),
        p.my_experts(d_gate_up, rank),
        p.my_experts(d_down, rank),
    )


class FixedRouter(nn.Module):
    """Routes as told; its weights are a parameter, so that their gradient can be read."""

    def __init__(self, ids: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.ids = ids
        self.weights = nn.Parameter(weights.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.ids, self.weights


def layer_answer(p: Problem, ctx, *, moe: MoE | None = None, **options) -> Answer:
    """Forward and backward of an MoE layer over the ranks of ``ctx``; this rank's share."""
    rank, device = ctx.rank, ctx.device
    if moe is None:
        router = FixedRouter(p.mine(p.ids, rank).to(device), p.mine(p.weights, rank).to(device))
        dim, hidden = p.down_proj.shape[1:]
        moe = MoE(
            dim, hidden, len(p.down_proj), p.ids.shape[1], group=ctx.group, router=router, device=device, **options
        )
    with torch.no_grad():
        moe.experts.gate_up_proj.copy_(p.my_experts(p.gate_up_proj, rank))
        moe.experts.down_proj.copy_(p.my_experts(p.down_proj, rank))
    moe.zero_grad()
    x = p.mine(p.x, rank).to(device).requires_grad_()
    out = moe(x)
    out.backward(p.mine(p.d_out, rank).to(device))
    moe.check()
    grads = (x.grad, moe.router.weights.grad, moe.experts.gate_up_proj.grad, moe.experts.down_proj.grad)
    return Answer(out.detach().cpu(), *(g.cpu() for g in grads))


def snr(reference: Tensor, value: Tensor) -> float:
    """20 log10(|reference| / |reference - value|), dB; infinite where they are equal."""
    reference, value = reference.double(), value.double()
    return 20 * torch.log10(reference.norm() / (reference - value).norm()).item()
