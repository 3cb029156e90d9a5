"""Section "products" of bench=gemm as a roofline: what a product reaches, over what memory and tensor cores allow.

x  flop per byte of the least memory traffic      y  TFLOP/s      roofs  copy speed times x; dense FP8; dense bf16

python -m mxep.integration.bench.roofline RESULTS.json PICTURE.svg      draws it again, without a GPU
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLORS = {"ours": "tab:blue", "fp8 row, fast": "tab:orange", "fp8 row, slow": "tab:red", "bf16": "tab:grey"}
MARKERS = {"forward": "o", "dgrad": "s", "wgrad": "^"}
LEFT = 50.0  # flop per byte, so that all of the memory's roof is seen
TICKS = [50, 100, 200, 500, 1000, 2000, 5000]


def draw(results: dict[str, Any], file: Path) -> None:
    """The results of bench=gemm, as JSON has them, as a picture; the file's ending says of which format.

    ValueError if they have no products.
    """
    # The object interface, without pyplot: no global figure, no display, nothing to close.
    from matplotlib.figure import Figure

    rows = [row for row in results.get("sections", {}).get("products", ()) if "us" in row]
    if not rows:
        raise ValueError("a roofline needs section 'products': got none in the results, measure it (bench.sections)")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="flop per byte of the least memory traffic",
        ylabel="TFLOP/s",
        title=f"Grouped products on one {results.get('device', 'device')}",
    )
    axes.set_xscale("log")
    axes.set_xticks(TICKS, labels=map(str, TICKS), minor=False)
    axes.set_xticks([], minor=True)
    points = [(row, row["flop"] / row["bytes"], row["TF"]) for row in rows if row["what"] in COLORS]
    left, right = min(LEFT, *(x for _, x, _ in points)), max(x for _, x, _ in points) * 1.5
    top = _draw_roofs(axes, results.get("ceilings", {}), rows, left, right)
    for what, color in COLORS.items():
        for product, marker in MARKERS.items():
            mine = [(x, y) for row, x, y in points if (row["what"], row["product"]) == (what, product)]
            if mine:
                xs, ys = zip(*mine)
                axes.scatter(xs, ys, s=28, color=color, marker=marker, label=f"{what}, {product}", zorder=3)
    axes.set_xlim(left, right)
    axes.set_ylim(0, 1.1 * max(top, *(y for *_, y in points)))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file)


def _draw_roofs(axes: Any, ceilings: dict[str, float], rows: list[dict[str, Any]], left: float, right: float) -> float:
    """The height of the highest: dense FP8, the fastest of all dense products that were measured."""
    dense = [row["TF"] for row in rows if row["what"].startswith("dense")]
    fp8: float = max([*dense, ceilings.get("dense fp8 TF", 0.0)])
    for name, top in (("dense fp8", fp8), ("dense bf16", ceilings.get("dense bf16 TF", 0.0))):
        if top:
            axes.plot([left, right], [top, top], color="black", linewidth=1)
            axes.annotate(f"{name}: {top:.4g}", (right, top), (-4, 3), textcoords="offset points", ha="right")
    if copy := ceilings.get("copy TB/s"):
        end = min(right, fp8 / copy)
        xs = [left * (end / left) ** (i / 50) for i in range(51)]  # a curve, as only x is logarithmic
        axes.plot(xs, [copy * x for x in xs], color="black", linewidth=1, linestyle="--")
        at = xs[30], copy * xs[30]
        axes.annotate(f"copy: {copy:.2f} TB/s", at, (-6, 4), textcoords="offset points", ha="right")
    return fp8


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
