"""The keys of a command line, before Hydra sees them. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from .names import CHANGES, RECIPES, is_recipe
from .schema import Config, configs_dir


def override_key(override: str) -> str:
    """The key or group that an argument of the command line sets."""
    return override.lstrip("+~").split("=")[0].split("@")[0]


def complaint(arguments: Sequence[str], tasks: Sequence[str]) -> str | None:
    """A task without its key, a key that there is not, for which Hydra would advise a `+`, or a choice that is none."""
    own = any(argument.startswith(("-cd", "--config-", "hydra.searchpath")) for argument in arguments)
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
        if not own and (said := _unknown_choice(key, argument.partition("=")[2])):
            return said
    return None


def _unknown_choice(group: str, choice: str) -> str | None:
    """Of a group of configs, such as recipe=mxpf8. Lists are Hydra's to read."""
    known = sorted(file.stem for file in (configs_dir() / group).glob("*.yaml"))
    if not known or choice in (*known, "null") or not re.fullmatch(r"\w+", choice):
        return None
    if group == "recipe" and is_recipe(choice):
        return f"no such choice: recipe={choice}; did you mean recipe.name={choice}?"
    near = did_you_mean(choice, known)
    return f"no such choice: {group}={choice}{near or '; wanted ' + ', '.join(known)}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of a message: the name that is meant, if one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def recipes_like(name: str) -> list[str]:
    """Names of recipes with the changes that `name` has, as far as they are known."""
    changes = [f"_{change}" for change in CHANGES if change in name]
    known = [*RECIPES, "auto", *(base + "".join(changes) for base in RECIPES if changes)]
    return [each for each in known if is_recipe(each)]


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
