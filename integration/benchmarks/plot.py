"""Results of a bench as a picture; the file's ending says of which format.

    gemm    section "products" as a roofline: TFLOP/s over flop per byte; roofs: copy speed, dense FP8, dense bf16
    comms   sections "sweep" and "headline": GB/s over bytes, mxep beside the library's all-to-all
    layer   section "stages": a model's step in mxep and in the baseline, stage upon stage

python integration/benchmarks/plot.py RESULTS.json PICTURE.svg           draws it again, without a GPU
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

PRODUCTS = ("mxep", "fp8 row, fast", "fp8 row, slow", "bf16")
MARKERS = {"forward": "o", "dgrad": "s", "wgrad": "^"}
TICKS = [50, 100, 200, 500, 1000, 2000, 5000]
EXCHANGES = ("dispatch mxfp8", "dispatch bf16", "combine bf16", "NCCL bf16", "NCCL 8-bit", "gloo bf16", "gloo 8-bit")
TOTALS = ("sum", "busy", "whole")


def draw(results: dict[str, Any], file: Path) -> None:
    """`results`: as JSON has them. ValueError if they have none of the sections above."""
    # The object interface, without pyplot: no global figure, no display, nothing to close.
    from matplotlib.figure import Figure

    sections = results.get("sections", {})
    for names, paint in DRAWN.items():
        if rows := [row for name in names for row in sections.get(name, ()) if "us" in row]:
            figure = Figure(figsize=(10, 5.5), layout="constrained")
            figure.suptitle(f"{results.get('what')} on {results.get('device')}")
            paint(figure, rows, results.get("ceilings", {}))
            figure.legend(loc="outside lower center", ncols=5, fontsize="small")
            figure.savefig(file)
            return
    raise ValueError("a picture needs section products, sweep, headline or stages: got no figures of any")


def _roof(axes: Any, text: str, height: float) -> None:
    axes.axhline(height, color="black", linewidth=1)
    axes.annotate(text, (1, height), (-4, 3), ("axes fraction", "data"), textcoords="offset points", ha="right")


def _products(figure: Any, rows: Rows, ceilings: dict[str, float]) -> None:
    axes = figure.add_subplot(xlabel="flop per byte of the least memory traffic", ylabel="TFLOP/s", xscale="log")
    axes.set_xticks(TICKS, labels=map(str, TICKS), minor=False)
    fp8 = max([row["TF"] for row in rows if row["what"].startswith("dense")], default=0.0)
    roofs = {"dense fp8": max(fp8, ceilings.get("dense fp8 TF", 0.0)), "dense bf16": ceilings.get("dense bf16 TF", 0.0)}
    for name, top in roofs.items():
        if top:
            _roof(axes, f"{name}: {top:.4g}", top)
    if copy := ceilings.get("copy TB/s"):
        xs = [x for x in range(TICKS[0], TICKS[-1], 5) if copy * x <= roofs["dense fp8"]]
        axes.plot(xs, [copy * x for x in xs], color="black", linestyle="--", label=f"copy: {copy:.2f} TB/s")
    for i, what in enumerate(PRODUCTS):
        for product, marker in MARKERS.items():
            points = [row for row in rows if (row["what"], row["product"]) == (what, product)]
            if points:
                xs, ys = [row["flop"] / row["bytes"] for row in points], [row["TF"] for row in points]
                axes.scatter(xs, ys, color=f"C{i}", marker=marker, label=f"{what}, {product}", zorder=3)
    axes.set_ylim(bottom=0)


def _exchanges(figure: Any, rows: Rows, ceilings: dict[str, float]) -> None:
    rows = [row for row in rows if row["what"] in EXCHANGES and row.get("wire bytes")]
    # A line through the shapes that differ in tokens alone; the others are points.
    most = collections.Counter(tuple(row["shape"][1:]) for row in rows).most_common(1)[0][0] if rows else ()
    meanings = {"wire": "leave the GPU", "logical": "would leave, a row for each (token, expert) pair"}
    for place, (kind, meaning) in enumerate(meanings.items()):
        axes = figure.add_subplot(1, 2, place + 1, xlabel=f"MB that {meaning}", ylabel="GB/s", xscale="log")
        for i, what in enumerate(EXCHANGES):
            points = [(row[f"{kind} bytes"] / 1e6, row[f"{kind} GB/s"], row) for row in rows if row["what"] == what]
            line = sorted((x, y) for x, y, row in points if tuple(row["shape"][1:]) == most)
            axes.plot(*zip(*line) if line else ((), ()), color=f"C{i}", linewidth=1)
            if points:
                xs, ys, _ = zip(*points)
                axes.scatter(xs, ys, color=f"C{i}", label=what if place == 0 else None, zorder=3)
        if kind == "wire" and ceilings:
            height, name = max((height, name) for name, height in ceilings.items())
            _roof(axes, f"{name.removesuffix(' GB/s')}: {height:.0f}", height)
        axes.set_ylim(bottom=0)


def _stages(figure: Any, rows: Rows, ceilings: dict[str, float]) -> None:
    from matplotlib import colormaps

    models = list(dict.fromkeys(row["model"] for row in rows))
    stages = list(dict.fromkeys(row["stage"] for row in rows if row["stage"] not in TOTALS))
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1, title=f"{model}, ms")
        cases = list(dict.fromkeys(row["what"] for row in rows if row["model"] == model))
        for at, case in enumerate(cases):
            us = {row["stage"]: row["us"] for row in rows if (row["model"], row["what"]) == (model, case)}
            bottom = 0.0
            for i, stage in enumerate(stages):
                label, height = stage if (place, at) == (0, 0) else None, us.get(stage, 0.0) / 1e3
                axes.bar(at, height, 0.7, bottom=bottom, color=colormaps["tab20"](i % 20), label=label)
                bottom += height
            axes.hlines(us.get("whole", 0.0) / 1e3, at - 0.4, at + 0.4, color="black")
        axes.set_xticks(range(len(cases)), cases, rotation=20, fontsize="x-small", ha="right")


DRAWN = {("products",): _products, ("sweep", "headline"): _exchanges, ("stages",): _stages}
"""Sections -> what draws them."""

if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
