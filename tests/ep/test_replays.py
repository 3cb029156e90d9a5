"""A layer's steps are replayed from their third call on, and nobody can tell by the bits."""

import pytest
import torch
from torch import Tensor

from mxep.ep import MoE, steps
from mxep.ep.dispatchers import base, local
from mxep.gemm import quantize_weights_once

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
T, DIM, HIDDEN_DIM, EXPERTS, TOP_K = 200, 128, 64, 8, 2
OTHERS = (steps.wgrad, base._plan, local._sum_home)
STEPS = (steps.pack_rows, steps.rowwise_weights, steps.mlp_forward, steps.colwise_weights, steps.mlp_backward)


def make_layer(recipe: str, dispatcher: str) -> MoE:
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


def without_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.quant.replay._taken_apart", lambda tensors, static: (None, []))


def replays() -> list[int]:
    return [step.replays for step in STEPS]


def refused() -> list[list[str]]:
    return [step.refused for step in (*STEPS, *OTHERS)]


@pytest.mark.parametrize("dispatcher", ["local", "symmetric", "all_to_all"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32", "mxfp8_e5m2", "fp8", "bf16"])
def test_replays_have_the_bits_of_the_functions(recipe, dispatcher, monkeypatch):
    layer, before, refused_before = make_layer(recipe, dispatcher), replays(), refused()
    batches = [torch.randn(2, T - 30 * (i % 3), DIM, device="cuda", dtype=torch.bfloat16) for i in range(9)]
    got = [run(layer, *batch) for batch in batches]
    more = [now - then for now, then in zip(replays(), before)]
    without_replays(monkeypatch)
    for one, batch in zip(got, batches):
        for name, a, b in zip(("out", "dx", "router", "gate_up", "down"), one, run(layer, *batch)):
            assert torch.equal(a, b), name
    assert replays() == [now + then for now, then in zip(more, before)], "none went by a tape"
    assert dispatcher == "all_to_all" or all(n >= 3 for n in more), more
    assert dispatcher == "all_to_all" or refused() == refused_before


def test_weights_that_change_in_place_are_quantized_anew():
    layer = make_layer("mxfp8", "local")
    x = torch.randn(T, DIM, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            before = layer(x)
        layer.experts.down_proj.mul_(2)
        after = layer(x)
    assert torch.equal(after, 2 * before)


def test_replays_step_aside_for_weights_that_are_held():
    layer = make_layer("mxfp8", "local")
    x, d_out = torch.randn(2, T, DIM, device="cuda", dtype=torch.bfloat16)
    want = [run(layer, x, d_out) for _ in range(3)][-1]
    with quantize_weights_once() as once:
        for _ in range(3):
            for a, b in zip(run(layer, x, d_out), want):
                assert torch.equal(a, b)
        assert once.quantizations == 4


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


def test_a_graph_of_replays_runs_with_other_tokens():
    layer = make_layer("mxfp8", "symmetric")
    x, d_out = torch.randn(2, T, DIM, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        run(layer, x, d_out)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(static)
    for _ in range(3):
        static.copy_(torch.randn_like(x))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, layer(static))
