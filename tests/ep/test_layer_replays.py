"""A layer's passes are played from their third call on, or their steps are, and nobody can tell by the bits."""

import itertools

import pytest
import torch
from torch import Tensor

from mxep.ep import MoE
from mxep.ep.dispatchers import AllToAllDispatcher, TokenDispatcher
from mxep.ep.dispatchers.all_to_all import _plan_rows
from mxep.ep.dtensors import local_tensor
from mxep.ep.formats import pack, quantize_colwise, quantize_rowwise
from mxep.ep.layer import mlp_backward, mlp_forward
from mxep.runtime.replay import no_replays
from ranks import distributed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
T, DIM, HIDDEN_DIM, EXPERTS, TOP_K = 200, 128, 64, 8, 2
STEPS = (pack, quantize_rowwise, mlp_forward, quantize_colwise, mlp_backward)


def make_layer(recipe: str, dispatcher: str | TokenDispatcher) -> MoE:
    torch.manual_seed(0)
    limits = {"max_tokens": T} if dispatcher == "symmetric" else {}
    return MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe=recipe, dispatcher=dispatcher, device="cuda", **limits)


def run(layer: MoE, x: Tensor, d_out: Tensor) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    poison = torch.full((1 << 26,), 0xFF, dtype=torch.uint8, device="cuda")
    del poison
    out = layer(x)
    out.backward(d_out)
    layer.check()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]


def replays(layer: MoE) -> dict[str, int]:
    return {each.__name__: each.replays for each in layer.dispatcher.passes.values()}


@pytest.mark.parametrize("recipe", ["mxfp8_e5m2", "mxfp8_32x32", "fp8", "bf16", "mxfp8_gate_up_fp8"])
def test_replayed_steps_of_all_to_all_have_the_bits_of_the_functions(recipe):
    """Passes of other dispatchers: test_dispatchers_lengths.py."""
    layer, before = make_layer(recipe, AllToAllDispatcher(EXPERTS)), sum(step.replays for step in STEPS)
    batches = [torch.randn(2, T - 30 * (i % 3), DIM, device="cuda", dtype=torch.bfloat16) for i in range(12)]
    got = [run(layer, *batch) for batch in batches]
    assert not replays(layer)
    assert sum(step.replays for step in STEPS) > before
    with no_replays():
        wanted = [run(layer, *batch) for batch in batches]
    for one, other in zip(got, wanted):
        for name, a, b in zip(("out", "dx", "router", "gate_up", "down"), one, other):
            assert torch.equal(a, b), name


@distributed(1, 2, device="cuda")
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16", "mxfp8_gate_up_fp8"])
def test_layers_and_micro_batches_in_flight_share_graphs_on_all_ranks(ctx, recipe):
    torch.manual_seed(0)
    layers = [MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe=recipe, group=ctx.group, max_tokens=T, device=ctx.device)
              for _ in range(3)]  # fmt: skip
    torch.manual_seed(ctx.rank)

    def step(batches: list[Tensor]) -> list[Tensor]:
        """All forwards, then all backwards: what a layer keeps is of one micro-batch."""
        for layer in layers:
            layer.zero_grad()
        outs = []
        for x in batches:
            x = x.detach().requires_grad_()
            for layer in layers:
                x = x + layer(x)
            outs.append(x)
        for out in outs:
            out.float().pow(2).mean().backward()
        for layer in layers:
            layer.check()
        return [*outs, *(local_tensor(p.grad).clone() for layer in layers for p in layer.parameters())]

    steps = [[torch.randn(T - 8 * i, DIM, device=ctx.device, dtype=torch.bfloat16) for i in range(2)] for _ in range(4)]
    got = [step(batches) for batches in steps]
    replayed = replays(layers[0])
    assert layers[0].dispatcher is layers[1].dispatcher
    # Of 24 all but the first two of each size.
    assert replayed == {"forward_pass": 24 - 4, "backward_pass": 24 - 4}
    with no_replays():
        wanted = [step(batches) for batches in steps]
    for one, other in zip(got, wanted):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
    assert replays(layers[0]) == replayed


