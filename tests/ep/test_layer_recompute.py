"""A layer that keeps less than all rows of gate_up, and computes the others again: the same bits in less memory."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ep.problem import NAMES, inputs, make_ranks
from mxep.comms import Capacity
from mxep.ep import LoRAExperts, MoE, freeze_experts, make_dispatcher, run_experts
from mxep.ep.dispatchers import AllToAllDispatcher, LocalDispatcher, SymmetricDispatcher, TokenDispatcher
from mxep.gemm import Recipe, quantize_weights_once
from mxep.quant import SwiGLU
from ranks import Context, distributed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, HIDDEN_DIM, EXPERTS, TOP_K, T = 64, 96, 6, 2, 200
RECIPES = ["bf16", "fp8", "mxfp8", "mxfp8_32x32", "mxfp8_e5m2", "mxfp8_wgrad_bf16", "mxfp8_mxfp4_weights"]
RECIPES += ["mxfp8_gate_up_fp8", "fp8_gate_up_fp8"]
FEW = Capacity.factor(0.3, "recompute")
GPT_OSS = SwiGLU(1.702, 0.8, 1.0, interleaved=True)


def dispatcher(kind: str, capacity: Capacity) -> TokenDispatcher:
    if kind == "symmetric":
        return SymmetricDispatcher(EXPERTS, dim=DIM, max_tokens=T, capacity=capacity)
    return LocalDispatcher(EXPERTS, capacity=capacity)


def layer(kind: str, capacity: Capacity, **how: Any) -> MoE:
    torch.manual_seed(0)
    made = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher=dispatcher(kind, capacity), device=DEVICE, **how)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return made


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """On a GPU as many as a record needs to be played, of lengths that change."""
    for i in range(6 if DEVICE.type == "cuda" else 1):
        yield torch.randn(2, T - 30 * (i % 3), DIM, device=DEVICE, dtype=torch.bfloat16).unbind()  # type: ignore[misc]


def run(moe: MoE, x: Tensor, d_out: Tensor) -> list[Tensor]:
    """out, and all gradients."""
    moe.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    poison(x)
    out = moe(x)
    poison(x)
    out.backward(d_out)
    moe.check()
    return [out.detach(), x.grad, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)]  # type: ignore[list-item]


def poison(x: Tensor) -> None:
    """Make fresh memory NaN."""
    if x.is_cuda:
        torch.full((1 << 26,), 0xFF, dtype=torch.uint8, device=x.device)


def assert_same_bits(make: Callable[[Capacity], MoE], run: Callable[..., list[Tensor]] = run) -> None:
    every, few = make(Capacity.worst_case()), make(FEW)
    for x, d_out in batches():
        for a, b in zip(run(every, x, d_out), run(few, x, d_out), strict=True):
            assert torch.equal(a, b)
        routing = few.last_routing
        assert few.dispatcher.kept_rows(routing) < int(routing.plan.offs[-1]), "a test of nothing"


KINDS = "local", "symmetric"


@pytest.mark.parametrize(
    ("recipe", "kind"), [*zip(RECIPES, itertools.cycle(KINDS)), ("bf16", KINDS[1]), ("mxfp8", KINDS[1])]
)
def test_recomputed_rows_have_the_bits_of_kept_ones(recipe: str, kind: str) -> None:
    assert_same_bits(lambda capacity: layer(kind, capacity, recipe=recipe))


@pytest.mark.parametrize(("recipe", "kind"), [("bf16", "local"), ("mxfp8", "symmetric")])
def test_so_they_have_with_biases_and_another_activation(recipe: str, kind: str) -> None:
    assert_same_bits(lambda capacity: layer(kind, capacity, recipe=recipe, bias=True, activation=GPT_OSS))


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4", "fp8_block", "fp8_row"])
def test_so_they_have_over_frozen_experts_with_lora(fmt: str) -> None:
    def make(capacity: Capacity) -> MoE:
        made = layer("symmetric", capacity, recipe="mxfp8")
        if fmt == "bf16":
            made.experts.requires_grad_(False)
        else:
            freeze_experts(made, fmt)  # type: ignore[arg-type]
        made.experts = LoRAExperts(made.experts, 8).to(DEVICE)
        for name, p in sorted(made.experts.named_parameters()):
            if p.requires_grad:
                torch.manual_seed(len(name))
                torch.nn.init.normal_(p, std=0.1)
        return made

    assert_same_bits(make)


def test_so_they_have_if_no_weight_is_trained() -> None:
    def make(capacity: Capacity) -> MoE:
        made = layer("symmetric", capacity, recipe="mxfp8")
        made.experts.requires_grad_(False)
        return made

    assert_same_bits(make)


def test_so_they_have_with_weights_that_a_step_quantizes_once() -> None:
    def twice(moe: MoE, x: Tensor, d_out: Tensor) -> list[Tensor]:
        with quantize_weights_once():
            return [*run(moe, x, d_out), *run(moe, x, d_out)]

    assert_same_bits(lambda capacity: layer("symmetric", capacity, recipe="mxfp8"), twice)


def test_so_they_have_when_the_weights_come_after_the_input() -> None:
    """As zero-bubble pipelines ask: two backward passes over one graph."""

    def apart(moe: MoE, x: Tensor, d_out: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = moe(x)
        dx = torch.autograd.grad(out, x, d_out, retain_graph=True)
        return [*dx, *torch.autograd.grad(out, [*moe.experts.parameters()], d_out)]

    for kind in ("local", "symmetric"):
        assert_same_bits(lambda capacity, kind=kind: layer(kind, capacity, recipe="mxfp8"), apart)


@pytest.mark.parametrize(
    ("recipe", "options"), [("bf16", {}), ("mxfp8", {"bias": True}), ("mxfp8_gate_up_fp8", {})], ids=str
)
def test_so_they_have_in_a_compiled_graph(recipe: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    made = [layer("symmetric", capacity, recipe=recipe, **options) for capacity in (Capacity.worst_case(), FEW)]
    x, d_out = next(batches())
    compiled = torch.compile(made[1], fullgraph=True, backend="aot_eager")
    found = []
    for moe, call in zip(made, (made[0], compiled)):
        leaf = x.detach().requires_grad_()
        out = call(leaf)
        out.backward(d_out)
        found.append([out, leaf.grad, *(p.grad for p in moe.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_gate_up_fp8"])
def test_a_layer_keeps_no_row_of_gate_up_over_the_factor(recipe: str) -> None:
    found = {}
    for capacity in (Capacity.worst_case(), FEW):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            moe = layer("symmetric", capacity, recipe=recipe)
            moe(next(batches())[0])
        found[capacity.kind] = sum(t.nbytes for t in saved)
    plan = moe.last_routing.plan
    element, scale = (1, 1) if recipe == "mxfp8_gate_up_fp8" else (2, 0)
    missing = plan.max_rows - moe.dispatcher.kept_rows(moe.last_routing)
    less = missing * (2 * HIDDEN_DIM * element + scale)
    if recipe == "bf16":  # its rows are made again from slots
        less += (plan.max_rows - T) * DIM * 2
    assert found["worst_case"] - found["factor"] == less


@distributed(2, recipe=["bf16", "mxfp8"], name=["symmetric", "all_to_all", "hierarchical"])
def test_all_tokens_may_go_to_one_rank(ctx: Context, recipe: str, name: str) -> None:
    ranks = make_ranks([70, 45], seed=4)
    ranks.whole.expert_ids[:] %= len(ranks.whole.down_proj) // 2
    results = []
    for capacity in (Capacity.worst_case(), Capacity.factor(0.5, "recompute")):
        *tensors, d_out = inputs(ranks, ctx)
        x, ids, weights, proj, down = tensors
        sizes: dict[str, Any] = {"dim": x.shape[1], "max_tokens": None if name == "all_to_all" else 70}
        sizes |= {"ranks_per_node": 1} if name == "hierarchical" else {}
        made = make_dispatcher(name, 2 * len(down), group=ctx.group, capacity=capacity, **sizes)
        out, routing = run_experts(x, ids, weights, proj, down, dispatcher=made, recipe=Recipe.named(recipe))
        results.append((out, *torch.autograd.grad(out, (x, weights, proj, down), d_out)))
        made.check()
        kept, rows = made.kept_rows(routing), int(routing.plan.offs[-1])
        assert (kept < rows) == (capacity.overflow == "recompute" and name != "all_to_all" and ctx.rank == 0)
    for what, a, b in zip(NAMES, *results):
        assert torch.equal(a, b), what


def test_a_dispatcher_with_buffers_of_each_steps_size_keeps_all() -> None:
    moe = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher=AllToAllDispatcher(EXPERTS, capacity=FEW))
    moe(torch.randn(T, DIM, dtype=torch.bfloat16))
    assert moe.dispatcher.kept_rows(moe.last_routing) == moe.last_routing.plan.max_rows


def test_evaluation_keeps_nothing() -> None:
    every, few = (layer("symmetric", capacity, recipe="mxfp8") for capacity in (Capacity.worst_case(), FEW))
    x, _ = next(batches())
    with torch.no_grad():
        assert torch.equal(every(x), few(x))


@pytest.mark.parametrize(("sources", "load"), [*itertools.product([1, 4], [0.5, 1.25, 100.0])])
def test_the_factor_bounds_what_is_kept_not_what_has_room(sources: int, load: float) -> None:
    sizes: dict[str, Any] = {"num_local_experts": 4, "alignment": 32}
    capacity = Capacity.factor(load, "recompute")
    assert capacity.rows(sources, 64, 2, **sizes) == Capacity.worst_case().rows(sources, 64, 2, **sizes)
    assert str(capacity) == f"Capacity.factor({load:g}, overflow='recompute')"
