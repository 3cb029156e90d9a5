"""Compare mxep with its peers on one GPU: a layer, forward and backward (docs/lab/peers.md has packages and figures).

    python integration/benchmarks/peers.py --out layers.json

Each peer has one process for the whole run. For each shape and number of tokens, this process writes the results of an
fp64 reference into a file. Then each peer makes the same inputs from the same seed, compiles, runs, and reports SNR and
memory. Finally all are timed in turn, `rounds` times, in shuffled orders. A peer over its time limit is ended, and its
row says so. No peer's code is copied here; one that is not installed raises ImportError.

T tokens, K experts a token, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.baseline import PAD, BaselineLayer, Product, bf16_product
from benchmarks.script import describe, free_memory, gradients, save, synchronize
from mxep.ep import run_experts
from mxep.ep.dispatchers import LocalDispatcher
from mxep.gemm import Recipe, quantize_weights_once
from mxep.integration.metrics import snr
from mxep.integration.report import Row, shortened
from mxep.integration.verify import Problem, moe_layer

RESULTS = ("out", "dx", "d_weights", "d_gate_up", "d_down")
WARM_STEPS = 4  # after the first; mxep replays from the third call of a shape on
LEAD_SECONDS = 0.1  # of a stretch, not timed
LEAST_FREE = 0.45  # share of device memory; with less, a process frees its inputs until its next stretch
CACHES = {"TRITON_CACHE_AUTOTUNING": "1", "QUACK_CACHE_AUTOTUNING": "1"}
"""Environment of a measurement: peers cache their autotuning for the next run."""


class Shape(NamedTuple):
    """D, F, E, K. arriving: tokens that arrive per token of this rank."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    arriving: int = 1

    def flop(self, tokens: int) -> float:
        """Floating-point operations of forward and backward."""
        return 18.0 * tokens * self.arriving * self.top_k * self.dim * self.hidden

    def draw(self, tokens: int, device: torch.device) -> Problem:
        """Draw the same bf16 values in every process on one kind of device. Experts are uniformly random."""
        generator = torch.Generator(device).manual_seed(1)
        tokens *= self.arriving

        def normal(*sizes: int, std: float = 1.0) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, device=device, generator=generator).mul_(std)

        scores = torch.rand(tokens, self.experts, dtype=torch.float32, device=device, generator=generator)
        weights, ids = scores.topk(self.top_k)
        x, d_out = normal(tokens, self.dim), normal(tokens, self.dim)
        w13 = normal(self.experts, 2 * self.hidden, self.dim, std=self.dim**-0.5)
        w2 = normal(self.experts, self.dim, self.hidden, std=self.hidden**-0.5)
        return Problem(x, d_out, ids.int(), weights / weights.sum(1, keepdim=True), w13, w2)


# One rank of 8: E / 8 experts, T K token copies. A token of DeepSeek-V3 goes to 8 experts in 4 of 8 groups, so to 2
# experts on each of 4 ranks: 8 ranks with T tokens send a rank 4 T tokens with 2 experts each. Qwen3 is treated alike.
SHAPES = {
    "Qwen3-30B, rank of 8": Shape(2048, 768, 16, 2, 4),
    "Qwen3-235B, rank of 8": Shape(4096, 1536, 16, 2, 4),
    "DeepSeek-V3, rank of 8": Shape(7168, 2048, 32, 2, 4),
    "Mixtral 8x7B": Shape(4096, 14336, 8, 2),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "tiny": Shape(64, 32, 4, 2),
}


def reference(p: Problem) -> dict[str, Tensor]:
    """All RESULTS, computed in fp64, as fp32 on the host."""
    double = {name: each.double() for name, each in vars(p).items() if name != "expert_ids"}
    found = moe_layer(dataclasses.replace(p, **double))
    return {name: each.float().cpu() for name, each in zip(RESULTS, vars(found).values())}


@dataclass(frozen=True)
class Layer:
    """call: forward. leaves: x, weights, w13, w2. gate_first: changes w13's layout to (E, 2F, D), gate first."""

    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    gate_first: Callable[[Tensor], Tensor] = lambda w13: w13


def leaves(p: Problem, w13: Tensor | None = None) -> tuple[Tensor, ...]:
    own = p.gate_up_proj if w13 is None else w13
    return tuple(each.detach().requires_grad_() for each in (p.x, p.weights, own, p.down_proj))


def pipeline(p: Problem, product: Product = bf16_product, pad: int = PAD) -> Layer:
    """The baseline's gathers, SwiGLU and weighted sum around a grouped GEMM."""
    x, weights, w13, w2 = leaves(p)
    layer = BaselineLayer(w13, w2, product=product, pad=pad)
    return Layer(lambda: layer(x, p.expert_ids, weights), (x, weights, w13, w2))


def torchao_row(p: Problem) -> Layer:
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

    return pipeline(p, lambda a, w, offs: grouped_mm(a, w.mT, offs, pad_token_groups_for_grouped_mm=False))


