"""Padding is in no expert: a masked layer computes what the layer computes without the padding."""

import pytest
import torch

from ep.problem import FixedRouting, share
from host_sync import no_host_sync
from mxep.comms import Capacity
from mxep.ep import MoE, Router, load_balancing_loss, router_z_loss
from ranks import Context, distributed

CASES = ("bf16", "symmetric"), *(("mxfp8", name) for name in ("local", "all_to_all", "symmetric", "hierarchical"))


def make(ctx: Context, **options) -> MoE:
    torch.manual_seed(0)
    router = Router(64, 8, 2, balance=True, keep_logits=True, device=ctx.device)
    options = {"recipe": "mxfp8", "num_shared_experts": 1, "shared_expert_gate": True, "router": router} | options
    group = None if options.get("dispatcher") == "local" else ctx.group
    return MoE(64, 32, 8, 2, group=group, device=ctx.device, max_tokens=24, **options)


def padded(ctx: Context, filler: float = float("nan")) -> tuple[torch.Tensor, torch.Tensor]:
    """x (2, 12, 64), whose padding holds `filler`, and its mask: 7 and 10 tokens, and as many more as the rank."""
    torch.manual_seed(ctx.rank)
    x = torch.randn(2, 12, 64, dtype=torch.bfloat16)
    mask = torch.arange(12) < torch.tensor([[7 + ctx.rank], [10]])
    return x.masked_fill(~mask[..., None], filler).to(ctx.device), mask.to(ctx.device)


def run(moe: MoE, x: torch.Tensor, mask: torch.Tensor | None, forward=None) -> dict[str, torch.Tensor]:
    """Outputs, gradients, losses, load and counts, of tokens alone."""
    leaf = x.clone().requires_grad_()
    out = (moe if forward is None else forward)(leaf, mask=mask)
    real = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else mask
    router = moe.router
    aux, z = load_balancing_loss(router.last_logits, router.last_expert_ids), router_z_loss(router.last_logits)
    (out.float().square().sum() + 100 * aux + 10 * z).backward()
    assert not out[~real].any()
    assert not leaf.grad[~real].any()
    results = {"out": out[real], "dx": leaf.grad[real], "aux": aux, "z": z, "load": router.load.clone()}
    results |= {name: share(parameter.grad) for name, parameter in moe.named_parameters()}
    if forward is None:
        results |= moe.last_routing.stats()
    moe.check()
    router.load.zero_()
    moe.zero_grad()
    return {name: value.detach().clone() for name, value in results.items()}


def assert_alike(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        if name in ("aux", "z", "router.weight", "shared.gate", "shared.gate_up_proj", "shared.down_proj", "dx"):
            # Sums over tokens, in torch's order, which is another one for another number of them.
            torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}")
        else:
            assert torch.equal(got[name], value), name


@distributed(2, case=CASES)
def test_a_masked_batch_is_the_packed_one(ctx: Context, case: tuple[str, str]) -> None:
    recipe, dispatcher = case
    x, mask = padded(ctx)
    moe = make(ctx, recipe=recipe, dispatcher=dispatcher)
    assert_alike(run(moe, x, mask), wanted := run(moe, x[mask], None))
    assert_alike(run(moe, x.flatten(0, 1), mask.flatten()), wanted)
    assert_alike(run(moe, x.nan_to_num(1e30), mask), wanted)


@pytest.mark.parametrize("options", [{"score_before_experts": True}, {"bias": True}, {"recipe": "mxfp8_wgrad_bf16"}])
def test_other_layers_leave_padding_out(options: dict) -> None:
    ctx = Context(0, 1, torch.device("cpu"), None)
    x, mask = padded(ctx)
    moe = make(ctx, dispatcher="local", **options)
    for name, parameter in moe.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    assert_alike(run(moe, x, mask), run(moe, x[mask], None))


ROUTERS = [
    *({}, {"normalize": False}, {"score": "sigmoid", "scale": 2.0}, {"num_groups": 4, "top_groups": 2}),
    {"num_groups": 4, "top_groups": 2, "score": "sigmoid", "normalize": False},
]


@pytest.mark.parametrize("options", ROUTERS, ids=str)
def test_a_router_alone_leaves_padding_out(options: dict) -> None:
    torch.manual_seed(0)
    router = Router(16, 8, 2, balance=True, **options)
    x, mask = torch.randn(10, 16), torch.arange(10) % 3 > 0
    x[~mask] = float("inf")
    x.requires_grad_()
    ids, weights = router(x, mask)
    weights.square().sum().backward()
    assert (ids[~mask] == -1).all()
    assert not weights[~mask].any()
    assert not x.grad[~mask].any()
    assert router.weight.grad.isfinite().all()
    wanted_ids, wanted = router(x[mask])
    assert torch.equal(ids[mask], wanted_ids)
    torch.testing.assert_close(weights[mask], wanted)
    assert router.load.sum() == 2 * 2 * mask.sum()


