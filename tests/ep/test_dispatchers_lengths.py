"""Layers whose batches have room for more tokens: the bits of layers without, from the tokens to all gradients."""

import functools

import pytest
import torch
from torch import Tensor

from mxep.comms import Capacity, CapacityExceeded
from mxep.ep import MoE
from mxep.ep.dispatchers import LocalDispatcher, SymmetricDispatcher, TokenDispatcher, base
from mxep.runtime.lengths import Length, room_for
from mxep.runtime.record import Fill, Launch, Record, View
from mxep.runtime.replay import no_replays
from ranks import Context, distributed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DIM, HIDDEN_DIM, EXPERTS, TOP_K, MOST = 64, 32, 4, 2, 40
RECIPES = ["bf16", "mxfp8", "fp8", "mxfp8_32x32", "mxfp8_gate_up_fp8"]
CAPACITIES = [Capacity.worst_case(), Capacity.factor(1, "drop")]


@pytest.fixture(autouse=True)
def rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LEAST_DEVICE_WITH_ROOMS", -1)


def make_layer(kind: str, recipe: str, capacity: Capacity, device: str, *, most: int = MOST) -> MoE:
    torch.manual_seed(0)
    made: TokenDispatcher = LocalDispatcher(EXPERTS, capacity=capacity)
    if kind == "symmetric":
        made = SymmetricDispatcher(EXPERTS, dim=DIM, max_tokens=most, capacity=capacity)
    return MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe=recipe, dispatcher=made, device=device)


def batch(tokens: int, device: str | torch.device) -> list[Tensor]:
    return [*torch.randn(2, tokens, DIM, device=device, dtype=torch.bfloat16)]


def run(layer: MoE, x: Tensor, d_out: Tensor) -> list[Tensor]:
    """out, and all gradients."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    if x.is_cuda:
        poison = torch.full((1 << 26,), 0xFF, dtype=torch.uint8, device=x.device)
        del poison
    out = layer(x)
    out.backward(d_out)
    assert out.shape == x.shape
    assert not out._is_view(), "in-place ops on it would raise"
    layer.check()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]


def assert_same_bits(layer: MoE, batches: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With rooms, and records where they are made, and without either."""
    got = [run(layer, *each) for each in batches]
    monkeypatch.setattr(base, "LEAST_DEVICE_WITH_ROOMS", 99)
    with no_replays():
        wanted = [run(layer, *each) for each in batches]
    for (x, _), one, other in zip(batches, got, wanted):
        assert all(map(torch.equal, one, other)), len(x)


@pytest.mark.parametrize(
    ("kind", "capacity", "recipe"),
    [*(("local", CAPACITIES[1], recipe) for recipe in RECIPES), ("symmetric", CAPACITIES[0], "mxfp8")],
    ids=str,
)
def test_a_room_changes_no_bit(kind, capacity, recipe, monkeypatch):
    layer = make_layer(kind, recipe, capacity, "cpu")
    assert layer.dispatcher.room_for(torch.empty(33, DIM)) == (48 if kind == "local" else MOST)
    assert_same_bits(layer, [batch(tokens, "cpu") for tokens in (1, 17, 40)], monkeypatch)


@distributed(2, device="cpu", recipe=["bf16", "mxfp8"])
def test_ranks_with_batches_of_other_lengths_get_the_same_bits(ctx: Context, recipe: str) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(base, "LEAST_DEVICE_WITH_ROOMS", -1)
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe=recipe, group=ctx.group, max_tokens=MOST, device=ctx.device)
    torch.manual_seed(ctx.rank)
    assert layer.dispatcher.room_for(torch.empty(7, DIM)) == 16
    assert_same_bits(layer, [batch(7 + 13 * ((turn + ctx.rank) % 3), ctx.device) for turn in range(4)], patch)
    patch.undo()


def test_a_room_is_never_more_than_the_layer_takes_and_none_where_nothing_is_known():
    x = torch.empty(33, DIM)
    assert LocalDispatcher(EXPERTS).room_for(x) == 48
    assert LocalDispatcher(EXPERTS, max_tokens=40).room_for(x) == 40
    assert LocalDispatcher(EXPERTS, max_tokens=32).room_for(x) is None  # a batch that is too large
    assert SymmetricDispatcher(EXPERTS, dim=DIM).room_for(x) is None  # whose first batch says how large buffers are
    assert LocalDispatcher(EXPERTS).room_for(x[:0]) is None
    assert LocalDispatcher(EXPERTS).room_for(torch.empty(66, DIM), 2) == 96  # two rows of each token


def test_a_dispatcher_derived_from_one_with_rooms_has_none_unless_it_says_so():
    class Mine(LocalDispatcher):
        def dispatch(self, payload, expert_ids, weights, *, alignment, overlap=False):
            return super().dispatch(payload, expert_ids, weights, alignment=alignment, overlap=overlap)

    assert Mine(EXPERTS).room_for(torch.empty(33, DIM)) is None
    layer = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher=Mine(EXPERTS))
    assert layer(batch(33, "cpu")[0]).shape == (33, DIM)


