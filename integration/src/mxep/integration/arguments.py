"""The keys of a command line, before Hydra sees them. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from .schema import Config


def override_key(override: str) -> str:
    """The key or group that an argument of the command line sets."""
    return override.lstrip("+~").split("=")[0].split("@")[0]


def complaint(arguments: Sequence[str], tasks: Sequence[str]) -> str | None:
    """A task without its key, or a key that there is not, for which Hydra would advise a `+`."""
    for argument in arguments:
        if argument in tasks:
            return f"{argument}: wanted KEY=VALUE, as task={argument}"
        if argument.startswith("-") or "=" not in argument or (key := override_key(argument)).startswith("hydra"):
            continue
        section: Any = Config
        for name in key.split("."):
            if dataclasses.is_dataclass(section):
                if name not in (types := get_type_hints(section)):
                    return f"no such key: {key}{_alike(key)}"
                section = types[name]
    return None


def _alike(key: str) -> str:
    """The keys that may be meant."""
    known, last = list(_keys()), key.rpartition(".")[2]
    same = [one for one in known if one.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else "; mxep --cfg job prints all keys"


def _keys(section: Any = Config, prefix: str = "") -> Iterator[str]:
    for name, kind in get_type_hints(section).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")
