"""What a key of a config may be: a range of numbers, or one of some names. `schema` says it beside each key's type.

    lr: Annotated[float, Range(0, 1, above=True)]      name: Annotated[str, OneOf(TASKS)]

Every number has a range, and no range has NaN or an infinity. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` to ``most``. above, below: without these two."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        lower = value > self.least if self.above else value >= self.least
        return lower and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        words = f"{'a number above' if self.above else 'at least'} {self.least}"
        return words if self.most == math.inf else f"{words} and {'below' if self.below else 'at most'} {self.most}"


@dataclass(frozen=True)
class OneOf:
    """One of ``names``."""

    names: tuple[str, ...]

    def __contains__(self, value: str) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


INT64 = 2**63 - 1  # the largest integer of torch's sizes
Count = Annotated[int, Range(1, INT64)]
NotNegative = Annotated[int, Range(0, INT64)]
Positive = Annotated[float, Range(0, above=True)]
Share = Annotated[float, Range(0, 1)]
Seconds = Annotated[float, Range(0, 2_000_000, above=True)]  # poll() takes 2^31 ms
Seed = Annotated[int, Range(0, 2**32 - 1)]  # torch's generator on CPUs drops higher bits


def out_of_bounds(section: Any, prefix: str = "") -> Iterator[str]:
    """A line for each value in ``section``, a dataclass, that its key may not have: the key, the value, the bounds."""
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        yield from _out_of_bounds(f"{prefix}{name}", getattr(section, name), hint)


def _out_of_bounds(key: str, value: Any, hint: Any) -> Iterator[str]:
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    of_items = get_args(hint)[-1] if get_args(hint) else hint  # of Any: Any
    if dataclasses.is_dataclass(value):
        yield from out_of_bounds(value, f"{key}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _out_of_bounds(f"{key}[{index}]", inner, of_items)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _out_of_bounds(f"{key}.{name}", inner, of_items)
    elif bounds := next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Range | OneOf)), None):
        if value is not None and value not in bounds:
            yield f"{key}: got {value!r}, wanted {bounds}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: got {value}, wanted a finite number"
