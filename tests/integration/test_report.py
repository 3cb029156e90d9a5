"""report.html as a parser and as a browser see it, and what its curves are."""

import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from integration.conftest import TINY
from mxep.integration import checkpoint, report
from mxep.integration.schema import Config
from mxep.integration.train import Outcome, Run

SECTIONS = {
    "Loss in nats per byte",
    "Curves",
    "Token copies, over all steps, layers and ranks",
    "Speed",
    "Where it ran",
    "Config",
}
BROWSERS = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]


class Page(HTMLParser):
    """sections: heading -> rows of cells, as text. links: every attribute that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, list[list[str]]] = {}
        self.links: list[str] = []
        self.tag = self.heading = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag == "tr":
            self.sections[self.heading].append([])
        elif tag in ("td", "th"):
            self.sections[self.heading][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tag == "h2" and data.strip():
            self.heading = data
            self.sections[data] = []
        elif self.tag in ("td", "th") and data.strip():
            self.sections[self.heading][-1][-1] += data
        elif self.tag == "pre":
            self.sections[self.heading].append([data])

    def table(self, heading: str) -> dict[str, dict[str, str]]:
        head, *rows = self.sections[heading]
        return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def made_up(name: str, steps: int, *, layers: int = 3, above: float = 0.0) -> Run:
    """A loss that falls from 5 to 2 and `above`; layer i of L is loaded 1 + (i + 1) / L times the mean."""
    routing = {"rows_routed": 100, "rows_sent": 90, "rows_computed": 128, "rows_padding": 28, "rows_dropped": 2}
    loads = [1 + (i + 1) / layers for i in range(layers)]
    fixed = {
        **routing,
        "rows_invalid": 1,
        "expert_load": 2.0,
        "expert_loads": loads,
        "seconds": 0.5,
        "tokens_per_s": 64,
    }
    metrics = [
        {"run": name, "step": i + 1, "loss": 2 + above + 3 * math.exp(-6 * i / steps), **fixed} for i in range(steps)
    ]
    return Run(name, steps, False, metrics, 2.0 + above)


def check_page(raw: str, rows: list[dict[str, Any]]) -> None:
    """It has all sections, the numbers of metrics.jsonl, and needs no network."""
    page = Page(raw)
    assert page.sections.keys() == SECTIONS

    routing = page.table("Token copies, over all steps, layers and ranks")
    speed = page.table("Speed")
    assert routing.keys() == speed.keys() == {"bf16", "mxfp8"}
    for name in ("bf16", "mxfp8"):
        of = [row for row in rows if row["run"] == name]
        totals = {key: sum(row[f"rows_{key}"] for row in of) for key in ("computed", "padding", "routed", "sent")}
        columns = {"routed": "routed", "sent": "sent", "computed": "GEMM rows"}
        assert all(routing[name][column] == f"{totals[key]:,}" for key, column in columns.items())
        assert routing[name]["dropped"] == routing[name]["bad ids"] == "0"
        assert routing[name]["padding"] == f"{totals['padding'] / totals['computed']:.2%}"
        assert all(row["expert_load"] == max(row["expert_loads"]) >= 1 for row in of)
        assert speed[name]["seconds"] == f"{sum(row['seconds'] for row in of):,.1f}"
        losses = page.table("Loss in nats per byte")[name]
        assert losses["training, last 20 steps"] == f"{sum(row['loss'] for row in of[-20:]) / 20:.4f}"

    assert "TFLOP/s: Megatron's count, 2 layers, vocabulary 256, sequence 32." in raw.replace("&#x27;", "'")
    assert page.links == ["data:,"]
    titles = re.findall(r"<svg [^>]*><title>([^<]*)</title>", raw)
    assert titles == ["loss in nats per byte, by step", "mxfp8 - bf16 in nats per byte, smoothed"]
    assert not re.search(r"https?://|url\(|@import|<script", raw)
    assert "seed: 7\n" in page.sections["Config"][0][0]
    where = dict(page.sections["Where it ran"])
    assert re.match(r"mxep [\d.]+, python 3[\d.]+, torch \d", where["versions"])
    assert where["command"].startswith("mxep model=tiny")


def test_a_run_leaves_numbers_config_checkpoints_and_a_page_and_the_loss_falls(mxep, text: Path, tmp_path: Path):
    finished = mxep(*TINY, f"data.path={text}", "train.steps=30", "seed=7")
    assert finished.code == 0, finished.err
    for wanted in ("bf16", "mxfp8", "difference", "held-out text", "sent", "routed", "GEMM rows"):
        assert wanted in finished.out
    run = tmp_path / "run"
    assert "seed: 7" in (run / "config.yaml").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["run"], row["step"]) for row in rows] == [(r, s) for r in ("bf16", "mxfp8") for s in range(1, 31)]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["provenance"]["versions"].keys() >= {"python", "torch"}
    bf16, mxfp8 = summary["runs"]
    tokens = 30 * 4 * 32
    for run_summary in (bf16, mxfp8):
        assert run_summary["valid_loss"] < summary["unigram_entropy"]
        assert run_summary["rows_routed"] == tokens * 2 * 2  # 2 experts a token, 2 layers
        assert tokens * 2 <= run_summary["rows_sent"] <= run_summary["rows_routed"]
    assert bf16["rows_padding"] == 0 < mxfp8["rows_padding"]
    assert summary["valid_loss_difference"] == mxfp8["valid_loss"] - bf16["valid_loss"]
    for name, folder in checkpoint.find(run).items():
        assert folder.name == "step-000030"
        assert checkpoint.read_state(folder).run == name
        parts = {what: map(load_file, (folder / what).iterdir()) for what in ("model", "optimizer")}
        names = {what: {name for file in files for name in file} for what, files in parts.items()}
        biases = {f"blocks.{i}.moe.router.expert_bias" for i in range(2)}
        assert names["model"] < {name.removeprefix("first.") for name in names["optimizer"]} | biases

    check_page((run / "report.html").read_text(), rows)


def test_rates_of_a_run_are_means_over_its_time_and_a_step_takes_the_median():
    steps = [(1.0, 100.0, 2.0), (3.0, 400.0, 6.0), (4.0, 50.0, 1.0)]  # seconds, tokens/s, TFLOP/s
    run = made_up("bf16", 3)
    for row, (seconds, tokens, tflops) in zip(run.metrics, steps, strict=True):
        row |= {"seconds": seconds, "tokens_per_s": tokens, "tflops": tflops, "mfu": tflops / 10, "peak_gib": tokens}
    (summary,) = report.summarize(Outcome([run], "", 3.0))["runs"]
    assert summary["tokens_per_s"] == pytest.approx((100 + 1200 + 200) / 8)
    assert summary["tflops"] == pytest.approx((2 + 18 + 4) / 8)
    assert summary["mfu"] == pytest.approx(2.4 / 8)
    assert (summary["seconds"], summary["ms_a_step"], summary["peak_gib"]) == (8.0, 3000.0, 400.0)
    run.metrics[1]["mfu"] = None
    assert report.summarize(Outcome([run], "", 3.0))["runs"][0]["mfu"] is None


def curves_of(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in pixels from the top left."""
    lines = re.findall(r'<polyline points="([^"]*)"', svg)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]  # type: ignore[misc]


