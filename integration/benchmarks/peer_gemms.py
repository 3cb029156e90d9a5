"""The grouped GEMMs of peers.py's layers alone, operands quantized before: mxep, torch and DeepGEMM.

M routed tokens in E equal groups, N out features, K in features. A layer has two weights: w13 (N = 2F, K = D) and
w2 (N = D, K = F). Each has three GEMMs, see gemm.py. dB: SNR against the same GEMM in bf16.

DeepGEMM: m-grouped for forward and dgrad, k-grouped for wgrad, scales for 1 x 128 elements of rows and 128 x 128 of
weights. Its wgrad adds to fp32; the others write bf16.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import gemm
from benchmarks.peer_layers import Shape
from benchmarks.timer import Alternative, Call, Timer
from mxep.gemm import backends
from mxep.integration.metrics import snr

Row = dict[str, Any]


def deepgemm(product: str, p: gemm.Problem) -> Call:
    """Raises ImportError without it."""
    import deep_gemm
    from deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8

    ends = p.offs.tolist()
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    counts = torch.tensor(sizes, dtype=torch.int32, device=p.a.device)
    if product == "wgrad":

        def columns(x: Tensor) -> tuple[Tensor, Tensor]:
            """Per group (features, rows), one behind the other; scales (features, row blocks of all)."""
            parts = [per_token_cast_to_fp8(part.T.contiguous(), False) for part in x[: ends[-1]].split(sizes)]
            return torch.cat([qdata.flatten() for qdata, _ in parts]), torch.cat([scale for _, scale in parts], 1)

        operands = columns(p.dy), columns(p.a)
        dw = torch.empty(p.w.shape, dtype=torch.float32, device=p.w.device)
        zero = torch.zeros_like(dw)

        def wgrad() -> Tensor:
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*operands, dw, sizes, counts, zero, recipe=(1, 1, 128))
            return dw

        return wgrad
    rows, weight = (p.a, p.w) if product == "forward" else (p.dy, p.w.mT.contiguous())
    blocks = [per_block_cast_to_fp8(each, False) for each in weight]
    right = torch.stack([qdata for qdata, _ in blocks]), torch.stack([scale for _, scale in blocks])
    left = per_token_cast_to_fp8(rows, False)
    groups = torch.arange(len(sizes), dtype=torch.int32, device=p.a.device).repeat_interleave(counts)
    out = rows.new_empty(len(rows), weight.shape[1])

    def call() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            left, right, out, groups, recipe_a=(1, 128), recipe_b=(128, 128), disable_ue8m0_cast=True
        )
        return out

    return call


def measure(shapes: Sequence[Shape], names: Sequence[str], tokens: Sequence[int], result: Row) -> Iterator[Row]:
    """A row for each GEMM and peer; `result` gets the ceilings."""
    device = torch.device("cuda")
    timer = Timer(device, seconds=0.1, rounds=3)
    result["ceilings"] = gemm.ceilings(timer)
    backend = backends.select("auto", device)
    generator = torch.Generator(device).manual_seed(1)
    for shape, name, count in ((shape, name, count) for shape, name in zip(shapes, names) for count in tokens):
        m = count * shape.arriving * shape.top_k
        for weight, n, k in (("w13", 2 * shape.hidden, shape.dim), ("w2", shape.dim, shape.hidden)):
            at = gemm.At((m, n, k, shape.experts), backend, generator, timer)
            problems = at.problems(gemm.Problem.gaussian, lambda p: p.least_bytes("forward", 1))
            for product in gemm.PRODUCTS:
                makers = {what: make for what, make in gemm.products(product, backend).items() if "dense" not in what}
                makers["DeepGEMM"] = functools.partial(deepgemm, product)
                label = {"gemm": f"{name}, {count} tokens, {weight}: {m} x {n} x {k}", "product": product}
                for row in compare(timer, product, problems, makers):
                    yield label | row


def compare(
    timer: Timer, product: str, problems: Sequence[gemm.Problem], makers: dict[str, Callable[[gemm.Problem], Call]]
) -> Iterator[Row]:
    wanted = gemm.bf16_product(product, problems[-1])()
    found: dict[str, float] = {}

    def inspect(what: str, got: Tensor) -> None:
        found[what] = snr(wanted, got)

    def alternative(what: str, make: Callable[[gemm.Problem], Call]) -> Alternative:
        return Alternative(lambda: [make(p) for p in problems], "may", inspect=functools.partial(inspect, what))

    rows = timer.compare({what: alternative(what, make) for what, make in makers.items()})
    for what, row in rows.items():
        figures = {"TF": problems[0].flop / row["us"] / 1e6, "dB": found[what]} if "us" in row else {}
        yield {"what": what} | row | figures
