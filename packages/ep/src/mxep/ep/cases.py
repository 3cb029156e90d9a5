"""Recipe x dispatcher: every combination is a row here, and nowhere else an `if`.

The seven that the field compares are bf16, fp8 and mxfp8 without expert parallelism, the same three over all-to-all
collectives, and mxfp8 over symmetric memory; the others cost nothing and are in the table too. NVSHMEM, which takes a
process for itself, is not.
"""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Case:
    """One way to run the layer: names for ``MoE(recipe=..., dispatcher=...)``."""

    recipe: str
    dispatcher: str

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.dispatcher}"


COMPARED = ("local", "all_to_all", "symmetric", "hierarchical")
CASES: dict[str, Case] = {
    case.name: case for case in (Case(r, d) for d, r in product(COMPARED, ("bf16", "fp8", "mxfp8")))
}
SEVEN_CASES = (*tuple(CASES)[:6], "mxfp8/symmetric")
