"""make_plan against python loops, and the capacities."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comms.cases import CASES, Sent, assert_bitwise, bring, expected_plan
from mxep.comms import DROPPED, Capacity, RoutingPlan, make_plan
from mxep.comms.layout import ANY_ID
from mxep.comms.plan import plan_rows


def tables(everyone: list[Sent], max_tokens: int, *, poison: int = 0) -> tuple[torch.Tensor, ...]:
    """The senders' tables as a workspace holds them; past num_tokens lies ``poison``, which looks like an expert."""
    shape = (len(everyone), max_tokens, everyone[0].ids.shape[1])
    ids = torch.full(shape, poison, dtype=torch.int32)
    weights = torch.full(shape, float("nan"))
    for rank, sent in enumerate(everyone):
        ids[rank, : len(sent.ids)] = sent.ids
        weights[rank, : len(sent.ids)] = sent.weights
    return ids, weights, torch.tensor([len(sent.ids) for sent in everyone], dtype=torch.int32)


def check_plan(plan: RoutingPlan, everyone: list[Sent], max_tokens: int, experts: range, *, exact: bool) -> None:
    top_k = everyone[0].ids.shape[1]
    wanted = expected_plan(everyone, experts, plan.alignment, plan.max_rows)
    padding = [None] * (plan.max_rows - len(wanted.pairs))
    slots, weights = [], []
    slot_rows = torch.full((len(everyone) * max_tokens, top_k), -1, dtype=torch.int32)
    for rank, sent in enumerate(everyone):
        for token, row in enumerate(sent.ids.tolist()):
            for k, expert in enumerate(row):
                if expert in experts:
                    slot_rows[rank * max_tokens + token, k] = DROPPED
    for row, pair in enumerate(wanted.pairs + padding):
        slot = -1 if pair is None else pair[0] * max_tokens + pair[1]
        slots.append(slot)
        weights.append(0.0 if pair is None else float(everyone[pair[0]].weights[pair[1], pair[2]]))
        if pair is not None:
            slot_rows[slot, pair[2]] = row
    assert_bitwise(plan.row_slot, torch.tensor(slots, dtype=torch.int32), "row_slot")
    assert_bitwise(plan.row_weight, torch.tensor(weights), "row_weight")
    assert_bitwise(plan.slot_rows, slot_rows, "slot_rows")
    assert_bitwise(plan.offs, torch.tensor(wanted.offs, dtype=torch.int32), "offs")
    assert_bitwise(plan.group_sizes, torch.tensor(wanted.group_sizes, dtype=torch.int32), "group_sizes")
    assert int(plan.invalid) == 0
    # Of all owners, where the plan knows who they are; with exact capacity R_max is this one's alone.
    owners = len(plan.overflow)
    for owner in range(owners):
        of = experts if owners == 1 else range(owner * len(experts), (owner + 1) * len(experts))
        theirs = expected_plan(everyone, of, plan.alignment, 10**9)
        assert int(plan.needed[owner]) == theirs.offs[-1], owner
        lost = 0 if exact else expected_plan(everyone, of, plan.alignment, plan.max_rows).overflow
        assert int(plan.overflow[owner]) == lost, owner


def test_the_example_of_the_docstring():
    ids = torch.tensor([[[1, 0], [5, 1]], [[0, -1], [1, 1]]], dtype=torch.int32)
    plan = make_plan(
        ids,
        torch.arange(8.0).view(2, 2, 2),
        torch.tensor([2, 1], dtype=torch.int32),
        first_expert=0,
        num_local_experts=2,
        alignment=4,
    )
    assert plan.max_rows == 16
    assert plan.row_slot.tolist() == [0, 2, -1, -1, 0, 1, -1, -1] + 8 * [-1]
    assert plan.row_weight.tolist() == [1, 4, 0, 0, 0, 3, 0, 0] + 8 * [0]
    assert plan.slot_rows.tolist() == [[4, 0], [-1, 5], [1, -1], [-1, -1]]
    assert plan.offs.tolist() == [4, 8]
    assert plan.group_sizes.tolist() == [2, 2]


