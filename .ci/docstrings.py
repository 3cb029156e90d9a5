"""For mkdocstrings: docstrings are plain text, whose lines `name: what it is` are lines on the page, too."""

import re
from typing import Any

from griffe import Class, Extension, Function, Object

SECTION = re.compile(r"^(?:Args|Attributes):\n(?: {4,}\S.*\n?)+", re.MULTILINE)
ITEM = re.compile(r"^ {4}\S.*(?:\n {5,}\S.*)*", re.MULTILINE)


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


def one_name_an_item(text: str, names: list[str]) -> str:
    """Items `a, b: what` and `a: what. b: what` become an item for each name, with its type and default."""
    name = "|".join(map(re.escape, names))
    group = re.compile(rf"(?:^|(?<=[.;,] ))((?:{name})(?:, (?:{name}))*): ")

    def parted(item: re.Match[str]) -> str:
        pieces = group.split(" ".join(item[0].split()))[1:]
        items = [
            f"    {each}: {what.strip()}" for of, what in zip(pieces[::2], pieces[1::2]) for each in of.split(", ")
        ]
        return "\n".join(items) if len(items) > 1 else item[0]

    return SECTION.sub(lambda section: ITEM.sub(parted, section[0]), text)


class PlainText(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            names = [each.name for each in obj.parameters] if isinstance(obj, Class | Function) else []
            names += obj.members
            obj.docstring.value = as_markdown(
                one_name_an_item(obj.docstring.value, names) if names else obj.docstring.value
            )