def test_a_router_of_ones_own_and_a_routing_from_outside_are_masked() -> None:
    torch.manual_seed(0)
    ids, weights = torch.randint(0, 8, (24, 2)), torch.rand(24, 2)
    weights[10], ids[11] = float("nan"), 99
    mask = torch.arange(24) < 10
    x = torch.randn(24, 64, dtype=torch.bfloat16)
    for router in (FixedRouting(ids, weights), None):
        moe = MoE(64, 32, 8, 2, dispatcher="local", router=router)
        leaf = weights.clone().requires_grad_() if router is None else router.weights
        given = {"expert_ids": ids, "weights": leaf} if router is None else {}
        moe(x, mask=mask, **given).sum().backward()
        assert leaf.grad[:10].all()
        assert not leaf.grad[10:].any()
        assert moe.last_routing.stats()["routed"] == 20


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_wgrad_bf16"])
@pytest.mark.parametrize("shared", [0, 1])
def test_a_nan_gradient_of_padding_reaches_no_gradient(recipe: str, shared: int) -> None:
    torch.manual_seed(0)
    moe = MoE(64, 32, 8, 2, dispatcher="local", recipe=recipe, bias=True, num_shared_experts=shared)
    mask, x, d_out = torch.arange(24) < 10, torch.randn(24, 64).bfloat16(), torch.randn(24, 64).bfloat16()
    found = []
    for filler in (0.0, float("nan")):
        leaf = x.clone().requires_grad_()
        moe(leaf, mask=mask).backward(d_out.masked_fill(~mask[:, None], filler))
        found.append([leaf.grad, *(parameter.grad for parameter in moe.parameters())])
        moe.zero_grad()
    assert all(map(torch.equal, *found))


def test_padding_takes_no_room_of_a_capacity() -> None:
    mask = torch.arange(64) < 16
    moe = MoE(64, 32, 8, 2, dispatcher="local", recipe="bf16", capacity=Capacity.factor(0.25))
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    moe(x, mask=mask)
    moe.check()
    moe(x)
    assert moe.dispatcher.counts()["dropped"] > 0


@pytest.mark.parametrize("filler", [True, False])
def test_all_or_nothing_may_be_padding(filler: bool) -> None:
    moe, x = MoE(64, 32, 8, 2, dispatcher="local", num_shared_experts=1), torch.randn(5, 64).bfloat16()
    out = moe(x, mask=torch.full((5,), filler))
    assert torch.equal(out, moe(x) if filler else torch.zeros_like(x))
    router = Router(64, 8, 2, keep_logits=True)
    router(x, torch.full((5,), filler))
    losses = router_z_loss(router.last_logits), load_balancing_loss(router.last_logits, router.last_expert_ids)
    sum(losses).backward()
    assert all(map(torch.isfinite, losses))
    assert router.weight.grad.isfinite().all()


@pytest.mark.slow
def test_a_masked_layer_is_one_compiled_graph() -> None:
    ctx = Context(0, 1, torch.device("cpu"), None)
    x, mask = padded(ctx)
    moe = make(ctx, dispatcher="local")
    wanted = run(moe, x, mask)
    torch.compiler.reset()
    got = run(moe, x, mask, torch.compile(moe, fullgraph=True, backend="eager"))
    for name in got:
        torch.testing.assert_close(got[name], wanted[name], rtol=2e-2, atol=2e-3)
    assert torch.equal(got["load"], wanted["load"])


def test_a_graph_of_any_number_of_tokens_takes_a_mask() -> None:
    moe = MoE(64, 32, 8, 2, recipe="bf16", max_tokens=64, dispatcher="local")
    x, mask = torch.randn(40, 64, dtype=torch.bfloat16), torch.arange(40) > 3
    torch._dynamo.maybe_mark_dynamic(x, 0)  # as after calls of other lengths without a mask
    got = torch.compile(moe, fullgraph=True, backend="eager")(x, mask=mask)
    assert torch.equal(got, moe(x, mask=mask))


def test_a_mask_that_does_not_fit_is_named() -> None:
    moe, x = MoE(64, 32, 8, 2, dispatcher="local"), torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    for mask in (torch.ones(2, 3), torch.ones(3, 2, dtype=torch.bool), torch.ones(5, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask: expected bool \(2, 3\) on cpu, False for padding, got torch\."):
            moe(x, mask=mask)
    with pytest.raises(ValueError, match="on meta"):
        moe(x, mask=torch.ones(2, 3, dtype=torch.bool, device="meta"))


@distributed(1, device="cuda")
def test_a_graph_computes_with_another_mask_at_each_replay(ctx: Context) -> None:
    moe = make(ctx, dispatcher="local")
    x, mask = padded(ctx)
    out = moe(x, mask=mask)  # warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_host_sync():  # torch 2.13 syncs where a capture begins
        out = moe(x, mask=mask)
    for length in (3, 12, 0):
        mask.copy_((torch.arange(12) < length).expand(2, 12))
        x.copy_(torch.randn(2, 12, 64).masked_fill(~mask.cpu()[..., None], float("nan")))
        graph.replay()
        assert torch.equal(out, moe(x, mask=mask))
        assert not out[~mask].any()


def test_a_routing_of_another_length_is_refused_with_a_mask_too() -> None:
    moe = MoE(32, 32, 4, 2, dispatcher="local")
    x, mask = torch.randn(4, 32, dtype=torch.bfloat16), torch.tensor([True, True, False, True])
    for length in (1, 3):  # the ids of one token would be broadcast
        ids, weights = torch.zeros(length, 2, dtype=torch.int32), torch.ones(length, 2)
        with pytest.raises(ValueError, match=r"dispatch wants x \(T, D\), expert_ids \(T, K\)"):
            moe(x, mask=mask, expert_ids=ids, weights=weights)
