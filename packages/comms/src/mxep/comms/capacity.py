"""Capacity: number of expert-major rows that a plan has room for. It is static; the number of valid rows is not."""

import math
import numbers
from dataclasses import dataclass

from .layout import round_up

ANY_ID = 2**31 - 1
"""Value of num_experts if E is unknown: any nonnegative id is valid."""


class CapacityExceeded(RuntimeError):
    """Rows did not fit the capacity. They were dropped and counted, so the step's results are not usable.

    Every rank of the group raises it in the same step, so all can skip that step.
    """


@dataclass(frozen=True)
class Capacity:
    """Rule that gives R_max. Make it with one of the three constructors. Raises ValueError for values out of range.

    With S slots, K experts per token, e local experts and groups padded to m rows:

    - :meth:`worst_case`: S * min(K, e) rows plus e * (m - 1) of padding. Always fits. The one exception is a token that
      names an expert twice while K > e.
    - :meth:`factor` (c): c times the balanced load T_max * K, plus padding; at most the worst case. Rows that do not
      fit are dropped and counted. overflow="raise" makes that an error, "drop" does not.
      All experts of a rank are capped at one number of rows, the largest that fits after padding. An expert shares its
      rows evenly between the source ranks. Each source keeps its first rows.
    - :meth:`exact`: the rows this step needs, read from the device (a device-to-host sync).
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
        """R_max, a multiple of ``alignment``. Not available for ``exact``, which needs the step's tables."""
        assert self.kind != "exact"
        padding = num_local_experts * (alignment - 1)
        worst = round_up(num_sources * max_tokens * min(top_k, num_local_experts) + padding, alignment)
        if self.kind == "worst_case":
            return worst
        balanced = math.ceil(self.load * max_tokens * top_k)
        return min(worst, round_up(balanced + padding, alignment))

    @staticmethod
    def enough(needed: int, max_tokens: int, top_k: int, *, num_local_experts: int, alignment: int) -> float:
        """Smallest factor, to two digits, with room for ``needed`` padded rows."""
        unpadded = needed - (num_local_experts + 1) * (alignment - 1)  # R_max is rounded up to a multiple
        return max(1, math.ceil(100 * unpadded / max(1, max_tokens * top_k))) / 100

    def __str__(self) -> str:
        if self.kind != "factor":
            return f"Capacity.{self.kind}()"
        drop = ", overflow='drop'" if self.overflow == "drop" else ""
        return f"Capacity.factor({self.load:g}{drop})"


def num_owners(num_experts: int, num_local_experts: int) -> int:
    """O, the number of ranks that a plan counts rows for: all if E is known and divides evenly, else this one."""
    known = num_experts != ANY_ID and num_experts % num_local_experts == 0
    return num_experts // num_local_experts if known else 1
