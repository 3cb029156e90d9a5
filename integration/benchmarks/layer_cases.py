"""The cases of bench=layer at one shape: MoE layers of mxep.ep and the baseline, with the same routing and weights.

    RECIPE/DISPATCHER              any of schema.CASES: MoE(recipe, dispatcher), Capacity.factor, weights quantized in
                                   every step
    RECIPE/DISPATCHER, kept        KEPT micro-batches in quantize_weights_once; figures are for one of them. Forward
                                   alone quantizes in each call, as in the first micro-batch
    ..., worst_case                the same with this capacity
    ..., recompute                 room for the worst case; 1.25 times the balanced load is kept for backward
    RECIPE/DISPATCHER, gate_up_fp8 gate_up is kept in FP8 for backward
    baseline bf16                  baseline.BaselineLayer
    baseline fp8                   the same with torchao's GEMMs (scales for rows and columns)
    baseline mxfp8                 the same with mxep.gemm.grouped_mm, which quantizes rows after they arrive in bf16

A step is forward and backward, with gradients of x, the routing weights and both projections. Ids and weights are
given, because the router would be the same in all cases.

floor = flops / dense rate + wire bytes / 450 GB/s + memory bytes / copy rate, without overlap:

- flops = 18 R D F: three GEMMs, 2 flop each, with w13 (2F x D) and w2 (D x F), for R valid rows of the busiest rank.
  The dense rate is that of a square GEMM in the same run: FP8, or bf16 for recipe bf16.
- Wire bytes of the busiest sender, in forward and in backward: a row in the recipe's format for each token and rank
  that needs it, and as many sums back in bf16.
- Memory bytes = 8 T D + 12 e D F (kept: 9 e D F), the least with any fusion: x, d_out and weights are read, out, dx and
  weight gradients written.

T tokens a rank, D model dim, F hidden dim, E experts in all, K experts a token, e experts of a rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.comms import Capacity
from mxep.ep import MoE
from mxep.gemm import grouped_mm, quantize_weights_once
from mxep.gemm.backends import select
from mxep.integration.launch import Rank
from mxep.integration.mesh import local
from mxep.integration.schema import CASES, KEPT_IN_FP8
from mxep.integration.verify import Results
from mxep.quant import BLOCK

from .baseline import PAD, BaselineLayer, Product, bf16_product
from .comms import SLACK, WIRE, Routed, Traffic
from .gemm import torchao_product
from .script import gradients

KEPT = 4
BASELINE = "baseline bf16"
MX = "mxfp8/symmetric"
BASELINES = (BASELINE, "baseline fp8", "baseline mxfp8")
SUFFIXES = ("", ", kept", ", worst_case", ", recompute", f", {KEPT_IN_FP8}")
NAMES = (*BASELINES, *(f"{case}{suffix}" for case in CASES for suffix in SUFFIXES))
"""All cases."""


class Shape(NamedTuple):
    """T, D, F, E, K."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int


class Problem(Routed):
    """Operands on this rank. Making one is collective if there are several ranks.

    x, d_out: (T, D) bf16. w13: (e, 2F, D). w2: (e, D, F). ranks_per_node: None: the ranks of a host.
    """

    def __init__(self, rank: Rank, shape: Shape, skew: float, seed: int, ranks_per_node: int | None = None) -> None:
        self.shape, self.ranks_per_node = shape, ranks_per_node
        tokens, dim, hidden, experts, top_k = shape
        super().__init__(rank, tokens, experts, top_k, skew, seed)

        def draw(*sizes: int, std: float = 1.0) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, **self.options).mul_(std)

        self.x, self.d_out = draw(tokens, dim), draw(tokens, dim)
        self.w13 = draw(self.local_experts, 2 * hidden, dim, std=dim**-0.5)
        self.w2 = draw(self.local_experts, dim, hidden, std=hidden**-0.5)


