"""Payloads that show a misroute, routings worth testing, and the oracles that moves are compared with.

A payload's bytes are a function of (rank, token, column); the oracles use python loops and what plain collectives
brought, nothing of mxep.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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
