"""What bench=comms times is right: every row, bit by bit, against what plain collectives and plain torch bring.

    slots     slot (s, t) = row t of rank s, for every t that this rank needs
    plan      that of the CPU kernel, from the gathered ids
    direct    row i = row of its slot, zero on padding
    return    sums of rows by hand, then an all-to-all of equal splits, then sums over ranks

Collective: all ranks go through all of it, whatever they find, and raise at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .comms_cases import Collective, Ours, Problem, everyone, pairs_by_owner


class Mismatch(RuntimeError):
    """Some move brought other bytes than it should."""


class Verification:
    """Collects what differs. wrong: a line for each tensor, with the first place."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.wrong: list[str] = []

    def close(self) -> None:
        """Raise Mismatch if anything differed."""
        if self.wrong:
            raise Mismatch("; ".join(self.wrong))

    def moves(self, ours: Ours, *, direct: bool) -> None:
        """All moves of a workspace, once. direct: those to groups, too."""
        p = self.problem
        self._plan(ours)
        here = (p.all_ids.div(p.local_experts, rounding_mode="floor") == p.rank).any(2).flatten()
        for name, payload in (("mxfp8", p.mxfp8), ("bf16", p.bf16)):
            wanted = [everyone(part).flatten(0, 1) for part in payload]
            slots, plan = ours.dispatch(payload)
            self._same_parts(f"dispatch {name}", slots.payload, wanted, here)
            self._same("dispatch's plan", plan.slot_rows, ours.plan.slot_rows)
            self._same_parts(f"dispatch {name}, again", ours.again(payload).payload, wanted, here)
            if direct and name == "mxfp8":
                valid = torch.arange(plan.max_rows, device=p.device) < plan.offs[-1]
                rows = [_take(part, plan.row_slot) for part in wanted]
                self._same_parts("direct", ours.direct().payload, rows, valid)
                self._same_parts("slots + gather", ours.grouped(), rows, valid)
        self._return(ours)

    def collective(self, collective: Collective, payload: Sequence[Tensor]) -> None:
        """It brings the rows of this rank's experts, by source and token, and takes them home again."""
        p = self.problem
        before = collective.sent.clone()
        got = collective.out().view(torch.uint8)
        rows = everyone(torch.cat(list(payload), 1))
        wanted = []
        for theirs, ids, sizes in zip(rows, p.all_ids, p.traffic.pairs):
            start = sum(sizes[: p.rank])
            wanted.append(theirs[pairs_by_owner(ids, p.local_experts)[start : start + sizes[p.rank]]])
        self._same("the collective", got, torch.cat(wanted))
        collective.sent.zero_()
        self._same("the collective, home", collective.home(), before)

    def _plan(self, ours: Ours) -> None:
        p, plan = self.problem, ours.plan
        weights, tokens = everyone(p.weights), torch.full((p.ranks,), p.shape.tokens, dtype=torch.int32)
        wanted = p.plan_of((p.all_ids.cpu(), weights.cpu(), tokens))
        lost = int(plan.overflow.sum())
        if lost or int(plan.invalid):
            self.wrong.append(f"plan: {lost} rows too many, {int(plan.invalid)} ids that are none")
        for name in ("offs", "group_sizes", "slot_rows"):
            self._same(f"plan.{name}", getattr(plan, name).cpu(), getattr(wanted, name))
        valid = torch.arange(wanted.max_rows) < wanted.offs[-1]
        for name in ("row_source", "row_slot", "row_weight"):
            self._same(f"plan.{name}", getattr(plan, name).cpu(), getattr(wanted, name), valid)

    def _return(self, ours: Ours) -> None:
        p, slot_rows = self.problem, ours.plan.slot_rows
        total = torch.zeros(len(slot_rows), p.shape.dim, device=p.device)
        for row in slot_rows.unbind(1):
            total += _take(ours.rows, row).float()
        wanted = torch.zeros(p.shape.tokens, p.shape.dim, device=p.device)
        for theirs in self._exchange(total.to(ours.rows.dtype)):
            wanted += theirs.float()
        of_pairs = torch.stack([_take(ours.values[:, None], row)[:, 0] for row in slot_rows.unbind(1)], 1)
        values = self._exchange(of_pairs).sum(0)  # one rank has the pair, others have zeroes
        out, _ = ours.back()
        self._same("return bf16", out, wanted.to(out.dtype))
        out, got = ours.back(ours.values)
        assert got is not None
        self._same("return bf16, values: rows", out, wanted.to(out.dtype))
        self._same("return bf16, values", got, values)

    def _exchange(self, mine: Tensor) -> Tensor:
        """(W * T, n) by the rank they are for -> (W, T, n) by the rank they are from."""
        there = torch.empty_like(mine)
        dist.all_to_all_single(there, mine)
        return there.view(self.problem.ranks, self.problem.shape.tokens, -1)

    def _same_parts(self, what: str, got: Sequence[Tensor], wanted: Sequence[Tensor], valid: Tensor) -> None:
        for i, (one, other) in enumerate(zip(got, wanted)):
            self._same(f"{what}, part {i}", one, other, valid)

    def _same(self, what: str, got: Tensor, wanted: Tensor, valid: Tensor | None = None) -> None:
        """live: (n,) bool, rows to look at."""
        if got.shape != wanted.shape:
            self.wrong.append(f"{what}: got shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
            return
        differs = _bits(got) != _bits(wanted)
        if valid is not None:
            differs &= valid.view(-1, *(1 for _ in range(differs.dim() - 1)))
        if count := int(differs.sum()):
            place = tuple(differs.nonzero()[0].tolist())
            self.wrong.append(f"{what}: at {place} got {got[place]}, wanted {wanted[place]}; {count} in all")


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by index, zeroes where it is negative."""
    return rows.index_select(0, index.clamp_min(0)).masked_fill_(index[:, None] < 0, 0)


def _bits(x: Tensor) -> Tensor:
    """So that NaN equals itself and -0 is not 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
