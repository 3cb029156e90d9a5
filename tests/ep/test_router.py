"""The router picks what its description says, weighs what it picked, and balances without touching the weights."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from mxep.ep import Router
from ranks import Context, distributed


def router(**options) -> Router:
    torch.manual_seed(0)
    return Router(16, 8, 2, **options)


def test_default_is_softmax_over_all_experts_top_k_normalised() -> None:
    r = router()
    x = torch.randn(5, 16)
    ids, weights = r(x)
    probability = (x @ r.weight.t()).softmax(-1)
    best = probability.topk(2, dim=-1)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(weights, best.values / best.values.sum(-1, keepdim=True))


@settings(max_examples=30, deadline=None)
@given(score=st.sampled_from(["softmax", "sigmoid"]), scale=st.floats(0.1, 4), seed=st.integers(0, 1000))
def test_normalised_weights_sum_to_scale(score: str, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    _, weights = Router(16, 8, 3, score=score, scale=scale)(torch.randn(7, 16))
    torch.testing.assert_close(weights.sum(-1), torch.full((7,), scale))


@pytest.mark.parametrize("compiled", [True, False])
def test_bf16_tokens_go_through_gemms_op_and_route_alike(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA; here the op's reference takes their place, with its bits."""
    r, x = router(score="sigmoid"), torch.randn(5, 16).bfloat16().requires_grad_()
    want = r(x)
    wanted = torch.autograd.grad(want[1].square().sum(), (x, r.weight))
    monkeypatch.setattr(sys.modules["mxep.gemm.router_ops"], "_DEVICE", "cpu")
    torch._dynamo.reset()
    got = (torch.compile(r, fullgraph=True, backend="aot_eager") if compiled else r)(x)
    assert "FP32Linear" in nodes_behind(got[1]) or compiled
    for a, b in zip((*got, *torch.autograd.grad(got[1].square().sum(), (x, r.weight))), (*want, *wanted)):
        torch.testing.assert_close(a, b)


def nodes_behind(x: torch.Tensor) -> str:
    """Names of the autograd nodes that made x."""
    names, left = [], [x.grad_fn]
    while left:
        node = left.pop()
        names.append(node.name())
        left += [before for before, _ in node.next_functions if before is not None]
    return " ".join(names)


def test_sigmoid_scores_without_normalisation_are_the_weights() -> None:
    r = router(score="sigmoid", normalize=False)
    x = torch.randn(5, 16)
    ids, weights = r(x)
    torch.testing.assert_close(weights, (x @ r.weight.t()).sigmoid().gather(1, ids.long()))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("height", [-60.0, -95.0, -120.0, -1e4])
def test_scores_that_underflow_have_weights_and_gradients(score: str, height: float) -> None:
    r = router(score=score)
    with torch.no_grad():
        r.weight.zero_()
        r.weight[:, 0] = height  # sigmoid of -104 and below is 0
        r.weight[:, 1] = torch.arange(8.0)
    x = torch.zeros(5, 16)
    x[:, :2] = torch.tensor([1.0, 0.25])
    x.requires_grad_()
    ids, weights = r(x)
    (weights * torch.tensor([40.0, -40.0])).sum().backward()
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    # Scores this small are e^logit, whose ratios are those of softmax.
    chosen = (x @ r.weight.t()).gather(1, ids.long())
    torch.testing.assert_close(weights, chosen.softmax(-1))
    by_hand = 80 * weights.prod(-1) * (ids[:, 0] - ids[:, 1])  # d/dx[1] of 40 (w0 - w1), logits are x[1] * id + ...
    torch.testing.assert_close(x.grad[:, 1], by_hand)
    assert r.weight.grad.isfinite().all()


def test_load_is_of_all_micro_batches_and_no_buffer_that_others_may_write() -> None:
    r = router(balance=True)
    batches = torch.randn(3, 5, 16)
    ids = torch.cat([r(x)[0] for x in batches])
    assert torch.equal(r.load, torch.bincount(ids.flatten(), minlength=8))
    assert [name for name, _ in r.named_buffers()] == ["expert_bias"]
    assert r.to("meta").load.is_meta