CAPACITIES = (Capacity.worst_case(), Capacity.factor(0.5), Capacity.factor(1.5), Capacity.exact())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("alignment", [1, 16])
def test_a_plan_is_what_loops_make(case, capacity, alignment):
    world, max_tokens, top_k, num_experts = 3, 7, 3, 12
    sizes = {"max_tokens": max_tokens, "top_k": top_k, "num_experts": num_experts, "world_size": world}
    everyone = [bring(case, rank, seed=4, **sizes) for rank in range(world)]
    for rank in range(world):
        experts = range(4 * rank, 4 * rank + 4)
        plan = make_plan(
            *tables(everyone, max_tokens, poison=experts[0]),
            first_expert=experts[0],
            num_local_experts=len(experts),
            alignment=alignment,
            capacity=capacity,
            num_experts=num_experts,
        )
        check_plan(plan, everyone, max_tokens, experts, exact=capacity == Capacity.exact())


def draw_tables(data, world: int, e: int, top_k: int, max_tokens: int) -> list[Sent]:
    identifier = st.sampled_from([-1, 0, *range(world * e)])
    everyone = []
    for _ in range(world):
        tokens = data.draw(st.integers(0, max_tokens))
        ids = data.draw(st.lists(identifier, min_size=tokens * top_k, max_size=tokens * top_k))
        ids_of_rank = torch.tensor(ids, dtype=torch.int32).view(tokens, top_k)
        everyone.append(Sent((), ids_of_rank, torch.rand(tokens, top_k)))
    return everyone


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_of_any_shape_is_what_loops_make(data):
    world, e, top_k = (data.draw(st.integers(1, 4)) for _ in range(3))
    max_tokens = data.draw(st.integers(0, 6))
    alignment = data.draw(st.sampled_from([1, 2, 3, 32]))
    everyone = draw_tables(data, world, e, top_k, max_tokens)
    rank = data.draw(st.integers(0, world - 1))
    capacity = data.draw(st.sampled_from(CAPACITIES))
    options = {"first_expert": rank * e, "num_local_experts": e, "alignment": alignment, "capacity": capacity}
    options["num_experts"] = data.draw(st.sampled_from([None, world * e]))
    plan = make_plan(*tables(everyone, max_tokens), **options)
    exact = capacity == Capacity.exact()
    check_plan(plan, everyone, max_tokens, range(rank * e, (rank + 1) * e), exact=exact)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_room_there_is_experts_and_sources_are_capped_as_loops_say(data):
    world, e, top_k = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    max_tokens, alignment = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([1, 2, 16, 32]))
    everyone = draw_tables(data, world, e, top_k, max_tokens)
    rank, tiles = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, 12))
    max_rows = tiles * alignment + data.draw(st.integers(0, alignment - 1))
    sizes = rank * e, e, alignment, max_rows, data.draw(st.sampled_from([ANY_ID, world * e])), 1
    sizes = *sizes, max_tokens, max_rows
    plan = RoutingPlan(*plan_rows(*tables(everyone, max_tokens), *sizes, None), alignment=alignment)
    check_plan(plan, everyone, max_tokens, range(rank * e, (rank + 1) * e), exact=False)


def plan_of(asked: list[list[int]], *, max_rows: int, alignment: int) -> RoutingPlan:
    """asked: by expert, the pairs of each rank; a pair is a token of its own, dealt in turns to the experts."""
    world, e = len(asked[0]), len(asked)
    ids_of = [[i for turn in range(99) for i in range(e) if turn < asked[i][rank]] for rank in range(world)]
    ids = torch.full((world, max(map(len, ids_of)), 1), -1, dtype=torch.int32)
    for rank, found in enumerate(ids_of):
        ids[rank, : len(found), 0] = torch.tensor(found, dtype=torch.int32)
    tokens = torch.tensor(list(map(len, ids_of)), dtype=torch.int32)
    fields = plan_rows(
        ids, torch.ones(ids.shape), tokens, 0, e, alignment, max_rows, e, 1, ids.shape[1], max_rows, None
    )
    return RoutingPlan(*fields, alignment=alignment)


