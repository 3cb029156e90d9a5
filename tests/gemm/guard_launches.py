"""The guard's kernels as a model would launch them, for `python tests/ahead_of_time.py tests/gemm/guard_launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing).
M rows, N out features, K in features, G groups.
"""

import torch

from mxep.gemm.kernels import guard

M, N, K, G = 65536, 4096, 7168, 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float8_e8m0fnu)


def counters() -> torch.Tensor:
    return numbers(5, dtype=torch.int64)


def moments(fmt: torch.dtype, blocks: int) -> torch.Tensor:
    return guard.moments(numbers(G, N, K, dtype=fmt), scales(G, N, blocks), scales(G, N, 1), numbers())


def check(fmt: torch.dtype, blocks: int, row_index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    a = numbers(M, K, dtype=fmt), scales(M, blocks), row_index, scales(M, 1)
    return guard.check(*a, numbers(4, G, K, dtype=torch.float32), numbers(G), numbers(), counters(), 1e-4)


LAUNCHES = {
    "trigger": lambda: guard.trigger(numbers(M), numbers(G, N), numbers(G), counters(), 8),
    "moments": lambda: moments(E4M3, K // 32),
    "moments E5M2 row-scaled": lambda: moments(E5M2, 1),
    "check": lambda: check(E4M3, K // 32, None),
    "check E5M2 of slots": lambda: check(E5M2, K // 32, numbers(M)),
    "check row-scaled": lambda: check(E4M3, 1, None),
}