def test_group_limited_routing_stays_in_the_best_groups() -> None:
    r = router(num_groups=4, top_groups=1)
    x = torch.randn(50, 16)
    ids, _ = r(x)
    group = ids.div(2, rounding_mode="floor")
    assert torch.equal(group[:, 0], group[:, 1])
    by_group = (x @ r.weight.t()).softmax(-1).view(50, 4, 2).sum(-1)
    assert torch.equal(group[:, 0].long(), by_group.argmax(-1))


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"normalize": False}, {"balance": True}, {"num_groups": 4, "top_groups": 2}),
        {"num_groups": 4, "top_groups": 2, "balance": True, "normalize": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_nan_logit_makes_the_weights_of_its_token_nan_and_no_others(score: str, options: dict) -> None:
    for expert in range(8):
        r, x = router(score=score, **options), torch.randn(4, 16)
        with torch.no_grad():
            r.weight[expert] = torch.nan
        ids, weights = r(x)
        assert (ids == expert).any(1).all()
        assert weights.isnan().any(1).all()
        r = router(score=score, **options)
        x[1] = torch.nan
        _, weights = r(x)
        assert weights.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "options", [{}, {"normalize": False}, {"balance": True}, {"num_groups": 4, "top_groups": 2}], ids=str
)
def test_scores_that_underflow_choose_the_best_experts(options: dict) -> None:
    r = router(score="sigmoid", **options)
    with torch.no_grad():
        r.weight.zero_()
        r.weight[:, 0] = torch.tensor([-400.0, -300, -500, -350, -160, -150, -170, -180])
    ids, _ = r(torch.eye(1, 16))
    assert ids.tolist() == [[5, 4]]


def test_bias_steers_the_choice_but_not_the_weights() -> None:
    r = router(balance=True, normalize=False)
    x = torch.randn(5, 16)
    r.expert_bias[3] = 10.0
    ids, weights = r(x)
    assert (ids == 3).any(-1).all()
    torch.testing.assert_close(weights, (x @ r.weight.t()).softmax(-1).gather(1, ids.long()))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_recomputed_forward_adds_nothing_to_the_load(use_reentrant: bool, compiled: bool) -> None:
    r = router(balance=True)
    block = torch.compile(r, fullgraph=True, backend="aot_eager") if compiled else r
    x = torch.randn(5, 16, requires_grad=True)
    # With a GPU compiling sets CUDA up, which checkpoint refuses of a forward whose generators it is to preserve.
    ids, weights = checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    weights.square().sum().backward()
    assert torch.equal(r.load, torch.bincount(ids.flatten(), minlength=8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "tanh"}, "softmax"),
        ({"dim": 0}, "dim: got 0, want a whole number, at least 1"),
        ({"top_k": 2.0}, "top_k: got 2.0, want a whole number"),
        ({"num_groups": 3}, "num_groups must divide num_experts=8"),
        ({"num_groups": 8, "top_groups": 1}, r"top_k must lie in 1\.\.1"),
    ],
)
def test_impossible_routers_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(**{"dim": 16, "num_experts": 8, "top_k": 2} | options)


def test_update_without_balance_and_wrong_width_are_errors() -> None:
    with pytest.raises(RuntimeError, match="balance=True"):
        router().update_bias()
    with pytest.raises(ValueError, match=r"\(T, 16\), got \(5, 17\)"):
        router()(torch.zeros(5, 17))


@distributed(2)
def test_update_bias_is_of_all_ranks_loads(ctx: Context) -> None:
    """Expert 0 is busy on rank 0 and idle over all ranks, expert 2 idle on each and busy over all."""
    router = Router(64, 3, 1, balance=True, device=ctx.device)
    router.load[:] = torch.tensor([9, 0, 8] if ctx.rank == 0 else [0, 13, 6])
    router.update_bias(0.5, ctx.group)
    assert router.expert_bias.tolist() == [0.5, -0.5, -0.5]
    assert router.load.tolist() == [0, 0, 0]
