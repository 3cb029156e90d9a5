"""Payloads that show a misroute, routings worth testing, and the oracles that moves are compared with.

A payload's bytes are a function of (rank, token, column); the oracles use python loops and what plain collectives
brought, nothing of mxep.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import Capacity, Handle, RoutingPlan, Transport, Workspace, combine, dispatch, gather_rows, make_plan
from ranks import Context

CASES = (
    "random",
    "full",
    "not routed",
    "one rank",
    "one expert",
    "even experts",
    "duplicates",
    "no tokens on rank 0",
    "no tokens at all",
)


@dataclass(frozen=True)
class Sent:
    """What one rank brings to a move: parts (T, n_i), ids (T, K), weights (T, K), all on the CPU."""

    payload: tuple[Tensor, ...]
    ids: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "Sent":
        return Sent(tuple(part.to(device) for part in self.payload), self.ids.to(device), self.weights.to(device))


def content(rank: int, tokens: int, width: int, salt: int = 0) -> Tensor:
    """(tokens, width) uint8: bytes that no other (rank, token) has in the same columns."""
    token, column = torch.arange(tokens)[:, None], torch.arange(width)
    return ((rank * 97 + token * 13 + column * 7 + (token + 1) * (column + 1) + salt * 29) % 251).to(torch.uint8)


def bring(case: str, rank: int, *, max_tokens: int, top_k: int, num_experts: int, world_size: int, seed: int) -> Sent:
    """What ``rank`` brings in a case: the same on every process that asks for it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = max_tokens if case == "full" else int(torch.randint(max_tokens + 1, (), generator=generator))
    if case == "no tokens at all" or (case == "no tokens on rank 0" and rank == 0):
        tokens = 0
    choices = min(top_k, num_experts)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:choices] for _ in range(tokens + 1)])[:tokens]
    ids = torch.cat((ids, ids.new_full((tokens, top_k - choices), -1)), 1)
    if case == "not routed":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    elif case == "one rank":
        ids = ids % (num_experts // world_size)
    elif case == "one expert":
        ids[:, 1:] = -1
        ids[:, 0] = num_experts - 1
    elif case == "even experts":
        ids = ids // 2 * 2
    elif case == "duplicates":
        ids[:, -1] = ids[:, 0]
    weights = torch.rand(ids.shape, generator=generator)
    payload = (content(rank, tokens, 24, seed), content(rank, tokens, 3, seed + 1))
    return Sent(payload, ids.int(), weights)


def gather(group: dist.ProcessGroup, mine: Sent) -> list[Sent]:
    """Every rank's, through a plain collective."""
    everyone: list[Sent] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


@dataclass(frozen=True)
class Expected:
    """The plan as python sees it. pairs: per row that fits or is padding (rank, token, k) or None."""

    pairs: list[tuple[int, int, int] | None]
    offs: list[int]
    group_sizes: list[int]
    overflow: int

    def rows(self, everyone: list[Sent], part: int) -> Tensor:
        """The expert-major rows of a part, zero on padding."""
        zero = torch.zeros(everyone[0].payload[part].shape[1], dtype=torch.uint8)
        rows = [zero if pair is None else everyone[pair[0]].payload[part][pair[1]] for pair in self.pairs]
        return torch.stack(rows) if rows else zero[None][:0]


def expected_plan(everyone: list[Sent], experts: range, alignment: int, max_rows: int) -> Expected:
    """Of what fits: no level is tried but one by one, and an expert's rows are handed out one by one."""
    asked: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in experts]
    for rank, sent in enumerate(everyone):
        for token, row in enumerate(sent.ids.tolist()):
            for k, chosen in enumerate(row):
                if chosen in experts:
                    asked[chosen - experts.start].setdefault(rank, []).append((rank, token, k))
    sizes = [sum(map(len, by_rank.values())) for by_rank in asked]
    level = 0
    while level < max(sizes) and sum(min(n, level + 1) + -min(n, level + 1) % alignment for n in sizes) <= max_rows:
        level += 1
    pairs: list[tuple[int, int, int] | None] = []
    ends = []
    for by_rank, size in zip(asked, sizes):
        room, given = min(size, level), dict.fromkeys(by_rank, 0)
        while room:
            for rank in sorted(given):
                if room and given[rank] < len(by_rank[rank]):
                    given[rank] += 1
                    room -= 1
        pairs += [pair for rank in sorted(given) for pair in by_rank[rank][: given[rank]]]
        pairs += [None] * (-len(pairs) % alignment)
        ends.append(len(pairs))
    return Expected(pairs, ends, sizes, sum(sizes) - sum(pair is not None for pair in pairs))


