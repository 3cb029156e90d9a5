"""For mkdocstrings: docstrings are plain text, whose lines `name: what it is` are lines on the page, too."""

import re
from typing import Any

from griffe import Extension, Object


def as_markdown(text: str) -> str:
    """Lines of names end the line before; stars are stars."""
    lines = []
    for line in text.splitlines():
        if lines and re.match(r"`*[A-Za-z_][\w.]*`*(, `*[A-Za-z_]\w*`*)*: ", line) and lines[-1].strip():
            lines[-1] += "  "
        if not line.startswith("    "):  # code, or a section's item
            line = re.sub(r"(`+[^`]*`+)|\*", lambda found: found[1] or r"\*", line)
        lines.append(line)
    return "\n".join(lines)


class PlainText(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