def torchao_block(p: Problem) -> Layer:
    import deep_gemm  # noqa: F401  # without it torchao would emulate, and say nothing
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

    product = grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm
    return pipeline(p, lambda a, w, offs: product(a, w.mT, offs, pad_token_groups_for_grouped_mm=False), 128)


def sonic(p: Problem) -> Layer:
    """Its default layout alternates rows of gate and up."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    experts, wide, _ = p.gate_up_proj.shape
    w13 = p.gate_up_proj.unflatten(1, (2, wide // 2)).transpose(1, 2).flatten(1, 2).contiguous()
    x, weights, w13, w2 = leaves(p, w13)
    tokens, top_k = p.expert_ids.shape
    token = torch.arange(tokens, dtype=torch.int32, device=x.device).repeat_interleave(top_k)
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> Tensor:
        pairs = weights.flatten(), token, p.expert_ids.flatten()
        projections = w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
        out: Tensor = moe_general_routing_inputs(x, *pairs, *projections, experts, stream, ActivationType.SWIGLU)[0]
        return out

    gate_first = lambda w: w.unflatten(1, (wide // 2, 2)).transpose(1, 2).flatten(1, 2)  # noqa: E731
    return Layer(call, (x, weights, w13, w2), gate_first)


def scattermoe(p: Problem) -> Layer:
    """GLUMLP stores up before gate, and needs routing weights in the dtype of x."""
    from scattermoe.mlp import GLUMLP

    (experts, wide, dim), top_k = p.gate_up_proj.shape, p.expert_ids.shape[1]
    up_first = lambda w: torch.cat(w.chunk(2, 1)[::-1], 1)  # noqa: E731
    x, weights, w13, w2 = leaves(p, up_first(p.gate_up_proj))
    with torch.device("meta"):
        mlp = GLUMLP(dim, wide // 2, experts, top_k)
    mlp.experts.weight, mlp.output_experts.weight = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
    w13, w2, ids = mlp.experts.weight, mlp.output_experts.weight, p.expert_ids.long()
    return Layer(lambda: mlp(x, weights.to(x.dtype), ids), (x, weights, w13, w2), up_first)


def mxep(p: Problem, name: str) -> Layer:
    x, weights, w13, w2 = leaves(p)
    how: dict[str, Any] = {"dispatcher": LocalDispatcher(len(w13)), "recipe": Recipe.named(name)}
    return Layer(lambda: run_experts(x, p.expert_ids, weights, w13, w2, **how)[0], (x, weights, w13, w2))


KEPT = ", kept"  # within quantize_weights_once
PEERS: dict[str, Callable[[Problem], Layer]] = {
    "grouped_mm bf16": pipeline,
    "ScatterMoE bf16": scattermoe,
    "SonicMoE bf16": sonic,
    "torchao fp8 row": torchao_row,
    "torchao fp8 block": torchao_block,
    "mxep bf16": functools.partial(mxep, name="bf16"),
    "mxep fp8": functools.partial(mxep, name="fp8"),
    "mxep mxfp8": functools.partial(mxep, name="mxfp8"),
    f"mxep mxfp8{KEPT}": functools.partial(mxep, name="mxfp8"),
}

worker: Worker  # of this process


class Worker:
    """A peer in its own process, at one shape and number of tokens at a time."""

    def __init__(self, peer: str, device: torch.device) -> None:
        self.peer, self.device, self.cuda = peer, device, device.type == "cuda"
        self.stack = contextlib.ExitStack()
        self.at: tuple[str, int] | None = None
        self.layer: Layer | None = None
        self.d_out: Tensor | None = None

    def prepare(self, shape: str, tokens: int, file: str | None) -> Row:
        """Compile and warm up. Returns SNR against the reference in `file`, and bytes above inputs."""
        self.release()
        if self.at is not None and self.at[0] != shape:
            torch._dynamo.reset()  # other widths would be variables of its code
        self.at = shape, tokens
        began = time.perf_counter()
        layer = self._make()
        before = torch.cuda.memory_allocated()
        self.step()
        synchronize()
        row: Row = {"first step s": time.perf_counter() - began}
        for _ in range(WARM_STEPS):
            self.step()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        got = self.step()
        synchronize()
        if self.cuda:
            row["peak"] = torch.cuda.max_memory_allocated() - before
        if file:
            expected = torch.load(file, mmap=True)
            got[3] = layer.gate_first(got[3])
            row["dB"] = {name: snr(expected[name], each) for name, each in zip(RESULTS, got)}
        del got
        if self.cuda:
            out = layer.call()
            row["kept"] = torch.cuda.memory_allocated() - before - out.nbytes
            gradients(out, layer.leaves, self.d_out)
        self._make_room()
        return row

    def stretch(self, seconds: float) -> Row:
        """Milliseconds of a step. The host syncs every five steps; training loops do so more often."""
        if self.layer is None:
            self._make()
            for _ in range(WARM_STEPS):
                self.step()
        for least in (min(LEAD_SECONDS, seconds), seconds):
            synchronize()
            began, took, steps = time.perf_counter(), 0.0, 0
            while took < least:
                for _ in range(5):
                    self.step()
                synchronize()
                steps += 5
                took = time.perf_counter() - began
        self._make_room()
        return {"ms": 1e3 * took / steps}

    def release(self) -> Row:
        self.layer = self.d_out = None
        self.stack.close()
        free_memory()
        return {}

    def step(self) -> list[Tensor]:
        assert self.layer is not None
        out = self.layer.call()
        return [out.detach(), *gradients(out, self.layer.leaves, self.d_out)]

    def _make(self) -> Layer:
        assert self.at is not None
        p = SHAPES[self.at[0]].draw(self.at[1], self.device)
        if self.peer.endswith(KEPT):
            self.stack.enter_context(quantize_weights_once())
        self.d_out, self.layer = p.d_out, PEERS[self.peer](p)
        return self.layer

    def _make_room(self) -> None:
        """Free the allocator's cache, and also the inputs if other processes could run out of memory."""
        if self.cuda:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            if free < LEAST_FREE * total:
                self.release()


