"""bench=comms: the exchange of mxep.comms on all ranks, beside the library's all-to-all, in one run.

    headline   everything at a few shapes, with all multiprocessors and with FEW
    skew       the moves where expert i is as likely as 1 / (i + 1)
    sweep      the moves over tokens, dim and top-k

us            median over rounds of the slowest rank, barriers included; dispatch includes tables and plan
wire GB/s     payload that leaves the rank which sends most, over that time
logical GB/s  the same as if a row left for each (token, expert) pair, as a plain all-to-all sends them
of wire       wire GB/s over the wire's ceiling of the same run: the faster of copy engines and of a put of large rows
x bf16        how many times as fast as the all-to-all of the same pairs in bf16; x 8-bit: in MXFP8

The all-to-all is NCCL's on GPUs, gloo's on CPU ranks. Each row is a JSON line as soon as it is there. What is timed is
verified before, bit by bit (comms_verify). The clock: comms_timing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mxep.comms import SharedMemoryTransport, SymmetricMemoryTransport, Transport, Workspace, dispatch

from ..config import ConfigError
from ..rank import Rank
from ..schema import BenchConfig
from .comms_cases import BLOCK, Alternative, Collective, Ours, Problem, Shape, collectives, direct_moves, moves
from .comms_timing import FailedTogether, Timing, round_robin, together
from .comms_verify import Verification
from .tables import Results, Row, Section

FEW = 32
"""Multiprocessors that a caller may spare."""
TIMEOUT = 30.0
WIRE_ROWS = {"cuda": (16384, 16384), "cpu": (64, 1024)}
"""Rows and their bytes, of the measurement of the wire."""
SKEWS = {"headline": 0.0, "skew": 1.0, "sweep": 0.0}
"""Section -> exponent of the experts' popularity; also all sections there are."""

EARLIER = "of an earlier run on 4 x H200, not of this one"
ELSEWHERE: Mapping[tuple[int, Shape], Mapping[str, tuple[float, str, str]]] = {
    (4, Shape(8192, 7168, 128, 8)): {
        "DeepEP V1 dispatch fp8, 128 SMs": (524, "dispatch mxfp8", EARLIER),
        "DeepEP V1 dispatch fp8, 24 SMs": (836, f"dispatch mxfp8, {FEW} SMs", EARLIER),
        "DeepEP V1 combine bf16, 128 SMs": (975, "return bf16", f"of rows summed already; {EARLIER}"),
    },
    (2, Shape(4096, 4096, 16, 1)): {
        "kraken dispatch bf16": (80, "dispatch bf16", "published, 2 x H100"),
        "kraken combine bf16": (83, "return bf16", "published, 2 x H100"),
    },
}
"""Ranks and shape -> us of others that are not run here, which row of ours does the same, whose figure it is."""


def check(config: BenchConfig) -> None:
    """ConfigError for devices, sections, shapes or folders that there are not."""
    if config.device not in ("cuda", "cpu"):
        raise ConfigError(f"bench.device: got {config.device!r}, wanted cuda or cpu")
    for key, names in (("bench.sections", config.sections or ()), ("bench.shapes", config.shapes)):
        for name in names:
            if name not in SKEWS:
                raise ConfigError(f"{key}: got {name!r}, wanted some of {', '.join(SKEWS)}")
    for kind, shapes in config.shapes.items():
        for shape in shapes:
            if len(shape) != 4 or min(shape) < 1 or shape[1] % BLOCK or shape[3] > shape[2]:
                wanted = f"tokens, dim in {BLOCK}s, experts and top-k of them"
                raise ConfigError(f"bench.shapes.{kind}: got {list(shape)}, wanted {wanted}")
    if config.picture is not None and not Path(config.picture).absolute().parent.is_dir():
        raise ConfigError(f"bench.picture: no such folder: {Path(config.picture).parent}")


@dataclass(frozen=True)
class Bench:
    """What sections need. peer: name of the library whose all-to-all is compared. wire: GB/s, its ceiling."""

    rank: Rank
    seed: int
    peer: str
    wire: float

    def transport(self) -> Transport:
        """A new one: a shape that fails takes its transport along, no other's. Collective."""
        return open_transport(self.rank)


def open_transport(rank: Rank) -> Transport:
    kind = SymmetricMemoryTransport if rank.device.type == "cuda" else SharedMemoryTransport
    return kind(timeout=TIMEOUT)


def measure_on_rank(rank: Rank, config: BenchConfig, seed: int, say: Callable[[str], None]) -> Results:
    """All sections; `say` gets each row when it is there. Collective, with the same results on all ranks."""
    if rank.world_size < 2:
        raise ConfigError("bench=comms wants at least 2 ranks, got 1: parallel.ranks=N")
    ceilings = _ceilings(rank)
    bench = Bench(rank, seed, "NCCL" if rank.device.type == "cuda" else "gloo", max(ceilings.values()))
    sections: dict[str, Section] = {}
    for name in config.sections or SKEWS:
        sections[name] = section = _section(name, bench.peer)
        for shape in (Shape(*sizes) for sizes in config.shapes.get(name, ())):
            for row in _rows(bench, name, shape):
                section.rows.append({"shape": list(shape), "ranks": rank.world_size, "skew": SKEWS[name], **row})
                say(json.dumps({"section": name, **section.rows[-1]}))
            if rank.device.type == "cuda":
                torch.cuda.empty_cache()
    return Results(f"mxep.comms, {rank.world_size} ranks", ceilings, sections)


