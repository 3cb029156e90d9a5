"""Auxiliary losses of routers: values where these are known, a plain formula's gradients, and who keeps logits."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mxep.ep import MoE, Router, load_balancing_loss, router_z_loss
from ranks import Context, distributed

T, E, K = 48, 8, 2
SCORES = pytest.mark.parametrize("score", ["softmax", "sigmoid"])


def random_routing(tokens: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits whose gradients are wanted, and ids, of which some are -1: one of a token, or all."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(tokens, E, generator=generator)
    ids = logits.topk(K).indices.int()
    ids[1::5, 1] = -1
    ids[2::7] = -1
    return logits.requires_grad_(), ids


def plain(logits: Tensor, ids: Tensor, score: str) -> Tensor:
    """The formula, expert by expert, in float64."""
    logits = logits.double()[(ids >= 0).any(1)]
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    rows = ids[ids >= 0].tolist()
    return E * sum(rows.count(e) / len(rows) * scores[:, e].mean() for e in range(E))


def gradient(loss: Tensor, *of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


@SCORES
def test_the_balancing_loss_is_one_at_balance_and_e_over_k_at_collapse(score: str) -> None:
    level, ids = torch.zeros(T, E), torch.arange(T * K).view(T, K) % E
    assert load_balancing_loss(level, ids, score=score).item() == pytest.approx(1, rel=1e-6)
    alike = torch.full((T, E), -60.0)
    alike[:, :K] = 0
    assert load_balancing_loss(alike, ids % K, score=score).item() == pytest.approx(E / K, rel=1e-6)


@SCORES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_balancing_loss_has_the_value_and_gradient_of_the_plain_formula(score: str, dtype: torch.dtype) -> None:
    logits, ids = random_routing()
    logits = logits.detach().to(dtype).requires_grad_()
    got, wanted = load_balancing_loss(logits, ids, score=score), plain(logits, ids, score)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)
    # A gradient in bf16 is rounded to it, on both sides.
    close = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-8}
    torch.testing.assert_close(gradient(got, logits), gradient(wanted, logits), **close)


def test_ids_out_of_range_count_as_little_as_minus_one() -> None:
    logits, ids = random_routing()
    wrong = ids.masked_fill(ids < 0, E).long()
    assert load_balancing_loss(logits, wrong).equal(load_balancing_loss(logits, ids))


@SCORES
def test_nan_logits_of_tokens_that_are_not_routed_reach_no_loss_and_no_gradient(score: str) -> None:
    logits, ids = torch.randn(5, 4), torch.tensor([[0, 1], [-1, -1], [2, -1], [9, -1], [3, 0]])
    found = []
    for unrouted in (0.0, float("nan"), float("inf"), float("-inf")):
        leaf = logits.clone()
        leaf[[1, 3]] = unrouted
        loss = load_balancing_loss(leaf.requires_grad_(), ids, score=score)
        loss.backward()
        assert not leaf.grad[[1, 3]].any()
        found.append((loss, leaf.grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_no_tokens_have_no_loss_and_a_gradient_without_nans() -> None:
    logits = torch.zeros(0, E, requires_grad=True)
    for loss in (load_balancing_loss(logits, torch.zeros(0, K)), router_z_loss(logits)):
        assert loss.item() == 0
        assert gradient(loss, logits).shape == (0, E)
    logits, ids = random_routing()
    loss = load_balancing_loss(logits, torch.full_like(ids, -1))
    assert loss.item() == 0
    assert not gradient(loss, logits).any()


def test_the_z_loss_is_the_mean_of_squared_logsumexps() -> None:
    logits, _ = random_routing()
    wanted = logits.double().exp().sum(1).log().pow(2).mean()
    torch.testing.assert_close(router_z_loss(logits).double(), wanted, rtol=1e-6, atol=0)
    got = gradient(router_z_loss(logits), logits)
    torch.testing.assert_close(got, gradient(wanted, logits), rtol=1e-5, atol=1e-8)


def test_scores_of_another_kind_and_sizes_that_do_not_fit_are_errors() -> None:
    logits, ids = random_routing()
    with pytest.raises(ValueError, match="score must be 'softmax' or 'sigmoid', got 'tanh'"):
        load_balancing_loss(logits, ids, score="tanh")
    with pytest.raises(ValueError, match=r"must be \(T, E\) and \(T, K\), got \(48, 8\) and \(47, 2\)"):
        load_balancing_loss(logits, ids[1:])


@distributed(2)
def test_over_a_group_the_mean_of_losses_is_that_of_the_whole_batch(ctx: Context) -> None:
    logits, ids = (x.to(ctx.device) for x in random_routing(2 * T))
    ids = ids.clamp_min(0)  # all ranks have as many tokens
    share = slice(ctx.rank * T, (ctx.rank + 1) * T)
    whole, alone = load_balancing_loss(logits, ids), load_balancing_loss(logits[share], ids[share])
    wanted = gradient(whole, logits)[share]
    for compiled in (False, True):
        loss = torch.compile(load_balancing_loss, fullgraph=True, backend="aot_eager", disable=not compiled)
        own = logits[share].detach().requires_grad_()
        got = loss(own, ids[share], group=ctx.group)
        torch.testing.assert_close(gradient(got, own) / 2, wanted, rtol=1e-5, atol=1e-8)
        mean = got.detach().clone()
        dist.all_reduce(mean, group=ctx.group)
        torch.testing.assert_close(mean / 2, whole.detach(), rtol=1e-6, atol=0)
        assert (got - alone).abs() > 1e-3
    nothing = load_balancing_loss(logits[:0] if ctx.rank else logits, ids[:0] if ctx.rank else ids, group=ctx.group)
    torch.testing.assert_close(nothing, whole * (1 - ctx.rank))


@SCORES
def test_under_autocast_losses_are_the_same(score: str) -> None:
    logits, ids = random_routing()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append((load_balancing_loss(logits, ids, score=score), router_z_loss(logits)))
    assert all(map(torch.equal, *found))


def make_router(**options) -> tuple[Router, Tensor]:
    torch.manual_seed(0)
    router = Router(16, E, K, keep_logits=True, **options)
    return router, (torch.randn(T, 16) + 2 * torch.randn(16)).requires_grad_()


def loss_of(router: Router, x: Tensor) -> Tensor:
    """As of a model: of what the weights are used for, and both auxiliary losses."""
    _, weights = router(x)
    balance = load_balancing_loss(router.last_logits, router.last_expert_ids, score=router.score)
    return weights[:, 0].square().mean() + 0.1 * balance + 0.01 * router_z_loss(router.last_logits)


def test_a_router_keeps_the_logits_of_a_forward_where_that_is_wanted() -> None:
    router, x = make_router(score="sigmoid", balance=True)
    assert router.last_logits is None
    ids, _ = router(x)
    torch.testing.assert_close(router.last_logits, x @ router.weight.t())
    assert router.last_expert_ids.equal(ids)
    assert repr(router).endswith("balance=True, keep_logits=True)")
    other = Router(16, E, K)
    other(x)
    assert other.last_logits is other.last_expert_ids is None


def test_a_forward_that_fails_or_is_routed_from_outside_leaves_no_logits() -> None:
    x = torch.randn(T, 64)
    moe = MoE(64, 32, E, K, router=Router(64, E, K, keep_logits=True), dispatcher="local", dtype=torch.float32)
    routing = {"expert_ids": torch.zeros(T, K, dtype=torch.int32), "weights": torch.ones(T, K)}
    for call in (
        lambda: moe(x[:, :32]),
        lambda: moe(x, **routing),
        lambda: moe.router(x[:, :32]),
        lambda: moe.router(x, x),
    ):
        moe(x)
        assert moe.router.last_logits is not None
        with contextlib.suppress(ValueError):
            call()
        assert moe.router.last_logits is moe.router.last_expert_ids is None


def test_copies_pickles_and_state_dicts_have_no_logits() -> None:
    router, x = make_router()
    router(x)
    for other in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert other.last_logits is other.last_expert_ids is None
        assert other.weight.equal(router.weight)
        assert loss_of(other, x).equal(loss_of(router, x))
    torch.save(router.state_dict(), io.BytesIO())
    assert list(router.state_dict()) == ["weight"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpointed_router_has_the_logits_of_its_forward_and_the_same_gradients(compiled: bool) -> None:
    router, x = make_router()
    wanted = gradient(loss_of(router, x), router.weight)
    torch._dynamo.reset()
    route = torch.compile(router, fullgraph=True, backend="aot_eager", disable=not compiled)
    # What follows the router keeps a tensor, so that recomputation does not stop within it.
    block = lambda x: route(x)[1][:, 0].square()  # noqa: E731
    squares = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    logits, ids = router.last_logits, router.last_expert_ids
    loss = squares.mean() + 0.1 * load_balancing_loss(logits, ids) + 0.01 * router_z_loss(logits)
    assert gradient(loss, router.weight).equal(wanted)
    assert compiled or router.last_logits is logits


@SCORES
def test_a_router_and_its_losses_are_one_full_graph(score: str) -> None:
    router, x = make_router(score=score)
    wanted = loss_of(router, x)
    torch._dynamo.reset()
    got = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(router, x)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(gradient(got, router.weight), gradient(wanted, router.weight))
    torch.testing.assert_close(router.last_logits, x @ router.weight.t())


@distributed(2, how=["DDP", "FSDP2"])
def test_data_parallel_routers_have_the_gradients_of_one_process(ctx: Context, how: str) -> None:
    router, x = make_router(device=ctx.device)
    x = x.detach().to(ctx.device)
    halves = x.view(2, T // 2, 16)
    wanted = torch.stack([gradient(loss_of(router, half.requires_grad_()), router.weight) for half in halves]).mean(0)
    if how == "DDP":
        model: torch.nn.Module = DistributedDataParallel(router, process_group=ctx.group)
    else:
        model = fully_shard(router, mesh=DeviceMesh.from_group(ctx.group, ctx.device.type))
    _, weights = model(halves[ctx.rank].detach().requires_grad_())
    balance = load_balancing_loss(router.last_logits, router.last_expert_ids)
    (weights[:, 0].square().mean() + 0.1 * balance + 0.01 * router_z_loss(router.last_logits)).backward()
    grad = router.weight.grad if how == "DDP" else router.weight.grad.full_tensor()
    torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_cuda_graph_replays_a_router_and_its_losses() -> None:
    router, x = make_router(device="cuda")
    x = x.detach().to("cuda", torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the logits that are kept keep the weight's node of autograd, and that its stream
        loss_of(router, x).backward()
    stream.synchronize()
    router.weight.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = loss_of(router, x)
        captured.backward()
    for seed in range(2):
        torch.manual_seed(seed)
        x.normal_()
        router.weight.grad.zero_()
        graph.replay()
        replayed = router.weight.grad.clone()
        router.weight.grad.zero_()
        wanted = loss_of(router, x)
        wanted.backward()
        torch.testing.assert_close(captured, wanted)
        torch.testing.assert_close(replayed, router.weight.grad)
