"""The kernels of the plan equal their references bit for bit: on a GPU, or interpreted without one.

What a launcher allocates is filled with garbage first, so a number that no kernel writes shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from comms.cases import assert_bitwise
from mxep.comms import plan
from mxep.comms.kernels import plan as kernels
from quant.poison import poisoned_allocations as poisoned_allocations

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


CASES = {
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


def check_plan(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(FIELDS, got, want, strict=True):
        assert one.is_contiguous()
        assert_bitwise(one.cpu(), other, name)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=needs_gpu) for name in LARGE)])
def test_the_kernels_make_the_plan_of_the_reference(name):
    case = (CASES | LARGE)[name]
    args = case.plan(case.tables())
    owners = case.E // case.e if case.E % case.e == 0 else 1
    running = torch.randint(0, 2 * case.T + 1, (2 * owners + 1,))
    got = running.to(DEVICE, copy=True)
    check_plan(kernels.make_plan(*on_device(args), got), plan.plan_rows.reference(*args, running))
    assert_bitwise(got.cpu(), running, "running counts")


def test_order_carries_over_the_tiles_of_a_program(monkeypatch):
    case = Case(2, 300, 8, 16, 8, full=True)
    experts, segments, _, _ = kernels._shape(case.e, case.W, case.T * case.K)
    three_tiles = 3 * segments * kernels.SEGMENT
    assert three_tiles // 3 * 2 < case.T * case.K < three_tiles
    monkeypatch.setattr(kernels, "_shape", lambda *sizes: (experts, segments, three_tiles, 1))
    tables = case.tables()
    check_plan(kernels.make_plan(*on_device(case.plan(tables))), plan.plan_rows.reference(*case.plan(tables), None))


@pytest.mark.parametrize("limit", [160, 96])
def test_a_table_with_room_for_more_tokens_is_planned_as_by_the_reference(limit):
    case = replace(CASES["1 rank with 256 experts"], T=21)
    tables, (*sizes, _, _) = case.tables(), case.plan(case.tables())[3:]
    sizes[3] = 160
    args = *tables, *sizes, 32, limit
    check_plan(kernels.make_plan(*on_device(args)), plan.plan_rows.reference(*args, None))


def test_token_numbers_that_cannot_be_are_taken_for_none_or_all():
    case = replace(CASES["4 ranks"], T=20)
    ids, weights, _ = case.tables()
    tables = ids, weights, torch.tensor([-5, 2**31 - 1, 20, 0], dtype=torch.int32)
    args = case.plan(tables)
    check_plan(kernels.make_plan(*on_device(args)), plan.plan_rows.reference(*args, None))


@needs_gpu
def test_the_op_passes_opcheck_on_a_gpu():
    case = CASES["16 ranks"]
    tables = case.tables()
    opcheck(plan.plan_rows.opdef, [*on_device(case.plan(tables)), None])


@needs_gpu
def test_a_captured_plan_follows_new_routing_and_never_waits():
    case = LARGE["4 x 8192 x 8, 1.25 x balanced"]
    tables = on_device(case.tables())

    def run() -> tuple[Tensor, ...]:
        return plan.plan_rows(*case.plan(tables), None)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned = run()
    for seed in (1, 2):
        new = replace(case, full=False).tables(seed)
        for table, values in zip(tables, new):
            table.copy_(values)
        graph.replay()
        check_plan(planned, plan.plan_rows(*case.plan(new), None))
