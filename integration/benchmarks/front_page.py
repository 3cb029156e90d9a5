"""The README's picture, from results that are kept: one layer of six models, and one whole model.

    layer-h200.json   section "layer" of the runs on 4 GPUs: ms of forward + backward, lower is better
    model-h200.json   section "model": tokens/s of a model's forward + backward, higher is better

python integration/benchmarks/front_page.py docs/results          writes docs/results/front-page.svg

The SVG is written as text, not drawn by matplotlib as the benches' pictures are. So the same results give the same
bytes, which a test compares, and a browser picks colours for the reader's scheme, dark or light.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Row = dict[str, Any]

FILE = "front-page.svg"
NAMES = {
    "deepseek_v3": "DeepSeek-V3, 128 experts",
    "deepseek_proxy": "DeepSeek proxy",
    "qwen3_30b": "Qwen3-30B-A3B",
    "qwen3_235b": "Qwen3-235B-A22B",
    "llama4_scout": "Llama-4 Scout",
    "mixtral_8x7b": "Mixtral 8x7B",
    "qwen3_30b_16_layers": "Qwen3-30B-A3B, 16 layers",
}
BASELINE = "baseline bf16"
ALIASES = {
    "standard bf16": BASELINE,
    "standard fp8": "baseline fp8",
    "bf16/symmetric": "mxep bf16",
    "mxfp8/symmetric": "mxep mxfp8",
}
"""Name of a case in older results or in bench=layer -> its series here."""
SERIES = {
    BASELINE: ("base", "bf16 baseline"),
    "baseline fp8": ("fp8", "torchao FP8 (measured on DeepSeek-V3 only)"),
    "mxep bf16": ("bf16", "mxep bf16"),
    "mxep mxfp8": ("mxfp8", "mxep MXFP8"),
}
"""Series -> CSS class, legend."""

# Okabe and Ito's colours: colour-blind readers can tell them apart. Each series also has its own place.
STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0;
      --base: #8c8c8c; --fp8: #e69f00; --bf16: #56b4e9; --mxfp8: #0072b2 }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #3d444d;
        --base: #8c8c8c; --fp8: #e69f00; --bf16: #9bd3f5; --mxfp8: #2b95d6 } }
text { font-family: system-ui, -apple-system, "Segoe UI", Arial, sans-serif; font-size: 12px; fill: var(--ink) }
.page { fill: var(--page); stroke: var(--line) } .title { font-size: 15px; font-weight: 600 }
.dim { fill: var(--dim); font-size: 11px } .name { font-weight: 600 } .best { font-weight: 700 }
.base { fill: var(--base) } .fp8 { fill: var(--fp8) } .bf16 { fill: var(--bf16) } .mxfp8 { fill: var(--mxfp8) }
"""
WIDTH, MARGIN, LEFT = 900, 20, 290  # LEFT: where bars begin. Room for DejaVu Sans, the widest of the fonts
BAR, STEP, GAP = 11, 14, 15  # a bar's height, from bar to bar, between models
ROOM = 115  # right of the longest bar, for its figure


def layer_rows(results: Row) -> dict[str, list[Row]]:
    """Model -> its rows of the layer, one a series, evenly routed, of the runs with the most GPUs."""
    rows = [row for run in results["runs"] for row in run["sections"].get("layer", ())]
    most = max(row["ranks"] for row in rows)
    models: dict[str, list[Row]] = {}
    for row in rows:
        what = ALIASES.get(row["what"], row["what"])
        if row["ranks"] == most and not row["skew"] and what in SERIES:
            models.setdefault(row["model"], []).append(row | {"what": what})
    return models


def layer_shape(row: Row) -> str:
    """`8192 tokens, 7168 x 2048, top-8 of 128`"""
    tokens, dim, hidden, experts, top_k = row["shape"]
    return f"{tokens} tokens/GPU, {dim} x {hidden}, top-{top_k} of {experts}"


def model_shape(row: Row) -> str:
    tokens, _, dim, hidden, experts, top_k = row["shape"]
    return layer_shape({"shape": [tokens, dim, hidden, experts, top_k]})


