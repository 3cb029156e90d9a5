"""Plans against python loops, capacities, and the kernels of the plan, which equal the reference bit for bit.

Kernels run on a GPU, or interpreted without one. What a launcher allocates is filled with garbage first, so a number
that no kernel writes shows.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from comms.cases import CASES, Sent, assert_bitwise, bring, expected_plan
from host_sync import no_host_sync
from mxep.comms import DROPPED, Capacity, RoutingPlan, make_plan
from mxep.comms.kernels import plan as kernels
from mxep.comms.layout import ANY_ID
from mxep.comms.plan import plan_rows
from quant.poison import poisoned_allocations as poisoned_allocations


def tables(everyone: list[Sent], max_tokens: int, *, poison: int = 0) -> tuple[torch.Tensor, ...]:
    """The senders' tables as a workspace holds them; past num_tokens lies ``poison``, which looks like an expert."""
    shape = (len(everyone), max_tokens, everyone[0].ids.shape[1])
    ids = torch.full(shape, poison, dtype=torch.int32)
    weights = torch.full(shape, float("nan"))
    for rank, sent in enumerate(everyone):
        ids[rank, : len(sent.ids)] = sent.ids
        weights[rank, : len(sent.ids)] = sent.weights
    return ids, weights, torch.tensor([len(sent.ids) for sent in everyone], dtype=torch.int32)


def check_plan(plan: RoutingPlan, everyone: list[Sent], max_tokens: int, experts: range) -> None:
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
    # Of all owners, where the plan knows who they are.
    owners = len(plan.overflow)
    for owner in range(owners):
        of = experts if owners == 1 else range(owner * len(experts), (owner + 1) * len(experts))
        theirs = expected_plan(everyone, of, plan.alignment, 10**9)
        assert int(plan.needed[owner]) == theirs.offs[-1], owner
        assert int(plan.overflow[owner]) == expected_plan(everyone, of, plan.alignment, plan.max_rows).overflow, owner


def test_the_example_of_the_docstring():
    ids = torch.tensor([[[1, 0], [5, 1]], [[0, -1], [1, 1]]], dtype=torch.int32)
    tables = ids, torch.arange(8.0).view(2, 2, 2), torch.tensor([2, 1], dtype=torch.int32)
    plan = make_plan(*tables, first_expert=0, num_local_experts=2, alignment=4)
    assert plan.max_rows == 16
    assert plan.row_slot.tolist() == [0, 2, -1, -1, 0, 1, -1, -1] + 8 * [-1]
    assert plan.row_weight.tolist() == [1, 4, 0, 0, 0, 3, 0, 0] + 8 * [0]
    assert plan.slot_rows.tolist() == [[4, 0], [-1, 5], [1, -1], [-1, -1]]
    assert plan.offs.tolist() == [4, 8]
    assert plan.group_sizes.tolist() == [2, 2]


CAPACITIES = (Capacity.worst_case(), Capacity.factor(0.5), Capacity.factor(1.5), Capacity.factor(4.0))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("capacity", "alignment"), [*zip(CAPACITIES, (1, 16, 1, 16))], ids=str)
def test_a_plan_is_what_loops_make(case, capacity, alignment):
    world, max_tokens, num_experts = 3, 7, 12
    sizes = {"max_tokens": max_tokens, "top_k": 3, "num_experts": num_experts, "world_size": world}
    everyone = [bring(case, rank, seed=4, **sizes) for rank in range(world)]
    options = {"num_local_experts": 4, "alignment": alignment, "capacity": capacity, "num_experts": num_experts}
    for rank in range(world):
        experts = range(4 * rank, 4 * rank + 4)
        plan = make_plan(*tables(everyone, max_tokens, poison=experts[0]), first_expert=experts[0], **options)
        check_plan(plan, everyone, max_tokens, experts)


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
def test_whatever_room_there_is_experts_and_sources_are_capped_as_loops_say(data):
    world, e, top_k = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    max_tokens, alignment = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([1, 2, 16, 32]))
    everyone = draw_tables(data, world, e, top_k, max_tokens)
    rank, tiles = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, 12))
    max_rows = tiles * alignment + data.draw(st.integers(0, alignment - 1))
    sizes = rank * e, e, alignment, max_rows, data.draw(st.sampled_from([ANY_ID, world * e])), 1
    sizes = *sizes, max_tokens, max_rows
    plan = RoutingPlan(*plan_rows(*tables(everyone, max_tokens), *sizes, None), alignment=alignment)
    check_plan(plan, everyone, max_tokens, range(rank * e, (rank + 1) * e))


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
    capacity = data.draw(st.sampled_from([Capacity.worst_case(), Capacity.factor(0.5, "drop")]))
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


