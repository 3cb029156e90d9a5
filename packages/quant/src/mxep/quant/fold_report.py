"""Count how much of a checkpoint folds exactly to one scale a row: `python -m mxep.quant.fold_report FOLDER`.

Hopper's GEMMs take E4M3 with one scale per row. So training on Hopper folds block scales into the elements
(`mxep.quant.fold`), which may round some elements. Weights of one kind have names that differ only in numbers; the
report prints these numbers as `*`. For each kind of weight, W (N, K) per expert, it counts:

    forward   rows in which `mxep.quant.fold` keeps the value of every element
    dgrad     block columns (32 columns x all N rows of an expert) in which `mxep.quant.fold_for_dgrad` does so
    changed   elements whose value changes, and the SNR in dB of the folded weight against the exact weight

Only power-of-two scales can be folded. Weights with other block scales are printed as "not folded": their GEMM applies
the scales to its partial sums, which is exact. Weights with other scales per row or per tensor need no fold in
forward. In dgrad they are printed as "scales dy", because dy is multiplied by the scales, and rounded once more.

Tensors are counted as they are stored. Training joins gate and up, and then both share one scale per column in dgrad.
If a checkpoint stores gate and up apart, the report does not count this effect.

The report needs no GPU and holds one expert in memory at a time.
"""

import argparse
import fnmatch
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from mxep.quant.block_fp8 import BlockFP8
from mxep.quant.checkpoint import QuantizedCheckpoint, StoredWeight
from mxep.quant.fold import flush_shift, shift_qdata
from mxep.quant.formats import BLOCK, E2M1, E4M3, NAN_SCALE
from mxep.quant.ops import HEADROOM, values_of
from mxep.quant.quantize import to_mxfp8
from mxep.quant.tensor import MXTensor

E2M1_ROOM = 14
"""Largest shift that is exact for every E2M1 number: from 2**6 times its value, an E4M3 number, to 2**-8 times."""


@dataclass
class Direction:
    """Counts of a fold in one direction, forward or dgrad.

    total, exact: number of rows (forward) or block columns (dgrad); of those in which every element keeps its value.
    elements, changed: number of elements; of those whose value changes.
    signal, error: sums of squares of the exact values and of the changes, over weights with a changed element.
    spread: largest shift of a block, in binades.
    """

    total: int = 0
    exact: int = 0
    elements: int = 0
    changed: int = 0
    signal: float = 0.0
    error: float = 0.0
    spread: int = 0

    def add(self, other: "Direction") -> None:
        """Count another weight of the same kind."""
        for each in fields(self):
            a, b = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(a, b) if each.name == "spread" else a + b)

    @property
    def snr(self) -> float:
        """SNR in dB of changed weights against the exact ones; inf if none changed."""
        return math.inf if self.error == 0 else 10 * math.log10(self.signal / self.error) if self.signal else -math.inf


@dataclass
class Kind:
    """Counts of all weights whose names differ only in numbers. forward, dgrad: None if nothing is folded there."""

    name: str
    format: str
    shape: tuple[int, ...]
    weights: int = 0
    forward: Direction | None = None
    dgrad: Direction | None = None


def count(mx: MXTensor) -> tuple[Direction, Direction]:
    """Count what folding changes in mx (..., N, K), E4M3 or E2M1 in blocks of 32 along K: forward, dgrad.

    Counts of forward equal those of `fold_with_stats`. Only blocks that may change are folded, so it is much faster.
    """
    e2m1 = mx.qdata.dtype == E2M1.dtype
    blocks = mx.qdata.view(torch.uint8).unflatten(-1, (mx.scale.shape[-1], -1))
    scale = mx.scale.view(torch.uint8).int()
    nan = scale == NAN_SCALE
    magnitudes = blocks & (0x77 if e2m1 else 0x7F)
    live = magnitudes.amax(-1).bool() & ~nan
    # An E4M3 byte c stays exact for shifts up to c // 8 - 1. Byte 0 wraps to 255, because a zero allows any shift.
    room = E2M1_ROOM if e2m1 else (((magnitudes - 1).amin(-1).int() + 1 >> 3) - 1).clamp_(min=0)
    found = []
    for axis in (-1, -2):
        largest = torch.where(live, scale, 0).amax(axis, keepdim=True)
        lost = nan.any(axis, keepdim=True)
        shift = torch.where(live & ~lost, largest - scale, 0)
        doubtful = shift > room
        changed, error = _changes(blocks[doubtful], shift[doubtful], e2m1=e2m1)
        kept = ~(torch.zeros_like(doubtful).masked_scatter_(doubtful, changed > 0).any(axis, keepdim=True) | lost)
        at = Direction(lost.numel(), int(kept.sum()), mx.numel(), int(changed.sum()))
        at.error = float((error * _energy(scale[doubtful])).sum())
        at.spread = int(shift.max()) if shift.numel() else 0
        found.append(at)
    if any(at.changed for at in found):
        signal = values_of(mx.qdata).view(*scale.shape, BLOCK).nan_to_num_().square_().sum(-1) * _energy(scale)
        for at in found:
            at.signal = float(signal[~nan].sum())
    return found[0], found[1]


