"""Kernels of mxep.gemm as a model would launch them, for `python tests/ahead_of_time.py tests/gemm/launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing). A line for
each variant that makes other code: another layout, format, operand.
M rows, N out features, K in features, G groups.
"""

import torch

from mxep.gemm.kernels import dot_scaled, lora, router_ops

M, N, K, G = 65536, 4096, 7168, 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Operand = tuple[torch.Tensor, torch.Tensor]


def rows(m: int = M, k: int = K, dtype: torch.dtype = E4M3) -> Operand:
    """qdata along k and their scales."""
    return torch.empty(m, k, dtype=dtype), torch.empty(m, k // 32, dtype=torch.float8_e8m0fnu)


def slots() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qdata and scales side by side in the rows of a receive buffer, and the index that picks them."""
    buffer = torch.empty(M, K + K // 32, dtype=torch.uint8)
    qdata, scale = buffer[:, :K].view(E4M3), buffer[:, K:].view(torch.float8_e8m0fnu)
    return qdata, scale, torch.empty(M, dtype=torch.int32)


def weight(n: int = N, k: int = K, dtype: torch.dtype = E4M3) -> Operand:
    """As `quantize` stores it rowwise."""
    return torch.empty(G, n, k, dtype=dtype), torch.empty(G, n, k // 32, dtype=torch.float8_e8m0fnu)


def weight_colwise() -> Operand:
    """As dgrad sees what `quantize` stores along columns."""
    return torch.empty(G, K, N, dtype=E4M3), torch.empty(G, N // 32, K, dtype=torch.float8_e8m0fnu).mT


def tiles() -> Operand:
    return torch.empty(G, N, K, dtype=E4M3), torch.empty(G, N // 32, K // 32, dtype=torch.float8_e8m0fnu)


def tokens(d: int, dtype: torch.dtype = E4M3) -> Operand:
    """As `requantize` stores what wgrad contracts: along the rows."""
    return torch.empty(d, M, dtype=dtype).mT, torch.empty(M // 32, d, dtype=torch.float8_e8m0fnu)


def ends() -> torch.Tensor:
    return torch.empty(G, dtype=torch.int32)


def mm(a: tuple[torch.Tensor, ...], w: Operand, bias: torch.Tensor | None = None) -> None:
    qdata, scale, *index = a
    dot_scaled.grouped_mm(qdata, scale, index[0] if index else None, *w, ends(), bias, torch.bfloat16)


def transposed(operand: Operand) -> Operand:
    return operand[0].mT, operand[1].mT


def wgrad(dy_dtype: torch.dtype = E4M3, *, add: bool = False, halves: bool = False) -> None:
    shape = (2, G, N // 2, K) if halves else (G, N, K)
    out = torch.empty(shape, dtype=torch.float32 if add else torch.bfloat16)
    dot_scaled.grouped_wgrad(out, *tokens(N, dy_dtype), *tokens(K), ends(), add=add)


def fp32(T: int, D: int, E: int, dtype: torch.dtype = torch.float32) -> None:
    """A router's three products."""
    x, w, dy = torch.empty(T, D, dtype=torch.bfloat16), torch.empty(E, D, dtype=dtype), torch.empty(T, E)
    router_ops.fp32_linear(x, w)
    router_ops.fp32_dgrad(dy, w, x.dtype)
    router_ops.fp32_wgrad(dy, x, dtype)


def choose(T: int, E: int, k: int, softmax: bool, steered: bool) -> None:
    ids, weights, chosen = router_ops.top_k(torch.empty(T, E), torch.empty(T, E) if steered else None, k, softmax)
    router_ops.top_k_backward(weights, weights, ids, chosen, E, softmax)


def low_rank(*x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, transposed: bool = False) -> None:
    """LoRA's products, of rows (qdata, scale and an index, or plain) of width K."""
    parts = (*x, None, None)[:3]
    A = torch.empty(G, K, 16, dtype=dtype).mT if transposed else torch.empty(G, 16, K, dtype=dtype)
    inner, n = torch.empty(M, 16, dtype=dtype), torch.empty(M, K, dtype=dtype)
    lora.lora_shrink(*parts, A, ends(), 1.0, dtype)
    lora.lora_expand(n, inner, A.mT, ends())
    lora.lora_wgrad(A, inner, *parts, ends(), 1.0)


LAUNCHES = {
    "forward": lambda: mm(rows(), weight()),
    "forward of slots, bias": lambda: mm(slots(), weight(), bias=torch.empty(G, N)),
    "forward E5M2": lambda: mm(rows(dtype=E5M2), weight()),
    "forward tiles": lambda: mm(rows(), tiles()),
    "forward odd blocks": lambda: mm(rows(k=1440), weight(k=1440)),
    "dgrad": lambda: mm(rows(k=N), weight_colwise()),
    "dgrad E5M2": lambda: mm(rows(k=N, dtype=E5M2), weight_colwise()),
    "dgrad tiles": lambda: mm(rows(k=N), transposed(tiles())),
    "wgrad": wgrad,
    "wgrad add": lambda: wgrad(add=True),
    "wgrad E5M2": lambda: wgrad(E5M2),
    "wgrad halves": lambda: wgrad(halves=True),
    "fp32": lambda: fp32(8192, 2048, 128),
    "fp32 of bf16": lambda: fp32(8192, 2048, 128, torch.bfloat16),
    "fp32 60 experts": lambda: fp32(8192, 2880, 60),
    "fp32 384 experts": lambda: fp32(8192, 7168, 384),
    "lora of slots": lambda: low_rank(*slots()),
    "lora of a scale a row": lambda: low_rank(torch.empty(M, K, dtype=E4M3), rows(k=32)[1], transposed=True),
    "lora of gradients": lambda: low_rank(*rows(dtype=E5M2), transposed=True),
    "lora of bf16": lambda: low_rank(torch.empty(M, K, dtype=torch.bfloat16)),
    "lora of fp32": lambda: low_rank(torch.empty(M, K), dtype=torch.float32),
    "top_k": lambda: choose(8192, 128, 8, True, False),
    "top_k steered": lambda: choose(8192, 256, 8, False, True),
}