def value_at(svg: str, pixel: float) -> float:
    """What height a pixel's height stands for, by the first and the last tick of the axis."""
    ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([-\d.e]+)<', svg)
    (y0, low), (y1, high) = ((float(y) - 4, float(value)) for y, value in (ticks[0], ticks[-1]))
    return low + (pixel - y0) / (y1 - y0) * (high - low)


def test_curves_are_the_losses_raw_and_smoothed_and_their_difference():
    bf16, mxfp8 = made_up("bf16", 200), made_up("mxfp8", 200, above=0.25)
    losses, difference = report.charts([bf16, mxfp8], 3.2)
    raw, smoothed, *_, entropy = curves_of(losses)
    assert len(curves_of(losses)) == 5
    assert [len(raw), len(smoothed)] == [201, 201]  # the last point is there twice
    for step in (0, 99, 199):
        assert value_at(losses, raw[step][1]) == pytest.approx(bf16.metrics[step]["loss"], abs=0.01)
    assert value_at(losses, entropy[0][1]) == pytest.approx(3.2, abs=0.01)
    assert raw[0][0] == report.LEFT
    assert {label for label in ("bf16", "mxfp8", "unigram entropy, 3.20") if f">{label}<" in losses} == {
        "bf16",
        "mxfp8",
        "unigram entropy, 3.20",
    }
    zero, above = curves_of(difference)
    assert all(value_at(difference, y) == pytest.approx(0.25, abs=0.002) for _, y in above)
    assert all(value_at(difference, y) == pytest.approx(0, abs=0.002) for _, y in zero)
    assert ">mxfp8 - bf16 in nats per byte, smoothed<" in difference