def kept_of(plan: RoutingPlan, world: int) -> list[list[int]]:
    """By expert, the rows that each rank keeps."""
    ends, slots, per_rank = [0, *plan.offs.tolist()], plan.row_slot.tolist(), len(plan.slot_rows) // world
    rows = [[slot // per_rank for slot in slots[i:j] if slot >= 0] for i, j in itertools.pairwise(ends)]
    return [[found.count(rank) for rank in range(world)] for found in rows]


def test_the_example_of_what_does_not_fit():
    asked = [[6, 1], [0, 2], [1, 3]]
    plan = plan_of(asked, max_rows=8, alignment=2)
    assert kept_of(plan, 2) == [[1, 1], [0, 2], [1, 1]]
    assert plan.offs.tolist() == [2, 4, 6]
    assert plan.row_slot.tolist()[6:] == [-1, -1]
    assert plan.group_sizes.tolist() == [7, 2, 4]
    assert (plan.needed.tolist(), plan.overflow.tolist()) == ([14], [7])
    # Rank 0 has brought experts 0 2 0 0 0 0 0, rank 1 0 1 2 1 2 2: each keeps its first.
    assert plan.row_slot.tolist()[:6] == [0, 7, 8, 10, 1, 9]


def test_balanced_experts_lose_alike_and_a_hot_one_loses_alone():
    assert kept_of(plan_of([[32]] * 8, max_rows=231, alignment=1), 1) == [[28]] * 8  # 224; 7 rows stay empty
    assert kept_of(plan_of([[64]] + [[9]] * 7, max_rows=100, alignment=1), 1) == [[37]] + [[9]] * 7
    assert kept_of(plan_of([[64], [9], [0], [33]], max_rows=128, alignment=32), 1) == [[32], [9], [0], [32]]
    assert kept_of(plan_of([[5], [0], [1]], max_rows=1, alignment=1), 1) == [[0], [0], [0]]


def test_sources_share_an_expert_alike_and_ties_go_to_the_lower_rank():
    assert kept_of(plan_of([[9, 1, 9, 9]], max_rows=12, alignment=1), 4) == [[4, 1, 4, 3]]
    assert kept_of(plan_of([[0, 3, 3, 3]], max_rows=2, alignment=1), 4) == [[0, 1, 1, 0]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_blocks_of_a_table_keep_what_they_would_as_tables(data):
    world, blocks, e = (data.draw(st.integers(1, 3)) for _ in range(3))
    tokens, top_k = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 2))
    alignment, max_rows = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(0, 20))
    sizes = 0, e, alignment, max_rows, ANY_ID
    shape = blocks, world, tokens, top_k
    flat = data.draw(
        st.lists(st.integers(-1, e - 1), min_size=torch.Size(shape).numel(), max_size=torch.Size(shape).numel())
    )
    apart, weights = torch.tensor(flat, dtype=torch.int32).view(shape), torch.rand(shape)

    def plan(ids: torch.Tensor, weights: torch.Tensor, blocks: int) -> RoutingPlan:
        num_tokens = torch.full(ids.shape[:1], ids.shape[1], dtype=torch.int32)
        fields = plan_rows(
            ids.contiguous(), weights.contiguous(), num_tokens, *sizes, blocks, ids.shape[1], max_rows, None
        )
        return RoutingPlan(*fields, alignment=alignment)

    got = plan(*(table.transpose(0, 1).flatten(1, 2) for table in (apart, weights)), blocks)
    wanted = plan(*(table.flatten(0, 1) for table in (apart, weights)), 1)
    assert torch.equal(got.offs, wanted.offs)
    assert torch.equal(got.counts, wanted.counts)
    found = got.slot_rows.view(world, blocks, tokens, top_k).transpose(0, 1) < 0
    assert torch.equal(found, wanted.slot_rows.view(shape) < 0)
    rows = got.slot_rows[got.slot_rows >= 0]  # in the order of slots for each expert
    experts = torch.searchsorted(got.offs.long(), rows.long(), right=True)
    assert all((rows[experts == i].diff() == 1).all() for i in range(e))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_table_with_room_for_more_tokens_has_the_rows_that_it_has_without(data):
    e, top_k, tokens = (data.draw(st.integers(1, 4)) for _ in range(3))
    room, alignment = tokens + data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 2, 16]))
    capacity = data.draw(st.sampled_from([Capacity.worst_case(), Capacity.factor(0.5, "drop"), Capacity.exact()]))
    of_one = tables(draw_tables(data, 1, e, top_k, tokens), tokens)
    options = {"first_expert": 0, "num_local_experts": e, "num_experts": e, "alignment": alignment}
    running = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    want = make_plan(*of_one, capacity=capacity, running=running[0], **options)
    got = make_plan(*of_one, capacity=capacity, running=running[1], max_tokens=room, **options)
    for name in ("offs", "group_sizes", "counts", "num_tokens"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(*running)
    assert got.max_rows >= want.max_rows
    assert torch.equal(got.row_slot[: want.max_rows], want.row_slot)
    assert torch.equal(got.row_weight[: want.max_rows], want.row_weight)
    assert (got.row_slot[want.max_rows :] == -1).all()
    assert torch.equal(got.slot_rows[:tokens], want.slot_rows)
    assert (got.slot_rows[tokens:] == -1).all()
    assert len(got.slot_rows) == room


@pytest.mark.parametrize(("shape", "blocks", "room"), [((2, 3, 1), 1, 8), ((1, 4, 1), 2, 8), ((1, 4, 1), 1, 3)])
def test_room_for_more_tokens_is_of_one_table(shape, blocks, room):
    of = torch.zeros(shape, dtype=torch.int32), torch.ones(shape), torch.ones(shape[0], dtype=torch.int32)
    options = {"first_expert": 0, "num_local_experts": 1, "alignment": 1, "blocks": blocks, "max_tokens": room}
    with pytest.raises(ValueError, match=rf"max_tokens: got {room} for {shape[0]} tables of {shape[1]} tokens"):
        make_plan(*of, **options)


def test_the_worst_case_holds_whatever_distinct_experts_ask():
    for top_k, e, alignment in ((2, 4, 32), (4, 2, 16), (1, 1, 32), (3, 3, 1)):
        ids = torch.arange(top_k, dtype=torch.int32).expand(2, 5, top_k).contiguous()
        plan = make_plan(
            ids,
            torch.ones(ids.shape),
            torch.full((2,), 5, dtype=torch.int32),
            first_expert=0,
            num_local_experts=e,
            alignment=alignment,
        )
        assert int(plan.overflow) == 0
        assert plan.max_rows % alignment == 0
        assert int(plan.group_sizes.sum()) == 10 * min(top_k, e)


def test_capacities_have_the_sizes_they_promise():
    def rows(capacity: Capacity) -> int:
        options = {"num_local_experts": 2, "alignment": 32}
        return capacity.rows(4, 100, 3, **options)

    assert rows(Capacity.worst_case()) == 864  # 400 * min(3, 2) + 2 * 31 = 862
    assert rows(Capacity.factor(1.0)) == 384  # 300 + 62 = 362
    assert rows(Capacity.factor(1.25)) == 448  # 375 + 62 = 437
    assert rows(Capacity.factor(100)) == 864
    assert str(Capacity.factor(1.25)) == "Capacity.factor(1.25)"
    assert str(Capacity.factor(1.25, overflow="drop")) == "Capacity.factor(1.25, overflow='drop')"
    with pytest.raises(ValueError, match="got 0, wanted a positive number"):
        Capacity.factor(0)
    with pytest.raises(ValueError, match="got overflow='forget', wanted 'raise' or 'drop'"):
        Capacity.factor(1.0, overflow="forget")
    for wrong in (("factor", -1.0), ("factor", math.nan), ("factor", True), ("factor", "1.25"), ("twice",)):
        with pytest.raises(ValueError, match=r"Capacity.*: got .*, wanted"):
            Capacity(*wrong)


def test_the_factor_that_would_have_been_enough_is_and_the_one_below_is_not():
    sizes = {"num_local_experts": 2, "alignment": 32}
    for needed in (64, 96, 384, 448, 864):
        enough = Capacity.enough(needed, 100, 3, **sizes)
        assert Capacity.factor(enough).rows(4, 100, 3, **sizes) >= needed
        if enough > 0.01:
            assert Capacity.factor(enough - 0.01).rows(4, 100, 3, **sizes) < needed


def test_rows_that_do_not_fit_are_counted_and_marked():
    ids = torch.zeros(1, 10, 1, dtype=torch.int32)
    tables_of_one = ids, torch.ones(ids.shape), torch.tensor([10], dtype=torch.int32)
    options = {"first_expert": 0, "num_local_experts": 2, "alignment": 2}
    plan = make_plan(*tables_of_one, capacity=Capacity.factor(0.3), **options)
    assert plan.max_rows == 6  # 3 + 2 * 1 of padding, rounded up
    assert int(plan.overflow) == 4
    assert plan.slot_rows.flatten().tolist() == [0, 1, 2, 3, 4, 5] + 4 * [DROPPED]
    assert plan.offs.tolist() == [6, 6]
    assert plan.group_sizes.tolist() == [10, 0]


def good_tables() -> tuple[torch.Tensor, ...]:
    return torch.zeros(1, 2, 2, dtype=torch.int32), torch.zeros(1, 2, 2), torch.tensor([2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("index", "table", "message"),
    [
        (0, torch.zeros(1, 2, 2), r"expert_ids: got torch.float32 \(1, 2, 2\), wanted torch.int32 \(W, T_max, K\)"),
        (0, torch.tensor([[[0, 8], [1, -3]]], dtype=torch.int32), r"expert ids: got \[-3, 8\], wanted -1 .* to 7"),
        (1, torch.zeros(1, 2, 1), r"weights: got torch.float32 \(1, 2, 1\), wanted torch.float32 \(1, 2, 2\)"),
        (2, torch.tensor([2]), r"num_tokens: got torch.int64 \(1,\), wanted torch.int32 \(1,\)"),
    ],
)
def test_bad_tables_are_refused(index, table, message):
    bad = list(good_tables())
    bad[index] = table
    with pytest.raises(ValueError, match=message):
        make_plan(*bad, first_expert=0, num_local_experts=4, alignment=1, num_experts=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 0}, "blocks: got 0, wanted a divisor of T_max = 2"),
        ({"blocks": 3}, "blocks: got 3, wanted a divisor of T_max = 2"),
        ({"alignment": 0}, "alignment: got 0, wanted at least 1"),
        ({"num_local_experts": 0}, "num_local_experts: got 0, wanted at least 1"),
        ({"num_experts": 3}, "experts 0 to 3: got 3 in all"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    options = {"first_expert": 0, "num_local_experts": 4, "alignment": 1} | change
    with pytest.raises(ValueError, match=message):
        make_plan(*good_tables(), **options)


def test_what_lies_past_a_senders_tokens_is_not_looked_at():
    ids = torch.full((2, 3, 2), 2**30, dtype=torch.int32)
    ids[0, 0] = torch.tensor([0, 1])
    plan = make_plan(
        ids,
        torch.full(ids.shape, float("nan")),
        torch.tensor([1, 0], dtype=torch.int32),
        first_expert=0,
        num_local_experts=2,
        alignment=1,
        num_experts=2,
    )
    assert plan.row_slot.tolist()[:3] == [0, 0, -1]
    assert plan.slot_rows.tolist() == [[0, 1]] + 5 * [[-1, -1]]
    assert not plan.row_weight.isnan().logical_and(plan.row_slot < 0).any()
