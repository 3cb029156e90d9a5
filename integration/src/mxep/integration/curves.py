"""loss.png: what the losses of runs were, how far they lie apart, and how evenly experts were loaded.

    losses         each run, smoothed, over its raw curve if there is one group; the unigram entropy
    differences    each run minus the first of its group, smoothed; of several groups (seeds) each, and their mean
    expert load    busiest expert / mean, layers x steps, a panel for each run of the first group

Okabe and Ito's colors and cividis, which color-blind readers can tell apart, and a style of line for each run besides.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

from .train import Run

Groups = Mapping[str, Mapping[str, Run]]
"""What runs have in common, as "seed 0" -> names -> runs; the first of a group is what others are compared with."""

STYLES = (("#0072B2", "-", 2.5), ("#D55E00", "--", 1.5), ("#009E73", "-.", 1.0), ("#000000", ":", 1.0))
"""Color, line and width of each run of a group. They often lie upon each other: each is narrower than those below."""


def draw(groups: Groups, title: str, entropy: float) -> bytes:
    """The panels as a PNG."""
    figure(groups, title, entropy).savefig(file := io.BytesIO(), format="png")
    return file.getvalue()


def figure(groups: Groups, title: str, entropy: float) -> Any:
    """The panels as matplotlib's Figure. Steps that were skipped have no loss; a run without loads has no panel."""
    # The object interface, without pyplot: no global figure, no display, nothing to close.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    first = next(iter(groups.values()))
    differences = len(first) > 1
    loaded = {name: run for name, run in first.items() if any("expert_loads" in row for row in run.metrics[-1:])}
    heights = [3.0, *([1.5] if differences else []), *(0.55 + 0.12 * min(12, len(_loads(r))) for r in loaded.values())]
    drawn = Figure(figsize=(8, 1.7 + sum(heights)), dpi=150, layout="constrained")
    panels = drawn.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _losses(panels[0], groups, entropy)
    panels[0].set_title(title)
    if differences:
        _differences(panels[1], groups)
    below = panels[len(panels) - len(loaded) :]
    most = max((max(filter(math.isfinite, sum(_loads(run), [1.0]))) for run in loaded.values()), default=1.0)
    for axes, (name, run) in zip(below, loaded.items()):
        loads, steps = _loads(run), [row["step"] for row in run.metrics]
        extent = (steps[0] - 0.5, steps[-1] + 0.5, len(loads) - 0.5, -0.5)
        image = axes.imshow(loads, extent=extent, aspect="auto", cmap="cividis", vmin=1, vmax=most)
        axes.set_title(f"expert load of {name}", loc="left", fontsize="small")
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    if loaded:
        drawn.colorbar(image, ax=list(below), location="bottom", label="busiest expert / mean", aspect=60)
    panels[-1].set_xlabel("step")
    drawn.align_ylabels(panels)
    return drawn


def _losses(axes: Any, groups: Groups, entropy: float) -> None:
    for place, runs in enumerate(groups.values()):
        for (name, run), (color, style, width) in zip(runs.items(), STYLES):
            steps, losses = [row["step"] for row in run.taken], [row["loss"] for row in run.taken]
            if len(groups) == 1:
                axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            label = name if place == 0 else None
            axes.plot(steps, smooth(losses), color=color, linestyle=style, linewidth=width, label=label)
    axes.axhline(entropy, color="grey", linestyle=":", linewidth=1, label=f"unigram entropy, {entropy:.2f}")
    axes.set_ylabel("loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()


def _differences(axes: Any, groups: Groups) -> None:
    base, *others = next(iter(groups.values()))
    for name, (color, style, _) in zip(others, STYLES[1:]):
        each = [difference(runs[name], runs[base]) for runs in groups.values()]
        for one in each if len(each) > 1 else ():
            axes.plot(list(one), smooth(list(one.values())), color=color, linewidth=0.6, alpha=0.5)
        steps = [step for step in each[0] if all(step in one for one in each)]
        mean = smooth([statistics.fmean(one[step] for one in each) for step in steps])
        label = f"{name} - {base}" + (f", mean of {len(each)}" if len(each) > 1 else "")
        axes.plot(steps, mean, color=color, linestyle=style, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_title(f"difference from {base}, smoothed", loc="left", fontsize="small")
    axes.set_ylabel("nats a byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def difference(run: Run, base: Run) -> dict[int, float]:
    """By how much the run's loss exceeds the base's, by step, of the steps that both took."""
    of_base = {row["step"]: row["loss"] for row in base.taken}
    return {row["step"]: row["loss"] - of_base[row["step"]] for row in run.taken if row["step"] in of_base}


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Means with weight ``weight ** distance`` to both sides, so that they follow a falling curve without a lag."""
    ahead, back = _sums(values, weight), _sums(values[::-1], weight)[::-1]
    return [(a + b - value) / (m + n - 1) for (a, m), (b, n), value in zip(ahead, back, values, strict=True)]


def _sums(values: list[float], weight: float) -> list[tuple[float, float]]:
    """Of values up to each, weighted, and of the weights."""
    sums = itertools.accumulate(values, lambda total, value: weight * total + value, initial=0.0)
    norms = itertools.accumulate(values, lambda total, _: weight * total + 1, initial=0.0)
    return list(zip(sums, norms))[1:]


def _loads(run: Run) -> list[list[float]]:
    """Busiest / mean of each layer over all steps; NaN for steps of a checkpoint that has the worst layer's alone."""
    layers = len(run.metrics[-1]["expert_loads"])
    rows = [row.get("expert_loads", [math.nan] * layers) for row in run.metrics]
    return [list(layer) for layer in zip(*rows, strict=True)]
