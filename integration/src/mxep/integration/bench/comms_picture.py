"""Sections "sweep" and "headline" of bench=comms as a picture: GB/s over bytes, ours beside the library's all-to-all.

    left   what leaves the GPU, over its time        right   what a row for each (token, expert) pair would be

python -m mxep.integration.bench.comms_picture RESULTS.json PICTURE.svg      draws it again, without a GPU
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

STYLES = {
    "dispatch mxfp8": ("tab:blue", "o"),
    "dispatch bf16": ("tab:cyan", "s"),
    "return bf16": ("tab:green", "^"),
    "NCCL bf16": ("tab:red", "s"),
    "NCCL 8-bit": ("tab:orange", "o"),
    "gloo bf16": ("tab:red", "s"),
    "gloo 8-bit": ("tab:orange", "o"),
}
KINDS = {"wire": "leave the GPU", "logical": "would leave, a row for each (token, expert) pair"}


def draw(results: dict[str, Any], file: Path) -> None:
    """The results of bench=comms, as JSON has them, as a picture; the file's ending says of which format.

    ValueError if they have no moves.
    """
    # The object interface, without pyplot: no global figure, no display, nothing to close.
    from matplotlib.figure import Figure

    sections = results.get("sections", {})
    rows = [row for name in ("sweep", "headline") for row in sections.get(name, ()) if row.get("what") in STYLES]
    rows = [row for row in rows if "wire GB/s" in row and row["wire bytes"]]
    if not rows:
        raise ValueError("a picture of bench=comms needs section sweep or headline: got no moves in the results")
    # A line through the shapes that differ in tokens alone; the others are points.
    (most, _), *_ = collections.Counter(tuple(row["shape"][1:]) for row in rows).most_common(1)
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(f"{results.get('what')} on {results.get('device')}; lines: D {most[0]}, top-{most[2]} of {most[1]}")
    for place, (kind, meaning) in enumerate(KINDS.items()):
        axes = figure.add_subplot(1, 2, place + 1, xlabel=f"MB that {meaning}", ylabel="GB/s", title=kind)
        axes.set_xscale("log")
        for what, (color, marker) in STYLES.items():
            mine = sorted(
                (row[f"{kind} bytes"] / 1e6, row[f"{kind} GB/s"], tuple(row["shape"][1:]) == most)
                for row in rows
                if row["what"] == what
            )
            if not mine:
                continue
            line = [point for point in mine if point[2]]
            axes.plot([x for x, _, _ in line], [y for _, y, _ in line], color=color, linewidth=1)
            xs, ys = [x for x, _, _ in mine], [y for _, y, _ in mine]
            label = what if place == 0 else None
            axes.scatter(xs, ys, s=24, color=color, marker=marker, label=label, zorder=3)
        if kind == "wire" and (ceilings := results.get("ceilings")):
            value, name = max((value, name) for name, value in ceilings.items())
            axes.axhline(value, color="black", linewidth=1, linestyle="--")
            label, place_of = f"{name.removesuffix(' GB/s')}: {value:.0f}", ("axes fraction", "data")
            axes.annotate(label, (0.01, value), (0, 3), xycoords=place_of, textcoords="offset points")
            axes.set_ylim(top=1.1 * max(value, *(row["wire GB/s"] for row in rows)))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(file)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
