"""The routing weight before the experts, as in Llama 4: against plain torch, over ranks, and after them, as usual."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from ep.problem import FixedRouting
from mxep.comms import DROPPED, Capacity
from mxep.ep import ExpertParallel, MoE, SymmetricDispatcher
from mxep.ep.dtensors import local_tensor
from mxep.integration.metrics import snr
from ranks import Context, distributed

T, D, H, E = 40, 64, 32, 4


def given(tokens: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids of which some are -1, weights and d_out."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, E, generator=g).topk(top_k).indices.int()
    ids[::7, 0] = -1
    x, d_out = (torch.randn(tokens, D, generator=g).bfloat16() for _ in range(2))
    return x, ids, 0.2 + torch.rand(tokens, top_k, generator=g), d_out


def defined(moe: MoE, x: Tensor, ids: Tensor, weights: Tensor, d_out: Tensor, *, before: bool) -> list[Tensor]:
    """out, and gradients of x, weights and both weights of the experts, in fp64."""
    experts = moe.experts.gate_up_proj, moe.experts.down_proj
    x, weights, w13, w2 = (t.detach().double().requires_grad_() for t in (x, weights, *experts))
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        e, score = ids[:, k].clamp(min=0).long(), torch.where(ids[:, k] >= 0, weights[:, k], 0.0)[:, None]
        gate, up = torch.einsum("td,tfd->tf", x * score if before else x, w13[e]).chunk(2, 1)
        y = torch.einsum("tf,tdf->td", F.silu(gate) * up, w2[e])
        out = out + (y * (ids[:, k] >= 0)[:, None] if before else y * score)
    out.backward(d_out.double())
    return [out.detach(), *(t.grad for t in (x, weights, w13, w2))]  # type: ignore[misc]


def train(moe: MoE, x: Tensor, ids: Tensor, weights: Tensor, d_out: Tensor) -> list[Tensor]:
    moe.zero_grad()
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = moe(x, expert_ids=ids, weights=weights)
    out.backward(d_out)
    return [out.detach(), x.grad, weights.grad, *(w.grad for w in moe.experts.parameters())]  # type: ignore[list-item]


def test_a_nan_weight_of_a_dropped_row_reaches_no_gradient() -> None:
    torch.manual_seed(0)
    capacity = Capacity.factor(0.5, overflow="drop")
    moe = MoE(D, H, E, 2, dispatcher="local", recipe="bf16", score_before_experts=True, capacity=capacity)
    x, ids, weights, d_out = given(T, 2)
    wanted = train(moe, x, ids, weights, d_out)
    dropped = moe.last_routing.plan.slot_rows.view(T, 2) == DROPPED
    assert dropped.sum() > 10
    got = train(moe, x, ids, weights.masked_fill(dropped, float("nan")), d_out)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("recipe", "least"), [("bf16", 44.0), ("mxfp8", 21.0)])
def test_it_is_what_plain_torch_computes(before: bool, top_k: int, recipe: str, least: float) -> None:
    """Roundings as without: bf16's of x, h, y and out at 50 dB each; MXFP8's of x, both weights and h at 28.5."""
    torch.manual_seed(0)
    moe = MoE(D, H, E, top_k, dispatcher="local", recipe=recipe, score_before_experts=before)
    problem = given(T, top_k)
    got, wanted = train(moe, *problem), defined(moe, *problem, before=before)
    for name, a, b in zip(("out", "x", "weights", "gate_up_proj", "down_proj"), wanted, got):
        assert snr(a, b.double()) > least, name
    other = defined(moe, *problem, before=not before)
    assert snr(other[0], got[0].double()) < 15, "and not the other way"
    assert moe.last_routing is not None
    assert moe.last_routing.expert_ids.shape == ((T * top_k, 1) if before else (T, top_k))


def test_it_multiplies_no_bias_of_what_an_expert_returns() -> None:
    x, ids, weights, _ = given(T, 2)
    how = {"dispatcher": "local", "recipe": "bf16", "bias": True, "dtype": torch.float32}
    moe = MoE(D, H, E, 2, score_before_experts=True, **how)  # type: ignore[arg-type]
    without = moe(x.float(), expert_ids=ids, weights=weights)
    torch.nn.init.normal_(moe.experts.down_bias)  # type: ignore[arg-type]
    added = (moe.experts.down_bias[ids.clamp(min=0)] * (ids >= 0)[..., None]).sum(1)  # type: ignore[index]
    torch.testing.assert_close(moe(x.float(), expert_ids=ids, weights=weights), without + added)


@pytest.mark.parametrize("before", [False, True])
def test_nan_weights_and_infinite_tokens_of_minus_one_reach_no_gradient(before: bool) -> None:
    x, ids, weights, d_out = given(T, 2)
    weights = weights.detach().clone()
    ids[0], ids[1, 1] = -1, -1
    wanted, found = [], []
    for results, unrouted in ((wanted, 0.0), (found, float("nan"))):
        moe = MoE(D, H, E, 2, dispatcher="local", recipe="bf16", score_before_experts=before, bias=True)
        torch.manual_seed(0)
        for parameter in moe.experts.parameters():
            torch.nn.init.normal_(parameter.data)
        tokens, of_ids = x.detach().clone(), torch.where(ids >= 0, weights, unrouted).requires_grad_()
        tokens[0] = unrouted * float("inf") if unrouted else 1.0
        out = moe(tokens.requires_grad_(), expert_ids=ids, weights=of_ids)
        out.backward(d_out)
        results += [out, tokens.grad, of_ids.grad, *(p.grad for p in moe.experts.parameters())]
    assert all(map(torch.equal, found, wanted))


def test_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    moe = MoE(D, H, E, 2, dispatcher="local", backend="reference", score_before_experts=True)
    x, ids, weights, _ = given(T, 2)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    routing = {"expert_ids": ids, "weights": weights}
    assert torch.equal(compiled(x, **routing), moe(x, **routing))


@distributed(2)
def test_ranks_compute_what_one_process_does_and_max_tokens_counts_tokens(ctx: Context) -> None:
    x, ids, weights, d_out = (t.to(ctx.device) for t in given(2 * T, 2))
    how = {"recipe": "bf16", "score_before_experts": True, "device": ctx.device, "gradient_reduction": "sum"}
    torch.manual_seed(0)
    alone = MoE(D, H, E, 2, dispatcher="local", **how)
    wanted = train(alone, x, ids, weights, d_out)
    here = slice(ctx.rank * T, (ctx.rank + 1) * T)
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    torch.manual_seed(0)
    shared = SymmetricDispatcher(E, dim=D, group=ctx.group, max_tokens=2 * T)
    for moe in (
        MoE(D, H, E, 2, group=ctx.group, max_tokens=T, **how),
        MoE(D, H, E, 2, group=mesh, dispatcher=shared, **how),
        parallelize_module(MoE(D, H, E, 2, dispatcher="local", **how), mesh, ExpertParallel(max_tokens=T)),
    ):
        assert (moe.dispatcher.max_tokens, moe.rows_per_token) == (2 * T, 2)
        with torch.no_grad():
            for mine, whole in zip(moe.experts.parameters(), alone.experts.parameters()):
                local_tensor(mine).copy_(whole.chunk(2)[ctx.rank])
        moe.router = FixedRouting(ids[here], weights[here])
        out = moe(x[here])
        assert torch.equal(out, wanted[0][here])
        out.backward(d_out[here])
        moe.check()
        assert torch.equal(moe.router.weights.grad, wanted[2][here])
        for mine, whole in zip(moe.experts.parameters(), wanted[3:]):
            assert snr(whole.chunk(2)[ctx.rank], local_tensor(mine.grad)) > 44, "sums in another order, in bf16"


@distributed(2)
def test_reserve_makes_room_for_each_of_a_tokens_products(ctx: Context) -> None:
    moe = MoE(D, H, E, 2, score_before_experts=True, group=ctx.group, device=ctx.device)
    few, many = torch.randn(4, D, device=ctx.device).bfloat16(), torch.randn(9, D, device=ctx.device).bfloat16()
    moe(few)
    moe.reserve(9)
    buffers = moe.dispatcher.max_tokens, repr(moe.dispatcher)
    moe(many)
    assert (moe.dispatcher.max_tokens, repr(moe.dispatcher)) == buffers
    assert "max_tokens=18 (so far)" in buffers[1]
    named = MoE(D, H, E, 2, score_before_experts=True, group=ctx.group, device=ctx.device, max_tokens=4)
    with pytest.raises(ValueError, match="reserve: got"):
        named.reserve(5)


def test_weights_may_lie_in_any_order() -> None:
    moe = MoE(D, H, E, 2, score_before_experts=True, dispatcher="local")
    x, ids, weights, _ = given(T, 2)
    wanted = moe(x, expert_ids=ids, weights=weights)
    assert torch.equal(moe(x, expert_ids=ids, weights=weights.T.contiguous().T), wanted)
