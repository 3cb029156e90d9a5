"""Capacity: how many expert-major rows a plan has room for. The size is static; the number of valid rows is not."""

import math
import numbers
from dataclasses import dataclass

from .layout import round_up

ANY_ID = 2**31 - 1
"""As num_experts: not known, so that every id may be an expert's."""


class CapacityExceeded(RuntimeError):
    """Rows did not fit the capacity. They were left out and counted, so the step's results are not usable.

    Every rank of the group raises it in the same step, so all may skip the step.
    """


@dataclass(frozen=True)
class Capacity:
    """How R_max follows from the shapes; made by one of the three constructors. ValueError for a value out of range.

    With S slots, K experts a token, e local experts and groups padded to m rows:

    - :meth:`worst_case`: S * min(K, e) rows and e * (m - 1) of padding. Always fits, unless a token names an expert
      twice and K > e.
    - :meth:`factor` (c): c times the balanced load T_max * K, and the padding; at most the worst case. Rows that do not
      fit are left out, as if they were not routed, and counted; overflow: "raise" makes an error of that, "drop" not.
      All experts of a rank are capped at one number of rows, the largest with which their padded rows fit, and an
      expert shares its rows alike between the ranks that its tokens come from, of which each keeps its first.
    - :meth:`exact`: what this step needs, read from the device (a host sync).
    """

    kind: str
    load: float = 0.0
    overflow: str = "raise"

    def __post_init__(self) -> None:
        if self.kind not in ("worst_case", "factor", "exact"):
            raise ValueError(f"Capacity: got {self.kind!r}, wanted worst_case(), factor(c) or exact()")
        number = isinstance(self.load, numbers.Real) and not isinstance(self.load, bool)
        if self.kind == "factor" and not (number and 0 < self.load < math.inf):
            raise ValueError(f"Capacity.factor: got {self.load!r}, wanted a positive number")
        if self.overflow not in ("raise", "drop"):
            raise ValueError(f"Capacity.factor: got overflow={self.overflow!r}, wanted 'raise' or 'drop'")
        object.__setattr__(self, "load", float(self.load))

    @staticmethod
    def worst_case() -> "Capacity":
        return Capacity("worst_case")

    @staticmethod
    def factor(load: float, overflow: str = "raise") -> "Capacity":
        return Capacity("factor", load, overflow)

    @staticmethod
    def exact() -> "Capacity":
        return Capacity("exact")

    def rows(self, num_sources: int, max_tokens: int, top_k: int, *, num_local_experts: int, alignment: int) -> int:
        """R_max, a multiple of ``alignment``. Not of ``exact``: only a step's tables know it."""
        assert self.kind != "exact"
        padding = num_local_experts * (alignment - 1)
        worst = round_up(num_sources * max_tokens * min(top_k, num_local_experts) + padding, alignment)
        if self.kind == "worst_case":
            return worst
        balanced = math.ceil(self.load * max_tokens * top_k)
        return min(worst, round_up(balanced + padding, alignment))

    @staticmethod
    def enough(needed: int, max_tokens: int, top_k: int, *, num_local_experts: int, alignment: int) -> float:
        """The least factor, to two digits, with room for ``needed`` padded rows."""
        unpadded = needed - (num_local_experts + 1) * (alignment - 1)  # as R_max is rounded up to a multiple
        return max(1, math.ceil(100 * unpadded / max(1, max_tokens * top_k))) / 100

    def __str__(self) -> str:
        if self.kind != "factor":
            return f"Capacity.{self.kind}()"
        drop = ", overflow='drop'" if self.overflow == "drop" else ""
        return f"Capacity.factor({self.load:g}{drop})"


def num_owners(num_experts: int, num_local_experts: int) -> int:
    """O, the ranks whose rows a plan counts: all where E is known and they have equal shares, else the planning one."""
    known = num_experts != ANY_ID and num_experts % num_local_experts == 0
    return num_experts // num_local_experts if known else 1
