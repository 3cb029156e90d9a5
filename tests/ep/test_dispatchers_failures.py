"""Dispatchers whose ranks do not do the same: who is told what, when, and what goes on afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep.problem import send, symmetric
from mxep.comms import Capacity, PeersDisagree, PeerTimeout, tell_failure
from mxep.ep import MoE, SymmetricDispatcher, make_dispatcher
from mxep.ep.dtensors import local_tensor
from ranks import Context, distributed

EXCHANGING = "symmetric", "all_to_all", "hierarchical"


def spread(ctx: Context, name: str, **options) -> MoE:
    """A layer between ranks, which are nodes of one rank each where the dispatcher has nodes."""
    nodes = {"ranks_per_node": 1} if name == "hierarchical" else {}
    torch.manual_seed(0)
    return MoE(64, 32, 4, 2, group=ctx.group, recipe="bf16", dispatcher=name, max_tokens=16, **nodes, **options)


@distributed(2, device="cpu", name=EXCHANGING)
def test_backwards_in_another_order_raise_on_every_rank(ctx: Context, name: str) -> None:
    """F F B B: the op ids and sizes are alike, but not whose gradients they are. The same order is none of it."""
    for orders in (((0, 1), (0, 1)), ((0, 1), (1, 0))):
        moe = spread(ctx, name)
        generator = torch.Generator().manual_seed(ctx.rank)
        xs = [torch.randn(16, 64, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
        ids = torch.tensor([[0, 3]], dtype=torch.int32).expand(16, 2)
        outs = [moe(x, expert_ids=ids, weights=torch.ones(16, 2)) for x in xs]
        with torch.no_grad():
            moe(xs[0], expert_ids=ids, weights=torch.ones(16, 2))  # an evaluation in between
        said, wrong = r"rank 0 .*dispatch \d+, rank 1 .*dispatch \d+", orders[0] != orders[1]
        with pytest.raises(PeersDisagree, match=said) if wrong else nullcontext():
            for i in orders[ctx.rank]:
                outs[i].sum().backward()


@distributed(2, device="cpu", name=EXCHANGING)
def test_layers_called_in_another_order_raise_on_every_rank(ctx: Context, name: str) -> None:
    """Two of one size, whose op ids, sizes and numbers of dispatches are alike."""
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    for orders in (((0, 1), (0, 1)), ((0, 1), (1, 0))):
        layers = [spread(ctx, name) for _ in range(2)]
        said, wrong = r"rank 0 .*of layer \d+, rank 1 .*of layer \d+", orders[0] != orders[1]
        with pytest.raises(PeersDisagree, match=said) if wrong else nullcontext():
            for i in orders[ctx.rank]:
                layers[i](x)


@distributed(2, device="cuda")
def test_layers_that_share_a_record_keep_their_numbers(ctx: Context) -> None:
    """It is played for one and for the other from the second round on, and has neither's number in it."""
    how = {"group": ctx.group, "recipe": "mxfp8", "dispatcher": "symmetric", "max_tokens": 16, "device": ctx.device}
    layers = [MoE(64, 32, 4, 2, **how) for _ in range(2)]
    x = torch.ones(16, 64, dtype=torch.bfloat16, device=ctx.device)
    for _ in range(4):
        for layer in layers:
            layer(x)
    layers[0].check()

    def crossed() -> None:
        for i in ((0, 1), (1, 0))[ctx.rank]:
            layers[i](x)
        layers[0].check()

    with pytest.raises(PeersDisagree, match=r"rank 0 .*of layer \d+, rank 1 .*of layer \d+"):
        crossed()


@distributed(2, device="cpu", name=EXCHANGING)
def test_a_layer_without_a_number_is_taken_for_any(ctx: Context, name: str) -> None:
    """As one rank's compiled graphs have none, while another's compiler has given up."""
    moe, x = spread(ctx, name), torch.ones(16, 64, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 3]], dtype=torch.int32).expand(16, 2), torch.ones(16, 2)
    out = moe(x, expert_ids=ids, weights=weights)
    for numbered in range(3):
        if ctx.rank == numbered:
            again = moe(x, expert_ids=ids, weights=weights)
        else:
            again, _ = moe.experts(x, ids, weights, dispatcher=moe.dispatcher, recipe=moe.recipe)
        assert torch.equal(again, out)


