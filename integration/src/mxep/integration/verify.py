"""task=verify on one rank: every case of schema.CASES against a dense fp32 layer on the same routing.

    problem from (seed, rank) -> MoE(recipe, dispatcher), forward and backward
                              -> moe_layer on all ranks' tokens, exact, and with the recipe's quantizers
    in one block of features, x and d_out are WIDE times as large, weights as small; results are scaled back
    SNR of the MoE against the exact layer  >=  SNR of the quantized reference against it - 0.3 dB

The wide block tells MXFP8 from FP8: FP8 has one scale a row and loses the row's small values, so layers reach 18 dB
instead of 23. A backend that folds MXFP8 to one scale a row loses as much, so its data has no wide block.

For recipes that do not quantize, the bound follows from bf16: one rounding of Gaussian data gives about 55.5 dB.
Forward rounds gate_up, h, a row, a slot's sum, a node's sum (with several nodes) and the owner's sum. gate_up counts
about 3 times, as it enters through a product of two factors, one of them curved. dx has as many roundings. For 9
roundings the bound is 55.5 - 10 log10(9) = 46.0 dB, less 1 dB for chance.

The reference is in plain fp32, expert by expert, with quantizers where a recipe has them:

    forward                                         backward
    x -> value                                      d_out -> gradient
    gate_up = x @ rows(w13)^T                       dh = d_out @ cols(w2);  dw2 = tokens(d_out)^T @ tokens(h)
    h = silu(gate) * up * weight -> value           d_gate_up -> gradient, d_weight = SwiGLU's backward of dh
    y = h @ rows(w2)^T                              dx = d_gate_up @ cols(w13);  dw13 = tokens(d_gate_up)^T @ tokens(x)
    out = sum of y over a token's experts

With `EXACT` quantizers this is the dense layer. With `quantizers(recipe)` the recipe is its only error, so no layer of
that recipe can do better. It shares no code with mxep.ep.

T tokens, K experts a token, D model dim, F hidden dim, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mxep.ep import DispatchFields, MoE, make_dispatcher
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend, select
from mxep.quant import BLOCK, MXFormat, quantize

from .config import to_json
from .launch import Rank, resolve_device
from .mesh import Mesh, all_gather, local
from .metrics import log_backend, snr
from .report import Report, Row, Section
from .schema import CASES, Config

MARGIN = 0.3  # dB
BF16 = 45.0  # dB, see above
WIDE = 2.0**14  # E4M3's normals span 2^-6 to 448: next to numbers this large, most others lose three bits
DROPPED = 3  # tokens of each rank whose first expert id is -1
Quantizer = Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    """A layer's input, weights and output gradient, all fp32.

    x, d_out: (T, D). expert_ids: (T, K) int, -1 for not routed. weights: (T, K). gate_up_proj: (E, 2F, D). down_proj:
    (E, D, F).
    """

    x: Tensor
    d_out: Tensor
    expert_ids: Tensor
    weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor


@dataclass(frozen=True)
class Results:
    """A layer's results: out, dx (T, D), d_weights (T, K), and the gradients of both projections."""

    out: Tensor
    dx: Tensor
    d_weights: Tensor
    d_gate_up_proj: Tensor
    d_down_proj: Tensor


@dataclass(frozen=True)
class Quantizers:
    """A recipe's roundings, each fp32 -> fp32. value: of activations and weights, gradient: of gradients; (x, axis),
    in blocks along the axis. value_tokens, gradient_tokens: of wgrad's operands, in blocks along tokens."""

    value: Quantizer
    gradient: Quantizer
    value_tokens: Quantizer
    gradient_tokens: Quantizer


def _exact(x: Tensor, axis: int = -1) -> Tensor:
    return x


EXACT = Quantizers(_exact, _exact, _exact, _exact)


def quantizers(recipe: Recipe) -> Quantizers:
    """The recipe's roundings, for weights in 1x32 blocks and wgrad "mx" only, as in all CASES."""
    if recipe.scaling == "none":
        return EXACT

    def rounding(fmt: MXFormat) -> Quantizer:
        how: Any = {"fmt": fmt, "mode": recipe.mode, "block_size": recipe.block_size}
        return lambda x, axis=-1: quantize(x, axis=axis, **how).dequantize(torch.float32)

    def along_tokens(quantizer: Quantizer) -> Quantizer:
        if recipe.scaling == "row":  # wgrad multiplies the row-scaled qdata again
            return _exact
        return lambda x: quantizer(F.pad(x, (0, 0, 0, -len(x) % recipe.group_alignment)), axis=-2)

    value, gradient = rounding(recipe.fmt), rounding(recipe.grad_fmt)
    return Quantizers(value, gradient, along_tokens(value), along_tokens(gradient))