def expert_outputs(sent: Sent, rank: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """What the experts make of a rank's tokens: (T, K, dim) rows and (T, K) fp32 values, the same on every process."""
    generator = torch.Generator().manual_seed(7777 * seed + rank)
    rows = torch.randn(*sent.ids.shape, dim, generator=generator).to(dtype)
    return rows, torch.randn(sent.ids.shape, generator=generator)


def expected_return(
    sent: Sent, outputs: Tensor, values: Tensor, lost: set[tuple[int, int]], *, experts_per_rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """(T, dim), (T, K): per rank fp32 sums in list order, rounded, summed in rank order. lost: (token, k) dropped."""
    out = torch.zeros(len(sent.ids), outputs.shape[2], dtype=outputs.dtype)
    kept = torch.zeros_like(values)
    for token, row in enumerate(sent.ids.tolist()):
        total = torch.zeros(outputs.shape[2])
        for rank in range(world_size):
            there = torch.zeros(outputs.shape[2])
            for k, expert in enumerate(row):
                if expert >= 0 and expert // experts_per_rank == rank and (token, k) not in lost:
                    there += outputs[token, k].float()
                    kept[token, k] = values[token, k]
            total += there.to(outputs.dtype).float()
        out[token] = total.to(outputs.dtype)
    return out, kept


def assert_bitwise(got: Tensor, wanted: Tensor, what: str) -> None:
    """Equal to the bit, NaN included; names the first place that differs."""
    assert got.shape == wanted.shape, f"{what}: got shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype, f"{what}: got {got.dtype}, wanted {wanted.dtype}"
    got, wanted = got.cpu().contiguous(), wanted.cpu().contiguous()
    if got.dim() == 0:
        got, wanted = got[None], wanted[None]
    differ = (got.view(torch.uint8) != wanted.view(torch.uint8)).nonzero()
    if len(differ):
        place = differ[0].tolist()
        place[-1] //= got.dtype.itemsize
        at = tuple(place)
        raise AssertionError(f"{what}: {len(differ)} bytes differ, first at {place}: {got[at]} for {wanted[at]}")


MAX_TOKENS, TOP_K, DIM = 6, 3, 20
EXPERTS_PER_RANK = {1: 5, 2: 3, 3: 2, 4: 2}


def make_workspace(
    ctx: Context, kind: type | None = None, *, timeout: float = 60.0, transport: Transport | None = None, **changes
) -> Workspace:
    sizes = {"max_tokens": MAX_TOKENS, "top_k": TOP_K, "dim": DIM, "row_bytes": 4 * DIM}
    sizes["num_experts"] = EXPERTS_PER_RANK[ctx.world_size] * ctx.world_size
    workspace = Workspace(transport or ctx.transport(kind, timeout=timeout), **{**sizes, **changes})
    poison(workspace)
    return workspace


def poison(workspace: Workspace) -> None:
    """NaN in every row and value, and tables that name real experts: whoever reads what nobody sent shows it."""
    for buffer in workspace.transport.buffers:
        buffer.local[workspace.layout.rows_start :].fill_(255)
        workspace.layout.ids(buffer.local).fill_(0)
        workspace.layout.num_tokens(buffer.local).fill_(workspace.max_tokens)
    workspace.transport.barrier("poison")


def bring_to(workspace: Workspace, case: str, rank: int, seed: int) -> Sent:
    sizes = {"max_tokens": workspace.max_tokens, "top_k": workspace.top_k, "num_experts": workspace.num_experts}
    return bring(case, rank, world_size=workspace.transport.world_size, seed=seed, **sizes)


def plan_slots(workspace: Workspace, handle: Handle, *, alignment: int = 4, capacity: Capacity | None = None):
    handle.wait()
    e = workspace.num_local_experts
    plan = make_plan(
        *handle.tables,
        first_expert=workspace.transport.rank * e,
        num_local_experts=e,
        alignment=alignment,
        capacity=capacity,
        num_experts=workspace.num_experts,
    )
    return dataclasses.replace(plan, dispatch=handle.number)


def cross(ctx: Context, workspace: Workspace, *, redispatch: bool = False) -> None:
    """Two dispatches, of which rank 1 takes the first for the second one, and the others the second."""
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    plans = [plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights)) for _ in range(2)]
    plan = plans[ctx.rank != 1]
    if redispatch:
        dispatch(workspace, mine.payload, mine.ids, plan=plan).wait()
    else:
        rows = torch.zeros(plan.max_rows, workspace.dim, dtype=torch.bfloat16, device=ctx.device)
        combine(workspace, rows, plan, mine.ids).wait()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    workspace.transport.check()