def test_the_worst_case_holds_whatever_distinct_experts_ask():
    for top_k, e, alignment in ((2, 4, 32), (4, 2, 16), (1, 1, 32), (3, 3, 1)):
        ids = torch.arange(top_k, dtype=torch.int32).expand(2, 5, top_k).contiguous()
        tables = ids, torch.ones(ids.shape), torch.full((2,), 5, dtype=torch.int32)
        plan = make_plan(*tables, first_expert=0, num_local_experts=e, alignment=alignment)
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
    assert rows(Capacity.factor(1.25, overflow="recompute")) == 864
    assert str(Capacity.factor(1.25)) == "Capacity.factor(1.25)"
    assert str(Capacity.factor(1.25, overflow="drop")) == "Capacity.factor(1.25, overflow='drop')"
    with pytest.raises(ValueError, match="got 0, wanted a positive number"):
        Capacity.factor(0)
    with pytest.raises(ValueError, match="got overflow='forget', wanted 'raise', 'drop' or 'recompute'"):
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


INTS = torch.tensor([[[0, 8], [1, -3]]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 2, 2)}, r"expert_ids: got torch.float32 \(1, 2, 2\), wanted torch.int32 \(W, T_max, K\)"),
        ({0: INTS, "num_experts": 8}, r"expert ids: got \[-3, 8\], wanted -1 .* to 7"),
        ({1: torch.zeros(1, 2, 1)}, r"weights: got torch.float32 \(1, 2, 1\), wanted torch.float32 \(1, 2, 2\)"),
        ({2: torch.tensor([2])}, r"num_tokens: got torch.int64 \(1,\), wanted torch.int32 \(1,\)"),
        ({"blocks": 0}, "blocks: got 0, wanted a divisor of T_max = 2"),
        ({"blocks": 3}, "blocks: got 3, wanted a divisor of T_max = 2"),
        ({"alignment": 0}, "alignment: got 0, wanted at least 1"),
        ({"num_local_experts": 0}, "num_local_experts: got 0, wanted at least 1"),
        ({"num_experts": 3}, "experts 0 to 3: got 3 in all"),
        ({"capacity": "exact"}, "capacity: expected a Capacity, or a factor such as 1.25, got 'exact'"),
        ({"max_tokens": 1}, "max_tokens: got 1 for 1 tables of 2 tokens"),
        ({"max_tokens": 8, "blocks": 2}, "max_tokens: got 8 for 1 tables of 2 tokens, 2 blocks"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    given = {0: torch.zeros(1, 2, 2, dtype=torch.int32), 1: torch.zeros(1, 2, 2), 2: torch.tensor([2]).int()} | change
    options = {"first_expert": 0, "num_local_experts": 4, "alignment": 1}
    options |= {name: value for name, value in change.items() if isinstance(name, str)}
    with pytest.raises(ValueError, match=message):
        make_plan(given[0], given[1], given[2], **options)


# ── kernels ──

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("row_slot", "row_weight", "slot_rows", "offs", "group_sizes", "counts", "num_tokens")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@dataclass(frozen=True)
class Case:
    """W ranks of at most T tokens with K of E experts each, e to a rank; the plan is that of rank 1, or of 0."""

    W: int
    T: int
    K: int
    E: int
    e: int
    alignment: int = 32
    room: float = 1.0
    """R_max as a part of what everything would need."""
    blocks: int = 1
    full: bool = False
    """All senders bring T tokens, all routed to valid, distinct experts; else fewer, with -1, twins and wrong ids."""

    @property
    def first(self) -> int:
        return min(self.e, self.E - self.e)

    @property
    def max_rows(self) -> int:
        return int(self.room * (self.W * self.T * self.K + self.e * (self.alignment - 1)))

    def tables(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        shape = self.W, self.T, self.K
        weights = torch.rand(shape, generator=random)
        if self.full:
            ids = torch.rand((*shape[:2], self.E), generator=random).argsort(-1)[:, :, : self.K]
            return ids.int(), weights, torch.full((self.W,), self.T, dtype=torch.int32)
        ids = torch.randint(-1, self.E, shape, generator=random, dtype=torch.int32)
        wrong = torch.tensor([-2, self.E, -(2**31), 2**31 - 1, self.E + self.e], dtype=torch.int32)
        at = torch.randint(0, 40 * len(wrong), shape, generator=random)
        ids = torch.where(at < len(wrong), wrong[at.clamp(max=len(wrong) - 1)], ids)
        return ids, weights, torch.randint(0, self.T + 1, (self.W,), generator=random, dtype=torch.int32)

    def plan(self, tables: Sequence[Tensor]) -> tuple[Any, ...]:
        sizes = self.first, self.e, self.alignment, self.max_rows, self.E, self.blocks
        return *tables, *sizes, tables[0].shape[1], self.max_rows


SIZES = {
    "4 ranks": Case(4, 160, 8, 128, 32),
    "1 rank with 256 experts": Case(1, 350, 8, 256, 256),
    "16 ranks": Case(16, 9, 4, 64, 4),
    "one of 16 experts": Case(2, 1100, 1, 16, 8),
    "one expert here": Case(3, 40, 2, 3, 1),
    "one expert in all": Case(1, 300, 1, 1, 1),
    "experts not a power of two": Case(3, 70, 6, 99, 33, alignment=24),
    "multiple 1": Case(3, 33, 5, 30, 10, alignment=1),
    "half the room": Case(4, 100, 8, 64, 16, room=0.13),
    "no room": Case(2, 20, 2, 8, 4, room=0),
    "no tokens": Case(2, 0, 2, 8, 4),
    "600 experts": Case(1, 50, 8, 600, 600, full=True),
    "more ranks than programs": Case(2, 5, 3, 40, 2, alignment=8, room=0.2),
    "600 experts of 50 ranks": Case(3, 50, 4, 600, 12, room=0.05),
    "three blocks of 2 ranks": Case(2, 120, 4, 16, 8, room=0.3, alignment=16, blocks=3),
    "blocks of a token": Case(4, 7, 3, 8, 4, room=0.5, alignment=1, blocks=7),
    "shares that are not equal": Case(2, 60, 3, 10, 4, room=0.5, alignment=8),
    "one source, half the room": Case(1, 200, 4, 8, 8, room=0.5),
}
LARGE = {
    "300 ranks": Case(300, 1, 1, 300, 1, alignment=4),
    "4 x 8192 x 8": Case(4, 8192, 8, 128, 32, full=True),
    "4 x 8192 x 8, 1.25 x balanced": Case(4, 8192, 8, 128, 32, room=0.3125, full=True),
    "4 x 128 x 8": Case(4, 128, 8, 128, 32, full=True),
    "1 x 8192 x 8 of 256": Case(1, 8192, 8, 256, 256, full=True),
    "16 x 8192 x 8 of 256": Case(16, 8192, 8, 256, 16),
    "2 x 4096 x 1 of 16": Case(2, 4096, 1, 16, 8, full=True),
    "8 x 32768 x 8": Case(8, 32768, 8, 128, 16),
}


def on_device(args: tuple[Any, ...]) -> list[Any]:
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


def check_kernels(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(FIELDS, got, want, strict=True):
        assert one.is_contiguous()
        assert_bitwise(one.cpu(), other, name)


@pytest.mark.parametrize("name", [*SIZES, *(pytest.param(name, marks=needs_gpu) for name in LARGE)])
def test_the_kernels_make_the_plan_of_the_reference(name):
    case = (SIZES | LARGE)[name]
    args = case.plan(case.tables())
    owners = case.E // case.e if case.E % case.e == 0 else 1
    running = torch.randint(0, 2 * case.T + 1, (2 * owners + 1,))
    got = running.to(DEVICE, copy=True)
    check_kernels(kernels.make_plan(*on_device(args), got), plan_rows.reference(*args, running))
    assert_bitwise(got.cpu(), running, "running counts")


def test_order_carries_over_the_tiles_of_a_program(monkeypatch):
    case = Case(2, 300, 8, 16, 8, full=True)
    experts, segments, _, _ = kernels._shape(case.e, case.W, case.T * case.K)
    three_tiles = 3 * segments * kernels.SEGMENT
    assert three_tiles // 3 * 2 < case.T * case.K < three_tiles
    monkeypatch.setattr(kernels, "_shape", lambda *sizes: (experts, segments, three_tiles, 1))
    tables = case.tables()
    check_kernels(kernels.make_plan(*on_device(case.plan(tables))), plan_rows.reference(*case.plan(tables), None))


@pytest.mark.parametrize("limit", [160, 96])
def test_a_table_with_room_for_more_tokens_is_planned_as_by_the_reference(limit):
    case = replace(SIZES["1 rank with 256 experts"], T=21)
    tables, (*sizes, _, _) = case.tables(), case.plan(case.tables())[3:]
    sizes[3] = 160
    args = *tables, *sizes, 32, limit
    check_kernels(kernels.make_plan(*on_device(args)), plan_rows.reference(*args, None))


def test_token_numbers_that_cannot_be_are_taken_for_none_or_all():
    case = replace(SIZES["4 ranks"], T=20)
    ids, weights, _ = case.tables()
    tables = ids, weights, torch.tensor([-5, 2**31 - 1, 20, 0], dtype=torch.int32)
    args = case.plan(tables)
    check_kernels(kernels.make_plan(*on_device(args)), plan_rows.reference(*args, None))


@needs_gpu
def test_the_op_passes_opcheck_on_a_gpu():
    case = SIZES["16 ranks"]
    tables = case.tables()
    opcheck(plan_rows.opdef, [*on_device(case.plan(tables)), None])


@needs_gpu
def test_a_captured_plan_follows_new_routing_and_never_waits():
    case = LARGE["4 x 8192 x 8, 1.25 x balanced"]
    tables = on_device(case.tables())

    def run() -> tuple[Tensor, ...]:
        return plan_rows(*case.plan(tables), None)

    run()
    with no_host_sync():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned = run()
    for seed in (1, 2):
        new = replace(case, full=False).tables(seed)
        for table, values in zip(tables, new):
            table.copy_(values)
        graph.replay()
        check_kernels(planned, plan_rows(*case.plan(new), None))
