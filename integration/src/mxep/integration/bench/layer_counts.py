"""Flops and bytes of a layer's step, and the least time that they take.

floor = flops / dense rate + wire bytes / 450 GB/s + memory bytes / copy rate, one after the other, of which

    flops    18 R D F: three products, 2 flop each, of w13 (2F x D) and w2 (D x F), for the R valid rows (no padding) of
             the rank that has most. Dense rate: of a square product in the same run, FP8 (for recipe bf16: bf16)
    wire     of the rank that sends most: a row for each token and rank that needs it, out in forward and in backward,
             in the recipe's format, and as many sums home, twice, in bf16. Ids, weights and signals do not count
    memory   what no fusion can avoid: x and d_out read, out and dx written; weights read (kept: as qdata) and their
             gradients written, all bf16: 8 T D + 12 e D F bytes (kept: 9 e D F). Copy rate: of the same run

TF of a row: 18 T K D F flops over its time, what a rank does on average.

T tokens a rank, K experts a token, D model dim, F hidden dim, e experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from .comms_cases import BLOCK, Traffic
from .layer_cases import Case, Problem

WIRE = 450.0
"""GB/s a direction, NVLink of an H200 by its data sheet."""


def useful_flop(p: Problem) -> int:
    """Of a step, of a rank on average."""
    return 18 * p.ids.numel() * p.shape.dim * p.shape.hidden


def row_bytes(recipe: str, dim: int) -> int:
    """Of a row on the wire, on its way out."""
    return {"bf16": 2 * dim, "fp8": dim + 1}.get(recipe, dim + dim // BLOCK)


def wire_bytes(p: Problem, case: Case) -> tuple[int, int]:
    """(out, home) of the rank that sends most, of forward and backward together, as the case moves rows."""
    one_each = case.standard or not case.name.startswith(f"{case.recipe}/symmetric")
    rows = p.traffic.pairs if one_each else p.traffic.tokens
    out = "bf16" if case.standard else case.recipe
    leaving, home = Traffic.leaving(rows), Traffic.leaving(rows, home=True)
    return 2 * leaving * row_bytes(out, p.shape.dim), 2 * home * row_bytes("bf16", p.shape.dim)


def least_wire_bytes(p: Problem, recipe: str) -> int:
    tokens, dim = p.traffic.tokens, p.shape.dim
    home = Traffic.leaving(tokens, home=True) * row_bytes("bf16", dim)
    return 2 * (Traffic.leaving(tokens) * row_bytes(recipe, dim) + home)


def least_memory_bytes(p: Problem, *, kept: bool) -> int:
    weights = p.w13.numel() + p.w2.numel()
    return 8 * p.x.numel() + (3 if kept else 4) * weights


def floor_ms(p: Problem, case: Case, ceilings: Mapping[str, float]) -> float | None:
    """None without the rates of a GPU."""
    rate = ceilings.get(f"dense {'bf16' if case.recipe == 'bf16' else 'fp8'} TF")
    copy = ceilings.get("copy TB/s")
    if rate is None or copy is None:
        return None
    flop = 18 * p.most_rows * p.shape.dim * p.shape.hidden
    wire = least_wire_bytes(p, case.recipe) / WIRE / 1e6
    return flop / rate / 1e9 + wire + least_memory_bytes(p, kept=case.kept) / copy / 1e9