def my_experts(workspace: Workspace, rank: int) -> range:
    return range(rank * workspace.num_local_experts, (rank + 1) * workspace.num_local_experts)


def check_arrived(
    slots: tuple[torch.Tensor, ...], plan: RoutingPlan, everyone: list[Sent], experts: range, what: str
) -> None:
    """Every valid and padding row of the payload, gathered from the slots, is what loops make of what was sent."""
    wanted = expected_plan(everyone, experts, plan.alignment, plan.max_rows)
    assert plan.offs.tolist() == wanted.offs, what
    assert plan.group_sizes.tolist() == wanted.group_sizes, what
    assert int(plan.overflow[experts.start // len(experts)]) == wanted.overflow, what
    for part, rows in enumerate(gather_rows(slots, plan.row_slot)):
        assert_bitwise(rows[: len(wanted.pairs)], wanted.rows(everyone, part), f"{what}, part {part}")
    pairs = [None if pair is None else everyone[pair[0]].weights[pair[1], pair[2]] for pair in wanted.pairs]
    weights = torch.tensor([0.0 if weight is None else float(weight) for weight in pairs])
    assert_bitwise(plan.row_weight[: len(pairs)], weights, f"{what}, weights")


def expert_rows(workspace: Workspace, plan: RoutingPlan, everyone: list[Sent], dtype: torch.dtype, seed: int):
    """(R_max, D) rows and (R_max,) values that this rank's experts give, NaN where nothing may be read."""
    rows = torch.full((plan.max_rows, workspace.dim), float("nan"), dtype=dtype)
    values = torch.full((plan.max_rows, 2), float("nan"))[:, 0]  # not contiguous
    outputs = [expert_outputs(sent, rank, workspace.dim, dtype, seed) for rank, sent in enumerate(everyone)]
    for pair, row in enumerate(plan.slot_rows.flatten().tolist()):
        if row >= 0:
            slot, k = divmod(pair, workspace.top_k)
            rank, token = divmod(slot, workspace.max_tokens)
            rows[row], values[row] = outputs[rank][0][token, k], outputs[rank][1][token, k]
    return rows.to(workspace.device), values.to(workspace.device)


def lost_pairs(workspace: Workspace, everyone: list[Sent], rank: int, alignment: int, max_rows: int) -> set:
    """(token, k) of this rank that did not fit the capacity of the rank they went to."""
    lost = set()
    for owner in range(workspace.transport.world_size):
        everything, kept = (
            expected_plan(everyone, my_experts(workspace, owner), alignment, rows).pairs for rows in (10**9, max_rows)
        )
        lost |= {pair[1:] for pair in set(everything) - set(kept) if pair is not None and pair[0] == rank}
    return lost


def check_return(ctx: Context, workspace: Workspace, plan, everyone, dtype, seed: int, what: str) -> None:
    mine = everyone[ctx.rank]
    rows, values = expert_rows(workspace, plan, everyone, dtype, seed)
    out, back = combine(workspace, rows, plan, mine.ids.to(ctx.device), row_values=values).wait()
    lost = lost_pairs(workspace, everyone, ctx.rank, plan.alignment, plan.max_rows)
    sizes = {"experts_per_rank": workspace.num_local_experts, "world_size": ctx.world_size}
    outputs = expert_outputs(mine, ctx.rank, workspace.dim, dtype, seed)
    wanted, wanted_values = expected_return(mine, *outputs, lost, **sizes)
    assert_bitwise(out, wanted, f"{what}, sums")
    assert_bitwise(back, wanted_values, f"{what}, values")
