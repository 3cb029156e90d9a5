"""Pictures of published results: `python integration/benchmarks/front_page.py docs/results` draws them there.

    front-page.svg    eager-*-h200.json       section "eager": ms of forward + backward of a layer of six models
                      step-qwen3-h200.json    section "model": tokens/s of a model's training step
    losses.svg        parity-h200.json        losses in training, three seeds of bf16 and MXFP8
    peers-h100.svg    peers-*-h100.json       ms of a layer by peer. A later file's time replaces an earlier one's

The same results give the same bytes, which a test compares. A browser picks colours for the reader's scheme.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1]))

from mxep.integration import report
from mxep.integration.report import Row

NAMES = {
    "deepseek_v3": "DeepSeek-V3, 128 experts",
    "deepseek_proxy": "DeepSeek-V3, 32 experts",
    "qwen3_30b": "Qwen3-30B-A3B",
    "qwen3_235b": "Qwen3-235B-A22B",
    "llama4_scout": "Llama-4 Scout",
    "mixtral_8x7b": "Mixtral 8x7B",
}
LAYERS, MODEL = ("eager-models", "eager-llama4-mixtral"), "step-qwen3"
BASELINE = "baseline bf16"
ALIASES = {"bf16/symmetric": "mxep bf16", "mxfp8/symmetric": "mxep mxfp8", "baseline": BASELINE}
"""Name of a case in bench=layer or bench=model -> its series here."""
SERIES = {
    BASELINE: ("base", "bf16 baseline"),
    "baseline fp8": ("fp8", "torchao FP8, where measured"),
    "mxep bf16": ("bf16", "mxep bf16"),
    "mxep mxfp8": ("mxfp8", "mxep MXFP8"),
}
"""Series -> CSS class, legend."""
PEERS = {"mxep bf16": "bf16", "mxep fp8": "fp8", "mxep mxfp8": "mxfp8", "mxep mxfp8, kept": "mxfp8"}
"""CSS class of our rows among peers."""
PEER_TOKENS = 4096

# Okabe and Ito's colours, for colour-blind readers. Series also have a fixed order.
STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0;
      --base: #8c8c8c; --fp8: #e69f00; --bf16: #56b4e9; --mxfp8: #0072b2 }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #3d444d;
        --base: #8c8c8c; --fp8: #e69f00; --bf16: #9bd3f5; --mxfp8: #2b95d6 } }
text { font-family: system-ui, -apple-system, "Segoe UI", Arial, sans-serif; font-size: 13px; fill: var(--ink) }
.page { fill: var(--page); stroke: var(--line) } .title { font-size: 16px; font-weight: 600 }
.dim { fill: var(--dim); font-size: 12px } .name { font-weight: 600 } .best { font-weight: 700 }
.base { fill: var(--base) } .fp8 { fill: var(--fp8) } .bf16 { fill: var(--bf16) } .mxfp8 { fill: var(--mxfp8) }
"""
WIDTH, MARGIN, LEFT = 640, 16, 222  # LEFT: where bars begin. The page is narrow enough for a phone
BAR, STEP, GAP = 13, 17, 16  # height of a bar, distance between bars, gap between models
ROOM = 115  # right of the longest bar, for its figure


