"""Compare mxep with its peers on one GPU: layers, forward + backward.

    python integration/benchmarks/peers.py layers --out layers.json
    python integration/benchmarks/peers.py table layers.json --out docs/results/peers-h100

docs/lab/peers.md lists the peers, their packages, and the method. Each run writes one JSON file; `table` makes OUT.md
and OUT.svg from such files.

layers: each peer has one process for the whole run. For each shape and number of tokens, another process computes the
layer in fp64. Each peer then makes the same inputs from the same seed, compiles, runs, and reports SNR and memory.
Finally all are timed in turn, `rounds` times, in shuffled orders. A peer over its time limit is ended, and its row says
so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_layers import PACKAGES, PEERS, RESULTS, SHAPES, Inputs, Layer, Shape, reference
from benchmarks.peer_table import by_cell, markdown, picture
from benchmarks.script import free_memory, synchronize
from mxep.integration.metrics import snr
from mxep.integration.results import provenance, shortened
from mxep.integration.results import write_json as write

Row = dict[str, Any]

REFERENCE = "reference"
WARM_STEPS = 4  # after the first; mxep replays from the third call of a shape on
LEAD_SECONDS = 0.1  # of a stretch, not timed
LEAST_FREE = 0.45  # share of device memory; with less, a process frees its inputs until its next stretch
LATE = "no answer within"
CACHES = {"TRITON_CACHE_AUTOTUNING": "1", "QUACK_CACHE_AUTOTUNING": "1"}
"""Environment of a measurement: peers cache their autotuning for the next run."""

worker: Worker  # of this process


class Worker:
    """A peer in its own process, at one shape and number of tokens at a time."""

    def __init__(self, peer: str, device: torch.device) -> None:
        self.peer, self.device, self.cuda = peer, device, device.type == "cuda"
        self.stack = contextlib.ExitStack()
        self.at: tuple[Shape, int] | None = None
        self.layer: Layer | None = None
        self.d_out: Tensor | None = None

    def refer(self, shape: str, tokens: int, file: str) -> Row:
        """Write the fp64 reference's results into a file."""
        torch.serialization.set_crc32_options(False)  # gigabytes
        torch.save(reference(Inputs.draw(SHAPES[shape], tokens, self.device)), file)
        return self.release()

    def prepare(self, shape: str, tokens: int, file: str | None) -> Row:
        """Compile and warm up. Returns SNR against the reference in `file`, and bytes above inputs."""
        self.release()
        if self.at is not None and self.at[0] != SHAPES[shape]:
            importlib.import_module("torch._dynamo").reset()  # other widths would be variables of its code
        self.at = SHAPES[shape], tokens
        began = time.perf_counter()
        layer, before = self._make(), torch.cuda.memory_allocated()
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
            wanted = torch.load(file, mmap=True)
            got[3] = layer.gate_first(got[3])
            row["dB"] = {name: snr(wanted[name], each) for name, each in zip(RESULTS, got)}
        del got
        if self.cuda:
            out = layer.call()
            row["kept"] = torch.cuda.memory_allocated() - before - out.nbytes
            torch.autograd.grad(out, layer.leaves, self.d_out)
        self._make_room()
        return row

    def stretch(self, seconds: float) -> Row:
        """Milliseconds of a step. The host syncs every five steps; training loops do so more often."""
        if self.layer is None:
            self._make()
            for _ in range(WARM_STEPS):
                self.step()
        for least in (LEAD_SECONDS, seconds):
            synchronize()
            began, steps = time.perf_counter(), 0
            while (took := time.perf_counter() - began) < min(least, seconds) or not steps:
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
        return [out.detach(), *torch.autograd.grad(out, self.layer.leaves, self.d_out)]

    def _make(self) -> Layer:
        assert self.at is not None
        given = Inputs.draw(*self.at, self.device)
        self.d_out, self.layer = given.d_out, PEERS[self.peer](given, self.stack)
        return self.layer

    def _make_room(self) -> None:
        """Free the allocator's cache, and also the inputs if other processes could run out of memory."""
        if self.cuda:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            if free < LEAST_FREE * total:
                self.release()


def begin(peer: str, device: str, log: str) -> None:
    """Start a peer's process. The file `log` gets everything that it prints."""
    global worker
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    worker = Worker(peer, torch.device(device))


def call(method: str, *args: Any) -> Row:
    """Run a method of this process's worker."""
    try:
        row: Row = getattr(worker, method)(*args)
    except Exception as error:
        traceback.print_exc()
        row = {"error": last_line(f"{type(error).__name__}: {error}")}
        worker.release()
    return row


