"""dispatcher="hierarchical": nodes x ranks on one machine, to the bit against one process that holds all tokens."""

import dataclasses
import itertools
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep.problem import FixedRouting, Ranks, make_ranks, send, share
from mxep.comms import Capacity, CapacityExceeded, PeerTimeout
from mxep.ep import HierarchicalDispatcher, LocalDispatcher, MoE, make_dispatcher
from mxep.ep.dispatchers.base import Done, Handle, Routing
from mxep.integration.verify import Results
from ranks import Context, distributed

DIM, EXPERTS = 64, 12


def sums_of(pairs: torch.Tensor, owner: torch.Tensor, world_size: int, ranks_per_node: int) -> torch.Tensor:
    """The definition of combine: (T, K, D) rows of each token's experts, on ranks ``owner`` (T, K) -> (T, D)."""
    total = torch.zeros(len(pairs), pairs.shape[2])
    for node in range(world_size // ranks_per_node):
        of_node = torch.zeros_like(total)
        for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
            of_rank = torch.zeros_like(total)
            for k in range(owner.shape[1]):
                mask = owner[:, k] == rank
                of_rank[mask] += pairs[mask, k].float()
            of_node += of_rank.to(pairs.dtype).float()
        total += of_node.to(pairs.dtype).float()
    return total.to(pairs.dtype)


class OfAllRanks(LocalDispatcher):
    """The definition of a layer. Tokens of all W ranks by (index in the node, node, token), sums by `sums_of`."""

    def __init__(self, num_experts: int, world_size: int, ranks_per_node: int) -> None:
        super().__init__(num_experts)
        self.ranks, self.ranks_per_node = world_size, ranks_per_node
        self.order = sorted(range(world_size), key=lambda rank: (rank % ranks_per_node, rank // ranks_per_node))

    def combine(
        self, rows: torch.Tensor, routing: Routing, row_values: torch.Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[torch.Tensor, torch.Tensor | None]]:
        row_of = routing.plan.slot_rows
        owner = routing.expert_ids.div(self.num_experts // self.ranks, rounding_mode="floor")
        _, values = super().combine(rows, routing, row_values).wait()
        return Done((sums_of(rows[row_of.clamp_min(0).long()], owner, self.ranks, self.ranks_per_node), values))


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
        torch.testing.assert_close(
            getattr(got, field.name), getattr(wanted, field.name), rtol=0, atol=0, msg=field.name
        )


def routings(world_size: int) -> dict[str, Ranks]:
    """Other numbers of tokens on each rank, one without any."""
    tokens = [0 if rank == 1 else 20 - 3 * rank for rank in range(world_size)]
    plain = make_ranks(tokens, experts=EXPERTS)
    none, skewed = make_ranks(tokens, experts=EXPERTS, seed=1), make_ranks(tokens, experts=EXPERTS, seed=2)
    none.whole.expert_ids[::2, 1] = -1
    none.whole.expert_ids[5] = -1
    skewed.whole.expert_ids[:] = torch.tensor(
        [EXPERTS - 1, 0, EXPERTS - 2]
    )  # from the second on nothing for most ranks
    top_1 = make_ranks(tokens, experts=EXPERTS, top_k=1, seed=3)
    return {"plain": plain, "-1": none, "skewed": skewed, "top-1": top_1}


@distributed(4, 6, slow=[6], device="cpu", recipe=["bf16", "mxfp8"])
def test_a_layer_computes_what_the_definition_does(ctx: Context, recipe: str) -> None:
    ranks_per_node = 2
    chosen = routings(ctx.world_size)
    if ctx.world_size > 4 and recipe != "bf16":  # a third node adds to sums, whatever rows are quantized to
        chosen = {"-1": chosen["-1"]}
    for ranks in chosen.values():
        dispatcher = hierarchical(ctx, ranks_per_node, max_tokens=max(ranks.tokens))
        got = ranks.run(ctx, recipe=recipe, dispatcher=dispatcher)
        assert_same_bits(got, definition(ctx, ranks, ranks_per_node, recipe))
        dispatcher.close()


@distributed(4, device="cpu", recipe=["bf16", "fp8"])
def test_one_rank_a_node_or_one_node_is_what_the_other_dispatchers_compute_and_others_round_once_more(
    ctx: Context, recipe: str
) -> None:
    ranks = make_ranks([16, 40, 21, 33], experts=EXPERTS)
    flat = ranks.run(ctx, recipe=recipe, dispatcher="symmetric")
    one, four, two = (ranks.run(ctx, recipe=recipe, dispatcher=hierarchical(ctx, n)) for n in (1, 4, 2))
    assert_same_bits(one, flat)
    assert_same_bits(four, flat)
    assert not torch.equal(two.out, flat.out)
    dispatcher = hierarchical(ctx, 2)
    assert_same_bits(two, ranks.run(ctx, recipe=recipe, dispatcher=dispatcher))
    assert dispatcher.counts()["dropped"] == 0


@distributed(4, 6, slow=[6], device="cpu")
def test_bytes_reach_the_slots_that_the_plan_names_and_cross_once_a_node(ctx: Context) -> None:
    """Two dispatches in flight, then bytes by the first plan. Rows say where they came from: (rank, token, batch)."""
    dispatcher, world = hierarchical(ctx, 2, max_tokens=10), ctx.world_size
    generator, all_ids = torch.Generator().manual_seed(0), []
    for batch in range(2):
        ids = torch.rand(world, 10, EXPERTS, generator=generator).topk(3).indices.int()
        ids[:, batch::4, 0] = -1
        all_ids.append(ids)

    def rows_of(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        named = torch.tensor([[ctx.rank, token, batch] for token in range(10)], dtype=torch.uint8)
        return named.repeat(1, 8), named  # parts of 24 and 3 bytes

    weights = torch.rand(10, 3)
    handles = [
        dispatcher.dispatch(rows_of(batch), all_ids[batch][ctx.rank], weights, alignment=4) for batch in range(2)
    ]
    arrived = []
    for batch, handle in enumerate(handles):
        first, routing = handle.wait()
        arrived.append(routing)
        for slots, sent in ((first, batch), (dispatcher.redispatch(rows_of(7), routing).wait(), 7)):
            wanted = []
            for expert in range(ctx.rank * EXPERTS // world, (ctx.rank + 1) * EXPERTS // world):
                order = sorted(range(world), key=lambda rank: (rank % 2, rank // 2))
                named = [[rank, t, sent] for rank in order for t in range(10) if expert in all_ids[batch][rank, t]]
                wanted += named + [None] * (-len(named) % 4)
            rows = routing.plan.row_slot[: int(routing.plan.offs[-1])].tolist()
            assert [slots[1][slot].tolist() if slot >= 0 else None for slot in rows] == wanted
            assert all(slots[0][slot].tolist() == slots[1][slot].tolist() * 8 for slot in rows if slot >= 0)
        stats, of_node = routing.stats(), EXPERTS // world * 2
        assert stats["sent"] == sum(
            len({i // of_node for i in token if i >= 0}) for token in all_ids[batch][ctx.rank].tolist()
        )
        pairs = sum(len({i // (EXPERTS // world) for i in t if i >= 0}) for ids in all_ids[batch].tolist() for t in ids)
        dist.all_reduce(stats["sent_within"], group=ctx.group)
        assert stats["sent_within"] == pairs
    assert len(arrived[0].tokens) == world // 2 * (1 + 10)


@distributed(4, device="cpu")
def test_every_rank_is_told_of_rows_and_of_slots_that_did_not_fit(ctx: Context) -> None:
    """T_max = 4, one expert a token: 4 rows on each rank, 2 slots for each node on each."""
    dispatcher = hierarchical(ctx, 2, max_tokens=4, capacity=Capacity.factor(1.0))
    assert dispatcher.slots_per_node(4, 1) == 2
    send(dispatcher, ctx, [[3 * ctx.rank], [3 * (ctx.rank ^ 2)]])  # fits
    dispatcher.check()
    for _ in range(2):
        send(dispatcher, ctx, [[0], [6], [1], [6]])  # 8 rows on ranks 0 and 2
        assert dispatcher.counts()["dropped"] == 8
        rows = r"4 on each rank: 4 on rank 0, which needed 8, 4 on rank 2, which needed 8; .*factor\(2\) would"
        with pytest.raises(CapacityExceeded, match=rows):
            dispatcher.check()
        dispatcher.check()
    send(dispatcher, ctx, [[3], [9], [10], [11]] if ctx.rank == 1 else [[3]])
    assert dispatcher.counts()["dropped"] == 1
    slots = r"2 slots for a node: 1 of rank 1, which had 3 tokens for a node; .*factor\(1.5\) has as many"
    with pytest.raises(CapacityExceeded, match=slots):
        dispatcher.check()
    send(dispatcher, ctx, [[99], [-7]] if ctx.rank == 2 else [[0]])
    assert dispatcher.counts()["invalid"] == 2
    with pytest.raises(ValueError, match=f"rank {ctx.rank}: 2 expert ids outside -1..11"):
        dispatcher.check()
    dispatcher.check()


@distributed(4, device="cpu")
def test_pairs_without_a_slot_are_as_good_as_not_routed(ctx: Context) -> None:
    ranks = make_ranks([20, 20, 17, 20], experts=EXPERTS)
    capacity = Capacity.factor(1.2, overflow="drop")
    # Half of the slots that are wanted, as tokens go to both nodes. Rows of experts fit.
    dispatcher = hierarchical(ctx, 2, max_tokens=20, capacity=capacity, nodes_per_token=1)
    assert dispatcher.slots_per_node(20, 3) == 12
    got = ranks.run(ctx, recipe="bf16", dispatcher=dispatcher)
    dropped, kept = 0, ranks.whole.expert_ids.clone()
    for ids in kept.split(ranks.tokens):
        for node in range(2):
            here = ids // 6 == node
            named = here.any(1).nonzero().flatten().tolist()
            if (n := len(named)) > 12:
                go = [math.floor(i * 12 / n + 0.5) != math.floor((i + 1) * 12 / n + 0.5) for i in range(n)]
                assert sum(go) == 12
                assert max(len(list(same)) for going, same in itertools.groupby(go) if not going) <= -(-n // 12)
            else:
                go = [True] * n
            lost = here.clone()
            lost[[token for token, goes in zip(named, go) if goes]] = False
            dropped += int(lost.sum())
            ids[lost] = -1
    ranks.whole.expert_ids.copy_(kept)
    assert_same_bits(got, ranks.run(ctx, recipe="bf16", dispatcher=hierarchical(ctx, 2)))
    assert dropped > 0
    dispatcher = hierarchical(ctx, 2, max_tokens=20, capacity=capacity, nodes_per_token=1)
    x = torch.zeros(ranks.tokens[ctx.rank], 16, dtype=torch.uint8)
    whole = make_ranks([20, 20, 17, 20], experts=EXPERTS).router(ctx)
    dispatcher.dispatch((x,), whole.expert_ids, whole.weights.detach(), alignment=1).wait()
    assert dispatcher.counts()["dropped"] == dropped


@distributed(4, device="cpu")
def test_nodes_are_hosts_unless_said_otherwise(ctx: Context) -> None:
    def named(hosts: str):
        return mock.patch("platform.node", return_value=hosts[ctx.rank])

    options = {"dim": DIM, "group": ctx.group}
    with named("aabb"):
        two = make_dispatcher("hierarchical", EXPERTS, **options)
    assert (two.nodes.ranks, two.nodes.count, two.nodes.node) == (2, 2, ctx.rank // 2)
    assert "nodes=2" in repr(two)
    assert make_dispatcher("hierarchical", EXPERTS, **options) is two
    assert make_dispatcher("hierarchical", EXPERTS, **options, ranks_per_node=1).nodes.count == 4
    moe = MoE(DIM, 32, EXPERTS, 2, group=ctx.group, dispatcher="hierarchical", ranks_per_node=1, nodes_per_token=2)
    assert (moe.dispatcher.nodes.count, moe.dispatcher.nodes_per_token) == (4, 2)
    for hosts, ranks_per_node in (("abab", 9), ("aaab", 8), ("abbb", 7)):
        group = dist.new_group(list(range(4)))
        with named(hosts), pytest.raises(ValueError, match=r"got (a x|b x).*, wanted as many ranks on each host"):
            HierarchicalDispatcher(EXPERTS, dim=DIM, group=group)
        with pytest.raises(ValueError, match=f"ranks_per_node: got {ranks_per_node}, wanted a divisor of the 4 ranks"):
            HierarchicalDispatcher(EXPERTS, dim=DIM, group=group, ranks_per_node=ranks_per_node)
    with pytest.raises(ValueError, match=r"ranks_per_node: got \['1', '2'\], wanted the same on all ranks"):
        HierarchicalDispatcher(EXPERTS, dim=DIM, group=group, ranks_per_node=1 + ctx.rank % 2)
    with pytest.raises(ValueError, match="nodes_per_token: got 3, wanted 1 to 2, the nodes"):
        hierarchical(ctx, 2, nodes_per_token=3)


@distributed(2, device="cpu")
def test_groups_of_nodes_are_not_split_from_the_whole_job(ctx: Context) -> None:
    """init_process_group(device_id=...) would have it so, and a rank of the job without such layers may not come."""
    bound, dist.group.WORLD.bound_device_id = dist.group.WORLD.bound_device_id, torch.device("cuda", 0)
    try:
        with mock.patch("torch.distributed.distributed_c10d._get_split_source", side_effect=AssertionError):
            assert hierarchical(ctx, 1).nodes.count == 2
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
    finally:
        dist.group.WORLD.bound_device_id = bound


@distributed(1, 2, device="cpu")
def test_what_does_not_fit_is_said_and_close_ends_it(ctx: Context) -> None:
    dispatcher = hierarchical(ctx, 1)
    send(dispatcher, ctx, [])
    routing = send(dispatcher, ctx, [[0], [3], [11]] if ctx.rank == 0 else [[1]])
    if ctx.world_size > 1:  # a process alone makes room by itself
        said = r"got 4 tokens, wanted at most max_tokens = 3: set max_tokens=4 or more, .* call reserve\(4\) of a"
        with pytest.raises(ValueError, match=said):
            send(dispatcher, ctx, [[0]] * 4)
        dispatcher.reserve(4 if ctx.rank else 1, ctx.device)
    assert int(send(dispatcher, ctx, [[0]] * 4).plan.offs[-1]) == (0 if ctx.rank else 4 * ctx.world_size)
    dispatcher.check()
    named = hierarchical(ctx, 1, max_tokens=3)
    with pytest.raises(ValueError, match="got 4 tokens, wanted at most max_tokens = 3: set max_tokens=4 or more, on"):
        send(named, ctx, [[0]] * 4)
    with pytest.raises(ValueError, match="reserve: got 4 tokens, wanted at most the max_tokens = 3 of this layer"):
        named.reserve(0 if ctx.rank else 4, ctx.device)
    named.close()
    (transport,) = dispatcher._transports()
    dispatcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.check()
    with pytest.raises(RuntimeError, match="closed"):
        send(dispatcher, ctx, [[0]])
    with pytest.raises(RuntimeError, match="got a routing from before it was closed"):
        dispatcher.combine(torch.zeros(routing.plan.max_rows, DIM, dtype=torch.bfloat16), routing)


@distributed(4, slow=[4], device="cpu")
def test_a_rank_that_does_not_come_ends_all_others_within_the_limit(ctx: Context) -> None:
    """Rank 3: its node's other rank names it by its index there."""
    dispatcher = hierarchical(ctx, 2, max_tokens=4, timeout=3.0)
    send(dispatcher, ctx, [[0], [9]])
    dist.barrier(ctx.group)
    started = time.monotonic()
    if ctx.rank < 3:
        with pytest.raises(RuntimeError) as caught:
            send(dispatcher, ctx, [[0], [9]])
        assert (ctx.rank == 1) != isinstance(caught.value, PeerTimeout)
        assert ctx.rank == 1 or caught.value.missing == (1,)
    assert time.monotonic() - started < 15
    dist.barrier(ctx.group)


def test_slots_follow_from_the_capacity_and_the_nodes_that_a_token_may_reach() -> None:
    """One process, so the nodes are made up."""

    def slots(capacity: Capacity | None, nodes: int, top_k: int, nodes_per_token: int | None = None) -> int:
        made = HierarchicalDispatcher(256, dim=DIM, capacity=capacity)
        made.nodes, made.experts_per_node = dataclasses.replace(made.nodes, count=nodes), 256 // nodes
        made.nodes_per_token = nodes_per_token or nodes
        return made.slots_per_node(8192, top_k)

    even = Capacity.factor(1.0)
    assert slots(None, 8, 8) == slots(Capacity.factor(9.0), 8, 8) == 8192
    assert slots(even, 8, 1) == 1024
    assert slots(even, 8, 1, 3) == 1024
    assert slots(even, 8, 8, 1) == 1024
    ids = torch.rand(20000, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    measured = (ids < 32).any(1).float().mean() * 8192
    assert abs(slots(even, 8, 8) - measured) < 60  # 3 standard deviations of the mean: 81, of 20000 draws of p = 0.66
    assert slots(Capacity.factor(1.25), 8, 8) == pytest.approx(1.25 * slots(even, 8, 8), abs=2)


@distributed(2, 6, slow=[6], case=[("hierarchical", 1), ("hierarchical", 2), ("all_to_all", 2), ("symmetric", 2)])
def test_combine_sums_rows_as_defined_on_any_device(ctx: Context, case: tuple[str, int]) -> None:
    """An expert's row is its token times a factor of the expert's, so that every rank knows its tokens' rows: large
    ones that cancel and hide small ones, so that another order of sums is another sum. Flat is one rank a node."""
    (kind, parts), tokens = case, 30 + ctx.rank
    ranks_per_node = max(1, ctx.world_size // 2 if ctx.world_size < 6 else 2)
    options = {"dim": DIM, "group": ctx.group, "max_tokens": 40}
    if kind == "hierarchical":
        options["ranks_per_node"] = ranks_per_node
    else:
        ranks_per_node = 1
    dispatcher = make_dispatcher(kind, EXPERTS, **options)
    factors = torch.tensor([2.0**30, 1.0, -(2.0**30), -0.75, 2.0**30, 1.5, -(2.0**30), 1, 1, 2.0**30, -(2.0**30), 1])
    factors = factors.bfloat16()
    generator = torch.Generator().manual_seed(ctx.rank)
    x = torch.randn(tokens, DIM, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(4).indices.int()
    ids[::5, 2] = -1
    payload = tuple(x.to(ctx.device).view(torch.uint8).chunk(parts, 1))
    weights = torch.rand(tokens, 4, generator=generator).to(ctx.device)
    slots, routing = dispatcher.dispatch(payload, ids.to(ctx.device), weights, alignment=8, overlap=True).wait()
    rows, plan = torch.cat(slots, 1).view(torch.bfloat16), routing.plan
    expert = torch.bucketize(torch.arange(plan.max_rows, device=ctx.device), plan.offs.long(), right=True)
    here = factors.chunk(ctx.world_size)[ctx.rank].to(ctx.device)
    factor = here[expert.clamp(max=len(here) - 1)]
    valid = (plan.row_slot >= 0)[:, None]
    made = torch.where(valid, rows[plan.row_slot.clamp_min(0).long()] * factor[:, None], float("nan"))
    out, values = dispatcher.combine(made, routing, plan.row_weight * 2, overlap=True).wait()
    pairs = x[:, None] * factors[ids.clamp_min(0).long()][:, :, None]
    owner = ids.div(EXPERTS // ctx.world_size, rounding_mode="floor")
    assert torch.equal(out.cpu(), sums_of(pairs, owner, ctx.world_size, ranks_per_node))
    assert torch.equal(values, torch.where(ids.to(ctx.device) >= 0, weights * 2, 0.0))
    dispatcher.check()


@distributed(2, 4, device="cuda")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_on_gpus_one_rank_a_node_is_what_symmetric_computes(ctx: Context, recipe: str) -> None:
    ranks = make_ranks([150, 200, 90, 220][: ctx.world_size], dim=256, hidden=128, experts=EXPERTS)
    flat = ranks.run(ctx, recipe=recipe, dispatcher="symmetric")
    for ranks_per_node in (1, ctx.world_size):
        assert_same_bits(ranks.run(ctx, recipe=recipe, dispatcher=hierarchical(ctx, ranks_per_node, dim=256)), flat)


@distributed(2, 4, device="cuda")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_captured_layer_replays_with_other_tokens_as_it_computes_eagerly(ctx: Context, recipe: str) -> None:
    """Two nodes: forward and backward, both legs, in one graph of `torch.cuda.graph`."""
    torch.manual_seed(0)
    dispatcher = hierarchical(ctx, ctx.world_size // 2, dim=256, max_tokens=96)
    moe = MoE(256, 128, EXPERTS, 3, dispatcher=dispatcher, group=ctx.group, device=ctx.device, recipe=recipe)
    x = torch.zeros(96, 256, dtype=torch.bfloat16, device=ctx.device, requires_grad=True)
    d_out = torch.zeros_like(x, requires_grad=False)
    ids = torch.zeros(96, 3, dtype=torch.int32, device=ctx.device)
    weights = torch.zeros(96, 3, device=ctx.device, requires_grad=True)
    leaves = [x, weights, *moe.experts.parameters()]

    def step() -> list[torch.Tensor]:
        out = moe(x, expert_ids=ids, weights=weights)
        return [out, *map(share, torch.autograd.grad(out, leaves, d_out))]

    @torch.no_grad()
    def new_batch(seed: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + ctx.rank)
        for tensor in (x, d_out):
            tensor.copy_(torch.randn(96, 256, generator=generator))
        scores, chosen = torch.rand(96, EXPERTS, generator=generator).topk(3)
        chosen[seed::7] = -1
        ids.copy_(chosen)
        weights.copy_(scores)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(3):
            new_batch(seed)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog has a thread of its own
        captured = step()
    for seed in (3, 4, 5):
        new_batch(seed)
        graph.replay()
        replayed = [tensor.detach().clone() for tensor in captured]
        wanted = [tensor.detach() for tensor in step()]
        assert all(tensor.any() for tensor in wanted)
        assert all(torch.equal(*pair) for pair in zip(replayed, wanted, strict=True)), seed
    moe.check()


@distributed(2, device="cpu")
def test_nodes_that_were_given_other_sizes_are_told_before_anything_is_sent(ctx: Context) -> None:
    x = torch.ones(4, DIM, dtype=torch.bfloat16)
    given = {"max_tokens": 4 + ctx.rank}, {"max_tokens": 4, "capacity": Capacity.factor(1.0 + ctx.rank)}
    for options, name in zip(given, ("max_tokens", "capacity")):
        moe = MoE(DIM, 32, EXPERTS, 2, group=ctx.group, dispatcher="hierarchical", ranks_per_node=1, **options)
        with pytest.raises(ValueError, match=f"ranks disagree on {name}: got"):
            moe(x)
    recipe = ("bf16", "mxfp8")[ctx.rank]
    moe = MoE(
        DIM, 32, EXPERTS, 2, group=ctx.group, dispatcher="hierarchical", ranks_per_node=1, max_tokens=4, recipe=recipe
    )
    with pytest.raises(ValueError, match="ranks disagree on bytes of a row: got"):
        moe(x)
