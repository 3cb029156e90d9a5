"""What bench=comms times is right: every row, bit by bit, against what plain collectives and plain torch bring.

    slots     slot (s, t) = row t of rank s, for every t that this rank needs
    plan      that of the CPU kernel, from the gathered ids
    combine   sums of rows by hand, then an all-to-all of equal splits, then sums over ranks

Each dispatch carries other bytes than the one before it, so that what an earlier one left is no right answer.
Collective: all ranks go through all of it, whatever they find. A tensor is compared before the next call is made, which
may write its memory again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..collective import all_gather_tensor
from .comms_cases import Exchange


def differences(e: Exchange) -> list[str]:
    """Of all exchanges of a workspace, once, the tensors that differ in any bit."""
    # As bytes: NaN equals itself and -0 is not 0.
    return [
        what
        for what, got, wanted in _expected(e)
        if got.shape != wanted.shape or not got.flatten().view(torch.uint8).equal(wanted.flatten().view(torch.uint8))
    ]


def _expected(e: Exchange) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What a tensor is, the tensor, what it must be."""
    p = e.problem
    yield from _plan(e)
    needed = (p.all_ids.div(p.local_experts, rounding_mode="floor") == p.rank).any(2).flatten()
    for name, payload in (("mxfp8", p.mxfp8), ("bf16", p.bf16)):
        wanted = [all_gather_tensor(part).flatten(0, 1)[needed] for part in payload]
        slots, plan = e.dispatch(payload)
        yield from ((f"dispatch {name}", got[needed], part) for got, part in zip(slots.payload, wanted))
        yield f"dispatch {name}: plan", plan.slot_rows, e.plan.slot_rows
        slots = e.again([~part for part in payload])
        yield from ((f"dispatch {name}, again", got[needed], ~part) for got, part in zip(slots.payload, wanted))
    yield from _combine(e)


def _plan(e: Exchange) -> Iterator[tuple[str, Tensor, Tensor]]:
    ids, weights, tokens = (table.cpu() for table in e.problem.tables)
    wanted = e.problem.plan_of((ids, weights, tokens))
    for name in ("offs", "group_sizes", "slot_rows", "overflow", "invalid"):
        yield f"plan.{name}", getattr(e.plan, name).cpu(), getattr(wanted, name)
    yield "plan.overflow: none", wanted.overflow, torch.zeros_like(wanted.overflow)
    valid = slice(int(wanted.offs[-1]))
    for name in ("row_source", "row_slot", "row_weight"):
        yield f"plan.{name}", getattr(e.plan, name).cpu()[valid], getattr(wanted, name)[valid]


def _combine(e: Exchange) -> Iterator[tuple[str, Tensor, Tensor]]:
    slot_rows, p = e.plan.slot_rows.unbind(1), e.problem

    def exchanged(rows: Tensor) -> Tensor:
        """(W * T, n) by the rank they are for -> (W, T, n) by the rank they are from."""
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows)
        return arrived.view(p.ranks, p.shape.tokens, -1)

    def take(rows: Tensor, index: Tensor) -> Tensor:
        """Rows by index, zeroes where it is negative."""
        return rows.index_select(0, index.clamp_min(0)).masked_fill_(index[:, None] < 0, 0)

    zero = torch.zeros((), device=p.device)
    total = sum((take(e.rows, row).float() for row in slot_rows), zero)
    wanted = sum((theirs.float() for theirs in exchanged(total.to(e.rows.dtype))), zero).to(e.rows.dtype)
    of_pairs = torch.cat([take(e.values[:, None], row) for row in slot_rows], 1)
    values = exchanged(of_pairs).sum(0)  # one rank has the pair, others have zeroes
    yield "combine bf16", e.combine()[0], wanted
    out, got = e.combine(e.values)
    assert got is not None
    yield "combine bf16, values: rows", out, wanted
    yield "combine bf16, values", got, values