def _changes(blocks: Tensor, shift: Tensor, *, e2m1: bool) -> tuple[Tensor, Tensor]:
    """Fold blocks (B, bytes) by shift (B,), and compare with the exact values.

    Returns the number of changed elements, and the sum of squared changes of q, not times the scale, (B,) each.
    """
    qdata = (values_of(blocks.view(E2M1.dtype)) * 2**HEADROOM).to(E4M3.dtype) if e2m1 else blocks.view(E4M3.dtype)
    before = values_of(qdata).nan_to_num_()
    folded = values_of(shift_qdata(qdata, shift[:, None])).nan_to_num_()
    difference = before.double() - folded.double() * 2.0 ** shift.clamp(max=flush_shift(E4M3.dtype))[:, None]
    scaled = difference / 2**HEADROOM if e2m1 else difference
    return (difference != 0).sum(-1), scaled.square().sum(-1)


def _energy(scale: Tensor) -> Tensor:
    """(2**(scale - 127))**2 in fp64: factor from a square without the scale to a square with it."""
    return 4.0 ** (scale.double() - 127)


def count_weight(weight: StoredWeight) -> tuple[Direction | None, Direction | None]:
    """Count what folding changes in a stored quantized weight, reading one expert at a time.

    Returns the counts of forward and of dgrad; None for a direction in which nothing is folded.
    """
    k, size = weight.shape[-1], math.prod(weight.shape)
    rows = size // max(k, 1)
    if weight.format in ("fp8_row", "fp8_tensor") and not weight.has_exponents():
        return Direction(rows, rows, size), None
    forward, dgrad = Direction(), Direction()
    for expert in [slice(e, e + 1) for e in range(weight.shape[0])] if len(weight.shape) == 3 else [None]:
        part = weight.read(expert)
        if isinstance(part, BlockFP8):
            if k % BLOCK or weight.block_size[1] % BLOCK or part.scale_exponents() is None:  # type: ignore[index]
                return None, None
            part = to_mxfp8(part)
        for total, found in zip((forward, dgrad), count(part)):  # type: ignore[arg-type]
            total.add(found)
    return forward, dgrad


def report(checkpoint: QuantizedCheckpoint, *, only: str = "*") -> list[Kind]:
    """One `Kind` per name of quantized weights, in file order. only: count names of this pattern, e.g. `*experts*`."""
    kinds: dict[tuple[str, str, tuple[int, ...]], Kind] = {}
    for weight in checkpoint.weights.values():
        if weight.format == "plain" or not fnmatch.fnmatchcase(weight.name, only):
            continue
        name = re.sub(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])", "*", weight.name)
        key = name, weight.format, weight.shape
        kind = kinds.setdefault(key, Kind(*key))
        forward, dgrad = count_weight(weight)
        kind.weights += 1
        kind.forward, kind.dgrad = _sum(kind.forward, forward), _sum(kind.dgrad, dgrad)
    return [*kinds.values()]


def _sum(a: Direction | None, b: Direction | None) -> Direction | None:
    if a is None or b is None:
        return a if b is None else b
    a.add(b)
    return a


def text_of(kinds: Sequence[Kind]) -> str:
    changed = "changed, SNR"
    lines = [("kind", "format", "weights", "shape", "forward: exact rows", changed, "dgrad: exact columns", changed)]
    for kind in kinds:
        shape = " x ".join(map(str, kind.shape))
        unfolded = "scales dy" if kind.format in ("fp8_row", "fp8_tensor") else "not folded"
        cells = *_cells(kind.forward, unfolded), *_cells(kind.dgrad, unfolded)
        lines.append((kind.name, kind.format, str(kind.weights), shape, *cells))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cells(at: Direction | None, unfolded: str) -> tuple[str, str]:
    if at is None:
        return unfolded, "-"
    # Rounded down, so that "100%" means every row is exact.
    share = f"{at.exact} of {at.total} ({math.floor(1000 * at.exact / max(at.total, 1)) / 10:g}%)"
    return share, "none" if not at.changed else f"{at.changed} ({at.changed / at.elements:.1e}), {at.snr:.1f} dB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, or 1 if the folder cannot be read (stderr has the reason)."""
    parser = argparse.ArgumentParser(prog="python -m mxep.quant.fold_report", description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="config.json and *.safetensors of a model")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="weights whose name matches, as *experts*")
    parser.add_argument("--json", action="store_true", help="one JSON object a kind")
    given = parser.parse_args(arguments)
    try:
        with QuantizedCheckpoint(given.folder) as checkpoint:
            kinds, named = report(checkpoint, only=given.only), checkpoint.quantization
    except (ValueError, OSError) as error:
        print(f"fold_report: {error}", file=sys.stderr)
        return 1
    if given.json:
        for kind in kinds:
            print(json.dumps(kind, default=lambda value: vars(value)))
    else:
        print(f"{given.folder}: {named or 'no quantization in config.json'}")
        print(text_of(kinds) if kinds else f"no quantized weight matches {given.only}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
