"""Section "stages" of bench=layer as a picture: a model's step in ours and in the standard layer, stage upon stage.

python -m mxep.integration.bench.layer_picture RESULTS.json PICTURE.svg      draws it again, without a GPU
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOTALS = ("sum", "busy", "whole")


def draw(results: dict[str, Any], file: Path) -> None:
    """The results of bench=layer, as JSON has them, as a picture; the file's ending says of which format.

    ValueError if they have no stages.
    """
    # The object interface, without pyplot: no global figure, no display, nothing to close.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = [row for row in results.get("sections", {}).get("stages", ()) if "us" in row]
    if not rows:
        raise ValueError("a picture of bench=layer needs section stages: got none in the results")
    models = list(dict.fromkeys(row["model"] for row in rows))
    stages = list(dict.fromkeys(row["stage"] for row in rows if row["stage"] not in TOTALS))
    colors = {stage: colormaps["tab20"](i % 20) for i, stage in enumerate(stages)}
    figure = Figure(figsize=(max(6, 2.6 * len(models)), 6), layout="constrained")
    figure.suptitle(f"{results.get('what')} on {results.get('device')}: forward + backward by kernels; bar: whole step")
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1, title=model)
        axes.title.set_fontsize("small")
        if place == 0:
            axes.set_ylabel("ms")
        mine = [row for row in rows if row["model"] == model]
        cases = list(dict.fromkeys(row["what"] for row in mine))
        for at, case in enumerate(cases):
            us = {row["stage"]: row["us"] for row in mine if row["what"] == case}
            bottom = 0.0
            for stage in stages:
                height = us.get(stage, 0.0) / 1e3
                axes.bar(at, height, 0.7, bottom=bottom, color=colors[stage])
                bottom += height
            axes.hlines(us.get("whole", 0.0) / 1e3, at - 0.4, at + 0.4, color="black", linewidth=1.5)
        axes.set_xticks(range(len(cases)), cases, rotation=20, fontsize="x-small", ha="right")
    handles = [_patch(colors[stage], stage) for stage in stages]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(file)


def _patch(color: Any, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