def test_a_long_curve_has_few_points_and_what_is_not_finite_none():
    points = [(float(i), math.inf if i == 4 else 1.0 + i % 2) for i in range(10_000)]
    (line,) = curves_of(report.chart("", [report.Curve(None, report.STYLES[0], points)]))
    assert 700 < len(line) <= report.POINTS + 1


@pytest.mark.parametrize("low", [-3.0, 0.0, 0.9])
@pytest.mark.parametrize("span", [1e-3, 0.07, 1.0, 4.4, 1e4])
def test_ticks_are_a_few_round_numbers_within_the_axis(low: float, span: float):
    ticks = report._ticks(low, low + span)
    assert 3 <= len(ticks) <= 7
    assert low <= ticks[0] < ticks[-1] <= low + span
    assert all(float(f"{tick:.6g}") == pytest.approx(tick, abs=1e-9) for tick in ticks)


def test_smoothing_keeps_constants_and_forgets_the_past():
    values = [value for _, value in report.smooth([(0, 1.5), (1, 1.5), (2, 2.5)], 0.5)]
    assert values == pytest.approx([1.5, 1.5, (1.5 * 0.75 + 2.5) / 1.75])
    assert report.smooth([]) == []


def test_runs_that_were_stopped_at_once_or_come_of_older_checkpoints_are_drawn(
    make_config: Callable[..., Config], tmp_path: Path
):
    old, stopped = made_up("bf16", 5), Run("mxfp8", 0, True, [], None)
    for row in old.metrics[:3]:
        del row["expert_loads"]
    report.write(Outcome([old, stopped], "<b>", 3.0), tmp_path, make_config(), "mxep")
    page = (tmp_path / "report.html").read_text()
    assert "Stopped: mxfp8, step 0 of 260." in page
    assert "<b>" not in page


@pytest.mark.skipif(not BROWSERS, reason="needs chromium or Chrome")
def test_a_browser_shows_the_curves_and_nothing_is_wider_than_a_phone(
    make_config: Callable[..., Config], tmp_path: Path
):
    import matplotlib.image  # of the development group

    runs = [made_up("bf16", 300, layers=48), made_up("mxfp8", 300, layers=48, above=0.1)]
    report.write(Outcome(runs, "some text", 3.2), tmp_path, make_config(), "mxep " + "x" * 300)
    page = tmp_path / "report.html"
    seen = "{charts: document.querySelectorAll('svg').length, wide: document.documentElement.scrollWidth,"
    seen += " inner: innerWidth,"
    seen += " fetched: performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:')),"
    seen += " headings: [...document.querySelectorAll('h2')].map(e => e.innerText)}"
    script = f"<script>onload = () => document.body.innerHTML = '<pre>' + JSON.stringify({seen}) + '</pre>'</script>"
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text() + script)

    found = json.loads(browse(probe, 420, "--dump-dom").partition("<pre>")[2].partition("</pre>")[0])
    assert found["charts"] == 2
    assert found["wide"] <= found["inner"]
    assert found["fetched"] == []
    assert set(found["headings"]) == SECTIONS
    browse(page, 1100, f"--screenshot={tmp_path / 'shot.png'}")
    pixels = matplotlib.image.imread(tmp_path / "shot.png")[..., :3] * 255
    for color, *_ in report.STYLES[:2]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - wanted).max(-1) < 8).sum() > 50


def browse(page: Path, width: int, do: str) -> str:
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={page.parent / 'browser'}", f"--window-size={width},3000", do]
    return subprocess.run(
        [BROWSERS[0], *options, page.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_a_narrow_console_cuts_no_label_no_figure_and_no_error() -> None:
    row: report.Row = {
        "what": "fp8/all_to_all, kept",
        "stage": "permute + pointwise",
        "us": 123456.7,
        "left us": -24905.0,
    }
    failed = {"what": "mxfp8/local", "error": "one rank's experts alone"}
    section = report.Section("stages", ("what", "stage"), {"us": ".1f", "left us": ".1f"}, [row, failed])
    console = Console(width=40, record=True, file=io.StringIO())

    section.show(console)

    shown = console.export_text()
    assert all(text in shown for text in (*map(str, row.values()), "mxfp8/local", "one rank's experts"))
