"""Ten thousand rounds of exchanges, every one checked on the device.

    torchrun --nproc-per-node 4 integration/benchmarks/marathon.py

Fresh skewed routing each round, random pauses on random ranks, two workspaces in turn or interleaved, forward and
backward mixed: a round sends, plans, maybe sends again along the plan of an earlier round, returns sums and numbers of
this round or of one before. Nothing but the moves synchronises ranks: each draws what all of them bring.

Payload bytes and rows are functions of (round, rank, token, column), small enough for exact sums in bf16. What differs
from what was brought is counted on the device and read at the end. With --graph the moves of a workspace are captured
once and replayed.
"""

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    RoutingPlan,
    SymmetricMemoryTransport,
    Workspace,
    combine,
    dispatch,
    gather_rows,
    make_plan,
)

MULTIPLE = 16


def pairs_of_rows(plan: RoutingPlan) -> Tensor:
    """(R_max,) int64 flat index slot * K + k of each row's pair, -1 on padding."""
    row = plan.slot_rows.flatten().long()
    pairs = torch.full((plan.max_rows + 1,), -1, device=row.device)
    flat = torch.arange(len(row), device=row.device)
    return pairs.scatter_(0, torch.where(row >= 0, row, plan.max_rows), flat)[: plan.max_rows]


class Round:
    """What all ranks bring: ids (W, T, K), drawn alike everywhere; the payload's salt."""

    def __init__(self, workspace: Workspace, generator: torch.Generator, salt: int) -> None:
        layout, device = workspace.layout, workspace.device
        shape = layout.world_size, layout.max_tokens, layout.top_k
        skew = random.Random(salt).choice((0.5, 1.0, 4.0, 20.0))
        drawn = torch.rand(shape, generator=generator, device=device)
        self.ids = (drawn**skew * workspace.num_experts).int().clamp_max(workspace.num_experts - 1)
        self.ids[torch.rand(shape, generator=generator, device=device) < 0.1] = -1
        self.salt = torch.tensor(salt, device=device)


