"""Kernels of mxep.comms as a model would launch them, for `python tests/ahead_of_time.py tests/comms/launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing). A line for
each variant that makes other code. `test_launches.py` wants no spills in any.
W ranks, T tokens of each, K experts a token, D elements of a row.
"""

from types import SimpleNamespace

import torch

from mxep.comms.kernels import all_to_all, plan, signals
from mxep.comms.kernels import rows as kernel_rows
from mxep.comms.kernels.exchange import KernelExchange
from mxep.comms.layout import Layout
from mxep.comms.transport import SymmetricBuffer

W, T, K, D = 4, 8192, 8, 7168


def tables(T: int, top_k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expert_ids, weights, num_tokens."""
    shape = W, T, top_k
    return torch.empty(shape, dtype=torch.int32), torch.empty(shape), torch.empty(W, dtype=torch.int32)


def make_plan(experts: int) -> None:
    """Of several sizes: kernels are compiled once for all."""
    for T, alignment in ((1, 1), (128, 32), (8192, 48)):
        plan.make_plan(*tables(T), experts, experts, alignment, W * T * K, 4 * experts, 1, T, W * T * K)
    plan.make_plan(*tables(0), 0, experts - 1, 1, 0, 4 * (experts - 1), 1, 0, 0)


def make_plan_of_many(ranks: int) -> None:
    """Of 4 experts each: shares of many sources."""
    shape = ranks, 512, K
    of = torch.empty(shape, dtype=torch.int32), torch.empty(shape), torch.empty(ranks, dtype=torch.int32)
    plan.make_plan(*of, 4, 4, 32, 512 * K, 4 * ranks, 1, 512, 512 * K)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def state() -> torch.Tensor:
    return torch.empty(4, dtype=torch.int64)


def exchange() -> KernelExchange:
    transport = SimpleNamespace(rank=1, state=state(), max_sms=132, clock=True, exchanges=0)
    return KernelExchange(transport, Layout(W, T, K, 2 * D), 32, None)


def buffer() -> SymmetricBuffer:
    return SymmetricBuffer(1, [], torch.empty(W, dtype=torch.int64))


def dispatch_mxfp8(number: torch.Tensor | None = None) -> None:
    payload = [torch.empty(T, width, dtype=torch.uint8) for width in (D, D // 32)]
    exchange().dispatch(buffer(), payload, ints(T, K), number=number)


def combine() -> None:
    rows, out = torch.empty(65536, D, dtype=torch.bfloat16), torch.empty(T, D, dtype=torch.bfloat16)
    of_slots = SimpleNamespace(slot_rows=ints(W * T, K), num_tokens=ints(W), dispatch=ints(1))
    exchange().combine(buffer(), rows, torch.empty(65536), of_slots, ints(T, K), out, torch.empty(T, K))


def plan_all_to_all(ranks: int) -> None:
    """Of several sizes: kernels are compiled once for all."""
    for T, experts in ((1, 1), (128, 32), (8192, 48)):
        all_to_all.plan_all_to_all(ints(T, K), torch.empty(T, K), experts, ranks, 7392)
    all_to_all.plan_all_to_all(ints(0, K), torch.empty(0, K), 5, ranks - 1, 48)


def headers() -> None:
    for rows in (1, 64, 99):
        of = torch.empty(rows, 7392, dtype=torch.uint8), torch.empty(W, 3, dtype=torch.int64), ints(1)
        all_to_all.compare_headers(*of, ints(1 + W), 3)


def join_rows(*widths: int, table: int = 0) -> None:
    """Of T K rows and of fewer: compiled once."""
    payload = [torch.empty(T, width, dtype=torch.uint8) for width in widths]
    first, other = (*payload, None)[:2]
    for count in (W + T * K, 1, 33):
        beside = torch.empty(count, table, dtype=torch.uint8) if table else None
        kernel_rows.join_rows(first, other, ints(count), beside, ints(1), 2)


def plan_slots(num_nodes: int) -> None:
    """Of several sizes: kernels are compiled once for all."""
    for T, slots in ((1, 1), (128, 16), (8192, 99)):
        of = ints(T, K), torch.empty(T, K), torch.empty(3, dtype=torch.int64)
        all_to_all.plan_slots(*of, num_nodes, slots, 16, 16 * num_nodes)


def tables_of_slots() -> None:
    for rows, experts in ((1, 1), (64, 16), (99, 5)):
        all_to_all.read_tables(torch.empty(rows, 8 * K, dtype=torch.uint8), experts, experts)
        all_to_all.pick_values(torch.empty(rows, K), ints(T, W), ints(T, K), experts)


LAUNCHES = {
    "nodes' plan of 64": lambda: plan_slots(64),
    "nodes' tables": tables_of_slots,
    "all_to_all's plan 256 ranks": lambda: plan_all_to_all(256),
    "headers": headers,
    "join mxfp8": lambda: join_rows(D, D // 32, table=8),
    "join bf16": lambda: join_rows(2 * D, table=8),
    "join combine": lambda: join_rows(2 * D, 4),
    "barrier": lambda: signals.barrier(buffer().pointers, state(), 1, True),
    "make_plan 256": lambda: make_plan(256),
    "make_plan 64 ranks": lambda: make_plan_of_many(64),
    "dispatch": dispatch_mxfp8,
    "redispatch": lambda: dispatch_mxfp8(ints(1)),
    "tables": lambda: exchange().dispatch_tables(buffer(), ints(T, K), torch.empty(T, K), ints(1)),
    "combine": combine,
}
