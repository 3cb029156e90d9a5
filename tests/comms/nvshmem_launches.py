"""Kernels of exchanges by puts, for `python tests/ahead_of_time.py tests/comms/nvshmem_launches.py`.

Apart from `launches.py`, as put and meet link NVSHMEM's device library, which takes some 10 s each.
"""

import torch

from mxep.comms.layout import Layout
from mxep.comms.nvshmem.exchange import compile_meet, compile_put, stage_sums, sum_arrived_slots
from mxep.comms.nvshmem.transport import device_library
from mxep.comms.plan import RoutingPlan

W, T, K, D = 4, 8192, 8, 7168


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def sums(dtype: torch.dtype, values: torch.Tensor | None) -> None:
    """Staged, and at home."""
    layout = Layout(W, T, K, 2 * dtype.itemsize * D)
    rows, buffer = torch.empty(65536, D, dtype=dtype), torch.empty(layout.nbytes, dtype=torch.uint8)
    plan = RoutingPlan.__new__(RoutingPlan)
    plan.__dict__.update(slot_rows=ints(W * T, K), num_tokens=ints(W))
    stage_sums(rows, values, plan, layout, torch.empty(W, dtype=torch.int64), buffer)
    home = None if values is None else torch.empty(T, K)
    sum_arrived_slots(layout, buffer, ints(T, K), 32, torch.empty(T, D, dtype=dtype), home)


LAUNCHES = {
    "put": lambda: compile_put(device_library()),
    "meet": lambda: compile_meet(device_library(), W),
    "sums bf16": lambda: sums(torch.bfloat16, torch.empty(65536)),
    "sums fp32": lambda: sums(torch.float32, None),
}