def moe_layer(problem: Problem, q: Quantizers = EXACT) -> Results:
    """Forward and backward of the layer. Each expert has its rows in token order."""
    x, d_out = q.value(problem.x), q.gradient(problem.d_out)
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    d_weights = torch.zeros_like(problem.weights)
    d_gate_up_proj = torch.zeros_like(problem.gate_up_proj)
    d_down_proj = torch.zeros_like(problem.down_proj)
    for expert, (w13, w2) in enumerate(zip(problem.gate_up_proj, problem.down_proj)):
        token, k = torch.where(problem.expert_ids == expert)
        if len(token) == 0:
            continue
        weight = problem.weights[token, k][:, None]
        rows, d_y = x[token], d_out[token]
        gate, up = (rows @ q.value(w13).T).chunk(2, -1)
        h = q.value(F.silu(gate) * up * weight)
        out.index_add_(0, token, h @ q.value(w2).T)

        d_h = d_y @ q.value(w2, axis=-2)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        d_gate = d_h * up * weight * (sigmoid + silu * (1 - sigmoid))
        d_gate_up = q.gradient(torch.cat((d_gate, d_h * silu * weight), -1))
        dx.index_add_(0, token, d_gate_up @ q.value(w13, axis=-2))
        d_weights[token, k] = (d_h * silu * up).sum(-1)
        d_down_proj[expert] = q.gradient_tokens(d_y).T @ q.value_tokens(h)
        d_gate_up_proj[expert] = q.gradient_tokens(d_gate_up).T @ q.value_tokens(rows)
    return Results(out, dx, d_weights, d_gate_up_proj, d_down_proj)


@dataclass(frozen=True)
class Check:
    """One tensor of a case on its worst rank: signal to noise and its threshold, in dB."""

    name: str
    snr: float
    threshold: float
    rank: int

    @property
    def passed(self) -> bool:
        return self.snr >= self.threshold

    @property
    def spare(self) -> float:
        """dB over the threshold; -inf for a NaN."""
        return -math.inf if math.isnan(self.snr) else self.snr - self.threshold


def report(config: Config, results: dict[str, list[Check]]) -> Report:
    """A table of checks: for each case, the SNR of each tensor and the least margin. A failed check is an error."""
    sizes = to_json(config)["verify"]
    device = torch.device(resolve_device(config.parallel.device, config.ranks))
    backend = select(config.backend, device)
    about = {"ranks": config.ranks, "backend": backend.name, "wide": wide_of(backend)}
    about |= {name: sizes[name] for name in ("tokens", "dim", "hidden_dim", "experts", "top_k")}
    sections: dict[str, Section] = {}
    failed = []
    for case, checks in results.items():
        figures = {check.name.removesuffix("_proj"): ".1f" for check in checks} | {"margin": "+.1f"}
        row: Row = {check.name.removesuffix("_proj"): check.snr for check in checks}
        row |= {"case": case, "margin": min(check.spare for check in checks)}
        row["checks"] = [dataclasses.asdict(check) for check in checks]
        wrong = [check for check in checks if not check.passed]
        row |= {"error": "FAIL"} if wrong else {"note": "pass"}
        sections.setdefault("layers", Section("", ("case",), figures)).rows.append(row)
        for check in wrong:
            got = f"{check.snr:.2f} dB on rank {check.rank}, wanted {check.threshold:.2f}"
            failed.append(f"{case}: {check.name}: {got}")
    title = "mxep verify: SNR in dB against dense fp32, worst rank, and least margin"
    data = f"one block of features is {WIDE:g} times as large: FP8 loses, MXFP8 does not"
    if backend.wants_rowwise:
        data = f"Gaussian data: {backend.name} folds MXFP8 to one scale a row, as FP8 has"
    return Report(title, {}, sections, about=about, remarks=[*failed, data])


def verify(rank: Rank, config: Config) -> dict[str, list[Check]]:
    """The checks of each case, one for each field of `Results`, on the rank with the least margin. Collective."""
    log_backend(config.backend, rank)
    mesh = Mesh.make(rank.world_size, rank.device)
    names = config.verify.cases or CASES
    found = {name: all_gather(_check(name, config, mesh, rank.device)) for name in names}
    return {name: [min(each, key=lambda check: check.spare) for each in zip(*ranks)] for name, ranks in found.items()}


def make_problem(config: Config, rank: int, wide: float) -> Problem:
    """Tokens of rank ``rank`` (higher ranks have fewer), and weights that all ranks share. Values are Gaussian, bf16.
    In the first block of features, tokens are multiplied by `wide`, and weights divided by it."""
    sizes, randn = config.verify, functools.partial(torch.randn, dtype=torch.float32)
    generator = torch.Generator().manual_seed(config.seed)
    w13 = randn(sizes.experts, 2 * sizes.hidden_dim, sizes.dim, generator=generator) * sizes.dim**-0.5
    w2 = randn(sizes.experts, sizes.dim, sizes.hidden_dim, generator=generator) * sizes.hidden_dim**-0.5
    generator.manual_seed(config.seed * 1000 + 1 + rank)
    tokens = max(1, sizes.tokens - DROPPED * rank)
    x, d_out = (randn(tokens, sizes.dim, generator=generator) for _ in range(2))
    scores, expert_ids = torch.rand(tokens, sizes.experts, generator=generator, dtype=torch.float32).topk(sizes.top_k)
    expert_ids[:DROPPED, 0] = -1
    x, d_out, w13, w2 = (tensor.bfloat16().float() for tensor in (x, d_out, w13, w2))
    for tensor, factor in ((x, wide), (d_out, wide), (w13, 1 / wide), (w2.mT, 1 / wide)):
        tensor[..., :BLOCK] *= factor
    return Problem(x, d_out, expert_ids, scores / scores.sum(-1, keepdim=True), w13, w2)


