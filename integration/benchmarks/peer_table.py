"""The table and the picture of peers.py, from its JSON files.

A later file replaces rows of earlier ones, but an error replaces no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.front_page import BAR, LEFT, MARGIN, ROOM, STEP, WIDTH, Page
from benchmarks.peer_layers import RESULTS

Row = dict[str, Any]

CLOSE = 3.0  # dB within which rows are compared
OURS = "mxep"


def worst(row: Row) -> float:
    """dB of the worst result, without the gradient of routing weights, which some peers return in bf16."""
    found = [db for name, db in row.get("dB", {}).items() if name != "d_weights"]
    return min(found) if found else float("-inf")


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows within CLOSE dB, the most exact group first. In a group, the fastest row is first."""
    groups: list[list[Row]] = []
    for row in sorted((row for row in rows if "ms" in row), key=worst, reverse=True):
        if groups and worst(groups[-1][0]) - worst(row) <= CLOSE:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group, key=lambda row: float(row["ms"])) for group in groups]


def by_cell(results: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """(shape, tokens) -> rows, each with its commit."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for result in results:
        for row in result["layers"]:
            rows = found.setdefault((row["shape"], row["tokens"]), {})
            if "ms" in row or row["peer"] not in rows:
                rows[row["peer"]] = row | {"commit": result["commit"]}
    return {key: list(rows.values()) for key, rows in found.items()}


def losses(cell: str, rows: Sequence[Row], figure: str, form: str, unit: float) -> list[str]:
    """Return a line for each peer that is ahead of all of our rows that are as exact.

    Rows with kept weights do not count, because peers quantize in every step.
    """
    lines = []
    timed = [row for row in rows if figure in row and "ms" in row and not row["peer"].endswith(", kept")]
    for row in timed:
        if row["peer"].startswith(OURS):
            continue
        ours = [own for own in timed if own["peer"].startswith(OURS) and worst(own) >= worst(row) - CLOSE]
        best = min(ours, key=lambda own: float(own[figure]), default=None)
        if best is None:
            lines.append(f"- {cell}: nothing of ours is as exact as {row['peer']} ({worst(row):.1f} dB)")
        elif row[figure] < best[figure]:
            mine, theirs = format(best[figure] / unit, form), format(row[figure] / unit, form)
            lines.append(f"- {cell}: {row['peer']} {theirs}, {best['peer']} {mine}")
    return lines


def markdown(results: Sequence[Row]) -> str:
    """List where a peer is ahead, then a table per shape."""
    devices = dict.fromkeys(f"{result['device']}, driver {result['driver']}" for result in results)
    versions = {name: version for result in results for name, version in result["versions"].items()}
    lines = [f"Device {'; '.join(devices)}, another one in each run."]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    found = by_cell(results)
    if found:
        for title, figure, form, unit in (
            ("Where a peer is faster (ms)", "ms", ".2f", 1.0),
            ("Where a peer keeps less between forward and backward (MiB)", "kept", ".0f", float(1 << 20)),
        ):
            lost = [
                line for (shape, n), rows in found.items() for line in losses(f"{shape}, {n}", rows, figure, form, unit)
            ]
            lines += ["", f"**{title}**", "", *(lost or ["- nowhere"])]
    for (shape, tokens), rows in found.items():
        lines += ["", f"### {shape}, {tokens} tokens ({rows[0]['rows an expert']:.0f} rows an expert)", ""]
        lines += ["| peer | ms | spread | TFLOP/s | dB " + ", ".join(RESULTS) + " | peak MiB | kept MiB | commit |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for place, group in enumerate(grouped(rows)):
            lines += ["| *less exact* | | | | | | | |"] if place else []
            lines += [line_of(row) for row in group]
        lines += [f"| {row['peer']} | {row['error']} | | | | | | {row['commit']} |" for row in rows if "ms" not in row]
    return "\n".join(lines) + "\n"


def line_of(row: Row) -> str:
    name = f"**{row['peer']}**" if row["peer"].startswith(OURS) else row["peer"]
    db = ", ".join(f"{row['dB'][each]:.1f}" for each in RESULTS) if "dB" in row else row.get("note", "")
    memory = [f"{row[key] / (1 << 20):.0f}" if key in row else "" for key in ("peak", "kept")]
    figures = [f"{row['ms']:.3g}", f"{row['spread']:.0%}", f"{row['TF']:.0f}", db, *memory, row["commit"]]
    return f"| {name} | {' | '.join(figures)} |"


def picture(results: Sequence[Row], tokens: int) -> str:
    """An SVG with a bar for each peer and shape, at one number of tokens."""
    kinds = {"mxep bf16": "bf16", "mxep fp8": "fp8", "mxep mxfp8": "mxfp8", "mxep mxfp8, kept": "mxfp8"}
    page, found = Page(), by_cell(results)
    page.title(
        "One MoE layer on one GPU, forward + backward: ms",
        f"{results[-1]['device']}, runs until {results[-1]['date']}, {tokens} tokens a rank. dB: SNR against fp64.",
    )
    for shape in dict.fromkeys(shape for shape, _ in found):
        rows = [row for group in grouped(found.get((shape, tokens), [])) for row in group]
        if not rows:
            continue
        page.y += 16
        page.text(MARGIN, f"{shape}, {rows[0]['rows an expert']:.0f} rows an expert", "name")
        page.y += 6
        longest = max(row["ms"] for row in rows)
        for row in rows:
            width = row["ms"] / longest * (WIDTH - MARGIN - ROOM - LEFT)
            page.text(MARGIN, row["peer"], "best" if row["peer"] in kinds else "dim", y=page.y + 10)
            page.box(LEFT, page.y, width, BAR, kinds.get(row["peer"], "base"))
            page.text(LEFT + width + 6, f"{row['ms']:.3g} ms, {worst(row):.0f} dB", "dim", y=page.y + 11)
            page.y += STEP
    page.y += MARGIN
    return page.svg("Times of one MoE layer on one GPU, mxep and its peers")
