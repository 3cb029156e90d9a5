"""What decides for a pass's record, and how long records live: on the CPU, which stands for a GPU."""

import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mxep.comms import Capacity
from mxep.ep import run_experts, shared_expert
from mxep.ep.dispatchers import LocalDispatcher
from mxep.ep.shared_expert import SharedExpert
from mxep.gemm import Recipe, quantize_weights_once
from mxep.runtime.replay import no_replays
from records_on_cpu import assert_alike, assert_replays_are_alike, replays_on_the_cpu

T, DIM, HIDDEN_DIM, EXPERTS, TOP_K = 6, 32, 32, 4, 2


@pytest.fixture(autouse=True)
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with replays_on_the_cpu(monkeypatch):
        yield


def run(
    dispatcher, *, recipe="mxfp8", needs=(True, True), backward=True, scale=1.0, main_grad=False, halves=False, seed=0
):
    """out, and the gradients that there are."""
    torch.manual_seed(0)
    ids = torch.randint(EXPERTS, (T, TOP_K))
    torch.manual_seed(seed)
    x, weights = torch.randn(T, DIM).bfloat16().requires_grad_(backward), torch.rand(T, TOP_K)
    proj = torch.randn(EXPERTS, 2 * HIDDEN_DIM, DIM).bfloat16().requires_grad_(needs[0] and backward)
    down = torch.randn(EXPERTS, DIM, HIDDEN_DIM).bfloat16().requires_grad_(needs[1] and backward)
    if main_grad:
        down.main_grad = torch.zeros(down.shape)
    both = tuple(proj.detach().chunk(2, 1)) if halves else proj
    how = {"recipe": Recipe.named(recipe), "backend": "reference", "wgrad_scale": scale}
    out, _ = run_experts(x, ids, weights, both, down, dispatcher=dispatcher, **how)
    if backward:
        out.backward(torch.ones_like(out))
    return [out.detach(), *(None if tensor.grad is None else tensor.grad for tensor in (x, proj, down))]


def test_calls_that_differ_in_anything_have_graphs_of_their_own() -> None:
    dispatcher = LocalDispatcher(EXPERTS, capacity=Capacity.worst_case())
    kinds = [{}, {"needs": (False, True)}, {"needs": (True, False)}, {"backward": False}, {"scale": 0.5}]
    kinds += [{"recipe": recipe} for recipe in ("mxfp8_32x32", "mxfp8_mxfp4_weights", "bf16", "mxfp8_gate_up_fp8")]
    kinds += [{"halves": True}]
    with no_replays():
        wanted = [[run(dispatcher, **kind, seed=seed) for kind in kinds] for seed in range(3)]
    assert not any(each.replays for each in dispatcher.passes.values())
    for seed in range(3):
        for kind, want in zip(kinds, wanted[seed]):
            for got, other in zip(run(dispatcher, **kind, seed=seed), want, strict=True):
                assert (got is None) == (other is None), kind
                assert got is None or torch.equal(got, other), kind
    forward, backward = (each.replays for each in dispatcher.passes.values())
    assert forward == 3 * len(kinds) - 2 * 9, "all but the first two of each; a scale of gradients is not forward's"
    assert backward == len(kinds) - 1


def test_a_dispatcher_is_asked_before_and_told_after_each_graph() -> None:
    class Asked(LocalDispatcher):
        def __init__(self) -> None:
            super().__init__(EXPERTS)
            self.exchanges, self.can = 0, True

        def graph_state(self):
            return () if self.can else None

        def launched(self, exchanges):
            self.exchanges += exchanges

    dispatcher = Asked()
    for _ in range(4):
        run(dispatcher)
    assert dispatcher.exchanges == 2 * 2 * 2
    dispatcher.can = False
    run(dispatcher)
    assert dispatcher.exchanges == 8


@pytest.mark.parametrize(
    ("recipe", "halves"), [("mxfp8", False), ("mxfp8_32x32", True), ("mxfp8_mxfp4_weights", False)]
)
def test_weights_that_are_held_are_arguments_of_the_graphs(recipe: str, halves: bool) -> None:
    dispatcher, how = LocalDispatcher(EXPERTS), {"recipe": recipe, "halves": halves}
    with no_replays():
        wanted = [run(dispatcher, **how, seed=seed) for seed in range(5)]
    with quantize_weights_once() as once:
        got = [run(dispatcher, **how, seed=seed) for seed in range(5)]
    assert once.quantizations
    assert_alike(got, wanted)
    assert [each.replays for each in dispatcher.passes.values()] == [3, 3]


@pytest.mark.parametrize(
    ("recipe", "held"), [("mxfp8", True), ("mxfp8_32x32", False), ("bf16", True), ("mxfp8_gate_up_fp8", False)]
)
def test_a_shared_expert_is_replayed_with_held_weights_too(recipe: str, held: bool) -> None:
    torch.manual_seed(0)
    shared = SharedExpert(DIM, HIDDEN_DIM)
    before = shared_expert._forward.replays, shared_expert._backward.replays

    def step(x: Tensor) -> list[Tensor]:
        shared.zero_grad(set_to_none=True)
        x = x.clone().requires_grad_()
        out = shared(x, recipe=Recipe.named(recipe))
        out.backward(torch.ones_like(out))
        return [out.detach(), x.grad, *(p.grad for p in shared.parameters())]

    assert_replays_are_alike(step, [torch.randn(T, DIM).bfloat16() for _ in range(5)], held=held)
    assert shared_expert._forward.replays >= before[0] + 3  # or 4, of a kind that was seen before
    assert shared_expert._backward.replays >= before[1] + 3


def test_a_dispatcher_goes_with_its_users_at_once() -> None:
    gc.disable()
    try:
        dispatcher = LocalDispatcher(EXPERTS)
        for _ in range(4):
            run(dispatcher)
        assert [each.replays for each in dispatcher.passes.values()] == [2, 2]
        gone = weakref.ref(dispatcher)
        del dispatcher
        assert gone() is None, "not only when garbage is collected"
    finally:
        gc.enable()


def test_a_dispatcher_that_is_closed_has_no_graphs_and_a_pickled_one_neither() -> None:
    dispatcher = LocalDispatcher(EXPERTS)
    for _ in range(2):
        run(dispatcher)
    copied: LocalDispatcher = pickle.loads(pickle.dumps(dispatcher))
    assert not copied.passes
    assert len(dispatcher.passes) == 2
    want: list[Tensor] = run(dispatcher)
    for got, other in zip(run(copied), want, strict=True):
        assert torch.equal(got, other)
    dispatcher.uses += 1
    dispatcher.close()
    assert dispatcher.passes
    dispatcher.close()
    assert not dispatcher.passes


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])  # others: test_weights_that_are_held_are_arguments_of_the_graphs
def test_passes_are_recorded_in_their_second_call(recipe: str) -> None:
    dispatcher = LocalDispatcher(EXPERTS, capacity=Capacity.worst_case())
    for _ in range(4):
        run(dispatcher, recipe=recipe)
        with quantize_weights_once():
            run(dispatcher, recipe=recipe)
    kinds = 1 if recipe == "bf16" else 2  # weights that are held are arguments
    assert [(each.replays, each.refused) for each in dispatcher.passes.values()] == [(8 - 2 * kinds, [])] * 2
