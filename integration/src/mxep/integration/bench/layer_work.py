"""Flops and bytes of a layer's step, in all and stage by stage, and the least time that they take.

floor = flops / dense rate + wire bytes / 450 GB/s + memory bytes / copy rate, one after the other, of which

    flops    18 R D F: three products, 2 flop each, of w13 (2F x D) and w2 (D x F), for the R valid rows (no padding) of
             the rank that has most. Dense rate: of a square product in the same run, FP8 (for recipe bf16: bf16)
    wire     of the rank that sends most: a row for each token and rank that needs it, out in forward and in backward,
             in the recipe's format, and as many sums back, twice, in bf16. Ids, weights and signals do not count
    memory   what no fusion can avoid: x and d_out read, out and dx written; weights read (kept: as qdata) and their
             gradients written, all bf16: 8 T D + 12 e D F bytes (kept: 9 e D F). Copy rate: of the same run

TF of a row: 18 T K D F flops over its time, what a rank does on average.

T tokens a rank, K experts a token, D model dim, F hidden dim, e experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .comms_cases import BLOCK
from .layer_cases import MX, Case, Problem

WIRE = 450.0
"""GB/s a direction, NVLink of an H200 by its data sheet."""

Work = tuple[str, float]
"""("bytes", "flop" or "wire bytes", how many)."""


def flop(p: Problem, rows: float) -> float:
    """Of a step with so many rows: ``p.ids.numel()`` on average, ``p.traffic.most_pairs`` of the rank that has most."""
    return 18.0 * rows * p.shape.dim * p.shape.hidden


def row_bytes(recipe: str, dim: int) -> int:
    """Of a row on the wire, dispatched."""
    return {"bf16": 2 * dim, "fp8": dim + 1}.get(recipe, dim + dim // BLOCK)


def wire_bytes(p: Problem, recipe: str, *, pairs: bool = False) -> tuple[int, int]:
    """(dispatched, combined) by the rank that sends most, forward and backward together; pairs: a row for each."""
    out, back = (p.traffic.leaving(combine=combine)[pairs] for combine in (False, True))
    return 2 * out * row_bytes(recipe, p.shape.dim), 2 * back * row_bytes("bf16", p.shape.dim)


def sent_mb(p: Problem, case: Case, num_slots: int = 0) -> dict[str, float]:
    """MB of rows that a rank sends in a step, at most, within its node and across to others.

    num_slots: that the hierarchical dispatcher has for a node. All of them cross, used or not.
    """
    of_pairs, rank, size = (
        case.baseline or case.dispatcher == "all_to_all",
        torch.arange(p.ranks, dtype=torch.int64),
        p.ranks_per_node,
    )
    rows = torch.tensor(p.traffic.pairs if of_pairs else p.traffic.tokens, dtype=torch.float64)
    near = rank[:, None] // size == rank // size
    if case.dispatcher == "hierarchical":  # a rank passes on what came to it from those of its index
        alike = (rank[:, None] % size == rank % size).double()
        rows = near * (alike @ rows) + ~near * alike * num_slots
    rows.fill_diagonal_(0)
    dispatched = "bf16" if case.baseline else case.recipe
    sent = 2 * (rows * row_bytes(dispatched, p.shape.dim) + rows.T * row_bytes("bf16", p.shape.dim)) / 1e6
    within, across = (float((sent * leg).sum(1).max()) for leg in (near, ~near))
    return {"ranks per node": size, "within MB": within, "across MB": across}


def memory_bytes(p: Problem, *, kept: bool) -> int:
    return 8 * p.x.numel() + (3 if kept else 4) * (p.w13.numel() + p.w2.numel())


def rate(kind: str, case: Case, ceilings: Mapping[str, float]) -> float | None:
    """Of a kind of work at its ceiling, in 1e12 a second; None without that of a GPU."""
    dense = f"dense {'bf16' if case.recipe == 'bf16' else 'fp8'} TF"
    return WIRE / 1e3 if kind == "wire bytes" else ceilings.get("copy TB/s" if kind == "bytes" else dense)


def floor_ms(p: Problem, case: Case, ceilings: Mapping[str, float]) -> float | None:
    """None without the rates of a GPU."""
    wire, memory = sum(wire_bytes(p, case.recipe)), memory_bytes(p, kept=case.kept)
    total = 0.0
    for kind, amount in (("flop", flop(p, p.traffic.most_pairs)), ("wire bytes", wire), ("bytes", memory)):
        if (ceiling := rate(kind, case, ceilings)) is None:
            return None
        total += amount / ceiling / 1e9
    return total


def work(p: Problem, case: Case) -> dict[str, Work]:
    """What stages (layer_stages) must do in a step of a case; those that are not named have no formula.

    R valid rows of the rank that has most, N = T K pairs.
    """
    rows, pairs, weights = p.traffic.most_pairs, p.ids.numel(), p.w13.numel() + p.w2.numel()
    dim, hidden, tokens = p.shape.dim, p.shape.hidden, p.shape.tokens
    gemms: dict[str, Work] = {"GEMMs": ("flop", flop(p, p.traffic.most_pairs))}
    if case.baseline:
        return gemms | {
            "NCCL": ("wire bytes", sum(wire_bytes(p, "bf16", pairs=True))),
            # Forward: gate and up read, h written; backward: these and d_h read, both gradients written.
            "SwiGLU": ("bytes", 16 * rows * hidden),
            # Spread, grouped, back and summed: 12 N D + 4 T D bytes forward, 14 N D + 4 T D backward.
            "permute + pointwise": ("bytes", 26 * pairs * dim + 8 * tokens * dim),
        }
    if not case.name.startswith(MX):
        return gemms
    out, back = wire_bytes(p, case.recipe)
    found: dict[str, Work] = gemms | {
        "dispatch": ("wire bytes", out),
        "combine": ("wire bytes", back),
        # x and d_out: bf16 read, qdata and scales written.
        "quantize": ("bytes", 2 * p.x.numel() * (3 + 1 / BLOCK)),
        # Rows of x and of d_out: qdata and scales read, qdata written.
        "gather + fold": ("bytes", 2 * rows * dim * (2 + 1 / BLOCK)),
        # Forward: gate and up read, qdata written; backward: these and d_h read, qdata of both gradients and h written.
        # Kept in FP8: once more gate and up read, and qdata written, which backward reads.
        "SwiGLU": ("bytes", (18 if case.kept_in_fp8 else 14) * rows * hidden),
        # Codes of both operands of both weight gradients, read and written.
        "fold for wgrad": ("bytes", 2 * rows * (2 * dim + 3 * hidden)),
        # bf16 read twice, since a column's scale needs all its rows first; qdata of both orientations written.
        "quantize weights": ("bytes", weights * 6 / (4 if case.kept else 1)),
    }
    return {stage: each for stage, each in found.items() if each[1]}
