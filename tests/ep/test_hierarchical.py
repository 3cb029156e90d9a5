"""dispatcher="hierarchical": nodes x ranks on one machine, to the bit against one process that holds all tokens."""

import contextlib
import dataclasses

import pytest
import torch

from ep.problem import Ranks, make_ranks
from mxep.comms import Capacity, CapacityExceeded
from mxep.ep import HierarchicalDispatcher, LocalDispatcher, MoE, combine, dispatch, expert_mlp, make_dispatcher
from mxep.ep.dispatchers.base import Routing
from mxep.ep.dispatchers.handles import Done, Handle
from mxep.gemm import Recipe
from mxep.integration.reference import Results
from mxep.integration.verify import FixedRouting
from ranks import Context, distributed

DIM, EXPERTS = 64, 12


class OfAllRanks(LocalDispatcher):
    """The definition. Tokens of all W ranks by (index in the node, node, token); sums by rank, by node, of nodes."""

    def __init__(self, num_experts: int, world_size: int, ranks_per_node: int) -> None:
        super().__init__(num_experts)
        self.ranks, self.ranks_per_node = world_size, ranks_per_node
        self.order = sorted(range(world_size), key=lambda rank: (rank % ranks_per_node, rank // ranks_per_node))

    def combine(
        self, rows: torch.Tensor, routing: Routing, row_values: torch.Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[torch.Tensor, torch.Tensor | None]]:
        ids, row_of = routing.expert_ids, routing.plan.slot_rows
        owner = ids.div(self.num_experts // self.ranks, rounding_mode="floor")
        total = torch.zeros(len(ids), rows.shape[1])
        for node in range(self.ranks // self.ranks_per_node):
            of_node = torch.zeros_like(total)
            for rank in range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node):
                of_rank = torch.zeros_like(total)
                for k in range(ids.shape[1]):
                    mask = (owner[:, k] == rank) & (row_of[:, k] >= 0)
                    of_rank[mask] += rows[row_of[mask, k].long()].float()
                of_node += of_rank.to(rows.dtype).float()
            total += of_node.to(rows.dtype).float()
        _, values = super().combine(rows, routing, row_values).wait()
        return Done((total.to(rows.dtype), values))


def hierarchical(ctx: Context, ranks_per_node: int, **options) -> HierarchicalDispatcher:
    wanted = {"num_experts": EXPERTS, "dim": DIM, "group": ctx.group, "ranks_per_node": ranks_per_node} | options
    return HierarchicalDispatcher(wanted.pop("num_experts"), **wanted)


def definition(ctx: Context, ranks: Ranks, ranks_per_node: int, recipe: str) -> Results:
    """This rank's share of what the layer computes over `OfAllRanks`."""
    p, tokens = ranks.whole, ranks.tokens
    alone = OfAllRanks(len(p.down_proj), ctx.world_size, ranks_per_node)

    def ordered(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.split(tokens)[rank] for rank in alone.order]).to(ctx.device)

    router = FixedRouting(ordered(p.expert_ids), ordered(p.weights))
    (experts, dim, hidden), top_k = p.down_proj.shape, p.weights.shape[1]
    moe = MoE(
        dim, hidden, experts, top_k, router=router, dispatcher=alone, recipe=recipe, gradient_reduction="sum",
        device=ctx.device,
    )  # fmt: skip
    with torch.no_grad():
        moe.experts.gate_up_proj.copy_(p.gate_up_proj)
        moe.experts.down_proj.copy_(p.down_proj)
    x = ordered(p.x).bfloat16().requires_grad_()
    out = moe(x)
    out.backward(ordered(p.d_out).to(out))
    sizes, place = [tokens[rank] for rank in alone.order], alone.order.index(ctx.rank)
    of_tokens = (t.split(sizes)[place] for t in (out, x.grad, router.weights.grad))
    of_experts = (w.grad.chunk(ctx.world_size)[ctx.rank] for w in (moe.experts.gate_up_proj, moe.experts.down_proj))
    return Results(*(t.detach().float().cpu() for t in (*of_tokens, *of_experts)))


def assert_same_bits(got: Results, wanted: Results) -> None:
    for field in dataclasses.fields(got):
        torch.testing.assert_close(getattr(got, field.name), getattr(wanted, field.name), rtol=0, atol=0, msg=field.name)


def routings(world_size: int) -> dict[str, Ranks]:
    """Other numbers of tokens on each rank, one without any."""
    tokens = [0 if rank == 1 else 20 - 3 * rank for rank in range(world_size)]
    plain = make_ranks(tokens, experts=EXPERTS)
    none, skewed = make_ranks(tokens, experts=EXPERTS, seed=1), make_ranks(tokens, experts=EXPERTS, seed=2)
    none.whole.expert_ids[::2, 1] = -1
    none.whole.expert_ids[5] = -1
    skewed.whole.expert_ids[:] = torch.tensor([EXPERTS - 1, 0, EXPERTS - 2])  # from the second on nothing for most ranks
    top_1 = make_ranks(tokens, experts=EXPERTS, top_k=1, seed=3)
    return {"plain": plain, "-1": none, "skewed": skewed, "top-1": top_1}


def check_layers(ctx: Context, ranks_per_node: int, recipe: str) -> None:
    for ranks in routings(ctx.world_size).values():
        dispatcher = hierarchical(ctx, ranks_per_node, max_tokens=max(ranks.tokens))
        got = ranks.run(ctx, recipe=recipe, dispatcher=dispatcher)
        assert_same_bits(got, definition(ctx, ranks, ranks_per_node, recipe))
        dispatcher.close()


@distributed(2, device="cpu")
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_a_layer_on_two_ranks_computes_what_the_definition_does(ctx: Context, ranks_per_node: int, recipe: str) -> None:
    check_layers(ctx, ranks_per_node, recipe)


@distributed(4, 6, device="cpu")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_layer_on_nodes_of_two_ranks_computes_what_the_definition_does(ctx: Context, recipe: str) -> None:
    check_layers(ctx, 2, recipe)