def by_model(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Model -> its rows in the order of SERIES, with `what` replaced by the series."""
    named = [row | {"what": ALIASES.get(row["what"], row["what"])} for row in rows]
    return {
        model: [row for what in SERIES for row in named if (row["model"], row["what"]) == (model, what)]
        for model in NAMES
        if any(row["model"] == model for row in named)
    }


def shape(row: Row) -> tuple[str, str]:
    """`8192 tokens per GPU`, `7168 x 2048, top-8 of 128`"""
    tokens, *_, dim, hidden, experts, top_k = row["shape"]
    return f"{tokens} tokens per GPU", f"{dim} x {hidden}, top-{top_k} of {experts}"


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
            self.text(x + 16, text, y=self.y + 11)
            x += 32 + 7.6 * len(text)
        self.y += 26

    def bars(self, name: str, shape: tuple[str, str], bars: list[tuple[str, float, str]], longest: float) -> None:
        """bars: series, length, label; in the order of SERIES."""
        top = self.y
        for i, (text, kind) in enumerate(((name, "name"), *((line, "dim") for line in shape))):
            self.text(MARGIN, text, kind, y=top + 11 + i * STEP)
        for i, (series, length, label) in enumerate(bars):
            width = length / longest * (WIDTH - MARGIN - ROOM - LEFT)
            self.box(LEFT, top + i * STEP, width, BAR, SERIES[series][0])
            best = "best" if series == "mxep mxfp8" else ""
            self.text(LEFT + width + 6, label, best, y=top + i * STEP + 11)
        self.y += len(bars) * STEP + GAP

    def svg(self, description: str) -> str:
        size = f'width="{WIDTH}" height="{self.y:g}" viewBox="0 0 {WIDTH} {self.y:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(description)}</title>'
        page = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.y - 1:g}" rx="8" class="page"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", page, *self.lines, "</svg>"]) + "\n"


def times(row: Row) -> str:
    ratio = row["x bf16"] if "x bf16" in row else row["x baseline"]
    return "" if row["what"] == BASELINE else f" ({ratio:.2f}x)"


def front_page(layers: Sequence[Row], model: Row) -> str:
    """The SVG of JSON results: of layers, and of one model."""
    page = Page()
    models = by_model(row for result in layers for row in result["sections"]["eager"])
    (gpus,) = {row["ranks"] for rows in models.values() for row in rows}
    (capacity,) = {row["capacity"] for rows in models.values() for row in rows if "capacity" in row}
    page.title(
        "One MoE layer, forward + backward: ms, shorter is better",
        f"{gpus} {layers[0]['device']}s, all called eagerly; mxep with a capacity of {capacity:g}.",
        "Baseline: torch's grouped GEMMs between NCCL's all-to-all. torchao: its GEMMs there.",
    )
    page.legend()
    longest = max(row["ms"] for rows in models.values() for row in rows)
    for name, rows in models.items():
        bars = [(row["what"], row["ms"], f"{row['ms']:.1f}{times(row)}") for row in rows]
        page.bars(NAMES[name], shape(rows[0]), bars, longest)
    ((name, rows),) = by_model(model["sections"]["model"]).items()
    page.y += 4
    page.title(
        "A training step of a whole model: tokens/s per GPU, longer is better",
        f"{rows[0]['ranks']} {model['device']}s, transformers' model after `optimize`, FSDP2, clipping, AdamW.",
    )
    rates = [row["tokens/s a GPU"] for row in rows]
    bars = [(row["what"], rate, f"{rate / 1e3:.1f}k{times(row)}") for row, rate in zip(rows, rates)]
    layers_cut, micro_batches, sequences, length = rows[0]["shape"]
    batch = f"{micro_batches} micro-batches of {sequences * length} tokens"
    page.bars(NAMES[name], (f"cut to {layers_cut} layers", batch), bars, max(rates))
    return page.svg("Times of MoE layers and speed of a whole model: bf16 baseline, torchao FP8, mxep bf16, mxep MXFP8")


def losses(result: Row) -> str:
    """The SVG of losses in training: means of three seeds, and MXFP8 - bf16 for each seed."""
    every = result["train"]["steps"] // len(result["runs"][0]["curve"])
    runs = {(run["recipe"], run["seed"]): run["curve"] for run in result["runs"]}
    seeds = sorted(seed for recipe, seed in runs if recipe == "mxfp8")
    styles, steps = report.STYLES, [every * (i + 1) for i in range(len(runs["mxfp8", 0]))]
    means = [
        report.Curve(name, style, [*zip(steps, map(statistics.fmean, zip(*(runs[name, seed] for seed in seeds))))])
        for name, style in zip(("bf16", "mxfp8"), styles)
    ]
    apart = [report.Curve(None, styles[-1], [(steps[0], 0.0), (steps[-1], 0.0)])]
    for seed, color in zip(seeds, ("#0072B2", "#D55E00", "#009E73")):
        difference = [a - b for a, b in zip(runs["mxfp8", seed], runs["bf16", seed])]
        apart.append(report.Curve(f"seed {seed}", (color, "", 1.5), [*zip(steps, difference)]))
    width, height = report.WIDTH, report.HEIGHT
    charts = (
        report.chart("loss in nats per byte, by step; mean of three seeds", means),
        report.chart("MXFP8 - bf16 in nats per byte, by step", apart),
    )
    placed = [
        chart.replace("<svg", f'<svg y="{i * height}" width="{width}" height="{height}"', 1)
        for i, chart in enumerate(charts)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {2 * height}" width="{width}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *placed, "</svg>"]) + "\n"


def peers(results: Sequence[Row]) -> str:
    """The SVG with a bar for each peer and shape, at PEER_TOKENS. dB is that of the least exact result, without the
    gradient of routing weights, which some peers return in bf16."""
    page, shapes = Page(), dict[str, dict[str, Row]]()
    for row in (row for result in results for row in result["rows"]):
        if row["tokens"] == PEER_TOKENS and "ms" in row:
            shapes.setdefault(row["shape"], {})[row["peer"]] = row
    where = f"{results[-1]['device']}, runs until {results[-1]['date']}"
    title = "One MoE layer on one GPU, forward + backward: ms"
    page.title(title, f"{where}, {PEER_TOKENS} tokens a rank. dB: SNR against fp64.")
    for name, by_peer in shapes.items():
        rows = sorted(by_peer.values(), key=lambda row: float(row["ms"]))
        page.y += 16
        page.text(MARGIN, f"{name}, {rows[0]['rows an expert']:.0f} rows an expert", "name")
        page.y += 6
        for row in rows:
            width = row["ms"] / rows[-1]["ms"] * (WIDTH - MARGIN - ROOM - LEFT)
            worst = min(db for result, db in row["dB"].items() if result != "d_weights")
            page.text(MARGIN, row["peer"], "best" if row["peer"] in PEERS else "dim", y=page.y + 10)
            page.box(LEFT, page.y, width, BAR, PEERS.get(row["peer"], "base"))
            page.text(LEFT + width + 6, f"{row['ms']:.3g} ms, {worst:.0f} dB", "dim", y=page.y + 11)
            page.y += STEP
    page.y += MARGIN
    return page.svg("Times of one MoE layer on one GPU, mxep and its peers")


def pictures(folder: Path) -> dict[str, str]:
    """File name -> SVG, from the results in a folder."""
    *layers, model, parity = (
        json.loads((folder / f"{name}-h200.json").read_text()) for name in (*LAYERS, MODEL, "parity")
    )
    files = sorted(folder.glob("peers-*-h100.json"), key=lambda file: int(file.name.split("-")[1]))
    runs = [json.loads(file.read_text()) for file in files]
    return {"front-page.svg": front_page(layers, model), "losses.svg": losses(parity), "peers-h100.svg": peers(runs)}


if __name__ == "__main__":
    for file, svg in pictures(Path(sys.argv[1])).items():
        (Path(sys.argv[1]) / file).write_text(svg)
