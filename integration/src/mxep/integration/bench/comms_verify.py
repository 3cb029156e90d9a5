"""What bench=comms times is right: every row, bit by bit, against what plain collectives and plain torch bring.

    slots     slot (s, t) = row t of rank s, for every t that this rank needs
    plan      that of the CPU kernel, from the gathered ids
    combine   sums of rows by hand, then an all-to-all of equal splits, then sums over ranks

Each dispatch carries other bytes than the one before it, so that what an earlier one left is no right answer.
Collective: all ranks go through all of it, whatever they find. A tensor is compared before the next call is made, which
may write its memory again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..collective import all_gather_tensor
from .comms_cases import Collective, Exchange, Problem, pairs_by_owner

Expected = Iterator[tuple[str, Tensor, Tensor, Tensor | None]]
"""What a tensor is, the tensor, what it must be, and which of its rows count, (n,) bool, None for all."""


def differences(expected: Iterable[tuple[str, Tensor, Tensor, Tensor | None]]) -> list[str]:
    """A line for each tensor that differs in any bit, with the first place."""
    found = []
    for what, got, wanted, mask in expected:
        if got.shape != wanted.shape:
            found.append(f"{what}: got shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
            continue
        differs = _bits(got) != _bits(wanted)
        if mask is not None:
            differs &= mask.view(-1, *(1 for _ in range(differs.dim() - 1)))
        if count := int(differs.sum()):
            place = tuple(differs.nonzero()[0].tolist())
            found.append(f"{what}: at {place} got {got[place]}, wanted {wanted[place]}; {count} in all")
    return found


def exchange(e: Exchange) -> Expected:
    """All exchanges of a workspace, once."""
    p = e.problem
    yield from _plan(e)
    needed = (p.all_ids.div(p.local_experts, rounding_mode="floor") == p.rank).any(2).flatten()
    for name, payload in (("mxfp8", p.mxfp8), ("bf16", p.bf16)):
        wanted = [all_gather_tensor(part).flatten(0, 1) for part in payload]
        slots, plan = e.dispatch(payload)
        yield from _parts(f"dispatch {name}", slots.payload, wanted, needed)
        yield "dispatch's plan", plan.slot_rows, e.plan.slot_rows, None
        again = e.again([~part for part in payload])
        yield from _parts(f"dispatch {name}, again", again.payload, [~part for part in wanted], needed)
    yield from _combine(e)


def collective(c: Collective, p: Problem, payload: Sequence[Tensor]) -> Expected:
    """It brings the rows of this rank's experts, by source and token, and takes them back again."""
    before, wanted = c.sent.clone(), []
    c.received.view(torch.uint8).fill_(0xFF)
    for theirs, ids, sizes in zip(all_gather_tensor(torch.cat(list(payload), 1)), p.all_ids, p.traffic.pairs):
        start = sum(sizes[: p.rank])
        wanted.append(theirs[pairs_by_owner(ids, p.local_experts)[start : start + sizes[p.rank]]])
    yield "the collective", c.dispatch().view(torch.uint8), torch.cat(wanted), None
    c.sent.view(torch.uint8).fill_(0xFF)
    yield "the collective, combine", c.combine(), before, None


def _plan(e: Exchange) -> Expected:
    ids, weights, tokens = (table.cpu() for table in e.problem.tables)
    wanted = e.problem.plan_of((ids, weights, tokens))
    valid = torch.arange(wanted.max_rows) < wanted.offs[-1]
    for name in ("offs", "group_sizes", "slot_rows", "overflow", "invalid"):
        yield f"plan.{name}", getattr(e.plan, name).cpu(), getattr(wanted, name), None
    yield "plan.overflow", wanted.overflow, torch.zeros_like(wanted.overflow), None
    for name in ("row_source", "row_slot", "row_weight"):
        yield f"plan.{name}", getattr(e.plan, name).cpu(), getattr(wanted, name), valid


def _combine(e: Exchange) -> Expected:
    slot_rows, p = e.plan.slot_rows.unbind(1), e.problem

    def exchanged(rows: Tensor) -> Tensor:
        """(W * T, n) by the rank they are for -> (W, T, n) by the rank they are from."""
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows)
        return arrived.view(p.ranks, p.shape.tokens, -1)

    zero = torch.zeros((), device=p.device)
    total = sum((_take(e.rows, row).float() for row in slot_rows), zero)
    wanted = sum((theirs.float() for theirs in exchanged(total.to(e.rows.dtype))), zero).to(e.rows.dtype)
    of_pairs = torch.cat([_take(e.values[:, None], row) for row in slot_rows], 1)
    values = exchanged(of_pairs).sum(0)  # one rank has the pair, others have zeroes
    yield "combine bf16", e.combine()[0], wanted, None
    out, got = e.combine(e.values)
    assert got is not None
    yield "combine bf16, values: rows", out, wanted, None
    yield "combine bf16, values", got, values, None


def _parts(what: str, got: Sequence[Tensor], wanted: Sequence[Tensor], mask: Tensor) -> Expected:
    for i, (one, other) in enumerate(zip(got, wanted)):
        yield f"{what}, part {i}", one, other, mask


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by index, zeroes where it is negative."""
    return rows.index_select(0, index.clamp_min(0)).masked_fill_(index[:, None] < 0, 0)


def _bits(x: Tensor) -> Tensor:
    """So that NaN equals itself and -0 is not 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
