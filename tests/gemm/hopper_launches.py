"""The Gluon kernels of mxep.gemm, for `python tests/ahead_of_time.py tests/gemm/hopper_launches.py --target 90`."""

import torch

from mxep.gemm.kernels import hopper

M, N, K, G = 65536, 4096, 7168, 32
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def mm(dtype: torch.dtype = E4M3, bias: torch.dtype | None = None, out_dtype: torch.dtype = torch.bfloat16) -> None:
    a, w = torch.empty(M, K, dtype=dtype), torch.empty(G, N, K, dtype=E4M3)
    scales = torch.empty(M, 1, dtype=E8M0), torch.empty(G, N, 1, dtype=E8M0)
    given = None if bias is None else torch.empty(G, N, dtype=bias)
    hopper.grouped_mm(a, scales[0], w, scales[1], ends(), given, out_dtype)


def blocks() -> None:
    a, w = torch.empty(M, K, dtype=E4M3), torch.empty(G, N, K, dtype=E4M3)
    scales = torch.empty(M, 1, dtype=E8M0), torch.empty(G, N // 128, K // 128, dtype=torch.float32)
    hopper.grouped_mm(a, scales[0], w, scales[1], ends(), None, torch.bfloat16)


def row_scales(bias: torch.dtype | None = None, out_dtype: torch.dtype = torch.bfloat16) -> None:
    a, w = torch.empty(M, K, dtype=E4M3), torch.empty(G, N, K, dtype=E4M3)
    scales = torch.empty(M, 1, dtype=E8M0), torch.empty(G, N, 1, dtype=torch.float32)
    given = None if bias is None else torch.empty(G, N, dtype=bias)
    hopper.grouped_mm(a, scales[0], w, scales[1], ends(), given, out_dtype)


def linear(rows: int, bias: torch.dtype | None = None) -> None:
    a, w = torch.empty(rows, K, dtype=E4M3), torch.empty(1, N, K, dtype=E4M3)
    scales = torch.empty(rows, 1, dtype=E8M0), torch.empty(1, N, 1, dtype=E8M0)
    given = None if bias is None else torch.empty(1, N, dtype=bias)
    hopper.grouped_mm(a, scales[0], w, scales[1], None, given, torch.bfloat16)


def wgrad(
    dtype: torch.dtype = E4M3, out_dtype: torch.dtype = torch.bfloat16, *, add: bool = False, halves: bool = False
) -> None:
    y_t, x_t = torch.empty(N, M, dtype=dtype), torch.empty(K, M, dtype=E4M3)
    out = torch.empty((2, G, N // 2, K) if halves else (G, N, K), dtype=out_dtype)
    hopper.grouped_wgrad(out, y_t, x_t, ends(), ends(), add=add)


def bf16(*, bias: bool = False, across: bool = False, out_dtype: torch.dtype = torch.bfloat16) -> None:
    a, w = torch.empty(M, K, dtype=torch.bfloat16), torch.empty(G, N, K, dtype=torch.bfloat16)
    w = torch.empty(G, K, N, dtype=torch.bfloat16).mT if across else w
    hopper.bf16_grouped_mm(a, w, ends(), torch.empty(G, N) if bias else None, out_dtype)


def bf16_wgrad(out_dtype: torch.dtype = torch.bfloat16, *, add: bool = False, halves: bool = False) -> None:
    y, x = torch.empty(M, N, dtype=torch.bfloat16), torch.empty(M, K, dtype=torch.bfloat16)
    out = torch.empty((2, G, N // 2, K) if halves else (G, N, K), dtype=out_dtype)
    hopper.bf16_grouped_wgrad(out, y, x, ends(), add=add)


def ends() -> torch.Tensor:
    return torch.empty(G, dtype=torch.int32)


LAUNCHES = {
    "forward": mm,
    "forward E5M2, fp32": lambda: mm(E5M2, out_dtype=torch.float32),
    "forward bias": lambda: mm(bias=torch.bfloat16),
    "forward blocks": blocks,
    "forward row scales": row_scales,
    "forward row scales, bias": lambda: row_scales(torch.bfloat16),
    "forward row scales, fp32": lambda: row_scales(out_dtype=torch.float32),
    "linear": lambda: linear(8192),
    "linear of one row, bias": lambda: linear(1, torch.float32),
    "wgrad E5M2": lambda: wgrad(E5M2),
    "wgrad fp32": lambda: wgrad(out_dtype=torch.float32),
    "wgrad halves": lambda: wgrad(halves=True),
    "wgrad E5M2 halves add": lambda: wgrad(E5M2, torch.float32, add=True, halves=True),
    "wgrad add": lambda: wgrad(out_dtype=torch.float32, add=True),
    "wgrad add bf16": lambda: wgrad(add=True),
    "bf16": bf16,
    "bf16 across, bias": lambda: bf16(bias=True, across=True),
    "bf16 fp32": lambda: bf16(out_dtype=torch.float32),
    "bf16 wgrad": bf16_wgrad,
    "bf16 wgrad halves": lambda: bf16_wgrad(halves=True),
    "bf16 wgrad add": lambda: bf16_wgrad(torch.float32, add=True),
}
