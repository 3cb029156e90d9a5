"""Shared experts beside the moves of tokens: the bits of one after the other, eager, recomputed and in a CUDA graph."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxep.ep import MoE
from ranks import Context, distributed

GPU = torch.cuda.is_available()
DIM, HIDDEN, TOKENS = (256, 128, 512) if GPU else (64, 32, 48)  # a CPU runs one thing after another anyway
SLEEP = 5_000_000  # cycles, some ms: what does not wait for the late one reads what is not there yet


class Late(nn.Module):
    """A module that begins late, both ways."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        sleep(x)
        out = self.module(x)
        if out.requires_grad:
            out.register_hook(sleep)
        return out


def sleep(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda._sleep(SLEEP)


def make(ctx: Context, recipe: str) -> MoE:
    sizes = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": 4, "top_k": 2, "num_shared_experts": 2}
    moe = MoE(**sizes, group=ctx.group, device=ctx.device, recipe=recipe, max_tokens=TOKENS)
    moe.shared = Late(moe.shared)
    return moe


def draw(ctx: Context, seed: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output."""
    generator = torch.Generator().manual_seed(2 * seed + ctx.rank)
    x, d_out = (torch.randn(TOKENS, DIM, generator=generator).to(ctx.device, torch.bfloat16) for _ in range(2))
    return x, d_out


def in_turn(moe: MoE, x: Tensor) -> Tensor:
    """The layer by its parts: experts, then the shared one."""
    out, _ = moe.experts(x, *moe.router(x), dispatcher=moe.dispatcher, recipe=moe.recipe)
    return out + moe.shared(x)


def results(moe: MoE, fn, x: Tensor, d_out: Tensor) -> list[Tensor]:
    """The output and all gradients. x is late, as the work before a layer is, and its memory is free right after."""
    moe.zero_grad()
    leaf = x.clone().requires_grad_()
    before = leaf * 1
    sleep(before)
    before = before * 1
    out = fn(before)
    del before
    out.backward(d_out)
    return [out.detach(), leaf.grad, *(p.grad for p in moe.parameters())]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted) == 7
    assert [torch.equal(*pair) for pair in zip(got, wanted)] == [True] * 7


@distributed(1, 2)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_bf16"])
def test_it_equals_experts_and_shared_experts_in_turn_bit_for_bit(ctx: Context, recipe: str) -> None:
    moe = make(ctx, recipe)
    for seed in range(3 if GPU else 1):
        inputs = draw(ctx, seed)
        wanted = results(moe, lambda x: in_turn(moe, x), *inputs)
        assert_same(results(moe, moe, *inputs), wanted)
        for reentrant in (True, False):
            assert_same(results(moe, lambda x, r=reentrant: checkpoint(moe, x, use_reentrant=r), *inputs), wanted)
        with torch.no_grad():
            assert torch.equal(moe(inputs[0]), wanted[0])


@distributed(1, 2)
def test_a_checkpoint_of_the_experts_alone_leaves_shared_experts_their_gradients(ctx: Context) -> None:
    moe = make(ctx, "mxfp8")
    inputs = draw(ctx, 0)
    wanted = results(moe, lambda x: in_turn(moe, x), *inputs)
    experts = moe.experts.forward
    for reentrant in (True, False):
        moe.experts.forward = lambda *args, r=reentrant, **kwargs: checkpoint(
            lambda *tensors: experts(*tensors, **kwargs), *args, use_reentrant=r
        )
        assert_same(results(moe, moe, *inputs), wanted)


@distributed(1, 2)
def test_frozen_shared_experts_and_a_frozen_rest_get_the_gradients_they_need(ctx: Context) -> None:
    moe = make(ctx, "mxfp8")
    x, d_out = draw(ctx, 0)
    for frozen in (moe.shared, moe.experts, moe.router):
        moe.requires_grad_(True)
        frozen.requires_grad_(False)
        both = []
        for fn in (moe, lambda x: in_turn(moe, x)):
            moe.zero_grad()
            fn(x).backward(d_out)
            both.append([p.grad for p in moe.parameters() if p.requires_grad])
        assert all(torch.equal(*pair) for pair in zip(*both))


@distributed(1, 2, device="cuda")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_captured_step_replayed_with_other_inputs_has_the_bits_of_one_in_turn(ctx: Context, recipe: str) -> None:
    moe = make(ctx, recipe)
    twin = copy.deepcopy(moe)
    x, d_out = draw(ctx, 0)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            results(moe, moe, x, d_out)
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(moe, moe, x, d_out)
    for seed in range(1, 4):
        inputs = draw(ctx, seed)
        wanted = results(twin, lambda x: in_turn(twin, x), *inputs)
        x.copy_(inputs[0])
        d_out.copy_(inputs[1])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, wanted)
    moe.check()