class Lane:
    """A workspace, buffers that a captured graph reads, and the count of what was wrong."""

    def __init__(self, transport: SymmetricMemoryTransport, tokens: int, top_k: int, dim: int, experts: int) -> None:
        self.workspace = Workspace(transport, max_tokens=tokens, top_k=top_k, dim=dim, num_experts=experts)
        self.wrong = torch.zeros((), dtype=torch.int64, device=transport.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def bytes_of(self, rank: Tensor, token: Tensor, salt: Tensor) -> Tensor:
        column = torch.arange(self.workspace.dim, device=salt.device)
        return ((rank * 97 + token * 13 + column * 7 + (token + 1) * (column + 1) + salt * 29) % 251).to(torch.uint8)

    def value_of(self, rank: Tensor, token: Tensor, k: Tensor, salt: Tensor) -> Tensor:
        return (rank * 5 + token * 3 + k * 7 + salt) % 16

    def mine(self, ids: Tensor) -> Tensor:
        return ids[self.workspace.transport.rank]

    def send(self, ids: Tensor, salt: Tensor) -> RoutingPlan:
        """Send and plan; check rows, order and sizes of groups."""
        workspace, rank = self.workspace, self.workspace.transport.rank
        token = torch.arange(ids.shape[1], device=salt.device)[:, None]
        payload = (self.bytes_of(torch.full_like(token, rank), token, salt),)
        weights = self.mine(ids).float() + 0.5
        handle = dispatch(workspace, payload, self.mine(ids), weights, async_op=True)
        assert handle.tables is not None
        e = workspace.num_local_experts
        plan = make_plan(
            *handle.tables,
            first_expert=rank * e,
            num_local_experts=e,
            alignment=MULTIPLE,
            capacity=Capacity.worst_case(),
            num_experts=workspace.num_experts,
        )
        self.check_rows(handle.wait(), plan, salt)
        flat = ids.flatten().long() - rank * e
        here = (flat >= 0) & (flat < e)
        sizes = torch.zeros(e + 1, dtype=torch.int64, device=salt.device)
        sizes.scatter_add_(0, torch.where(here, flat, e), torch.ones_like(flat))
        self.wrong += (plan.group_sizes != sizes[:-1]).sum() + plan.overflow.sum() + plan.invalid
        expert = torch.searchsorted(plan.offs, torch.arange(plan.max_rows, device=salt.device), right=True)
        source = pairs_of_rows(plan)
        valid, pair = source >= 0, source.clamp_min(0)
        self.wrong += (valid & (flat[pair] != expert)).sum() + (valid.sum() - here.sum()).abs()
        self.wrong += (valid & (plan.row_weight != ids.flatten()[pair] + 0.5)).sum()
        return plan

    def check_rows(self, payload: tuple[Tensor, ...], plan: RoutingPlan, salt: Tensor) -> None:
        rows = gather_rows(payload, plan.row_slot)[0]
        slot = plan.row_slot.clamp_min(0)[:, None]
        tokens = self.workspace.max_tokens
        wanted = self.bytes_of(slot // tokens, slot % tokens, salt) * (plan.row_slot >= 0)[:, None]
        self.wrong += (rows != wanted).sum()

    def again(self, ids: Tensor, plan: RoutingPlan, salt: Tensor) -> None:
        """Other bytes along a plan that is there, as a backward does."""
        rank = self.workspace.transport.rank
        token = torch.arange(ids.shape[1], device=salt.device)[:, None]
        part = self.bytes_of(torch.full_like(token, rank), token, salt)
        self.check_rows(dispatch(self.workspace, (part,), self.mine(ids)).wait(), plan, salt)

    def home(self, ids: Tensor, plan: RoutingPlan, salt: Tensor) -> None:
        """Rows whose values tell where they belong; NaN wherever nothing may be read."""
        workspace = self.workspace
        tokens, top_k = workspace.max_tokens, workspace.top_k
        source = pairs_of_rows(plan)
        pair = source.clamp_min(0)
        rank, token, k = pair // (tokens * top_k), pair // top_k % tokens, pair % top_k
        column = torch.arange(workspace.dim, device=salt.device) % 3
        nothing = (source < 0)[:, None]
        value = self.value_of(rank, token, k, salt)[:, None]
        rows = (value + column).bfloat16().masked_fill(nothing, float("nan"))
        numbers = value.float().masked_fill(nothing, float("nan"))[:, 0]
        out, values = combine(workspace, rows, plan, self.mine(ids), row_values=numbers).wait()
        routed = self.mine(ids) >= 0
        token = torch.arange(tokens, device=salt.device)[:, None]
        k = torch.arange(top_k, device=salt.device)
        mine = self.value_of(torch.full_like(token, workspace.transport.rank), token, k, salt)
        wanted = ((mine[:, :, None] + column) * routed[:, :, None]).sum(1)
        self.wrong += (out != wanted).sum() + (values != mine * routed).sum()

    def all_of_it(self) -> None:
        plan = self.send(self.static_ids, self.static_salt)
        self.home(self.static_ids, plan, self.static_salt)
        self.again(self.static_ids, plan, self.static_salt + 1)
        self.home(self.static_ids, plan, self.static_salt + 2)

    def capture(self, generator: torch.Generator) -> None:
        first = Round(self.workspace, generator, 0)
        self.static_ids, self.static_salt = first.ids, first.salt
        for _ in range(2):
            self.all_of_it()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.all_of_it()

    def replay(self, brought: Round) -> None:
        assert self.graph is not None
        self.static_ids.copy_(brought.ids)
        self.static_salt.copy_(brought.salt)
        self.graph.replay()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--graph", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = SymmetricMemoryTransport(timeout=30)
    lanes = [Lane(transport, 320, 4, 512, 4 * world), Lane(transport, 37, 2, 48, 2 * world)]
    together, luck = random.Random(0), random.Random(rank + 1)
    generator = torch.Generator(device).manual_seed(7)
    if arguments.graph:
        for lane in lanes:
            lane.capture(generator)
    in_flight: list[tuple[Lane, Tensor, RoutingPlan]] = []
    started = time.monotonic()
    for number in range(arguments.rounds):
        lane = together.choice(lanes)
        brought = Round(lane.workspace, generator, number)
        if luck.random() < 0.2:
            torch.cuda._sleep(luck.choice((20_000, 200_000, 2_000_000)))
        if arguments.graph:
            lane.replay(brought)
            continue
        plan = lane.send(brought.ids, brought.salt)
        in_flight.append((lane, brought.ids, plan))
        while in_flight and (together.random() < 0.6 or len(in_flight) > 4):
            lane, ids, plan = in_flight.pop(together.randrange(len(in_flight)))
            if together.random() < 0.4:
                lane.again(ids, plan, brought.salt + 1)
            lane.home(ids, plan, brought.salt)
        if number % 1000 == 999:
            transport.check()
    torch.cuda.synchronize()
    transport.check()
    wrong = sum(int(lane.wrong) for lane in lanes)
    moves = transport.arena.exchanges
    print(
        f"rank {rank} of {world}: {arguments.rounds} rounds, {moves} moves{' captured' if arguments.graph else ''}, "
        f"{time.monotonic() - started:.0f} s, {wrong} wrong",
        flush=True,
    )
    assert wrong == 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