@distributed(2, device="cpu", name=EXCHANGING)
def test_a_forward_repeated_after_all_was_sent_is_not_taken_for_the_next(ctx: Context, name: str) -> None:
    moe, x = spread(ctx, name), torch.ones(16, 64, dtype=torch.bfloat16)
    moe(x)
    if ctx.rank == 1:
        after_combine = mock.patch("mxep.ep.layer.saved_columns", side_effect=MemoryError)
        with after_combine, pytest.raises(MemoryError):
            moe(x)
    else:
        moe(x)
    with pytest.raises(PeersDisagree, match=r"rank 1 .*layer \d+, after 1 of its passes failed"):
        moe(x)


@distributed(2, device="cpu", name=("symmetric", "hierarchical"))
def test_an_abandoned_forward_is_not_taken_for_the_next(ctx: Context, name: str) -> None:
    """Rank 1 fails between dispatch and combine, and goes on with the next batch."""
    moe, x = spread(ctx, name), torch.ones(16, 64, dtype=torch.bfloat16)
    moe(x)
    if ctx.rank == 1:
        failing = mock.patch("mxep.ep.layer.mlp_forward", side_effect=MemoryError("of this batch alone"))
        with failing, pytest.raises(MemoryError):
            moe(x)
    with pytest.raises(PeersDisagree, match=r"rank 0 at combine"):
        moe(x)
    with pytest.raises((PeersDisagree, RuntimeError)):
        moe(x)


@distributed(2, device="cpu", case=(("symmetric", False), ("hierarchical", True), ("all_to_all", True)))
def test_peers_of_a_rank_that_raised_say_why_at_their_time_out(ctx: Context, case: tuple[str, bool]) -> None:
    name, backward = case
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    options = {"ranks_per_node": 1} if name == "hierarchical" else {}
    moe = MoE(64, 32, 4, 2, group=group, recipe="bf16", dispatcher=name, max_tokens=16, **options)
    x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
    moe(x)  # which makes buffers, together
    step = moe(x).sum().backward if backward else lambda: moe(x)
    if ctx.rank == 1:
        with mock.patch("mxep.ep.layer.pack", side_effect=MemoryError("no room for h")), pytest.raises(MemoryError):
            step()
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 raised MemoryError: no room for h \(\d+ s ago\)"):
            step()
    dist.barrier()


@distributed(2, device="cpu", name=("symmetric", "hierarchical", "all_to_all"))
def test_a_failure_that_ranks_got_over_is_not_named_later(ctx: Context, name: str) -> None:
    moe, x = spread(ctx, name), torch.ones(16, 64, dtype=torch.bfloat16)
    moe(x)
    for note_of_another_layer in (True, False):
        with mock.patch("mxep.ep.layer.pack", side_effect=MemoryError("of this batch")), pytest.raises(MemoryError):
            moe(x)
        dist.barrier(ctx.group)
        moe.check()  # nothing was sent since: peers may still wait
        assert "rank 1 raised MemoryError" in moe.dispatcher.told()
        dist.barrier(ctx.group)
        if note_of_another_layer:
            tell_failure(ctx.group, ValueError("of another layer"))
        dist.barrier(ctx.group)
        moe(x)
        moe.check()
        dist.barrier(ctx.group)
        assert ("rank 1 raised ValueError: of another layer" in moe.dispatcher.told()) is note_of_another_layer
        dist.barrier(ctx.group)
    assert moe.dispatcher.told() == ""


RAISING = {
    "composed": {  # in the order in which a pass goes through them
        "forward": ("ep.functional.pack.function", "gemm.product.run_forward", "ep.functional.swiglu_forward"),
        "backward": ("ep.functional.pack.function", "gemm.product.backward", "ep.functional.swiglu_backward"),
    },
    "compiled": {"forward": ("ep.autograd.pass_of",), "backward": ("ep.autograd.pass_of",)},
}


