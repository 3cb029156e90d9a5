"""quantize_weights_once around MoE layers: eager, composed and compiled ones share one quantization, to the bit."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mxep.ep import LocalDispatcher, MoE, SymmetricDispatcher
from mxep.ep.formats import PLAIN, LayerConfig, Saved, held_colwise, held_rowwise, saved_columns
from mxep.gemm import Recipe, quantize_once, quantize_weights_once, quantize_weights_once_a_step
from mxep.gemm.backends import select
from ranks import Context, distributed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


lookup = quantize_once.QuantizedOnce._get


def layer(recipe: str = "mxfp8", seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    return MoE(64, 64, 4, 2, recipe=recipe, dispatcher=LocalDispatcher(4), device=DEVICE)


def batch(seed: int) -> Tensor:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)
    return x.requires_grad_()


def step(model: Any, moe: MoE, micro_batches: int = 2) -> list[Tensor]:
    """Outputs and gradients of x of all micro-batches, then those of the parameters."""
    moe.zero_grad()
    results = []
    for seed in range(micro_batches):
        x = batch(seed)
        out = model(x)
        out.square().sum().backward()
        assert x.grad is not None
        results += [out.detach(), x.grad]
    return results + [p.grad.clone() for p in moe.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("mxfp8_32x32", "aot_eager"), pytest.param("fp8", "inductor", marks=pytest.mark.slow)],
)
def test_layers_share_it_and_give_away_nothing_of_what_is_held(recipe: str, backend: str) -> None:
    torch._dynamo.reset()
    moe = layer(recipe)
    compiled = torch.compile(moe, fullgraph=True, backend=backend)
    for _ in range(2):
        with quantize_weights_once() as once:
            results = step(compiled, moe)
            assert once.quantizations <= 4, "two weights, both ways, in one of the micro-batches"
        for got, wanted, eager in zip(results, step(compiled, moe), step(moe, moe), strict=True):
            assert torch.equal(got, wanted)
            # Inductor fuses what is around the experts, and rounds there less often.
            assert torch.equal(got, eager) or (got - eager).norm() <= 0.02 * eager.norm()
        with torch.no_grad():
            for p in moe.parameters():
                p.mul_(1.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="torchrun made a process group")
@pytest.mark.parametrize("dispatcher", ["local", "symmetric"])
def test_graph_trees_of_torch_compile_quantize_at_each_call(dispatcher: str) -> None:
    torch._dynamo.reset()
    moe, alone = layer(), layer()
    if dispatcher == "symmetric":
        moe.dispatcher = SymmetricDispatcher(4, dim=64, max_tokens=24)
    compiled = torch.compile(moe, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        outs = []
        with quantize_weights_once():
            for seed in range(2):  # the first of all warms up, the second is recorded: that wants a backward between
                out = compiled(batch(seed)).clone()
                out.sum().backward()
                moe.zero_grad()  # they lie in the graphs' memory
                outs.append(out.detach())
        moe.check()
        for seed, out in enumerate(outs):
            torch.testing.assert_close(out, alone(batch(seed)).detach(), rtol=2**-7, atol=1e-2)
        with torch.no_grad():
            for p, q in zip(moe.parameters(), alone.parameters()):
                p.mul_(1.1), q.mul_(1.1)


def test_composed_and_fused_layers_share_it() -> None:
    fused, composed = layer(), layer()
    composed.recipe = Recipe.named("mxfp8_wgrad_bf16")  # composed of functions; quantizes weights the same
    composed.experts = fused.experts
    composed.router = fused.router
    with quantize_weights_once() as once:
        step(fused, fused)
        step(composed, composed)
        assert once.quantizations == 4


def test_micro_batches_share_quantized_weights() -> None:
    moe, alone = layer(), layer()
    x = torch.randn(20, 64, dtype=torch.bfloat16, device=DEVICE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (moe, alone)]
    for _ in range(2):
        with quantize_weights_once() as once:
            outs = [moe(x * scale) for scale in (1, 2)]  # F F B B
            for out in outs:
                out.sum().backward()
            moe(x).sum().backward()
            assert once.quantizations == 4, "two weights, both ways"
        for scale in (1, 2, 1):
            alone(x * scale).sum().backward()
        assert torch.equal(moe(x), alone(x))
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(moe(x), alone(x))


def test_later_micro_batches_look_up_no_weight_until_one_changes() -> None:
    moe, other = layer(), layer(seed=1)
    with mock.patch.object(quantize_once.QuantizedOnce, "_get", autospec=True, side_effect=lookup) as seen:
        with quantize_weights_once():
            step(moe, moe, 3)
            assert seen.call_count == 4, "two weights, both ways"
            with torch.no_grad():
                moe.experts.down_proj.mul_(1)  # as PEFT writes what was there
            step(moe, moe, 3)
            assert seen.call_count == 8
            moe.experts.down_proj.data = other.experts.down_proj.data  # other memory: another weight
            got = step(moe, moe)
            assert seen.call_count == 12
        assert all(torch.equal(*pair) for pair in zip(got, step(moe, moe), strict=True))


def test_nothing_is_remembered_of_what_a_forward_saved() -> None:
    """Compiled code may use the memory of saved tensors again after a backward. On a CPU, as `hopper` saves no blocks."""
    experts, recipe = layer("mxfp8_32x32").experts.cpu(), Recipe.named("mxfp8_32x32")
    config = LayerConfig(recipe, select("auto", torch.device("cpu")), PLAIN)
    weights = experts.gate_up_proj.detach(), experts.down_proj.detach()
    with quantize_weights_once(), torch.no_grad():
        rowwise = held_rowwise(*weights, config, dgrad=True)
        assert rowwise is not None
        for value in (1, 2):
            copies = [w._replace(qdata=w.qdata.clone()) for w in saved_columns(rowwise)]
            colwise = held_colwise(*weights, Saved(None, None, *copies), config)
            assert colwise is not None
            assert torch.equal(colwise.gate_up.qdata.view(torch.uint8), rowwise.gate_up.qdata.view(torch.uint8))
            copies[0].qdata.view(torch.uint8).fill_(value)


def test_a_weight_where_an_earlier_one_lay_is_another() -> None:
    moe, x = MoE(32, 32, 4, 2, device="cpu"), torch.randn(24, 32, dtype=torch.bfloat16)
    weight = moe.experts.down_proj
    memory, values = bytearray(weight.nbytes), weight.detach().clone()
    with torch.no_grad():
        for factor in (1, 2):  # as where a library frees weights between layers, and an allocator reuses the memory
            with quantize_weights_once():
                for sign in (1, -1):
                    here = torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)
                    weight.data = here.copy_(values * factor * sign)
                    got = moe(x)
            assert torch.equal(got, moe(x))


@distributed(2)
def test_a_write_to_experts_over_ranks_is_noticed(ctx: Context) -> None:
    moe = MoE(32, 32, 4, 2, device=ctx.device, group=ctx.group)
    x = torch.randn(8, 32, dtype=torch.bfloat16, device=ctx.device)
    with quantize_weights_once(), torch.no_grad():
        moe(x)
        moe.experts.down_proj.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"a weight \(2, 32, 32\) was written to within"):
            moe(x)


@distributed(2)
def test_experts_over_ranks_are_quantized_once_a_step(ctx: Context) -> None:
    """An optimizer writes to DTensors, and that is no write within a step."""
    moe = MoE(32, 32, 4, 2, device=ctx.device, group=ctx.group)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    once = quantize_weights_once_a_step()
    for _ in range(3):
        x = torch.randn(8, 32, dtype=torch.bfloat16, device=ctx.device)
        with mock.patch.object(quantize_once, "_made", wraps=quantize_once._made) as made:
            for _ in range(2):
                moe(x).float().square().sum().backward()
        weights = [call.args[1] for call in made.call_args_list]
        assert sum(not w.is_meta for w in weights) == 4, "a rehearsal has weights on meta"
        optimizer.step()
    once.close()
