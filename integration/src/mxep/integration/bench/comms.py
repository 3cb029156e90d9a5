"""bench=comms: the exchange of mxep.comms on all ranks, beside the library's all-to-all, in one run.

    headline   a few shapes, with all multiprocessors and with FEW
    skew       where expert i is as likely as 1 / (i + 1)
    sweep      over tokens, dim and top-k

us            median over rounds of the slowest rank, barriers included; dispatch includes tables and plan
wire GB/s     payload that leaves the rank which sends most, over that time; ids, tables and signals do not count
logical GB/s  the same as if a row left for each (token, expert) pair, as a plain all-to-all sends them
of wire       wire GB/s over the wire's ceiling of the same run: the faster of copy engines and of a put of large rows
x bf16        how many times as fast as the all-to-all of the same pairs in bf16; x 8-bit: in MXFP8

The all-to-all is NCCL's on GPUs, gloo's on CPU ranks. Dispatch and combine are verified before, bit by bit.
All ranks start together on the device: a barrier, then a pause in which the hosts enqueue what follows, so that none
waits for its own host. Inputs are not rotated: the smallest shapes find them in the L2 cache, as after the kernel that
made them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mxep.comms import SharedMemoryTransport, SymmetricMemoryTransport, Transport, Workspace, dispatch

from ..collective import FailedOnRanks, on_all_ranks
from ..config import ConfigError
from ..rank import Rank
from ..results import Row
from ..timer import Alternative, Timer, free_memory
from .comms_cases import CALLS, Collective, Exchange, Problem, Shape, differences, is_narrow, leaving
from .run import Bench, table

FEW = 32
"""Multiprocessors that a caller may spare."""
TIMEOUT = 30.0
PAUSE = 1_000_000  # cycles, half a millisecond: longer than the launch of a graph
WIRE_ROWS = {"cuda": (16384, 16384), "cpu": (64, 1024)}
"""Rows and their bytes, of the measurement of the wire."""
SKEWS = {"headline": 0.0, "skew": 1.0, "sweep": 0.0}
"""Section -> exponent of the experts' popularity."""

FIGURES = "us, wire GB/s, logical GB/s, of wire, x bf16, x 8-bit"
TITLE = "x: how many times as fast as the library's all-to-all, its sizes known, nothing permuted"
SECTIONS = {name: table(f"{name}; {TITLE}", "shape, what", FIGURES) for name in SKEWS}


def open_transport(rank: Rank) -> Transport:
    """Collective."""
    kind = SymmetricMemoryTransport if rank.device.type == "cuda" else SharedMemoryTransport
    return kind(timeout=TIMEOUT)


def measure(bench: Bench) -> Iterator[tuple[str, Row]]:
    """All sections. Collective, with the same rows on all ranks."""
    if bench.rank.world_size < 2:
        raise ConfigError("bench=comms wants at least 2 ranks, got 1: parallel.ranks=N")
    bench.ceilings.update(ceilings(bench.rank))
    for name in bench.report.sections:
        for shape in (Shape(*sizes) for sizes in bench.config.shapes.get(name, ())):
            about = {"shape": list(shape), "ranks": bench.rank.world_size, "skew": SKEWS[name]}
            for what, row in _rows(bench, name, shape).items():
                yield name, {**about, "what": what, **row}
            free_memory(bench.device)


