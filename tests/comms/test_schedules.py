"""Kernels of the moves in many orders: right to the bit, no access that nothing orders, nobody waits for ever.

And each line that makes it so is missed, in every order or in one of a few, if it is taken away.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comms.cases import payload
from comms.scheduled import Ranks, ScheduledContext
from comms.test_exchange import (
    assert_bitwise,
    bring_to,
    check_arrived,
    check_return,
    make_workspace,
    my_experts,
    plan_slots,
)
from mxep.comms import Workspace, send_rows, send_rows_to_groups
from mxep.comms.kernels import put, signals, sums
from schedule import Deadlock, Race, Schedule, mutate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels are not interpreted")
TOKENS = 5


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that five tokens make three chunks of two tiles, and programs take one or two tiles at a time."""
    monkeypatch.setattr(sums, "CHUNK_BYTES", 320)
    monkeypatch.setattr(sums, "TILE_BYTES", 1)


def play(body: Callable[..., Any], seed: int, *, world_size: int = 2, programs: int = 2, **options: Any) -> list[Any]:
    return Ranks(Schedule(seed, **options), world_size, programs).run(body)


def rounds(ctx: ScheduledContext, cases: tuple[str, ...] = ("random", "full", "duplicates")) -> None:
    workspace = make_workspace(ctx, max_tokens=TOKENS)
    for seed, case in enumerate(cases):
        everyone = [bring_to(workspace, case, rank, seed) for rank in range(ctx.world_size)]
        mine = everyone[ctx.rank]
        slots = send_rows(workspace, mine.parts, mine.ids, mine.weights)
        ctx.read(*slots.parts, slots.expert_ids, slots.weights, slots.num_tokens)
        plan = plan_slots(workspace, slots)
        check_arrived(slots, plan, everyone, my_experts(workspace, ctx.rank), case)
        check_return(ctx, workspace, plan, everyone, torch.bfloat16, seed, case)


@pytest.mark.parametrize(("world_size", "programs", "resident"), [(2, 2, None), (2, 1, None), (2, 3, 1), (3, 1, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_tokens_go_out_and_sums_come_home(seed, world_size, programs, resident):
    play(rounds, seed, world_size=world_size, programs=programs, resident=resident)
