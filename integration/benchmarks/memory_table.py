"""What an MoE layer with the symmetric dispatcher holds, by the code's own sizes: tables of docs/guides/dispatchers.md.

    python integration/benchmarks/memory_table.py

Nothing is allocated and no GPU is needed: `Layout` gives the buffers, `Capacity` and `make_plan` the plan, and
`fake_saved` what the forward of a layer leaves to its backward on Hopper. The measured column is of
docs/results/layer-h200.json, of a commit whose layers kept h, too.

T tokens a rank, D model dim, F hidden dim, E experts in all, K experts a token, W ranks, N = T K pairs.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mxep.comms import Capacity, RoutingPlan, make_plan
from mxep.comms.layout import Layout
from mxep.ep.autograd import fake_saved
from mxep.ep.formats import LayerConfig, keeps_rows
from mxep.ep.layer import Needs
from mxep.gemm import Recipe
from mxep.gemm.backends import Hopper
from mxep.quant import SwiGLU
from mxep.runtime.bundle import tensors_in

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
BALANCED = Capacity.factor(1.25)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank. buffers: both of them, outside of torch's allocator, for all layers of a group. The others: of
    one layer between its forward and its backward. rows: quantized slots or rows, whichever are fewer (in bf16 rows).
    of_weights: their columns' amax. gradients: of both weights, in their dtype."""

    max_rows: int
    keeps_rows: bool
    buffers: int
    rows: int
    gate_up: int
    of_weights: int
    plan: int
    gradients: int

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
        config, needs = LayerConfig(how, Hopper(), SwiGLU()), Needs(True, True, False)
        saved = fake_saved(x, plan, (w13, w2), config, needs, copied=True)
        names = {field.name for field in dataclasses.fields(RoutingPlan)} - {"alignment", "dispatch"}
        fields = [getattr(plan, name) for name in names]
        return Memory(
            max_rows=plan.max_rows,
            keeps_rows=how.scaling == "none" or keeps_rows(plan.max_rows, len(plan.slot_rows), copied=True),
            buffers=2 * layout.nbytes,
            rows=_bytes(tensors_in(saved.rows)),
            gate_up=_bytes(tensors_in(saved.gate_up)),
            of_weights=_bytes(tensors_in((saved.gate_up_columns, saved.down_columns))),
            plan=_bytes(fields),
            gradients=_bytes([w13, w2]),
        )


def kept_by_the_standard_layer(tokens: int, dim: int, hidden_dim: int, experts: int, top_k: int) -> int:
    """Bytes of `baseline.py` with compiled pointwise kernels, of the same balanced load, without padding and
    indices: rows and h for the gradients of weights, gate_up, and what comes back (N, D) for that of their weights."""
    return 2 * tokens * top_k * (dim + hidden_dim + 2 * hidden_dim + dim)


def kept_by_sonic_moe(tokens: int, dim: int, hidden_dim: int, experts: int, top_k: int) -> int:
    """Bytes by its paper's formula for one rank: x and gate_up, T D + 2 T K F elements of bf16."""
    return 2 * (tokens * dim + 2 * tokens * top_k * hidden_dim)


def shapes() -> dict[str, list[int]]:
    """The six models of bench=layer: T, D, F, E, K."""
    listed = yaml.safe_load((ROOT / "configs/bench/layer.yaml").read_text())["shapes"]
    return {name: sizes for name, (sizes,) in listed.items() if name != "host"}


def measured() -> Iterator[tuple[str, list[int], float, float]]:
    """Model, shape, and GiB of a step on 2 H200s: outside of the allocator, and the peak in it."""
    runs = json.loads((ROOT / "docs/results/layer-h200.json").read_text())["runs"]
    (run,) = (run for run in runs if "memory" in run["sections"] and "2 ranks" in run["what"])
    for row in run["sections"]["memory"]:
        if row["what"] == "mxfp8/symmetric":
            yield row["model"], row["shape"], row["outside GiB"], row["peak GiB"] - row["outside GiB"]


def computed_table() -> str:
    """On 4 GPUs, the shapes of configs/bench/layer.yaml."""
    head = "model | T, D, F, E, K | buffers | R_max | rows or slots | `gate_up` | the rest | **kept a layer**"
    head += " | the standard layer | ratio | SonicMoE's formula"
    lines = [head + " | `factor(1)` | ratio | `gate_up` in FP8 | ratio | `worst_case` | in bf16"]
    for name, sizes in shapes().items():
        m = memory(*sizes, ranks=4)
        worst = memory(*sizes, ranks=4, capacity=Capacity.worst_case())
        plain, fp8 = (memory(*sizes, ranks=4, recipe=recipe) for recipe in ("bf16", "mxfp8_gate_up_fp8"))
        kind = "rows" if m.keeps_rows else "slots"
        least, standard = memory(*sizes, ranks=4, capacity=Capacity.factor(1)), kept_by_the_standard_layer(*sizes)
        of = [f"{_gib(m.rows)} ({kind})", _gib(m.gate_up), _gib(m.of_weights + m.plan), f"**{_gib(m.kept)}**"]
        cells = [name, ", ".join(map(str, sizes)), _gib(m.buffers), str(m.max_rows), *of]
        cells += [_gib(standard), f"{m.kept / standard:.2f}", _gib(kept_by_sonic_moe(*sizes))]
        cells += [_gib(least.kept), f"{least.kept / standard:.2f}", _gib(fp8.kept)]
        cells += [f"{fp8.kept / standard:.2f}", _gib(worst.kept), _gib(plain.kept)]
        lines.append(" | ".join(cells))
    return _table(lines)


def measured_table() -> str:
    """On 2 GPUs with half the experts, as measured there."""
    lines = ["model | buffers | measured outside | kept | weight gradients | both | measured peak"]
    for name, sizes, outside, peak in measured():
        m = memory(*sizes, ranks=2)
        cells = [name, _gib(m.buffers), f"{outside:.2f}", _gib(m.kept), _gib(m.gradients)]
        lines.append(" | ".join([*cells, _gib(m.kept + m.gradients), f"{peak:.2f}"]))
    return _table(lines)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def _table(lines: list[str]) -> str:
    lines.insert(1, " | ".join(["---"] * (lines[0].count(" | ") + 1)).replace(" | ", "|"))
    return "\n".join(f"|{line}|" if "---" in line else f"| {line} |" for line in lines)


if __name__ == "__main__":
    print(computed_table(), measured_table(), sep="\n\n")
