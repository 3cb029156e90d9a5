"""The layer in one autograd function: bit for bit the composed one, dx on its way before the last weight gradient."""

from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ep.problem import NAMES, composed, in_one, inputs, make_ranks
from mxep.comms import Capacity
from mxep.ep import SharedExpert, combine, dispatch, expert_mlp, make_dispatcher, run_experts, swiglu
from mxep.ep.dispatchers import LocalDispatcher, SymmetricDispatcher
from mxep.gemm import Recipe, grouped_mm
from mxep.gemm.backends.reference import Reference
from ranks import distributed


@distributed(2, recipe=["bf16", "fp8", "mxfp8_e5m2"])
def test_it_equals_the_composed_functions_bit_for_bit(ctx, recipe: str) -> None:
    ranks = make_ranks([70, 45], seed=4)
    for name, nodes in (("symmetric", {}), ("all_to_all", {}), ("hierarchical", {"ranks_per_node": 1})):
        results = []
        for layer in (composed, in_one):
            *given, d_out = inputs(ranks, ctx)
            x, _, weights, proj, down = given
            dispatcher = make_dispatcher(name, len(ranks.whole.down_proj), dim=x.shape[1], group=ctx.group, **nodes)
            out = layer(*given, dispatcher=dispatcher, recipe=Recipe.named(recipe))
            out.backward(d_out)
            results.append((out, x.grad, weights.grad, proj.grad, down.grad))
        for what, a, b in zip(NAMES, *results):
            assert torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8)), f"{name}: {what}"


@distributed(2, recipe=["fp8", "mxfp8"])
def test_rows_are_kept_instead_of_slots_where_they_are_fewer_and_change_no_bit(ctx, recipe: str) -> None:
    ranks = make_ranks([300, 260], experts=4, top_k=1, seed=11)
    results = []
    for capacity, fewer in ((Capacity.worst_case(), False), (Capacity.factor(1.5), True)):
        for layer in (composed, in_one):
            *given, d_out = inputs(ranks, ctx)
            x, ids, weights, proj, down = given
            dispatcher = make_dispatcher("symmetric", 4, dim=x.shape[1], group=ctx.group, capacity=capacity)
            rows, _, _ = dispatch(x, ids, weights, dispatcher=dispatcher, recipe=Recipe.named(recipe))
            assert (rows.row_index is None) is fewer
            out = layer(*given, dispatcher=dispatcher, recipe=Recipe.named(recipe))
            out.backward(d_out)
            dispatcher.check()
            results.append((out.detach(), x.grad, weights.grad, proj.grad, down.grad))
    for result in results[1:]:
        for what, a, b in zip(NAMES, results[0], result):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), what


@distributed(2, recipe=["bf16", "mxfp8"])
def test_a_frozen_weight_keeps_nothing_for_its_gradient_and_changes_no_other(ctx, recipe: str) -> None:
    ranks = make_ranks([70, 45], seed=9)
    *given, d_out = inputs(ranks, ctx)
    x, _, weights, proj, down = given
    dispatcher = make_dispatcher("symmetric", len(ranks.whole.down_proj), dim=x.shape[1], group=ctx.group)
    grads, kept = {}, {}
    for trained in ((True, True), (True, False), (False, True), (False, False)):
        saved: list[torch.Tensor] = []
        for weight, trains in zip((proj, down), trained):
            weight.requires_grad_(trains)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = in_one(*given, dispatcher=dispatcher, recipe=Recipe.named(recipe))
        kept[trained] = len(saved)
        wanted = [t for t in (x, weights, proj, down) if t.requires_grad]
        grads[trained] = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, d_out)))
    all_kept, all_grads = kept[True, True], grads[True, True]
    parts = 1 if recipe == "bf16" else 2  # of rows: qdata and scales
    assert kept == {trained: all_kept - parts * (not trained[0]) for trained in kept}
    for some in grads.values():
        assert all(torch.equal(grad, all_grads[which]) for which, grad in some.items())


