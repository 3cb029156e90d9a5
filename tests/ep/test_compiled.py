"""A block that holds the layer compiles into one graph, and computes what it computes uncompiled, bit for bit."""

from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mxep.comms import Capacity
from mxep.ep import MoE
from mxep.gemm.backends.reference import Reference
from ranks import distributed

DIM, TOKENS = 64, 40


class Block(torch.nn.Module):
    def __init__(self, ctx, **options) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"dim": DIM, "hidden_dim": 32, "num_experts": 4, "top_k": 2}
        self.moe = MoE(group=ctx.group, device=ctx.device, **sizes | options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.moe(x * 2))


def results(block: torch.nn.Module, fn, ctx, tokens: int = TOKENS) -> list[torch.Tensor]:
    """Output and all gradients for this rank's tokens."""
    generator = torch.Generator().manual_seed(ctx.rank)
    x, d_out = (torch.randn(tokens, DIM, generator=generator).to(ctx.device, torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    block.zero_grad()
    out = fn(x)
    out.backward(d_out)
    return [out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted) >= 5
    assert all(torch.equal(*pair) for pair in zip(got, wanted))


FEW_ROWS = {"top_k": 1, "capacity": Capacity.factor(1.5), "max_tokens": 256}
"""So few that they are kept for backward instead of slots."""


@distributed(2)
@pytest.mark.parametrize(("recipe", "sizes"), [("bf16", {}), ("mxfp8_e5m2", {}), ("mxfp8", FEW_ROWS)])
def test_it_is_one_graph_and_the_same_bits(ctx, recipe: str, sizes: dict) -> None:
    block = Block(ctx, recipe=recipe, num_shared_experts=1, **{"max_tokens": 64} | sizes)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for tokens in (TOKENS, TOKENS, 24):
        assert_same(results(block, compiled, ctx, tokens), results(block, block, ctx, tokens))
    with torch.no_grad():
        x = torch.ones(3, DIM, dtype=torch.bfloat16, device=ctx.device)
        assert torch.equal(compiled(x), block(x))
    block.moe.check()


def blocks(ctx, count: int, **options) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(Block(ctx, recipe="mxfp8", **options) for _ in range(count)))
    for block in model:
        block.moe.experts.down_proj.data.mul_(0.1)  # so that nothing overflows on the way through many
    return model


BATCHES = (TOKENS, TOKENS, 24, 56)


@distributed(1, 2)
@pytest.mark.parametrize("whole", [False, True])
def test_ten_layers_of_a_kind_compile_once_for_a_batch_and_once_for_any(ctx, whole: bool) -> None:
    model, plain = (blocks(ctx, 10, max_tokens=64) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter) if whole else model
    for block in () if whole else model:
        block.compile(fullgraph=True, backend=counter)
    for tokens in BATCHES:
        assert_same(results(model, compiled, ctx, tokens), results(plain, plain, ctx, tokens))
    assert counter.frame_count == 2


@distributed(1, 2)
def test_blocks_under_fsdp2_and_checkpointing_compile_once(ctx) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    counter = CompileCounterWithBackend("aot_eager")
    runs = []
    for compile_it in (False, True):
        model = blocks(ctx, 3, dispatcher="local", dtype=torch.float32)  # as the router: FSDP wants one dtype
        for block in model:
            if compile_it:
                block.compile(fullgraph=True, backend=counter)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def checkpointed(x: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        runs.append([results(model, fn, ctx) for fn in (model, model, checkpointed)])
    for eager, compiled in zip(*runs):
        assert_same(*([t.to_local() if isinstance(t, DTensor) else t for t in one] for one in (compiled, eager)))
    assert counter.frame_count == 1


@distributed(1, device="cpu")
def test_no_weight_gradient_is_computed_of_a_frozen_weight(ctx) -> None:
    block = Block(ctx, recipe="mxfp8", dispatcher="local")
    experts = block.moe.experts
    x, wgrad = torch.randn(TOKENS, DIM, dtype=torch.bfloat16), Reference.wgrad
    for trained in ((True, False), (False, True), (False, False)):
        experts.gate_up_proj.requires_grad_(trained[0])
        experts.down_proj.requires_grad_(trained[1])
        runs = []
        torch.compiler.reset()  # torch 2.11 does not notice that a parameter was frozen after it had compiled
        for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            block.zero_grad()
            leaf = x.clone().requires_grad_()
            with mock.patch.object(Reference, "wgrad", autospec=True, side_effect=wgrad) as products:
                fn(leaf).square().sum().backward()
            assert products.call_count == sum(trained)
            assert [weight.grad is not None for weight in experts.parameters()] == list(trained)
            runs.append([leaf.grad, *(p.grad for p in block.parameters() if p.requires_grad)])
        assert all(torch.equal(*pair) for pair in zip(*runs))


@distributed(1)
def test_inductor_runs_it(ctx) -> None:
    block = Block(ctx, recipe="mxfp8", dispatcher="local")
    compiled = torch.compile(block, fullgraph=True)
    for got, wanted in zip(results(block, compiled, ctx), results(block, block, ctx)):
        # It fuses what is around the layer, and rounds there less often.
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


@distributed(1)
def test_with_sizes_known_only_at_run_time_it_breaks_the_graph(ctx) -> None:
    for options in ({"dispatcher": "all_to_all"}, {"dispatcher": "symmetric"}):
        block = Block(ctx, **options)
        assert_same(results(block, torch.compile(block, backend="aot_eager"), ctx), results(block, block, ctx))


@distributed(2)
def test_checkpointed_activations_give_the_same_bits(ctx) -> None:
    block = Block(ctx, recipe="mxfp8", max_tokens=64)
    again = results(block, lambda x: checkpoint(block, x, use_reentrant=False), ctx)
    assert_same(again, results(block, block, ctx))
