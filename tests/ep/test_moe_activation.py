"""Clamped SwiGLU and biases of experts in the layer: against plain torch, and against the layer's parts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ep.problem import FixedRouting
from mxep.comms import DROPPED, Capacity
from mxep.ep import LocalDispatcher, MoE, combine, dispatch, expert_mlp, run_experts
from mxep.ep.dtensors import local_tensor
from mxep.ep.formats import PLAIN
from mxep.ep.functional import add_down_bias
from mxep.gemm import Recipe
from mxep.integration.metrics import snr
from mxep.quant import SwiGLU
from ranks import distributed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, D, F, E, K = 48, 64, 32, 4, 2
GPT_OSS = SwiGLU(1.702, 0.8, 1.0, interleaved=True)
RARELY_CLAMPED = SwiGLU(1.702, 5.0, 1.0, interleaved=True)
"""For rounded operands: a value that rounding takes across the limit gets no gradient, or all of it."""
ACTIVATIONS = [GPT_OSS, SwiGLU(limit=0.8), SwiGLU(1.702, 0.8, 1.0)]
NAMES = ("x", "weights", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


def problem(tokens: int = T) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What has gradients, by NAMES, in fp64; ids, of which some are -1; d_out."""
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, D), (tokens, K), (E, 2 * F, D), (E, D, F), (E, 2 * F), (E, D)
    given = {name: torch.randn(shape, generator=generator).double() for name, shape in zip(NAMES, shapes)}
    given["gate_up_proj"] *= D**-0.5
    given["down_proj"] *= F**-0.5
    ids = torch.rand(tokens, E, generator=generator).topk(K).indices
    ids[::5, 0] = -1
    return given, ids, torch.randn(tokens, D, generator=generator).double()


def defined(given: dict[str, Tensor], ids: Tensor, d_out: Tensor, activation: SwiGLU) -> dict[str, Tensor]:
    """out and all gradients, token by token, in fp64."""
    given = {name: x.clone().requires_grad_() for name, x in given.items()}
    x, weights, w13, w2, b13, b2 = given.values()
    out = torch.zeros_like(x)
    for k in range(K):
        e = ids[:, k].clamp(min=0)
        gate_up = torch.einsum("td,tfd->tf", x, w13[e]) + b13[e]
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if activation.interleaved else gate_up.chunk(2, 1)
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        h = (up + activation.shift) * (gate * torch.sigmoid(activation.alpha * gate))
        y = torch.einsum("tf,tdf->td", h, w2[e]) + b2[e]
        out = out + y * torch.where(ids[:, k] >= 0, weights[:, k], 0.0)[:, None]
    out.backward(d_out)
    return {"out": out.detach()} | {name: x.grad for name, x in given.items() if x.grad is not None}