class Case:
    """name: one of NAMES. recipe: of GEMMs, and of mxep's rows on the wire. bounded: the problem's capacity limits its
    rows. in_graph: no size is read on the host. least_snr: dB, against the baseline in bf16. FP8 reaches about 23."""

    def __init__(self, name: str) -> None:
        what, _, self.suffix = name.partition(", ")
        self.name, self.baseline = name, what.startswith("baseline ")
        self.recipe, _, self.dispatcher = what.removeprefix("baseline ").partition("/")
        self.kept, self.kept_in_fp8 = self.suffix == "kept", self.suffix == KEPT_IN_FP8
        self.whole_recipe = self.recipe + f"_{KEPT_IN_FP8}" * self.kept_in_fp8
        self.bounded = not self.baseline and self.suffix not in ("worst_case", "recompute")
        self.in_graph = not self.baseline and self.dispatcher != "all_to_all"
        self.least_snr = 40.0 if self.recipe == "bf16" else 20.0

    def capacity(self, p: Problem) -> Capacity:
        if self.suffix == "recompute":
            return Capacity.factor(SLACK, "recompute")
        return Capacity.factor(p.capacity) if self.bounded else Capacity(self.suffix)


@dataclass
class Layer:
    """A layer with a problem's operands. call: (x, weights) -> out. leaves: x, weights, w13, w2. close: frees memory
    that peers map. check: raises device errors. micro_batches: of a step. in_graph: a CUDA graph can capture it."""

    p: Problem
    call: Callable[[Tensor, Tensor], Tensor]
    leaves: tuple[Tensor, ...]
    close: Callable[[], None]
    check: Callable[[], None] = lambda: None
    micro_batches: int = 1
    in_graph: bool = False

    def out(self) -> Tensor:
        return self.call(*self.leaves[:2])

    def forward(self) -> Tensor:
        return self.out().detach()

    def step(self) -> Results:
        with quantize_weights_once() if self.micro_batches > 1 else contextlib.nullcontext():
            for _ in range(self.micro_batches):
                out = self.out()
                found = gradients(out, self.leaves, self.p.d_out)
        return Results(out.detach(), *(local(each) for each in found))


def make(p: Problem, case: Case) -> Layer:
    """Make the case's layer. Raises NotImplementedError or ImportError if it cannot run here. Collective."""
    return make_baseline(p, case) if case.baseline else make_mxep(p, case)


