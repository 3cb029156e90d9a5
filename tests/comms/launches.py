"""Kernels of mxep.comms as a model would launch them, for `python tests/ahead_of_time.py tests/comms/launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing). A line for
each variant that makes other code. `test_launches.py` wants no spills in any.
W ranks, T tokens of each, K experts a token, D elements of a row.
"""

import torch

from mxep.comms.kernels import plan, put, signals, sums
from mxep.comms.kernels.launch import Launch
from mxep.comms.layout import Layout

W, T, K, D = 4, 8192, 8, 7168


def tables(T: int, top_k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expert_ids, weights, num_tokens."""
    shape = W, T, top_k
    return torch.empty(shape, dtype=torch.int32), torch.empty(shape), torch.empty(W, dtype=torch.int32)


def make_plan(experts: int) -> None:
    """Of several sizes: kernels are compiled once for all."""
    for T, alignment in ((1, 1), (128, 32), (8192, 48)):
        plan.make_plan(*tables(T), experts, experts, alignment, W * T * K, 4 * experts)
    plan.make_plan(*tables(0), 0, experts - 1, 1, 0, 4 * (experts - 1))


def plan_destinations(experts: int) -> None:
    for T, alignment, rank in ((1, 1, 1), (128, 32, 0), (8192, 48, 3)):
        ids, _, num_tokens = tables(T)
        plan.plan_destinations(ids, num_tokens, rank, T, experts // W, alignment, W * T, experts)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def launch(step: str) -> Launch:
    pointers, state = torch.empty(W, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    return Launch(Layout(W, T, K, 2 * D, W * T), 1, pointers, state, step, 132, clock=True)


def put_mxfp8() -> None:
    payload = [torch.empty(T, width, dtype=torch.uint8) for width in (D, D // 32)]
    put.put_rows(launch("put_rows"), payload, ints(T, K), 32)


def return_sums() -> None:
    rows, out = torch.empty(65536, D, dtype=torch.bfloat16), torch.empty(T, D, dtype=torch.bfloat16)
    plan_of = ints(W * T, K), ints(W), ints(T, K)
    sums.return_sums(launch("return_sums"), rows, torch.empty(65536), *plan_of, 32, out, torch.empty(T, K))


def barrier() -> None:
    move = launch("barrier")
    signals.barrier(move.pointers, move.state, move.rank, move.clock)


LAUNCHES = {
    "barrier": barrier,
    "make_plan 256": lambda: make_plan(256),
    "plan_destinations 128": lambda: plan_destinations(128),
    "put_rows": put_mxfp8,
    "put_tables": lambda: put.put_tables(launch("put_tables"), ints(T, K), torch.empty(T, K), 32),
    "return_sums": return_sums,
}