def wide_of(backend: Backend) -> float:
    """Factor of the first block of features."""
    return 1.0 if backend.wants_rowwise else WIDE


def levelled(results: Results, wide: float) -> Results:
    """Results with the first block of features scaled back to ordinary size, so that each element counts."""
    factors = {"out": wide, "dx": wide, "d_gate_up_proj": 1 / wide, "d_down_proj": 1 / wide}
    changed = {name: getattr(results, name).clone() for name in factors}
    for name, factor in factors.items():
        (changed[name].mT if name == "d_down_proj" else changed[name])[..., :BLOCK] *= factor
    return dataclasses.replace(results, **changed)


def compare(got: Results, exact: Results, quantized: Results, rank: int) -> list[Check]:
    """One check for each tensor of ``got``. Its threshold follows from the SNR of ``quantized`` against ``exact``."""
    checks = []
    for field in dataclasses.fields(got):
        reference, bound = getattr(exact, field.name), getattr(quantized, field.name)
        threshold = min(snr(reference, bound) - MARGIN, BF16)
        checks.append(Check(field.name, snr(reference, getattr(got, field.name)), threshold, rank))
    return checks


def run_layer(problem: Problem, case: str, mesh: Mesh, device: torch.device, config: Config) -> Results:
    """Run the MoE layer on this rank's tokens. Weight gradients are those of this rank's experts."""
    recipe, kind = case.split("/")
    (experts, dim, hidden_dim), ranks = problem.down_proj.shape, mesh.ranks
    ranks_per_node = config.dispatcher.ranks_per_node or (1 if ranks % 2 else ranks // 2)
    nodes: DispatchFields = {"ranks_per_node": ranks_per_node} if kind == "hierarchical" else {}
    dispatcher = make_dispatcher(kind, experts, dim=dim, group=mesh.ep, **nodes)
    moe = MoE(
        dim,
        hidden_dim,
        experts,
        problem.weights.shape[1],
        group=mesh.ep,
        recipe=recipe,
        dispatcher=dispatcher,
        device=device,
        backend=config.backend,
        gradient_reduction="sum",
    )
    own = _experts_of(moe.dispatcher.rank, moe.dispatcher.num_local_experts)
    local(moe.experts.gate_up_proj).copy_(problem.gate_up_proj[own])
    local(moe.experts.down_proj).copy_(problem.down_proj[own])
    x = problem.x.to(device, torch.bfloat16).requires_grad_()
    weights = problem.weights.to(device).requires_grad_()
    out = moe(x, expert_ids=problem.expert_ids.int().to(device), weights=weights)
    out.backward(problem.d_out.to(out))
    moe.check()
    leaves = (x, weights, moe.experts.gate_up_proj, moe.experts.down_proj)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return Results(*(local(tensor).float().cpu() for tensor in (out, *gradients)))


def _check(name: str, config: Config, mesh: Mesh, device: torch.device) -> list[Check]:
    wide = wide_of(select(config.backend, device))
    problems = [make_problem(config, rank, wide) for rank in range(mesh.ranks)]
    own = problems[mesh.rank]
    got = run_layer(own, name, mesh, device, config)
    rank = mesh.rank
    if name.endswith("/local"):  # without expert parallelism a rank's experts see its own tokens only
        problems, rank = [own], 0
    per_token = "x", "d_out", "expert_ids", "weights"
    joined = {field: torch.cat([getattr(problem, field) for problem in problems]) for field in per_token}
    first = sum(len(problem.x) for problem in problems[:rank])
    share = dict.fromkeys(("out", "dx", "d_weights"), slice(first, first + len(own.x)))
    share |= dict.fromkeys(("d_gate_up_proj", "d_down_proj"), _experts_of(rank, len(got.d_down_proj)))

    def reference(q: Quantizers) -> Results:
        whole = moe_layer(dataclasses.replace(own, **joined), q)
        return levelled(Results(**{field: getattr(whole, field)[part] for field, part in share.items()}), wide)

    quantized = reference(quantizers(Recipe.named(name.split("/")[0])))
    return compare(levelled(got, wide), reference(EXACT), quantized, mesh.rank)


def _experts_of(rank: int, num_local: int) -> slice:
    return slice(rank * num_local, (rank + 1) * num_local)
