"""report.html: one file that needs no other and no network. Tables, a picture as base64, and the whole config."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from . import __version__
from .config import to_json
from .results import Section
from .schema import Config

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
img { width: 100% } div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th[scope=row], th.label { text-align: left } tbody th { font-weight: normal }
thead th { white-space: normal; vertical-align: bottom }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto }
"""


def write(
    folder: Path,
    title: str,
    picture: bytes,
    *,
    remarks: Sequence[str],
    losses: Sequence[Section],
    tables: Sequence[Section],
    config: Config,
    provenance: Mapping[str, Any],
) -> None:
    """loss.png, and report.html with it, into ``folder``. picture: a PNG. tables: what comes below it. provenance: as
    of `results.provenance`."""
    (folder / "loss.png").write_bytes(picture)
    image = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    versions = {"mxep": __version__, **provenance["versions"]}
    facts = {**provenance, "versions": ", ".join(f"{name} {one}" for name, one in versions.items())}
    shown = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(one))}</td></tr>'
        for name, one in facts.items()
        if one is not None
    )
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">',
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        f"<ul>{''.join(f'<li>{escape(remark)}</li>' for remark in remarks)}</ul>",
        *map(_table, losses),
        f'<h2>Curves and expert loads</h2>\n<img alt="Losses, their differences, expert loads" src="{image}">',
        *map(_table, tables),
        f'<h2>Where it ran</h2>\n<div><table class="facts">{shown}</table></div>',
        f"<h2>Config</h2>\n<pre>{escape(OmegaConf.to_yaml(OmegaConf.create(to_json(config))))}</pre>",
        "</body>\n</html>\n",
    )
    (folder / "report.html").write_text("\n".join(page))


def _table(section: Section) -> str:
    head = "".join(f'<th class="label">{escape(name)}</th>' for name in section.labels)
    head += "".join(f"<th>{escape(name)}</th>" for name in section.figures)
    body = []
    for row in section.rows:
        cells = [f'<th scope="row">{escape(str(row.get(name, "")))}</th>' for name in section.labels]
        figures = {name: row.get(name) for name in section.figures}
        texts = ["" if value is None else format(value, section.figures[name]) for name, value in figures.items()]
        body.append(f"<tr>{''.join(cells)}{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    rows = "\n".join(body)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f"<h2>{escape(section.title)}</h2>\n<div>{table}</div>"
