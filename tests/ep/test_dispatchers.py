"""Dispatchers: who shares one, who is told of what was lost, and what becomes of their memory."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep.problem import FixedRouting, send, symmetric
from mxep.comms import DROPPED, Capacity, CapacityExceeded, PeersDisagree, make_plan
from mxep.comms.transport import timeout_of
from mxep.ep import DISPATCHERS, MoE, __version__
from mxep.ep.dispatchers import (
    HierarchicalDispatcher,
    LocalDispatcher,
    SymmetricDispatcher,
    find_dispatcher,
    make_dispatcher,
)
from mxep.ep.dispatchers.base import TokenDispatcher
from mxep.ep.dtensors import local_tensor
from ranks import Context, distributed


@distributed(2)
def test_layers_that_ask_for_the_same_share_a_dispatcher_which_its_key_finds(ctx: Context) -> None:
    one = symmetric(ctx, max_tokens=8)
    assert symmetric(ctx, max_tokens=8) is one
    assert find_dispatcher(one.key) is one
    assert symmetric(ctx, max_tokens=8, group=None) is symmetric(ctx, max_tokens=8, group=dist.group.WORLD)
    assert f"mxep={__version__}," in one.key, "a graph kept on disk would be served to ops of another version"
    others = (
        symmetric(ctx, max_tokens=9),
        symmetric(ctx, max_tokens=8, timeout=9.0),
        symmetric(ctx, max_tokens=8, dtype=torch.float32),
        symmetric(ctx, max_tokens=8, capacity=Capacity.factor(2.0)),
        symmetric(ctx, max_tokens=8, num_experts=8),
        make_dispatcher("all_to_all", 4, dim=32, group=ctx.group, max_tokens=8),
        make_dispatcher("local", 4, dim=32, max_tokens=8),
    )
    assert len({each.key for each in (one, *others)}) == 8
    send(one, ctx, [[0]])
    later = symmetric(ctx, max_tokens=8)
    assert later is not one
    assert later.key != one.key


def test_who_makes_a_dispatcher_has_it_alone() -> None:
    ours = LocalDispatcher(4), SymmetricDispatcher(4, dim=32)
    layers = make_dispatcher("local", 4, dim=32), make_dispatcher("symmetric", 4, dim=32)
    assert not set(map(id, ours)) & set(map(id, layers))
    assert make_dispatcher("local", 4, dim=32) is layers[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("access", ["kernels", "puts", "host"])
def test_only_sums_that_are_put_between_nodes_travel_beside_what_computes(access: str, overlap: bool) -> None:
    dispatcher, workspace = SymmetricDispatcher(4, dim=32), mock.Mock()
    workspace.transport.access = access
    with (
        mock.patch.object(dispatcher, "_workspace_of", return_value=workspace),
        mock.patch("mxep.ep.dispatchers.symmetric.combine") as combine,
    ):
        dispatcher.combine(torch.zeros(4, 32), mock.Mock(), overlap=overlap)
    assert combine.call_args.kwargs["async_op"] == (overlap and access == "puts")


@distributed(2, device="cpu")
def test_a_destroyed_groups_name_finds_no_dispatcher_of_the_new_group(ctx: Context) -> None:
    old = dist.new_group([0, 1])
    of_old = symmetric(ctx, group=old)
    old_name = old.group_name
    dist.destroy_process_group(old)
    new = dist.new_group([0, 1])
    new._set_group_name(old_name)
    assert symmetric(ctx, group=new) is not of_old


@distributed(3)
def test_every_rank_is_told_in_the_step_in_which_one_overflows(ctx: Context) -> None:
    everything_to_rank_1 = [[2], [3], [3], [3]]
    options = {"max_tokens": 4, "num_experts": 2 * ctx.world_size}
    dispatcher = symmetric(ctx, capacity=Capacity.factor(1.0), **options)
    for _ in range(2):
        send(dispatcher, ctx, [[2 * ctx.rank]])  # fits everywhere
        routing = send(dispatcher, ctx, everything_to_rank_1)
        dropped = 4 * ctx.world_size - 4
        assert int(dispatcher.counts()["dropped"]) == int(routing.stats()["dropped"]) == dropped
        said = rf": {dropped} on rank 1, which needed {dropped + 4}; .*factor\({ctx.world_size}\) would"
        with pytest.raises(CapacityExceeded, match=said):
            dispatcher.check()
        assert int(dispatcher.counts()["dropped"]) == 0
        dispatcher.check()
    enough = symmetric(ctx, capacity=Capacity.factor(ctx.world_size), **options)
    send(enough, ctx, everything_to_rank_1)
    enough.check()


def lost_pairs(ctx: Context, ids: torch.Tensor, capacity: Capacity, num_experts: int) -> torch.Tensor:
    """(T, K) bool: which of this rank's pairs the owners' plans leave out, of tables that a collective brought."""
    found = [ids] * ctx.world_size
    dist.all_gather_object(found, ids, group=ctx.group)
    max_tokens, own = max(map(len, found)), num_experts // ctx.world_size
    tables = torch.stack([torch.nn.functional.pad(each, (0, 0, 0, max_tokens - len(each)), value=-1) for each in found])
    of = tables.int(), torch.ones(tables.shape), torch.tensor(list(map(len, found)), dtype=torch.int32)
    lost = torch.zeros_like(ids, dtype=torch.bool)
    for first in range(0, num_experts, own):
        sizes = {"first_expert": first, "num_local_experts": own, "num_experts": num_experts}
        plan = make_plan(*of, **sizes, alignment=1, capacity=capacity)
        lost |= plan.slot_rows.view(tables.shape)[ctx.rank, : len(ids)] == DROPPED
    return lost


def trained_biases(ctx: Context, ids: torch.Tensor, dispatcher: TokenDispatcher) -> tuple[list[torch.Tensor], MoE]:
    """A layer with biases: its output and all gradients."""
    generator = torch.Generator().manual_seed(ctx.rank)
    x, d_out = (torch.randn(len(ids), 64, generator=generator).requires_grad_() for _ in range(2))
    router = FixedRouting(ids.int(), torch.rand(ids.shape, generator=generator))
    how = {"recipe": "bf16", "bias": True, "dtype": torch.float32}
    moe = MoE(64, 32, 12, 3, router=router, dispatcher=dispatcher, **how)
    torch.manual_seed(1)
    for parameter in moe.experts.parameters():
        torch.nn.init.normal_(local_tensor(parameter.data), std=0.2)
    out = moe(x)
    out.backward(d_out.detach())
    return [out, x.grad, router.weights.grad, *(local_tensor(p.grad) for p in moe.experts.parameters())], moe


@distributed(4, device="cpu")
def test_symmetric_and_hierarchical_drop_the_same_pairs_with_their_biases(ctx: Context) -> None:
    """Most tokens choose expert 0; T is ragged, some ids are -1. There are slots enough between nodes."""
    tokens = (20, 20, 17, 0)[ctx.rank]
    ids = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(t))[:3] for t in range(20)])[:tokens]
    ids[: 9 + 5 * ctx.rank] = torch.tensor([0, 1, -1])
    capacity = Capacity.factor(1.2, overflow="drop")
    lost = lost_pairs(ctx, ids, capacity, 12)
    how = {"dim": 64, "dtype": torch.float32, "group": ctx.group, "max_tokens": 20}
    for name, nodes in (("symmetric", {}), ("hierarchical", {"ranks_per_node": 2})):
        dropping, roomy = (make_dispatcher(name, 12, capacity=c, **nodes, **how) for c in (capacity, None))
        got, moe = trained_biases(ctx, ids, dropping)
        wanted, _ = trained_biases(ctx, torch.where(lost, -1, ids), roomy)
        assert all(map(torch.equal, got, wanted)), name
        assert not got[2][lost].any()
        total = torch.tensor(int(lost.sum()))
        dist.all_reduce(total, group=ctx.group)
        assert moe.dispatcher.counts()["dropped"] == total > 20
        moe.check()
        assert moe.dispatcher.counts()["dropped"] == 0
    sized = [make_dispatcher("all_to_all", 12, capacity=c, **how) for c in (capacity, None)]
    got, wanted = (trained_biases(ctx, ids, each)[0] for each in sized)
    assert all(map(torch.equal, got, wanted)), "buffers of each step's size lose nothing"


@distributed(1, device="cuda")
def test_an_id_past_int32_is_no_experts(ctx: Context) -> None:
    """On CPUs `test_moe.py` has it."""
    dispatcher = make_dispatcher("local", 4, dim=32, group=ctx.group)
    routing = send(dispatcher, ctx, [[2**32], [3]], torch.int64)
    assert int(routing.plan.group_sizes.sum()) == 1
    assert int(routing.stats()["invalid"]) == int(dispatcher.counts()["invalid"]) == 1
    with pytest.raises(ValueError, match=r"1 expert ids outside -1..3"):
        dispatcher.check()


@distributed(2, device="cpu")
def test_nvshmem_by_name_says_that_it_needs_cuda(ctx: Context) -> None:
    moe = MoE(64, 32, 4, 2, dispatcher="nvshmem", group=ctx.group)
    with pytest.raises(ValueError, match="dispatcher nvshmem: got tensors on cpu, wanted CUDA; on CPU use symmetric"):
        moe(torch.ones(2, 64, dtype=torch.bfloat16))


@distributed(2)
def test_layers_of_a_group_share_one_pair_of_buffers_and_compute_what_they_do_alone(ctx: Context) -> None:
    """F F B B of layers that differ in all sizes."""
    sizes = ((64, 32, 12, 3, 24), (32, 64, 4, 2, 40), (128, 32, 4, 1, 8))
    generator = torch.Generator().manual_seed(ctx.rank)
    batches = [torch.randn(T, D, generator=generator).to(ctx.device, torch.bfloat16) for D, _, _, _, T in sizes]
    answers = []
    for kind in ("symmetric", "all_to_all"):
        torch.manual_seed(0)
        options = {"group": ctx.group, "dispatcher": kind, "device": ctx.device}
        layers = [MoE(*shape, max_tokens=T, **options) for *shape, T in sizes]
        leaves = [x.clone().requires_grad_() for x in batches]
        outs = [layer(x) for layer, x in zip(layers, leaves)]
        for out in outs:
            out.sum().backward()
        answers.append((*outs, *(x.grad for x in leaves)))
        if kind == "symmetric":
            opened = {id(t): t for layer in layers for t in layer.dispatcher._opened.values()}
            (transport,) = opened.values()
            assert transport.users == 3
            assert transport.exchanges == 4 * len(layers)
            spaces = [w for layer in layers for w in layer.dispatcher._workspaces.values()]
            assert transport.buffers[0].local.numel() == max(w.layout.nbytes for w in spaces)
    assert all(torch.equal(*pair) for pair in zip(*answers))


@distributed(2)
def test_the_last_layer_that_closes_gives_the_buffers_back(ctx: Context) -> None:
    options = {"group": ctx.group, "max_tokens": 4, "device": ctx.device, "timeout": 50.0}
    one, twin, other = (MoE(64, hidden, 4, 2, **options) for hidden in (32, 64, 96))
    wider = MoE(128, 32, 4, 2, **options)
    copied = copy.deepcopy(other)
    assert one.dispatcher is twin.dispatcher is copied.dispatcher
    x, wide = (torch.ones(4, dim, dtype=torch.bfloat16, device=ctx.device) for dim in (64, 128))
    for layer in (one, wider):
        layer(wide if layer is wider else x)
    (transport,) = wider.dispatcher._opened.values()
    assert transport.timeout == 50.0
    for layer in (one, wider, other, twin):
        layer.close()
    before = copied(x)  # still open
    copied.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.check()
    with pytest.raises(RuntimeError, match="closed"):
        one(x)
    again = MoE(64, 96, 4, 2, **options | {"timeout": 40.0})
    again.load_state_dict(copied.state_dict())
    assert torch.equal(again(x), before)
    with pytest.raises(ValueError, match="timeout: got 30 s, wanted 40 s as other layers of the group have"):
        MoE(64, 96, 4, 2, **options | {"timeout": 30.0})(x)


@distributed(2)
def test_an_empty_first_batch_sets_no_size(ctx: Context) -> None:
    moe = MoE(64, 32, 4, 2, group=ctx.group, device=ctx.device)
    outs = []
    leaves = [torch.ones(n, 64, dtype=torch.bfloat16, device=ctx.device).requires_grad_() for n in (0, 5 * ctx.rank)]
    outs = [moe(x) for x in leaves]
    for out, x in zip(outs, leaves):
        out.sum().backward()
        assert x.grad.shape == x.shape
    assert moe(leaves[1]).shape == leaves[1].shape
    moe.check()


def step(layers: list[MoE], x: torch.Tensor, d_out: torch.Tensor) -> list[torch.Tensor]:
    """What it computes: the output, dx and the gradients of weights here."""
    x, parameters = x.clone().requires_grad_(), [p for layer in layers for p in layer.parameters()]
    out = x
    for layer in layers:
        out = layer(out)
    grads = torch.autograd.grad(out, [x, *parameters], d_out)
    for layer in layers:
        layer.check()
    return [out, *map(local_tensor, grads)]


@distributed(2)
def test_reserve_makes_room_for_the_most_that_any_rank_names_and_never_less(ctx: Context) -> None:
    options = {"group": ctx.group, "device": ctx.device}
    moe, named = MoE(64, 32, 4, 2, **options), MoE(64, 32, 4, 2, max_tokens=9, **options)
    moe.load_state_dict(named.state_dict())
    x = torch.randn(9, 64, device=ctx.device).bfloat16()
    x = x if ctx.rank else x[:6]
    wanted = named(x)
    for _ in range(3):
        moe(x[:6])
    before = list(moe.dispatcher.passes.values())
    moe.reserve(9 if ctx.rank else 2)
    for _ in range(3):
        assert torch.equal(moe(x), wanted)
    after = list(moe.dispatcher.passes.values())
    assert not any(each in before for each in after), "graphs of fewer slots"
    moe.reserve(3)
    assert torch.equal(moe(x), wanted)
    assert list(moe.dispatcher.passes.values()) == after
    fresh = MoE(64, 32, 4, 2, **options)
    fresh.reserve(len(x))
    for tokens in (x[:2], x):
        assert fresh(tokens).shape == tokens.shape
    named.reserve(9)
    with pytest.raises(ValueError, match="reserve: got 10 tokens, wanted at most the max_tokens = 9 of this layer"):
        named.reserve(10 if ctx.rank else 0)
    with pytest.raises(ValueError, match="reserve: got -1 tokens, wanted at least 0"):
        moe.reserve(-1)
    for each in (moe, named, fresh):
        each.check()
    MoE(64, 32, 4, 2, dispatcher="all_to_all", **options).reserve(5)  # whose buffers have each step's size


@distributed(2)
def test_a_larger_batch_is_said_on_all_ranks_and_reserve_lets_them_make_the_step_again(ctx: Context):
    options = {"group": ctx.group, "device": ctx.device}
    moe, named = MoE(64, 32, 4, 2, **options), MoE(64, 32, 4, 2, max_tokens=9, **options)
    moe.load_state_dict(named.state_dict())
    x, d_out = (torch.randn(9 if ctx.rank else 6, 64, device=ctx.device).bfloat16() for _ in range(2))
    wanted = step([named], x, d_out)
    for _ in range(3):
        step([moe], x[:6], d_out[:6])
    with pytest.raises(ValueError if ctx.rank else PeersDisagree, match=r"set max_tokens=9 .* or call reserve\(9\)"):
        _ = moe(x), moe.check()
    for each in (moe, named):  # which share buffers
        each.reserve(len(x))
    for _ in range(3):
        assert all(map(torch.equal, step([moe], x, d_out), wanted))
        assert all(map(torch.equal, step([named], x, d_out), wanted))


@distributed(2, device="cuda")
def test_every_rank_is_told_of_what_overflowed_in_a_replay(ctx: Context) -> None:
    dispatcher = symmetric(ctx, max_tokens=4, capacity=Capacity.factor(1.0))
    ids = torch.tensor([[0], [2], [1], [3]], dtype=torch.int32, device=ctx.device)
    parts, weights = (torch.zeros(4, 16, dtype=torch.uint8, device=ctx.device),), torch.ones(4, 1, device=ctx.device)
    for _ in range(2):
        dispatcher.dispatch(parts, ids, weights, alignment=1).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatcher.dispatch(parts, ids, weights, alignment=1).wait()
    graph.replay()
    dispatcher.check()
    ids.copy_(torch.tensor([[2], [2], [3], [3]]))
    for _ in range(3):
        graph.replay()
    assert int(dispatcher.counts()["dropped"]) == 12
    with pytest.raises(CapacityExceeded, match="4 on each rank: 12 on rank 1, which needed 8; "):
        dispatcher.check()
    dispatcher.check()


@distributed(2, device="cuda")
def test_layers_on_two_streams_compute_what_they_do_on_one(ctx: Context) -> None:
    torch.manual_seed(0)
    options = {"group": ctx.group, "device": ctx.device, "max_tokens": 512}
    layers = [MoE(dim, 256, 8, 2, **options) for dim in (256, 512)]
    batches = [torch.randn(512, layer.dim, dtype=torch.bfloat16, device=ctx.device) for layer in layers]
    d_outs = [torch.randn_like(x) for x in batches]

    def run(streams: list[torch.cuda.Stream]) -> list[torch.Tensor]:
        leaves, outs = [x.clone().requires_grad_() for x in batches], []
        torch.cuda.synchronize()
        for layer, x, stream in zip(layers, leaves, streams):
            with torch.cuda.stream(stream):
                outs.append(layer(x))
                torch.cuda._sleep(1_000_000 * (1 + ctx.rank))
        for out, d_out, stream in zip(outs, d_outs, streams):
            with torch.cuda.stream(stream):
                out.backward(d_out)
        torch.cuda.synchronize()
        return [*outs, *(x.grad for x in leaves)]

    one = torch.cuda.current_stream()
    wanted = run([one, one])
    for _ in range(3):
        got = run([torch.cuda.Stream(), torch.cuda.Stream()])
        assert all(torch.equal(*pair) for pair in zip(got, wanted))
    layers[0].check()


@distributed(2, device="cpu")
def test_steps_of_all_to_all_that_receive_about_as_much_have_one_shape(ctx: Context) -> None:
    dispatcher = make_dispatcher("all_to_all", 4, dim=32, group=ctx.group, max_tokens=101)
    plans = [send(dispatcher, ctx, [[0]] * n + [[3]] * (101 - n)).plan for n in (49, 50)]
    assert plans[0].group_sizes.tolist() != plans[1].group_sizes.tolist()
    assert len({(len(plan.slot_rows), plan.max_rows) for plan in plans}) == 1


def test_threads_may_call_layers_of_one_process_at_once() -> None:
    """Outputs and gradients of two unrelated layers in two threads are those of one layer alone."""
    layers, batches = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        layers.append(MoE(64, 32, 4, 2, recipe="bf16", dtype=torch.float32, max_tokens=128))
        batches.append(torch.randn(128, 64, requires_grad=True))

    def step(i: int) -> list[torch.Tensor]:
        out = layers[i](batches[i])
        return [out, *torch.autograd.grad(out.square().sum(), [batches[i], *layers[i].experts.parameters()])]

    wanted = [step(0), step(1)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as threads:
            steps = [[threads.submit(step, i) for i in range(2)] for _ in range(20)]
            wrong = [i for pair in steps for i in range(2) if not all(map(torch.equal, pair[i].result(), wanted[i]))]
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_group_of_one_rank_has_the_limits_that_were_named(name: str) -> None:
    """And with them what `check`, `reserve` and a larger batch do, but for all_to_all, which has none."""
    layer = MoE(64, 32, 4, 1, recipe="bf16", dispatcher=name, max_tokens=8, capacity=Capacity.factor(0.5))
    assert "LocalDispatcher(ranks=1" in repr(layer)
    limited = name not in ("local", "all_to_all")
    x, ids = torch.ones(8, 64, dtype=torch.bfloat16), torch.zeros(8, 1, dtype=torch.int32)
    layer(x, expert_ids=ids, weights=torch.ones(8, 1))
    with nullcontext() if name == "all_to_all" else pytest.raises(CapacityExceeded, match="4 on rank 0"):
        layer.check()
    layer.check()
    for call in (lambda: layer(torch.ones(9, 64, dtype=torch.bfloat16)), lambda: layer.reserve(9)):
        with pytest.raises(ValueError, match="max_tokens = 8") if limited else nullcontext():
            call()
    layer.close()
    with pytest.raises(RuntimeError, match="closed"):
        layer(x)


@pytest.mark.parametrize("kind", [SymmetricDispatcher, HierarchicalDispatcher])
@distributed(2)
def test_a_dispatcher_for_narrower_rows_is_refused(ctx: Context, kind: type) -> None:
    made = kind(4, dim=32, group=ctx.group, max_tokens=8)
    assert make_dispatcher(made, 4, dim=32) is made
    with pytest.raises(ValueError, match="make the dispatcher with dim=64"):
        MoE(64, 32, 4, 2, dispatcher=made)


def test_a_layer_made_before_the_process_group_says_so() -> None:
    layer = MoE(64, 32, 4, 2, recipe="bf16")
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=2),
        pytest.raises(ValueError, match="made for a process alone, and there is a process group now"),
    ):
        layer(torch.ones(2, 64, dtype=torch.bfloat16))


@distributed(2, device="cpu", name=("symmetric", "hierarchical"))
def test_a_wait_is_as_long_as_the_process_groups_unless_it_is_named(ctx: Context, name: str) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    for timeout, seconds in ((None, 77), (9.0, 9)):
        nodes = {"ranks_per_node": 2} if name == "hierarchical" else {}
        moe = MoE(64, 32, 4, 2, group=group, recipe="bf16", dispatcher=name, max_tokens=4, timeout=timeout, **nodes)
        moe(torch.ones(4, 64, dtype=torch.bfloat16))
        (transport,) = moe.dispatcher._transports()
        assert transport.timeout == seconds
        moe.close()
    apart = make_dispatcher("hierarchical", 4, dim=32, group=group, ranks_per_node=1)
    assert timeout_of(apart.nodes.within, torch.device("cpu")) == 77