@distributed(2, device="cpu", how=tuple(RAISING), when=("forward", "backward"))
def test_composed_and_compiled_layers_tell_peers_what_they_raised(ctx: Context, how: str, when: str) -> None:
    """All ranks raise at once, and find the other's note without waiting for it."""
    for function in RAISING[how][when]:
        recipe = "mxfp8_wgrad_bf16" if how == "composed" else "mxfp8"
        moe = MoE(64, 32, 4, 2, group=dist.new_group([0, 1]), recipe=recipe, dispatcher="symmetric", max_tokens=16)
        layer = torch.compile(moe, fullgraph=True, backend="aot_eager") if how == "compiled" else moe
        x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        out = layer(x).sum() if when == "backward" else None
        with mock.patch(f"mxep.{function}", side_effect=MemoryError("no room for h")), pytest.raises(MemoryError):
            layer(x) if out is None else out.backward()
        dist.barrier()
        assert f"rank {1 - ctx.rank} raised MemoryError: no room for h (" in moe.dispatcher.told(), function


@distributed(2, device="cpu")
def test_an_exchange_that_failed_before_peers_heard_of_it_may_be_made_again(ctx: Context) -> None:
    moe = spread(ctx, "symmetric")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(ctx.rank)).bfloat16()
    wanted = moe(x)
    for times in range(1, 3):  # an odd number would leave its buffers out of step
        for _ in range(times * (ctx.rank == 0)):
            failing = mock.patch("mxep.comms.shared_memory._pack", side_effect=MemoryError)
            with failing, pytest.raises(MemoryError):
                moe(x)
        assert torch.equal(moe(x), wanted)


@distributed(2, device="cpu", name=EXCHANGING)
def test_a_forward_that_a_checkpoint_repeats_is_a_dispatch_of_its_own(ctx: Context, name: str) -> None:
    moe = spread(ctx, name)
    grads = []
    for call in (moe, lambda x: checkpoint(moe, x, use_reentrant=False)):
        xs = [torch.full((16, 64), 1.0 + i, dtype=torch.bfloat16, requires_grad=True) for i in range(2)]
        outs = [call(x) for x in xs]
        grads.append(torch.autograd.grad(sum(out.sum() for out in outs), [*xs, *moe.parameters()]))
    assert all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in zip(*grads, strict=True))


@distributed(2, device="cpu")
def test_reserve_gives_up_what_one_rank_knows_to_have_failed_on_all_and_they_go_on(ctx: Context) -> None:
    both = symmetric(ctx, max_tokens=8), symmetric(ctx, max_tokens=9)  # which share buffers
    for each in both:
        send(each, ctx, [[0], [3]])
    if ctx.rank:
        with pytest.raises(ValueError, match="expert ids"):
            send(both[0], ctx, [[9]])
    dist.barrier(ctx.group)
    both[0].reserve(0, ctx.device)  # rank 0 has not met the refusal
    with pytest.raises(RuntimeError, match="refused an exchange"):
        send(both[1], ctx, [[0], [3]])
    both[1].reserve(0, ctx.device)
    for each in both:
        assert send(each, ctx, [[0], [3]]).plan.group_sizes.tolist() == ([2, 0] if ctx.rank == 0 else [0, 2])
        each.check()


@distributed(2, device="cpu")
def test_reserve_after_a_failed_step_forgets_what_that_step_lost(ctx: Context) -> None:
    one = symmetric(ctx, max_tokens=8, capacity=Capacity.factor(0.25))
    send(one, ctx, [[0]] * 4)  # 8 rows, of which 2 fit, in the step that fails
    assert one.counts()["dropped"] == 6
    if ctx.rank:
        with pytest.raises(ValueError, match=r"expert ids: got \[9\]"):
            send(one, ctx, [[9]])
    dist.barrier(ctx.group)
    one.reserve(0, ctx.device)
    assert not one.passes
    assert one.counts()["dropped"] == 0
    send(one, ctx, [[0], [3]] if ctx.rank else [[1], [2]])
    one.check()


@distributed(2, device="cpu")
def test_layers_made_again_after_a_refused_first_send_work_while_the_old_ones_live(ctx: Context) -> None:
    old = symmetric(ctx, max_tokens=8)
    with pytest.raises(ValueError if ctx.rank else PeersDisagree, match="expert ids"):
        send(old, ctx, [[9 if ctx.rank else 0]])
    again = symmetric(ctx, max_tokens=8)
    assert again is not old
    assert send(again, ctx, [[0], [3]]).plan.group_sizes.tolist() == ([2, 0] if ctx.rank == 0 else [0, 2])
    again.close()
    old.close()