class Page:
    """Lines of an SVG, from top to bottom."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.y = MARGIN

    def text(self, x: float, text: str, kind: str = "", *, y: float | None = None) -> None:
        kind = f' class="{kind}"' if kind else ""
        self.lines.append(f'<text x="{x:g}" y="{self.y if y is None else y:g}"{kind}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" class="{kind}"/>')

    def title(self, title: str, *remarks: str) -> None:
        self.y += 14
        self.text(MARGIN, title, "title")
        for remark in remarks:
            self.y += 16
            self.text(MARGIN, remark, "dim")
        self.y += 16

    def legend(self) -> None:
        x = float(MARGIN)
        for kind, text in SERIES.values():
            self.box(x, self.y, 11, 11, kind)
            self.text(x + 16, text, y=self.y + 10)
            x += 40 + 6.8 * len(text)
        self.y += 26

    def bars(self, name: str, shape: str, bars: list[tuple[str, float, str]], longest: float) -> None:
        """bars: series, length, label; in the order of SERIES."""
        top = self.y
        height = (len(bars) - 1) * STEP + BAR
        self.text(MARGIN, name, "name", y=top + height / 2 - 2)
        self.text(MARGIN, shape, "dim", y=top + height / 2 + 12)
        for i, (series, length, label) in enumerate(bars):
            width = length / longest * (WIDTH - MARGIN - ROOM - LEFT)
            self.box(LEFT, top + i * STEP, width, BAR, SERIES[series][0])
            best = "best" if series == "mxep mxfp8" else ""
            self.text(LEFT + width + 6, label, best, y=top + i * STEP + 10)
        self.y += height + GAP

    def svg(self, description: str) -> str:
        size = f'width="{WIDTH}" height="{self.y:g}" viewBox="0 0 {WIDTH} {self.y:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(description)}</title>'
        page = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.y - 1:g}" rx="8" class="page"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", page, *self.lines, "</svg>"]) + "\n"


def in_order(rows: list[Row]) -> list[Row]:
    return sorted((row for row in rows if row["what"] in SERIES), key=lambda row: list(SERIES).index(row["what"]))


def times(row: Row) -> str:
    return "" if row["what"] == BASELINE else f" ({row['x bf16']:.2f}x)"


def front_page(layer: Row, model: Row) -> str:
    """The SVG of both results, as JSON has them."""
    page = Page()
    models = layer_rows(layer)
    run = next(run for run in layer["runs"] if run["sections"].get("layer"))
    gpus = next(iter(models.values()))[0]["ranks"]
    (capacity,) = {row["capacity"] for rows in models.values() for row in rows if "capacity" in row}
    page.title(
        "One MoE layer, forward + backward: ms, shorter is better",
        f"{gpus} {run['device']}s, {run['date']}, sustained; mxep a CUDA graph, room for {capacity:g} x balanced load.",
        "baseline, torchao: grouped products behind NCCL's all-to-all, launched eagerly, as the host reads sizes.",
    )
    page.legend()
    longest = max(row["ms"] for rows in models.values() for row in rows)
    for name, rows in models.items():
        bars = [(row["what"], row["ms"], f"{row['ms']:.1f}{times(row)}") for row in in_order(rows)]
        page.bars(NAMES.get(name, name), layer_shape(rows[0]), bars, longest)
    rows = in_order(model["sections"]["model"])
    page.y += 4
    page.title(
        "A whole model, forward + backward: tokens/s, longer is better",
        f"{rows[0]['ranks']} {model['device']}s, {model['date']}, transformers' model, no optimizer, called eagerly. "
        "torchao: not measured.",
    )
    longest = max(row["tokens/s"] for row in rows)
    bars = [(row["what"], row["tokens/s"], f"{row['tokens/s'] / 1e3:.1f}k{times(row)}") for row in rows]
    name = str(rows[0]["model"])
    page.bars(NAMES.get(name, name), model_shape(rows[0]), bars, longest)
    return page.svg("Times of MoE layers and speed of a whole model: bf16 baseline, torchao FP8, mxep bf16, mxep MXFP8")


def main(folder: Path) -> None:
    layer, model = (json.loads((folder / f"{name}-h200.json").read_text()) for name in ("layer", "model"))
    (folder / FILE).write_text(front_page(layer, model))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