def test_what_users_see_of_a_routing_is_of_the_real_tokens():
    layer = make_layer("local", "mxfp8", Capacity.worst_case(), "cpu")
    layer(batch(33, "cpu")[0])
    assert layer.last_routing is not None
    assert layer.last_routing.expert_ids.shape == (33, TOP_K)
    assert layer.last_routing.plan.num_tokens.tolist() == [33]
    assert int(layer.last_routing.stats()["routed"]) == 33 * TOP_K


@pytest.mark.parametrize("kind", [LocalDispatcher, functools.partial(SymmetricDispatcher, dim=DIM, max_tokens=400)])
def test_scores_before_experts_make_a_tokens_rows_a_room_of_whole_tokens(kind, monkeypatch):
    torch.manual_seed(0)
    made = kind(EXPERTS)
    layer = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher=made, score_before_experts=True)
    assert_same_bits(layer, [batch(tokens, "cpu") for tokens in (3, 17, 33)], monkeypatch)


def step_of(record: Record, what: object, tokens: int) -> object:
    """A step as it is for so many tokens, without what a play works out anew: the shape of a view of tokens."""

    def of(x: object) -> object:
        if isinstance(x, View) and x.source in record.moving:
            return x._replace(shape=(), strides=())
        if hasattr(x, "for_triton"):
            return type(x), of(x.base), x.block_shape, tuple(x.shape), tuple(x.strides)
        return ("length", x.of(tokens)) if isinstance(x, Length) else x

    if isinstance(what, Launch):
        return what.kernel, what.compiled, what.grid, tuple(map(of, what.args)), what.constants
    if isinstance(what, Fill) and isinstance(what.value, Length):
        return what.to, of(what.value), what.size
    return what


@needs_gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("kind", ["local", "symmetric"])
def test_records_of_two_lengths_of_a_room_differ_in_nothing_but_what_moves(kind, capacity, recipe):
    """Or one could not be played for the other: a grid, a size or a number that follows from tokens would be wrong."""
    found: list[list[Record]] = []
    for tokens in (289, 302):
        layer = make_layer(kind, recipe, capacity, "cuda", most=640)
        for _ in range(2):  # the second is recorded, and a third would make a graph of the record
            run(layer, *batch(tokens, "cuda"))
        kinds = [list(each._kinds.values()) for each in layer.dispatcher.passes.values()]
        assert all(len(each) == 1 for each in kinds), [each.refused for each in layer.dispatcher.passes.values()]
        found.append([each[0].record for each in kinds])
    for one, other in zip(*found, strict=True):
        assert one.moving == other.moving != ()
        assert one.made == other.made
        assert one.results == other.results
        for a, b in zip(one.steps, other.steps, strict=True):
            assert a.after == b.after
            assert step_of(one, a.what, 295) == step_of(other, b.what, 295)


@needs_gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("kind", ["local", "symmetric"])
def test_lengths_that_come_once_are_played_and_have_the_bits_of_the_functions(kind, capacity, recipe, monkeypatch):
    layer = make_layer(kind, recipe, capacity, "cuda", most=640)
    lengths = [200, 193, 2, 17, 31, 20, 600, 640, 590, 1, 199, 195, 3, 29, 18, 577, 578, 194]
    assert_same_bits(layer, [batch(tokens, "cuda") for tokens in lengths], monkeypatch)
    seen = len({room_for(tokens) for tokens in lengths})
    assert [each.replays for each in layer.dispatcher.passes.values()] == [len(lengths) - 2 * seen] * 2
    assert not any(each.refused for each in layer.dispatcher.passes.values())


@needs_gpu
def test_a_thousand_lengths_leave_few_records_and_no_memory():
    layer = make_layer("local", "mxfp8", Capacity.worst_case(), "cuda")
    torch.manual_seed(1)
    run(layer, *batch(1000, "cuda"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for tokens in torch.randperm(1000).add(1).tolist():
        run(layer, *batch(tokens, "cuda"))
    layer.zero_grad(set_to_none=True)
    assert torch.cuda.memory_allocated() <= before
    assert all(len(each._kinds) == 32 + 8 for each in layer.dispatcher.passes.values())


def test_what_did_not_fit_is_told_of_the_tokens_that_there_were(monkeypatch):
    said = []
    for least in (-1, 99):
        monkeypatch.setattr(base, "LEAST_DEVICE_WITH_ROOMS", least)
        layer = make_layer("local", "bf16", Capacity.factor(0.25), "cpu")
        torch.manual_seed(1)
        layer(batch(17, "cpu")[0])
        with pytest.raises(CapacityExceeded) as caught:
            layer.check()
        said.append(str(caught.value))
    assert said[0] == said[1]