@distributed(3)
def test_every_rank_is_told_of_ids_that_one_brings_and_are_none(ctx: Context) -> None:
    for ids in ([[0], [9]], [[0], [2**32]]):
        mine = ids if ctx.rank == 1 else [[0], [1]]
        for kind in ("all_to_all", "symmetric"):
            options = {"dim": 32, "group": ctx.group, "max_tokens": 2}
            dispatcher = make_dispatcher(kind, 2 * ctx.world_size, **options)
            if ctx.device.type == "cuda":
                send(dispatcher, ctx, mine, torch.int64)
                with pytest.raises(ValueError, match=f"1 expert ids outside -1..{2 * ctx.world_size - 1}"):
                    dispatcher.check()
                continue
            peers_say = PeersDisagree if kind == "symmetric" and ctx.rank != 1 else ValueError
            with pytest.raises(peers_say, match=r"1 on rank 1|rank 1 brought invalid expert ids|expert ids: got"):
                send(dispatcher, ctx, mine, torch.int64)
            dist.barrier(ctx.group)


@distributed(2, device="cpu", name=["symmetric", "all_to_all", "hierarchical"])
def test_with_peers_a_second_thread_raises_until_the_first_has_ended(ctx: Context, name: str) -> None:
    group = dist.new_group([0, 1])
    moe = MoE(64, 32, 4, 2, group=group, recipe="bf16", dispatcher=name, max_tokens=8)

    def step() -> torch.Tensor:
        out = moe(torch.ones(8, 64, dtype=torch.bfloat16))
        out.sum().backward()  # in this thread on CPUs, in autograd's on GPUs
        return out.detach()

    def in_thread(called: str) -> torch.Tensor:
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(step())
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=run, name=called)
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    first = in_thread("first")
    assert torch.equal(step(), first), "a thread that has ended makes room"
    with pytest.raises(RuntimeError, match="got thread 'other', expected 'MainThread'"):
        in_thread("other")
    other = MoE(64, 32, 4, 2, group=group, recipe="bf16", dispatcher=name, max_tokens=4)
    with pytest.raises(RuntimeError, match="expected 'MainThread'"), ThreadPoolExecutor(1) as threads:
        threads.submit(other.reserve, 4).result()
    assert torch.equal(step(), first)


@distributed(1, device="cpu")
def test_a_second_thread_raises_with_one_rank_too_where_layers_share_buffers(ctx: Context) -> None:
    first, other = (SymmetricDispatcher(4, dim=32, group=ctx.group, max_tokens=2) for _ in range(2))
    send(first, ctx, [[0]])
    with pytest.raises(RuntimeError, match="expected 'MainThread'"), ThreadPoolExecutor(1) as threads:
        threads.submit(send, other, ctx, [[0]]).result()
    send(other, ctx, [[0]])
    assert first._opened == other._opened


@distributed(2)
def test_check_asks_the_transport_too(ctx: Context) -> None:
    dispatcher = symmetric(ctx, max_tokens=2)
    send(dispatcher, ctx, [[0]])
    dispatcher.check()
    (transport,) = dispatcher._opened.values()

    def fail() -> None:
        raise PeersDisagree("met peers in other exchanges")

    transport.check = fail
    with pytest.raises(PeersDisagree):
        dispatcher.check()


@distributed(2, device="cpu", when=("forward", "backward"))
def test_layers_made_again_after_an_error_between_layers_of_one_rank_work(ctx: Context, when: str) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))

    def make() -> MoE:
        return MoE(64, 32, 4, 2, group=group, recipe="bf16", dispatcher="symmetric", max_tokens=16)

    moe, x = make(), torch.ones(16, 64, dtype=torch.bfloat16)
    out = moe(x).sum()
    if ctx.rank == 0:  # rank 1 raised outside of mxep, so that its buffers are intact
        with pytest.raises(PeerTimeout):
            moe(x) if when == "forward" else out.backward()
    dist.barrier()
    again = make()
    again(x).sum().backward()
    again.check()
    if ctx.rank == 1:
        with pytest.raises(RuntimeError, match=r"given up, because it failed on a peer.*make the layers again"):
            moe(x)