def make_mxep(p: Problem, case: Case) -> Layer:
    if case.dispatcher == "local" and p.ranks > 1:
        raise NotImplementedError("one rank's experts alone, all of them: parallel.ranks=1")
    moe = MoE(
        *p.shape[1:],
        group=dist.group.WORLD,
        recipe=case.whole_recipe,
        dispatcher=case.dispatcher,
        capacity=case.capacity(p),
        max_tokens=p.shape.tokens,
        ranks_per_node=p.ranks_per_node if case.dispatcher == "hierarchical" else None,
        router=nn.Identity(),  # unused: ids and weights are given
        backend=select("auto", p.device),  # type: ignore[arg-type,unused-ignore]
        gradient_reduction="sum",  # as the baseline's
        device=p.device,
    )
    experts = moe.experts
    experts.gate_up_proj = nn.Parameter(share(p.w13, experts.gate_up_proj))
    experts.down_proj = nn.Parameter(share(p.w2, experts.down_proj))
    x, weights = p.x.detach().requires_grad_(), p.weights.clone().requires_grad_()
    leaves = x, weights, experts.gate_up_proj, experts.down_proj

    def call(x: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = moe(x, expert_ids=p.ids, weights=weights)
        return out

    return Layer(p, call, leaves, moe.close, moe.check, KEPT if case.kept else 1, case.in_graph)


def share(own: Tensor, like: Tensor) -> Tensor:
    """A tensor that is spread over ranks like ``like``, with ``own`` as this rank's part."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False)


def make_baseline(p: Problem, case: Case) -> Layer:
    """The baseline, launched by the host, as it syncs in every step."""
    product: Product = bf16_product
    if case.recipe == "fp8":
        product = torchao_product(p.device)
    elif case.recipe == "mxfp8":
        product = functools.partial(grouped_mm, recipe="mxfp8")
    leaves = tuple(each.detach().requires_grad_() for each in (p.x, p.weights, p.w13, p.w2))
    group = dist.new_group()  # of its own: otherwise NCCL's memory would count for the first layer only
    pad = BLOCK if case.recipe == "mxfp8" else PAD
    layer = BaselineLayer(*leaves[2:], group=group, product=product, pad=pad)
    return Layer(
        p, lambda x, weights: layer(x, p.ids, weights), leaves, functools.partial(dist.destroy_process_group, group)
    )


Work = dict[str, tuple[str, float]]
"""Stage -> ("bytes", "flop" or "wire bytes", how many)."""


def flop(shape: Shape, rows: float) -> float:
    """Flops of a step with `rows` rows: T K on average, ``traffic.most_pairs`` on the busiest rank."""
    return 18.0 * rows * shape.dim * shape.hidden


def row_bytes(recipe: str, dim: int) -> int:
    """Bytes of one dispatched row on the wire."""
    return {"bf16": 2 * dim, "fp8": dim + 1}.get(recipe, dim + dim // BLOCK)


def wire_bytes(shape: Shape, traffic: Traffic, recipe: str, *, pairs: bool = False) -> tuple[int, int]:
    """Bytes (dispatched, combined) by the rank that sends most, forward and backward together. pairs: count a row for
    each (token, expert) pair, not for each token and rank."""
    out, back = (traffic.leaving(combine=combine)[pairs] for combine in (False, True))
    return 2 * out * row_bytes(recipe, shape.dim), 2 * back * row_bytes("bf16", shape.dim)


def rate(kind: str, case: Case, ceilings: Mapping[str, float]) -> float | None:
    """The ceiling for a kind of work, in 1e12 a second. None if it was not measured."""
    dense = f"dense {'bf16' if case.recipe == 'bf16' else 'fp8'} TF"
    return WIRE / 1e3 if kind == "wire bytes" else ceilings.get("copy TB/s" if kind == "bytes" else dense)


def floor_ms(shape: Shape, ranks: int, traffic: Traffic, case: Case, ceilings: Mapping[str, float]) -> float | None:
    """A step's floor (module docstring). None without a GPU's rates."""
    weights = shape.experts // ranks * shape.dim * shape.hidden
    amounts = {"flop": flop(shape, traffic.most_pairs), "wire bytes": sum(wire_bytes(shape, traffic, case.recipe))}
    amounts["bytes"] = 8 * shape.tokens * shape.dim + (9 if case.kept else 12) * weights
    rates = {kind: rate(kind, case, ceilings) for kind in amounts}
    return None if None in rates.values() else sum(n / (rates[kind] or 1.0) / 1e9 for kind, n in amounts.items())


def work(shape: Shape, ranks: int, traffic: Traffic, case: Case) -> Work:
    """Least work of each stage of bench=layer in a step of a case. Stages without a formula are missing."""
    (tokens, dim, hidden, experts, top_k), rows = shape, traffic.most_pairs
    gemms: Work = {"GEMMs": ("flop", flop(shape, rows))}
    if case.baseline:
        return gemms | {
            "NCCL": ("wire bytes", sum(wire_bytes(shape, traffic, "bf16", pairs=True))),
            # Forward: gate and up read, h written. Backward: gate, up and d_h read, both gradients written.
            "SwiGLU": ("bytes", 16 * rows * hidden),
            # Rows spread, grouped, sent back and summed: 12 N D + 4 T D bytes forward, 14 N D + 4 T D backward.
            "permute + pointwise": ("bytes", 26 * tokens * top_k * dim + 8 * tokens * dim),
        }
    if not case.name.startswith(MX):
        return gemms
    out, back = wire_bytes(shape, traffic, case.recipe)
    found: Work = gemms | {
        "dispatch": ("wire bytes", out),
        "combine": ("wire bytes", back),
        # For x and d_out: bf16 read, qdata and scales written.
        "quantize": ("bytes", 2 * tokens * dim * (3 + 1 / BLOCK)),
        # For rows of x and of d_out: qdata and scales read, qdata written.
        "gather + fold": ("bytes", 2 * rows * dim * (2 + 1 / BLOCK)),
        # Forward: gate and up read, qdata of h written. Backward: gate, up and d_h read, qdata of both gradients and
        # of h written. Kept in FP8: forward also reads gate and up once more, and writes their qdata for backward.
        "SwiGLU": ("bytes", (18 if case.kept_in_fp8 else 14) * rows * hidden),
        # Qdata of both operands of both weight gradients, read and written.
        "fold for wgrad": ("bytes", 2 * rows * (2 * dim + 3 * hidden)),
        # bf16 read twice, because a column's scale needs all rows first. Qdata of both orientations written.
        "quantize weights": ("bytes", 18 * experts // ranks * dim * hidden / (KEPT if case.kept else 1)),
    }
    return {stage: each for stage, each in found.items() if each[1]}