def _rows(bench: Bench, section: str, shape: Shape) -> dict[str, Row]:
    if shape.experts % bench.rank.world_size:
        return {"all": {"note": f"{shape.experts} experts are not the same number on each rank"}}
    peer = "NCCL" if bench.device.type == "cuda" else "gloo"
    try:  # a transport that fails takes no other shape along
        with contextlib.closing(on_all_ranks(lambda: open_transport(bench.rank))) as transport:
            p = on_all_ranks(lambda: Problem(transport, shape, SKEWS[section], bench.seed))
            rows = make_timer(transport).compare(_alternatives(p, section, peer))
    except FailedOnRanks as error:
        return {"all": {"error": str(error)}}
    us = {name: row["us"] for name, row in rows.items() if "us" in row}
    for name in us:
        peers = {"x bf16": f"{peer} bf16, combine" if "combine" in name else f"{peer} bf16"}
        if is_narrow(name):
            peers["x 8-bit"] = f"{peer} 8-bit"
        for kind, sent in zip(("wire", "logical"), leaving(name, p) if name != "plan" else ()):
            rows[name] |= {f"{kind} GB/s": sent / us[name] / 1e3, f"{kind} bytes": sent}
            rows[name] |= {column: us[other] / us[name] for column, other in peers.items() if other in us}
            rows[name]["of wire"] = rows[name]["wire GB/s"] / max(bench.ceilings.values())
    return rows


def make_timer(transport: Transport) -> Timer:
    """One whose failures end everything, as they end the transport."""

    def start() -> None:
        transport.barrier("bench")
        if transport.device.type == "cuda":
            torch.cuda._sleep(PAUSE)

    return Timer(transport.device, seconds=0.02, rounds=7, start=start, shared=True)


def _alternatives(p: Problem, section: str, peer: str) -> dict[str, Alternative]:
    """Ready and verified. Raises FailedOnRanks."""

    def exchange(num_sms: int | None) -> Exchange:
        made = Exchange(p, num_sms=num_sms)
        if wrong := differences(made):
            raise RuntimeError(f"wrong bits: {', '.join(wrong)}")
        return made

    exchanges = {"": on_all_ranks(lambda: exchange(None))}
    if section == "headline":
        exchanges[f", {FEW} SMs"] = on_all_ranks(lambda: exchange(FEW))
    bf16, mx = Collective(p, p.bf16, torch.bfloat16), Collective(p, p.mxfp8, torch.uint8)
    peers = {f"{peer} bf16": bf16.dispatch, f"{peer} 8-bit": mx.dispatch, f"{peer} bf16, combine": bf16.combine}
    alternatives = {
        name + suffix: Alternative(lambda call=call, made=made: [lambda: call(made)], check=p.transport.check)  # type: ignore[misc]
        for suffix, made in exchanges.items()
        for name, call in CALLS.items()
        if not (name == "plan" and suffix)
    }
    return alternatives | {name: Alternative(lambda call=call: [call], "may") for name, call in peers.items()}  # type: ignore[misc]


def ceilings(rank: Rank) -> dict[str, float]:
    """GB/s that leave a rank when each sends the same to all others: by copies, and by mxep's put of large rows."""
    transport = open_transport(rank)
    tokens, dim = WIRE_ROWS[rank.device.type]
    peers = [(rank.rank + i) % rank.world_size for i in range(1, rank.world_size)]
    x = torch.ones(tokens, dim, dtype=torch.uint8, device=rank.device)
    piece = tokens // len(peers) * dim
    buffer = transport.allocate(rank.world_size * piece)
    workspace = Workspace(transport, max_tokens=tokens, top_k=1, dim=dim, row_bytes=dim, num_experts=rank.world_size)
    ids = torch.tensor(peers, dtype=torch.int32, device=rank.device)[
        torch.arange(tokens, dtype=torch.int64) % len(peers), None
    ]

    def copies() -> None:
        for peer in peers:
            buffer.peers[peer][rank.rank * piece :][:piece].copy_(x.view(-1)[:piece])

    def put() -> None:
        dispatch(workspace, [x], ids).wait()

    alternatives = {  # copies are slower in a graph
        "copy engines GB/s": Alternative(lambda: [copies], "never", check=transport.check),
        "put of large rows GB/s": Alternative(lambda: [put], check=transport.check),
    }
    rows = make_timer(transport).compare(alternatives)
    transport.close()
    if failures := [row["error"] for row in rows.values() if "error" in row]:
        raise FailedOnRanks(failures[0])
    sent = {"copy engines GB/s": len(peers) * piece, "put of large rows GB/s": tokens * dim}
    return {name: sent[name] / row["us"] / 1e3 for name, row in rows.items()}
