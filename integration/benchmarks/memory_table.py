"""What an MoE layer with the symmetric dispatcher holds, by the code's own sizes: for docs/guides/dispatchers.md.

    python integration/benchmarks/memory_table.py

Nothing is allocated and no GPU is needed: `Layout` gives the buffers, `Capacity` and `make_plan` the plan, and
`saved_of_shapes` what the forward of a layer leaves to its backward on Hopper.

T tokens a rank, D model dim, F hidden dim, E experts in all, K experts a token, W ranks, N = T K pairs.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mxep.comms import Capacity, RoutingPlan, make_plan
from mxep.comms.layout import Layout
from mxep.ep.autograd import saved_of_shapes
from mxep.ep.layer import Needs
from mxep.ep.mlp import LayerConfig
from mxep.gemm import Recipe
from mxep.gemm.backends import Hopper
from mxep.runtime.bundle import tensors_in

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
BALANCED = Capacity.factor(1.25)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank. buffers: both of them, outside of torch's allocator, for all layers of a group. The others: of
    one layer between its forward and its backward. rows: quantized slots or rows, whichever are fewer (in bf16 rows).
    of_weights: their columns' amax."""

    buffers: int
    rows: int
    gate_up: int
    of_weights: int
    plan: int

    @property
    def kept(self) -> int:
        return self.rows + self.gate_up + self.of_weights + self.plan


def memory(
    tokens: int,
    dim: int,
    hidden_dim: int,
    experts: int,
    top_k: int,
    *,
    ranks: int,
    recipe: str = "mxfp8",
    capacity: Capacity = BALANCED,
) -> Memory:
    how, local = Recipe.named(recipe), experts // ranks
    layout = Layout(ranks, tokens, top_k, 2 * dim)
    with FakeTensorMode():
        plan = make_plan(
            torch.empty(ranks, tokens, top_k, dtype=torch.int32),
            torch.empty(ranks, tokens, top_k),
            torch.empty(ranks, dtype=torch.int32),
            first_expert=0,
            num_local_experts=local,
            alignment=how.group_alignment,
            capacity=capacity,
            num_experts=experts,
        )
        x = torch.empty(tokens, dim, dtype=torch.bfloat16)
        w13, w2 = x.new_empty(local, 2 * hidden_dim, dim), x.new_empty(local, dim, hidden_dim)
        config, needs = LayerConfig(how, Hopper()), Needs(True, True, False)
        saved = saved_of_shapes(x, plan, (w13, w2), config, needs, copied=True)
        names = {field.name for field in dataclasses.fields(RoutingPlan)} - {"alignment", "dispatch"}
        fields = [getattr(plan, name) for name in names]
        return Memory(
            buffers=2 * layout.nbytes,
            rows=_bytes(tensors_in(saved.rows)),
            gate_up=_bytes(tensors_in(saved.gate_up)),
            of_weights=_bytes(tensors_in((saved.gate_up_columns, saved.down_columns))),
            plan=_bytes(fields),
        )


def kept_by_the_standard_layer(tokens: int, dim: int, hidden_dim: int, experts: int, top_k: int) -> int:
    """Bytes of `baseline.py` with compiled pointwise kernels, of the same balanced load, without padding and
    indices: rows and h for the gradients of weights, gate_up, and what comes back (N, D) for that of their weights."""
    return 2 * tokens * top_k * (dim + hidden_dim + 2 * hidden_dim + dim)


def shapes() -> dict[str, list[int]]:
    """The six models of bench=layer: T, D, F, E, K."""
    listed = yaml.safe_load((ROOT / "configs/bench/layer.yaml").read_text())["shapes"]
    return {name: sizes for name, (sizes,) in listed.items() if name != "host"}


def computed_table() -> str:
    """On 4 GPUs, the shapes of configs/bench/layer.yaml."""
    head = "model | T, D, F, E, K | buffers | **kept** | standard layer | ratio"
    lines = [head + " | `factor(1)` | `gate_up` in FP8 | `worst_case` | in bf16"]
    for name, sizes in shapes().items():
        m, standard = memory(*sizes, ranks=4), kept_by_the_standard_layer(*sizes)
        least, worst = (memory(*sizes, ranks=4, capacity=c) for c in (Capacity.factor(1), Capacity.worst_case()))
        plain, fp8 = (memory(*sizes, ranks=4, recipe=recipe) for recipe in ("bf16", "mxfp8_gate_up_fp8"))
        cells = [name, ", ".join(map(str, sizes)), _gib(m.buffers), f"**{_gib(m.kept)}**", _gib(standard)]
        cells += [f"{m.kept / standard:.2f}", *(_gib(other.kept) for other in (least, fp8, worst, plain))]
        lines.append(" | ".join(cells))
    return _table(lines)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def _table(lines: list[str]) -> str:
    lines.insert(1, " | ".join(["---"] * (lines[0].count(" | ") + 1)).replace(" | ", "|"))
    return "\n".join(f"|{line}|" if "---" in line else f"| {line} |" for line in lines)


if __name__ == "__main__":
    print(computed_table())