def begin(peer: str, device: str) -> None:
    global worker
    worker = Worker(peer, torch.device(device))


def call(method: str, *args: Any) -> Row:
    """Run a method of this process's worker."""
    try:
        row: Row = getattr(worker, method)(*args)
    except Exception as error:
        traceback.print_exc()
        row = {"error": describe(error)}
        worker.release()
    return row


class Process:
    """A peer's process. `ask` starts it if it does not run."""

    def __init__(self, peer: str, given: argparse.Namespace) -> None:
        self.peer, self.given = peer, given
        self.pool: ProcessPoolExecutor | None = None

    def ask(self, method: str, *args: Any) -> Row:
        """Run a method of Worker. Returns {"error": why} if it takes longer than the limit or the process ends."""
        if self.pool is None:
            start = self.peer, self.given.device
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin, start)
        try:
            answer = self.pool.submit(call, method, *args).result(self.given.limit)
            ended = "CUDA error" in answer.get("error", "")  # the process cannot recover from it
        except (TimeoutError, BrokenProcessPool) as error:
            late = f"no answer within {self.given.limit:.0f} s"
            answer = {"error": f"{method}: {late if isinstance(error, TimeoutError) else 'the process ended'}"}
            ended = True
        log(f"{self.peer}: {json.dumps(shortened(answer))}")
        if ended:
            self.close()
        return answer

    def close(self) -> None:
        if self.pool is not None:
            for process in list(self.pool._processes.values()):
                process.kill()
            self.pool.shutdown()
        self.pool = None


def compare(given: argparse.Namespace) -> None:
    """Write the result after each shape and number of tokens."""
    os.environ |= CACHES
    began, rows = time.monotonic(), list[Row]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = {peer: Process(peer, given) for peer in given.peers}
        for process in processes.values():
            stack.callback(process.close)
        for shape, tokens in itertools.product(given.shapes, given.tokens):
            found = cell(given, processes, shape, tokens, str(Path(folder, "reference.pt")))
            rows += [shortened(row) for row in found]
            save(given.out, rows, given.commit, seconds=round(time.monotonic() - began))


def cell(given: argparse.Namespace, processes: dict[str, Process], shape: str, tokens: int, file: str) -> list[Row]:
    """Rows of all peers at a shape and number of tokens. file: for the reference's results."""
    sizes, note, rows = SHAPES[shape], {}, dict[str, Row]()
    name = {"shape": shape, "sizes": list(sizes), "tokens": tokens}
    name["rows an expert"] = tokens * sizes.arriving * sizes.top_k / sizes.experts
    log(f"{shape}, {tokens} tokens")
    try:
        torch.serialization.set_crc32_options(False)  # gigabytes
        torch.save(reference(sizes.draw(tokens, torch.device(given.device))), file)
    except torch.OutOfMemoryError as error:
        note = {"note": f"no reference: {describe(error)}"}
    free_memory()
    for peer, process in processes.items():
        rows[peer] = name | {"peer": peer} | note | process.ask("prepare", shape, tokens, None if note else file)
    times: dict[str, list[float]] = {peer: [] for peer, row in rows.items() if "error" not in row}
    for turn in range(given.rounds):
        for peer in random.Random(turn).sample(list(times), len(times)):
            if "error" not in rows[peer]:
                row = processes[peer].ask("stretch", given.seconds)
                times[peer] += [row["ms"]] if "ms" in row else []
                rows[peer] |= {key: value for key, value in row.items() if key == "error"}
    for peer, ms in times.items():
        if ms:
            median = statistics.median(ms)
            rows[peer] |= {"ms": median, "spread": max(ms) / min(ms) - 1, "TF": sizes.flop(tokens) / median / 1e9}
    for process in processes.values():
        if process.pool is not None:
            process.ask("release")
    return list(rows.values())


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--seconds", type=float, default=0.3, help="of a stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=200, help="seconds for an answer of a peer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="the code's version, where there is no git")
    compare(parser.parse_args(argv))


if __name__ == "__main__":
    main()