def last_line(text: str) -> str:
    """The last nonempty line, at most 160 characters, for a cell of a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160].replace("|", "/") if lines else "no message"


class Process:
    """A peer's process. `ask` starts it if it does not run."""

    def __init__(self, peer: str, device: str, logs: Path) -> None:
        self.peer, self.device, self.log = peer, device, logs / f"{peer.replace(' ', '_')}.log"
        self.pool: ProcessPoolExecutor | None = None

    def ask(self, limit: float, method: str, *args: Any) -> Row:
        """Run a method of Worker. Returns {"error": why} if it takes more than `limit` seconds or the process ends."""
        if self.pool is None:
            given = self.peer, self.device, str(self.log)
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin, given)
        try:
            answer = self.pool.submit(call, method, *args).result(limit)
            ended = "CUDA error" in answer.get("error", "")  # the process cannot recover from it
        except (TimeoutError, BrokenProcessPool) as error:
            late = isinstance(error, TimeoutError)
            why = f"{LATE} {limit:.0f} s" if late else f"the process ended: {last_line(self._said())}"
            answer, ended = {"error": f"{method}: {why}"}, True
        if "error" in answer:
            log(f"{self.peer}: {answer['error']}: {self._said()}")
        if ended:
            self.close()
        return answer

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def close(self) -> None:
        if self.pool is not None:
            for process in list(self.pool._processes.values()):
                process.kill()
            self.pool.shutdown()
        self.pool = None


def cells(given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Shapes and token counts, the middle count first: Liger tunes its kernels once per width, at the first count."""
    counts = sorted(given.tokens)
    counts.insert(0, counts.pop(len(counts) // 2))
    return ((shape, tokens) for shape in given.shapes for tokens in counts)


def layers(given: argparse.Namespace) -> None:
    os.environ |= CACHES
    began, result = time.monotonic(), about(given)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = {peer: Process(peer, given.device, Path(folder)) for peer in (*given.peers, REFERENCE)}
        for process in processes.values():
            stack.callback(process.close)
        late: dict[tuple[str, str], Row] = {}
        for shape, tokens in cells(given):
            found = cell(given, processes, late, shape, tokens, str(Path(folder, "reference.pt")))
            result["layers"] += [shortened(row) for row in found]
            result["seconds"] = round(time.monotonic() - began)
            if given.out:
                write(result, [given.out])
    print(markdown([result]), flush=True)


def cell(
    given: argparse.Namespace,
    processes: dict[str, Process],
    late: dict[tuple[str, str], Row],
    shape: str,
    tokens: int,
    file: str,
) -> list[Row]:
    """Rows of all peers at a shape and number of tokens. late: (peer, shape) that timed out -> its row."""
    sizes = SHAPES[shape]
    name = {"shape": shape, "sizes": list(sizes), "tokens": tokens}
    name["rows an expert"] = tokens * sizes.arriving * sizes.top_k / sizes.experts
    made = processes[REFERENCE].ask(given.limit, "refer", shape, tokens, file)
    note = {"note": f"no reference: {made['error']}"} if "error" in made else {}
    rows: dict[str, Row] = {}
    for peer in given.peers:
        args = shape, tokens, None if note else file
        row = late.get((peer, shape)) or processes[peer].ask(given.limit, "prepare", *args)
        if LATE in row.get("error", ""):
            late[peer, shape] = row
        rows[peer] = name | {"peer": peer} | note | row
        log(f"{shape}, {tokens}: {peer} {json.dumps(shortened(row))}")
    times: dict[str, list[float]] = {peer: [] for peer, row in rows.items() if "error" not in row}
    for turn in range(given.rounds):
        for peer in random.Random(turn).sample(list(times), len(times)):
            if "error" not in rows[peer]:
                row = processes[peer].ask(given.limit, "stretch", given.seconds)
                times[peer] += [row["ms"]] if "ms" in row else []
                rows[peer] |= {key: value for key, value in row.items() if key == "error"}
    for peer, ms in times.items():
        if ms:
            median = statistics.median(ms)
            rows[peer] |= {"ms": median, "spread": max(ms) / min(ms) - 1, "TF": sizes.flop(tokens) / median / 1e9}
    for process in processes.values():
        if process.pool is not None:
            process.ask(given.limit, "release")
    return list(rows.values())


def about(given: argparse.Namespace) -> Row:
    where = provenance(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), given.commit)
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            where["versions"][package] = importlib.metadata.version(package)
    return {"what": "mxep and its peers, one GPU", **where, "layers": []}


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def table(given: argparse.Namespace) -> None:
    results = [json.loads(file.read_text()) for file in given.files]
    given.out.with_suffix(".md").write_text(markdown(results))
    tokens = sorted({tokens for _, tokens in by_cell(results)})
    if tokens:
        given.out.with_suffix(".svg").write_text(picture(results, tokens[len(tokens) // 2]))


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    run = actions.add_parser("layers")
    run.set_defaults(action=layers)
    run.add_argument("--out", type=Path)
    run.add_argument("--peers", type=names_in, default=list(PEERS), help="names, a semicolon between them")
    run.add_argument("--shapes", type=names_in, default=[name for name in SHAPES if name != "tiny"])
    run.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[1024, 4096, 16384])
    run.add_argument("--seconds", type=float, default=0.3, help="of a stretch")
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--limit", type=float, default=200, help="seconds for an answer of a peer")
    run.add_argument("--device", default="cuda")
    run.add_argument("--commit", help="the code's version, where there is no git")
    shown = actions.add_parser("table")
    shown.add_argument("files", type=Path, nargs="+")
    shown.add_argument("--out", type=Path, required=True)
    shown.set_defaults(action=table)
    given = parser.parse_args(argv)
    for known, asked in ((PEERS, getattr(given, "peers", [])), (SHAPES, getattr(given, "shapes", []))):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"expected some of {'; '.join(known)}, got {'; '.join(unknown)}")
    given.action(given)


if __name__ == "__main__":
    main()
