"""Kernels of mxep.comms as a model would launch them, for `python tests/ahead_of_time.py tests/comms/launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing). A line for
each variant that makes other code. `test_launches.py` wants no spills in any.
W ranks, T tokens of each, K experts a token.
"""

import torch

from mxep.comms.kernels import plan

W, T, K = 4, 8192, 8


def tables(T: int, top_k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expert_ids, weights, num_tokens."""
    shape = W, T, top_k
    return torch.empty(shape, dtype=torch.int32), torch.empty(shape), torch.empty(W, dtype=torch.int32)


def make_plan(experts: int) -> None:
    """Of several sizes: kernels are compiled once for all."""
    for T, multiple in ((1, 1), (128, 32), (8192, 48)):
        plan.make_plan(*tables(T), experts, experts, multiple, W * T * K, 4 * experts)
    plan.make_plan(*tables(0), 0, 20 if experts == 32 else experts - 1, 1, 0, 2**31 - 1)


def plan_destinations(experts: int) -> None:
    for T, multiple, rank in ((1, 1, 1), (128, 32, 0), (8192, 48, 3)):
        ids, _, num_tokens = tables(T)
        plan.plan_destinations(ids, num_tokens, rank, T, experts // W, multiple, W * T, experts)


LAUNCHES = {
    "make_plan 32": lambda: make_plan(32),
    "make_plan 256": lambda: make_plan(256),
    "plan_destinations 128": lambda: plan_destinations(128),
}