@distributed(1, 2, device="cuda")
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_another_routing_in_each_step_is_one_replay_more_and_captures_nothing(ctx, recipe):
    """Even ones, all rows to one expert of either rank, and none at all, of which ranks have other ones."""
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe=recipe, group=ctx.group, max_tokens=T, device=ctx.device)
    torch.manual_seed(ctx.rank)
    x, d_out = torch.randn(2, T, DIM, device=ctx.device, dtype=torch.bfloat16)

    def routing(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.rand(T, EXPERTS).argsort(1)[:, :TOP_K]
        if step % 4 == 1:
            ids[:, 0], ids[:, 1] = (step + ctx.rank) % EXPERTS, -1
        elif step % 4 == 2:
            ids[:] = -1
        elif step % 4 == 3:
            ids[ctx.rank :: 3, 1] = -1
        return ids.to(ctx.device), torch.rand(T, TOP_K, device=ctx.device)

    def step(ids: Tensor, weights: Tensor) -> list[Tensor]:
        layer.zero_grad(set_to_none=True)
        leaf, scale = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = layer(leaf, expert_ids=ids, weights=scale)
        out.backward(d_out)
        layer.check()
        grads = (local_tensor(p.grad).clone() for p in layer.experts.parameters())
        return [out.detach(), leaf.grad, scale.grad, *grads]

    given = [routing(i) for i in range(10)]
    got, counts = [], []
    for each in given:
        got.append(step(*each))
        counts.append(replays(layer))
    for before, after in itertools.pairwise(counts[1:]):  # the second is recorded
        assert after == {name: number + 1 for name, number in before.items()}
    assert counts[-1].keys() == {"forward_pass", "backward_pass"}
    with no_replays():
        wanted = [step(*each) for each in given]
    for one, other in zip(got, wanted):
        assert all(map(torch.equal, one, other))
    assert replays(layer) == counts[-1]
    assert not any(each.refused for each in layer.dispatcher.passes.values())


@pytest.mark.parametrize("tokens", [0, 1, 200, 5000, 40000])
def test_what_all_to_all_sends_is_planned_by_one_graph(tokens):
    """torch sorts few pairs in one way and many in another."""
    before = _plan_rows.replays
    for _ in range(6):
        ids = torch.randint(-2, 18, (tokens, 8), dtype=torch.int32, device="cuda")
        weights = torch.rand(tokens, 8, device="cuda")
        with torch.no_grad():
            got = _plan_rows(ids, weights, experts_per_rank=4, num_ranks=4, width=96)
            with no_replays():
                wanted = _plan_rows(ids, weights, experts_per_rank=4, num_ranks=4, width=96)
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)
    assert tokens == 0 or _plan_rows.replays == before + 4


def test_replays_go_on_beside_a_graph_that_a_user_replays():
    layer = make_layer("mxfp8", "symmetric")
    x, d_out = torch.randn(2, T, DIM, device="cuda", dtype=torch.bfloat16)
    want = [run(layer, x, d_out) for _ in range(3)][-1]
    before, graph, static = replays(layer), torch.cuda.CUDAGraph(), x.clone()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(static)
    for _ in range(4):
        graph.replay()
        for a, b in zip(run(layer, x, d_out), want):
            assert torch.equal(a, b)
        assert torch.equal(out, want[0])
    assert all(now > then for now, then in zip(replays(layer).values(), before.values()))


def test_gradients_that_are_added_are_seen_by_autograd():
    layer = make_layer("mxfp8", "local")
    x, d_out = torch.randn(2, T, DIM, device="cuda", dtype=torch.bfloat16)
    want = run(layer, x, d_out)[-1].float()
    main_grad = layer.experts.down_proj.main_grad = torch.zeros(EXPERTS, DIM, HIDDEN_DIM, device="cuda")
    for step in range(1, 5):
        version = main_grad._version
        run(layer, x, d_out)
        assert main_grad._version > version
        torch.testing.assert_close(main_grad, step * want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