def _rows(bench: Bench, section: str, shape: Shape) -> list[Row]:
    if shape.experts % bench.rank.world_size:
        return [{"what": "all", "note": f"{shape.experts} experts are not the same number on each rank"}]
    transport = None
    try:
        transport = together(bench.transport)
        alternatives = _alternatives(bench, transport, section, shape)
        timings = round_robin(alternatives, transport)
    except FailedTogether as error:
        return [{"what": "all", "error": str(error)}]
    finally:
        if transport is not None:
            transport.close()
    rows = {name: figures(alternatives[name], timings[name]) for name in alternatives}
    _compare(rows, bench)
    listed = [{"what": name, **row} for name, row in rows.items()] + _elsewhere(rows, bench, shape)
    return [{key: _short(value) for key, value in row.items()} for row in listed]


def _short(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _alternatives(bench: Bench, transport: Transport, section: str, shape: Shape) -> dict[str, Alternative]:
    """Ready and verified. Raises FailedTogether."""
    problem = together(lambda: Problem(transport, shape, SKEWS[section], bench.seed))
    direct = section != "sweep" and shape.top_k == 1
    verification = Verification(problem)

    def ours(programs: int | None) -> Ours:
        made = Ours(problem, num_sms=programs, direct=direct and programs is None)
        verification.moves(made, direct=direct and programs is None)
        return made

    def collective(payload: list[torch.Tensor], dtype: torch.dtype) -> Collective:
        made = Collective(problem, payload, dtype)
        verification.collective(made, payload)
        return made

    all_programs = together(lambda: ours(None))
    found = moves(all_programs, every=section != "sweep")
    if section != "sweep":
        found["plan"] = Alternative(all_programs.make_plan)
    if direct:
        found |= direct_moves(all_programs)
    if section == "headline":
        found |= moves(together(lambda: ours(FEW)), every=True, suffix=f", {FEW} SMs")
    bf16 = together(lambda: collective(problem.bf16, torch.bfloat16))
    mx = together(lambda: collective(problem.mxfp8, torch.uint8))
    together(verification.close)
    return found | collectives(bf16, mx, problem.traffic, bench.peer)


def figures(alternative: Alternative, timing: Timing | FailedTogether) -> Row:
    """A row without its ratios."""
    if isinstance(timing, FailedTogether):
        return {"error": str(timing)}
    wire, logical = alternative.rows * alternative.row_bytes, alternative.pairs * alternative.row_bytes
    row: Row = {"us": timing.us}
    if alternative.row_bytes:
        rates = {"wire GB/s": wire / timing.us / 1e3, "logical GB/s": logical / timing.us / 1e3}
        row |= {**rates, "wire bytes": wire, "logical bytes": logical}
    return row | ({"note": timing.note} if timing.note else {})


def _compare(rows: dict[str, Row], bench: Bench) -> None:
    """Adds ratios: to the wire's ceiling, and to the all-to-all of the same pairs in the same direction."""
    us = {name: row["us"] for name, row in rows.items() if "us" in row}
    for name, row in rows.items():
        if "wire GB/s" not in row:
            continue
        row["of wire"] = row["wire GB/s"] / bench.wire
        home = name.startswith("return") or name.endswith("home")
        peers = {"x bf16": f"{bench.peer} bf16, home"} if home else {"x bf16": f"{bench.peer} bf16"}
        if "mxfp8" in name or "8-bit" in name:
            peers["x 8-bit"] = f"{bench.peer} 8-bit"
        row |= {column: us[peer] / us[name] for column, peer in peers.items() if peer in us}


def _elsewhere(rows: dict[str, Row], bench: Bench, shape: Shape) -> list[Row]:
    found = []
    for what, (us, ours, source) in ELSEWHERE.get((bench.rank.world_size, shape), {}).items():
        here = f"; {ours} here is {us / rows[ours]['us']:.2f} x as fast" if "us" in rows.get(ours, {}) else ""
        found.append({"what": what, "us elsewhere": us, "note": f"{us} us {source}{here}"})
    return found


def _ceilings(rank: Rank) -> dict[str, float]:
    """GB/s that leave a rank when each sends the same to all others: by copies, and by our put of large rows."""
    transport = open_transport(rank)
    tokens, dim = WIRE_ROWS[rank.device.type]
    peers = [(rank.rank + i) % rank.world_size for i in range(1, rank.world_size)]
    x = torch.ones(tokens, dim, dtype=torch.uint8, device=rank.device)
    piece = tokens // len(peers) * dim
    buffer = transport.allocate(rank.world_size * piece)
    workspace = Workspace(transport, max_tokens=tokens, top_k=1, dim=dim, row_bytes=dim, num_experts=rank.world_size)
    ids = torch.tensor(peers, dtype=torch.int32, device=rank.device)[torch.arange(tokens) % len(peers), None]

    def copies() -> None:
        for peer in peers:
            buffer.peers[peer][rank.rank * piece :][:piece].copy_(x.view(-1)[:piece])

    alternatives = {
        "copy engines GB/s": Alternative(copies, len(peers), 0, piece, "never"),  # in a graph they are slower
        "put of large rows GB/s": Alternative(lambda: dispatch(workspace, [x], ids), tokens, 0, dim),
    }
    timings = round_robin(alternatives, transport)
    transport.close()
    rows = {name: figures(alternatives[name], timing) for name, timing in timings.items()}
    if failures := [row["error"] for row in rows.values() if "error" in row]:
        raise FailedTogether(failures[0])
    return {name: row["wire GB/s"] for name, row in rows.items()}


def _section(name: str, peer: str) -> Section:
    title = f"{name}; x: how many times as fast as {peer}'s all-to-all, its sizes known, nothing permuted"
    columns = {"us": ".1f", "wire GB/s": ".0f", "logical GB/s": ".0f", "of wire": ".2f", "x bf16": ".2f"}
    return Section(title, ("shape", "what"), {**columns, "x 8-bit": ".2f"})