def run(given: dict[str, Tensor], ids: Tensor, d_out: Tensor, dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
    moved = {name: x.to(torch.float32 if name == "weights" else dtype).requires_grad_() for name, x in given.items()}
    x, weights, w13, w2, b13, b2 = moved.values()
    biases = {"gate_up_bias": b13, "down_bias": b2}
    out, _ = run_experts(x, ids, weights, w13, w2, dispatcher=LocalDispatcher(E), **biases, **how)
    out.backward(d_out.to(dtype))
    return {"out": out.detach()} | {name: x.grad for name, x in moved.items() if x.grad is not None}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_fp32_is_the_definition(activation: SwiGLU) -> None:
    """Products of 64 and of up to 48 rows in fp32: 2^-24, 144 dB, times a few roundings each."""
    wanted = defined(*problem(), activation)
    got = run(*problem(), torch.float32, activation=activation, recipe=Recipe.bf16())
    assert got.keys() == wanted.keys()
    assert min((snr(wanted[name], got[name]), name) for name in wanted) > (120, "")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_bf16", "fp8"])
def test_quantized_is_near_the_definition(recipe: str) -> None:
    """As near as a model's layer: 18.5 dB."""
    wanted = defined(*problem(), RARELY_CLAMPED)
    got = run(*problem(), torch.float32, activation=RARELY_CLAMPED, recipe=Recipe.named(recipe))
    assert min((snr(wanted[name], got[name]), name) for name in wanted) > (18.5, "")


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8"])
def test_fused_is_composed_bit_for_bit(recipe: str) -> None:
    """But for gate_up's bias where SwiGLU folds: its gradient sums rows that lost what is below 2^-18 of their amax."""
    given, ids, d_out = problem()
    given, ids, d_out = {name: x.to(DEVICE) for name, x in given.items()}, ids.to(DEVICE), d_out.to(DEVICE)
    how: dict[str, Any] = {"recipe": Recipe.named(recipe)}
    fused = run(given, ids, d_out, torch.bfloat16, activation=GPT_OSS, **how)
    dtypes = {"weights": torch.float32}
    moved = {name: x.to(dtypes.get(name, torch.bfloat16)).requires_grad_() for name, x in given.items()}
    x, weights, w13, w2, b13, b2 = moved.values()
    of = {"dispatcher": LocalDispatcher(E)} | how
    rows, row_weight, routing = dispatch(x, ids, weights, **of)
    options = {"row_weight": row_weight, "activation": GPT_OSS, "gate_up_bias": b13} | how
    y = expert_mlp(rows, w13, w2, routing.plan.offs, **options)
    out = add_down_bias(combine(y, routing, **of), ids, weights, b2)
    out.backward(d_out.bfloat16())
    assert torch.equal(out, fused["out"])
    for name, part in moved.items():
        same = torch.equal(part.grad, fused[name])
        assert same or ((DEVICE, name) == ("cuda", "gate_up_bias") and snr(part.grad, fused[name]) > 50), name


@distributed(2, dispatcher=["symmetric", "all_to_all", "hierarchical"])
def test_ranks_that_share_experts_have_the_gradients_of_the_mean(ctx, dispatcher: str) -> None:
    given, ids, d_out = problem(2 * T)
    wanted = defined(given, ids, d_out, RARELY_CLAMPED)
    here = slice(ctx.rank * T, (ctx.rank + 1) * T)
    router = FixedRouting(ids[here].to(ctx.device), given["weights"][here].float().to(ctx.device))
    sizes = {"recipe": "bf16", "router": router, "activation": RARELY_CLAMPED, "bias": True, "dtype": torch.float32}
    moe = MoE(D, F, E, K, group=ctx.group, device=ctx.device, dispatcher=dispatcher, **sizes)
    parameters = dict(moe.experts.named_parameters())
    assert parameters.keys() == set(NAMES[2:])
    with torch.no_grad():
        for name, parameter in parameters.items():
            local_tensor(parameter).copy_(given[name].chunk(2)[ctx.rank])
    x = given["x"][here].float().to(ctx.device).requires_grad_()
    out = moe(x)
    out.backward(d_out[here].to(out))
    moe.check()
    pairs = [(wanted["out"][here], out.detach()), (wanted["x"][here], x.grad)]
    pairs.append((wanted["weights"][here], router.weights.grad))
    for name, parameter in parameters.items():
        assert isinstance(parameter.grad, DTensor)
        pairs.append((wanted[name].chunk(2)[ctx.rank] / 2, parameter.grad.to_local()))
    # On a GPU the recipe's products are of bf16, whatever the parameters are.
    assert min(snr(a, b.cpu()) for a, b in pairs) > (120 if ctx.device.type == "cpu" else 40)


@pytest.mark.parametrize("form", ["mxfp8", "mxfp8_wgrad_bf16", "compiled", "no gradients", "score_before_experts"])
def test_rows_that_are_dropped_have_no_bias(form: str) -> None:
    torch.manual_seed(0)
    drop, before = Capacity.factor(0.5, overflow="drop"), form == "score_before_experts"
    how = {"recipe": form if form.startswith("mxfp8") else "bf16", "score_before_experts": before, "bias": True}
    moes = [MoE(D, F, E, K, dispatcher="local", device=DEVICE, capacity=c, **how) for c in (drop, None)]
    for name in ("gate_up_bias", "down_bias"):
        torch.nn.init.normal_(getattr(moes[0].experts, name))
    moes[1].load_state_dict(moes[0].state_dict())
    given, ids, d_out = problem(4 * T)
    ids, found = ids.to(DEVICE), []
    run = torch.compile(moes[0], fullgraph=True, backend="aot_eager") if form == "compiled" else moes[0]
    for moe, call in zip(moes, (run, moes[1])):
        x, weights = given["x"].to(DEVICE, torch.bfloat16), given["weights"].float().to(DEVICE)
        x, weights = (leaf.requires_grad_(form != "no gradients") for leaf in (x, weights))
        with torch.set_grad_enabled(form != "no gradients"):
            out = call(x, expert_ids=ids, weights=weights)
            if form != "no gradients":
                out.backward(d_out.to(out))
            if moe is moes[0]:
                moe(x.detach(), expert_ids=ids, weights=weights.detach())  # whose routing is known, not a graph's
                lost = (moe.last_routing.plan.slot_rows == DROPPED).view(ids.shape)
                assert lost.all(1).any()
                assert lost.any(1).logical_and(~lost.all(1)).any()
                assert not out[lost.all(1)].any()
                ids = torch.where(lost, -1, ids)
        found.append([out, x.grad, weights.grad, *(p.grad for p in moe.experts.parameters())])
    for got, wanted in zip(*found):
        assert torch.equal(got, wanted) if wanted is not None else got is None


def test_bias_gradients_of_a_backward_in_two() -> None:
    """dx first; the operands of gate_up_proj's gradient, which its bias sums, are kept."""
    given, ids, d_out = problem()
    whole = run(given, ids, d_out, torch.float32, activation=GPT_OSS, recipe=Recipe.mxfp8())
    moved = {name: x.float().requires_grad_() for name, x in given.items()}
    x, weights, w13, w2, b13, b2 = moved.values()
    options: dict[str, Any] = {"dispatcher": LocalDispatcher(E), "recipe": Recipe.mxfp8(), "activation": GPT_OSS}
    out, _ = run_experts(x, ids, weights, w13, w2, gate_up_bias=b13, down_bias=b2, **options)
    grad, of = d_out.float(), (w13, w2, b13, b2)
    got = *torch.autograd.grad(out, (x, weights), grad, retain_graph=True), *torch.autograd.grad(out, of, grad)
    for name, part in zip(NAMES, got, strict=True):
        assert torch.equal(part, whole[name]), name


def test_frozen_weights_and_trained_biases() -> None:
    given, ids, d_out = problem()
    wanted = run(given, ids, d_out, torch.float32, activation=GPT_OSS, recipe=Recipe.mxfp8())
    moved = {name: x.float().requires_grad_(name.endswith("_bias")) for name, x in given.items()}
    x, weights, w13, w2, b13, b2 = moved.values()
    options: dict[str, Any] = {"dispatcher": LocalDispatcher(E), "recipe": Recipe.mxfp8(), "activation": GPT_OSS}
    out, _ = run_experts(x, ids, weights, w13, w2, gate_up_bias=b13, down_bias=b2, **options)
    out.backward(d_out.float())
    for name, part in moved.items():
        assert part.grad is None if not part.requires_grad else torch.equal(part.grad, wanted[name]), name


def test_autocast_rounds_no_sum() -> None:
    given, ids, _ = problem()
    b2 = given["down_bias"].float().to(DEVICE)
    out, weights = (given[name].float().to(DEVICE) for name in ("x", "weights"))
    wanted = add_down_bias(out, ids.to(DEVICE), weights, b2)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = add_down_bias(out, ids.to(DEVICE), weights, b2)
    assert got.dtype == torch.float32
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bias_that_is_not_finite_is_its_own_tokens_alone(value: float) -> None:
    """Tokens 0, 3, ... are of experts 0 and 1, others of two others, of one, or of none."""
    given, _, d_out = problem()
    out, weights, b2, d_out = (x.float() for x in (given["x"], given["weights"], given["down_bias"], d_out))
    ids = torch.tensor([[0, 1], [2, 3], [-1, 2]]).repeat(len(out), 1)[: len(out)]
    mine = (ids == 0).any(1)
    weights = weights.masked_fill(ids == 1, 0.0)  # which a product cannot tell from no expert
    found = []
    for spoilt in (False, True):
        bias = b2.clone()
        bias[0, 5] = value if spoilt else bias[0, 5]
        given = [x.clone().requires_grad_() for x in (out, weights, bias)]
        got = add_down_bias(given[0], ids, given[1], given[2])
        got.backward(torch.where(got.isfinite(), d_out, math.nan))
        found.append([got.detach(), *(x.grad for x in given)])
    (wanted, d_x, d_weights, d_bias), (got, *grads) = found
    assert torch.equal(got[~mine], wanted[~mine])
    assert not got[mine].isfinite().all(1).any()
    assert torch.equal(grads[0][~mine], d_x[~mine])
    assert torch.equal(grads[1][~mine], d_weights[~mine])
    assert torch.equal(grads[2][2:], d_bias[2:])
    assert not grads[2][:2].isfinite().any(), "of expert 1, too, whose tokens these are"


@distributed(2, device="cpu", dispatcher=("symmetric", "hierarchical", "all_to_all"))
def test_one_experts_nan_bias_reaches_no_token_of_others_over_ranks(ctx, dispatcher: str) -> None:
    given, _, d_out = problem(2 * T)
    here = slice(ctx.rank * T, (ctx.rank + 1) * T)
    ids = torch.tensor([[0, 1], [E - 2, E - 1]]).repeat(T, 1)[:T]
    odd = ids[:, 0] > 0
    found = []
    for spoilt in (False, True):
        options = {"ranks_per_node": 1} if dispatcher == "hierarchical" else {}
        router = FixedRouting(ids, given["weights"][here].float())
        options |= {"recipe": "bf16", "router": router, "bias": True, "dtype": torch.float32, "dispatcher": dispatcher}
        torch.manual_seed(0)
        moe = MoE(D, F, E, 2, group=ctx.group, **options)
        bias = local_tensor(moe.experts.down_bias)
        with torch.no_grad():
            if spoilt and ctx.rank == 0:
                bias[0] = math.nan
        x = given["x"][here].float().requires_grad_()
        out = moe(x)
        out.backward(torch.where(out.isfinite(), d_out[here].float(), math.nan))
        grads = {name: local_tensor(p.grad) for name, p in moe.experts.named_parameters()}
        found.append((out.detach()[odd], x.grad[odd], *(grad for grad in grads.values() if ctx.rank == 1)))
        assert spoilt != bool(out[~odd].isfinite().all())
    for wanted, got in zip(*found, strict=True):
        assert wanted.isfinite().all()
        assert torch.equal(got, wanted)


def test_a_shared_expert_has_the_activation() -> None:
    torch.manual_seed(0)
    x, grads = torch.randn(T, D), []
    for recipe in ("bf16", "mxfp8_wgrad_bf16"):
        torch.manual_seed(1)
        moe = MoE(D, F, E, K, recipe=recipe, num_shared_experts=1, activation=GPT_OSS, dtype=torch.float32)
        assert moe.shared is not None
        got = moe.shared(x, recipe=moe.recipe, activation=GPT_OSS)
        gate_up = x @ moe.shared.gate_up_proj.T
        gate, up = gate_up[:, ::2].clamp(max=0.8), gate_up[:, 1::2].clamp(-0.8, 0.8)
        wanted = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ moe.shared.down_proj.T
        assert snr(wanted.detach(), got.detach()) > (120 if recipe == "bf16" else 20)
        grads = [torch.autograd.grad(out.sum(), moe.shared.gate_up_proj)[0] for out in (wanted, got)]
        assert snr(*grads) > (115 if recipe == "bf16" else 15)
        assert not torch.equal(moe(x), MoE.forward(moe_without(moe), x))


def moe_without(moe: MoE) -> MoE:
    """The same layer, plain."""
    moe.activation = PLAIN
    return moe


def test_what_does_not_fit_says_so() -> None:
    given, ids, _ = problem()
    x, weights, w13, w2, b13, b2 = (part.float() for part in given.values())
    options: dict[str, Any] = {"dispatcher": LocalDispatcher(E), "recipe": Recipe.mxfp8()}
    with pytest.raises(ValueError, match="activation: got interleaved gate and up, which are apart"):
        run_experts(x, ids, weights, (w13[:, :F], w13[:, F:]), w2, activation=GPT_OSS, **options)
    with pytest.raises(ValueError, match=r"gate_up_bias: got \(4, 32\) on cpu, want \(experts here, 2 F\) = \(4, 64\)"):
        run_experts(x, ids, weights, w13, w2, gate_up_bias=b13[:, :F], **options)
    with pytest.raises(ValueError, match=r"down_bias: got shape \(2, 64\), want \(experts here, D\) = \(4, 64\)"):
        run_experts(x, ids, weights, w13, w2, down_bias=b2[:2], **options)