@distributed(1, device="cpu")
def test_weights_that_do_not_fit_and_errors_on_the_way_leave_no_move_behind(ctx) -> None:
    ranks = make_ranks([20], seed=10)
    x, ids, weights, proj, down, _ = inputs(ranks, ctx)
    e = len(down)
    dispatcher = SymmetricDispatcher(e, dim=x.shape[1], group=ctx.group)
    how = {"dispatcher": dispatcher, "recipe": Recipe.mxfp8()}
    for wrong, message in (
        ({"gate_up_proj": proj[1:]}, r"gate_up_proj: got shape .*want \(experts here, 2 F, D\)"),
        ({"down_proj": down.mT}, r"got shape .*want \(experts here"),
        ({"down_proj": down.double()}, r"down_proj: got torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            run_experts(x, ids, weights, **({"gate_up_proj": proj, "down_proj": down} | wrong), **how)
    assert not dispatcher.used  # nothing moved
    with pytest.raises(MemoryError), mock.patch.object(Reference, "quantize_weight_rowwise", side_effect=MemoryError):
        run_experts(x, ids, weights, proj, down, **how)
    (workspace,) = dispatcher._workspaces.values()
    assert workspace.transport.in_flight is None
    assert run_experts(x, ids, weights, proj, down, **how)[0].shape == x.shape


class Watched(Reference):
    """Knows whether memory is still held: of gate_up, the first product of all, when the first weight gradient begins;
    of h, which that one used, when the product after it begins."""

    def __init__(self) -> None:
        self.gate_up: StorageWeakRef | None = None
        self.h: StorageWeakRef | None = None
        self.held: list[bool] = []

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        self.gate_up = self.gate_up or StorageWeakRef(out.untyped_storage())
        return out

    def prepare_wgrad(self, dy, a, *args):
        if self.h is None:
            self.h = StorageWeakRef(a.qdata.untyped_storage())
            self.held.append(not self.gate_up.expired())
        return super().prepare_wgrad(dy, a, *args)

    def dgrad(self, *args, **kwargs):
        if self.h is not None:
            self.held.append(not self.h.expired())
        return super().dgrad(*args, **kwargs)


@distributed(1, device="cpu")
def test_what_backward_has_used_is_gone_before_what_takes_memory_unless_the_graph_is_retained(ctx) -> None:
    ranks = make_ranks([20], seed=8)
    *given, d_out = inputs(ranks, ctx)
    x, _, weights, proj, down = given
    for retained in (False, True):
        backend = Watched()
        dispatcher = LocalDispatcher(len(ranks.whole.down_proj))
        out = run_experts(*given, dispatcher=dispatcher, recipe=Recipe.mxfp8(), backend=backend)[0]
        once = torch.autograd.grad(out, (x, weights, proj, down), d_out, retain_graph=retained)
        assert backend.held == [retained, False]
        if retained:
            again = torch.autograd.grad(out, (x, weights, proj, down), d_out)
            assert all(torch.equal(a, b) for a, b in zip(once, again))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, (x, weights, proj, down), d_out)


class Spy(Reference):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def dgrad(self, *args, **kwargs):
        self.seen.append("dgrad")
        return super().dgrad(*args, **kwargs)

    def wgrad(self, *args, **kwargs):
        self.seen.append("wgrad")
        return super().wgrad(*args, **kwargs)


class SpyDispatcher(LocalDispatcher):
    def __init__(self, *args, seen: list[str], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = seen

    def dispatch(self, *args, **kwargs):
        self.seen.append("x goes out")
        return super().dispatch(*args, **kwargs)

    def redispatch(self, *args, **kwargs):
        self.seen.append("d_out goes out")
        return super().redispatch(*args, **kwargs)

    def combine(self, *args, overlap: bool = False):
        if not overlap:
            return super().combine(*args)
        self.seen.append("dx goes home")
        return Spied(super().combine(*args), self.seen)


class Spied(NamedTuple):
    handle: Any
    seen: list[str]

    def wait(self):
        self.seen.append("dx is home")
        return self.handle.wait()


@distributed(1, device="cpu")
def test_dx_goes_home_while_the_last_weight_gradient_computes(ctx) -> None:
    ranks = make_ranks([20], seed=6)
    *given, d_out = inputs(ranks, ctx)
    seen: list[str] = []
    dispatcher = SpyDispatcher(len(ranks.whole.down_proj), seen=seen, capacity=Capacity.worst_case())
    out, _ = run_experts(*given, dispatcher=dispatcher, recipe=Recipe.mxfp8(), backend=Spy(seen))
    out.backward(d_out)
    assert seen[0] == "x goes out"
    assert seen[1:] == ["d_out goes out", "dgrad", "wgrad", "dgrad", "dx goes home", "wgrad", "dx is home"]


@distributed(1)
def test_a_weight_made_for_a_forward_goes_with_its_backward(ctx) -> None:
    """Not with the graph, which lives as long as somebody holds the loss."""
    *given, d_out = inputs(make_ranks([30], seed=3), ctx)
    dispatcher = LocalDispatcher(len(given[3]))
    made = [w * 1 for w in given[3:]]
    held = [StorageWeakRef(w.untyped_storage()) for w in made]
    out = in_one(*given[:3], *made, dispatcher=dispatcher, recipe=Recipe.named("mxfp8"))
    del made
    out.backward(d_out)
    assert all(weight.expired() for weight in held)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_layer_on_one_rank_keeps_x_and_no_rows_of_it(recipe: str, top_k: int) -> None:
    """But for quantized slots with top-1, where x may be a temporary tensor."""
    whole = make_ranks([40], top_k=top_k, seed=3).whole
    given = whole.x.to(torch.bfloat16), whole.gate_up_proj.clone(), whole.down_proj.clone()
    x, proj, down = (each.requires_grad_() for each in given)
    how, saved = {"dispatcher": LocalDispatcher(len(down)), "recipe": Recipe.named(recipe)}, list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        run_experts(x, whole.expert_ids, whole.weights, proj, down, **how)
    again = recipe == "bf16" or top_k == 2
    assert any(t.data_ptr() == x.data_ptr() for t in saved) == again
    of_rows = [t.dtype for t in saved if t.shape[1:] == x.shape[1:] and t.data_ptr() != x.data_ptr()]
    assert (torch.float8_e4m3fn in of_rows or torch.bfloat16 in of_rows) != again


def test_a_recipe_may_be_given_by_name() -> None:
    whole = make_ranks([40], seed=3).whole
    x, how = whole.x.to(torch.bfloat16), {"dispatcher": LocalDispatcher(len(whole.down_proj)), "recipe": "mxfp8"}
    rows, row_weight, routing = dispatch(x, whole.expert_ids, whole.weights, **how)
    proj = whole.gate_up_proj, whole.down_proj
    y = expert_mlp(rows, *proj, routing.plan.offs, row_weight=row_weight, **how)
    out, _ = run_experts(x, whole.expert_ids, whole.weights, *proj, **how)
    assert torch.equal(combine(y, routing, **how), out)


def test_what_is_no_recipe_is_refused_with_the_names() -> None:
    x, weights, offs = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(1, 64, 64), torch.tensor([32]).int()
    calls = (
        partial(expert_mlp, x, weights, weights, offs),
        partial(swiglu, x, None, None),
        partial(grouped_mm, x, weights, offs),
    )
    for call in (*calls, partial(SharedExpert(64, 32), x)):
        for wrong in ("mx", None):
            with pytest.raises(ValueError, match=r"recipe: got .*, want bf16, fp8, mxfp8"):
                call(recipe=wrong)


def test_x_changed_before_backward_is_an_error() -> None:
    """Rows made again from it would be others than forward's."""
    whole = make_ranks([40], seed=3).whole
    x, proj = whole.x.to(torch.bfloat16), whole.gate_up_proj.clone().requires_grad_()
    how = {"dispatcher": LocalDispatcher(len(proj)), "recipe": Recipe.named("mxfp8")}
    out, _ = run_experts(x, whole.expert_ids, whole.weights, proj, whole.down_proj, **how)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
