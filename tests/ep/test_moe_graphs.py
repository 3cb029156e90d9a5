"""Layers in CUDA graphs: torch.compile's, torch.cuda.make_graphed_callables', and one of a whole training step.

What a graph computes is compared with the same calls without one. docs/guides/graphs.md is the page about it for users.
"""

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from ep.problem import share
from mxep.comms import Capacity
from mxep.ep import MoE, clip_grad_norm_, parameter_groups
from mxep.gemm import quantize_weights_once
from ranks import distributed

DIM, HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 64, 32, 8, 2, 64
RECIPES = pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])


def make_moe(ctx, recipe: str, **options) -> MoE:
    """On one GPU all experts in the process; else the symmetric dispatcher, whose sizes are known beforehand."""
    # A peer may compile for longer than the default timeout.
    symmetric = {"max_tokens": MAX_TOKENS, "timeout": 150.0}
    dispatcher = {"dispatcher": "local"} if ctx.world_size == 1 and ctx.device.type == "cuda" else symmetric
    return MoE(DIM, HIDDEN, EXPERTS, TOP_K, group=ctx.group, device=ctx.device, recipe=recipe, **dispatcher, **options)


class Block(nn.Module):
    """A residual block, whose router reads EXPERTS of the features that `tokens` makes: other ones in each block.

    Experts add a tenth of what they could, so no rounding of another order decides where a token goes.
    """

    def __init__(self, ctx, index: int, recipe: str, **options) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM, device=ctx.device, dtype=torch.bfloat16)
        self.moe = make_moe(ctx, recipe, **options)
        with torch.no_grad():
            self.moe.router.weight.copy_(torch.eye(DIM)[:EXPERTS].roll(3 * index, 0))
            share(self.moe.experts.down_proj).mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def make_model(ctx, recipe: str, blocks: int = 2, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(ctx, index, recipe, **options) for index in range(blocks)))


def tokens(ctx, seed: int, length: int) -> Tensor:
    """(length, DIM), another routing for each seed: the first features are 0, 1/2, ... in an order of each token's."""
    generator = torch.Generator().manual_seed(100 * seed + ctx.rank)
    x = torch.randn(length, DIM, generator=generator)
    x[:, :EXPERTS] = torch.rand(length, EXPERTS, generator=generator).argsort(-1) / 2
    return x.to(ctx.device, torch.bfloat16)


def allocate_gradients(model: nn.Module) -> None:
    """Else the first gradients are a graph's own memory, which its next replay writes over."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def loss_of(x: Tensor, out: Tensor) -> Tensor:
    return (out - x.roll(1, 0)).float().square().mean()


def copies(model: nn.Module, *, gradients: bool = False) -> list[Tensor]:
    return [share(p.grad if gradients else p).detach().clone() for p in model.parameters()]


def train(ctx, model: nn.Module, call: Callable[[Tensor], Tensor], lengths: list[int]) -> list[Tensor]:
    """A step of two micro-batches for each of `lengths`, by SGD: outputs, gradients of x, those of weights, weights."""
    allocate_gradients(model)
    optimizer = torch.optim.SGD(parameter_groups(model), lr=1.0)  # down_proj moves by 6% a step
    results = []
    for step, length in enumerate(lengths):
        model.zero_grad(set_to_none=False)
        for micro_batch in range(2):
            x = tokens(ctx, 2 * step + micro_batch, length).requires_grad_()
            out = call(x)
            loss_of(x.detach(), out).backward()
            results += [out.detach().clone(), x.grad.clone()]  # theirs may be a graph's memory
        for block in model:
            block.moe.check()
        results += copies(model, gradients=True)
        optimizer.step()
    return results + copies(model)


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted) > 0
    wrong = [i for i, pair in enumerate(zip(got, wanted)) if not torch.equal(*pair)]
    assert not wrong, f"results {wrong} of {len(got)} differ"


def assert_close(got: list[Tensor], wanted: list[Tensor], recipe: str) -> None:
    """Within what fused elementwise code may differ by, as it rounds to bf16 less often: 2^-9 of an input.

    That moves one element in 2^-9 / 2^-4 = 1/32 to the next E4M3 number, 2^-3 away: 2% of a product's norm (the root of
    1/32 times 2^-3), which comes into gradients by two operands, of two layers; 2.5% were seen, in bf16 0.7%. Stale
    inputs make it 100%.
    """
    bound = {"bf16": 0.02, "mxfp8": 0.06}[recipe]
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a.float() - b.float()).norm() <= bound * b.float().norm(), f"result {i} of {len(got)}"


@pytest.mark.slow
@distributed(1, 2, timeout=400, device="cuda")
@pytest.mark.timeout(900)  # inductor compiles forward and backward, for a batch size and then for any, in two modes
@RECIPES
def test_reduce_overhead_trains_several_layers_as_eager_does(ctx, recipe: str) -> None:
    """Without a GPU there are no graphs: `test_autograd_compiled.py` has what inductor makes of a layer there."""
    # The first call of a size warms up, the second is recorded, others are replayed. Another size compiles again.
    lengths = [48, 48, 32, 32, 48]
    runs = []
    for mode in ("reduce-overhead", None):
        torch._dynamo.reset()  # or it would remember that sizes change
        counters.clear()
        model = make_model(ctx, recipe)
        runs.append(train(ctx, model, torch.compile(model, mode=mode, fullgraph=True), lengths))
        assert counters["stats"]["unique_graphs"] == 2, "one for the first size, one for any"
        assert counters["inductor"]["cudagraph_skips"] == 0
    model = make_model(ctx, recipe)
    assert_close(runs[0], train(ctx, model, model, lengths), recipe)
    # The same kernels, launched by the host. Only the router's gradient, torch's product of fp32 numbers, was seen to
    # differ, by the order of its sums.
    for i, (a, b) in enumerate(zip(*runs, strict=True)):
        assert torch.equal(a, b) or (a.dtype == torch.float32 and (a - b).norm() <= 1e-5 * b.norm()), f"result {i}"


@distributed(1, 2, device="cuda")
@RECIPES
def test_a_graphed_callable_is_the_layer_bit_for_bit(ctx, recipe: str) -> None:
    length = 40 + 8 * ctx.rank  # ranks may bring another number of tokens, each the same at every call
    torch.manual_seed(0)
    plain = make_moe(ctx, recipe)
    torch.manual_seed(0)
    moe = make_moe(ctx, recipe)
    graphed = torch.cuda.make_graphed_callables(moe, (tokens(ctx, 99, length).requires_grad_(),))
    runs = []
    for layer, call in ((plain, plain), (moe, graphed)):
        allocate_gradients(layer)
        optimizer = torch.optim.SGD(parameter_groups(layer), lr=1.0)
        results = []
        for step in range(3):
            layer.zero_grad(set_to_none=False)
            for micro_batch in range(2):
                x = tokens(ctx, 2 * step + micro_batch, length).requires_grad_()
                out = call(x)
                loss_of(x.detach(), out).backward()
                results += [out.detach().clone(), x.grad.clone()]
            layer.check()
            results += copies(layer, gradients=True)
            optimizer.step()  # a replay reads weights where they lie
        runs.append(results + copies(layer))
    assert_same(runs[1], runs[0])


def average_over_ranks(ctx, model: nn.Module) -> None:
    """Gradients of all but experts, whose are averages already."""
    for p in model.parameters():
        if ctx.world_size > 1 and not isinstance(p, DTensor):
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=ctx.group)


def train_in_whole_steps(ctx, recipe: str, *, captured: bool, once: bool, **options) -> list[Tensor]:
    """Three steps to warm up, then five on other tokens, `captured` as replays: their losses and norms, the weights.

    once: the micro-batches of a step share quantized weights.
    """
    model = make_model(ctx, recipe, blocks=3, **options)
    lr = torch.tensor(0.0, device=ctx.device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=lr, capturable=True, fused=True)
    batches = [tokens(ctx, seed, MAX_TOKENS - 8 * ctx.rank) for seed in (98, 99)]

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        losses = []
        with quantize_weights_once() if once else contextlib.nullcontext():
            for x in batches:
                losses.append(loss_of(x, model(x)))
                losses[-1].backward()
        average_over_ranks(ctx, model)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return torch.stack(losses).detach(), norm

    # One stream for all: autograd runs a leaf's node on the stream of its first use.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        stream.synchronize()
        graph, run = torch.cuda.CUDAGraph(), step
        if captured:
            gc.collect()  # garbage must not be freed within the capture
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's threads go on
                static = step()

            def run() -> tuple[Tensor, Tensor]:
                graph.replay()
                return static

        results = []
        for number in range(5):
            for i, x in enumerate(batches):
                x.copy_(tokens(ctx, 2 * number + i, len(x)))
            lr.fill_(0.002 * (number + 1))  # as a schedule does
            results += [each.clone() for each in run()]
            for block in model:
                block.moe.check()
        results += copies(model)
        torch.cuda.synchronize()
    graph.reset()  # before the communicators that it calls
    return results


@distributed(1, 2, device="cuda")
@RECIPES
def test_a_whole_step_in_one_graph_is_the_eager_step_bit_for_bit(ctx, recipe: str) -> None:
    eager = train_in_whole_steps(ctx, recipe, captured=False, once=False)
    losses, norms = eager[:10:2], eager[1:10:2]
    assert len({loss[0].item() for loss in losses}) == 5, "five steps, five batches"
    assert all(norm.item() > 0.1 for norm in norms), "clipping has something to do"
    for once in (False, True):
        assert_same(train_in_whole_steps(ctx, recipe, captured=True, once=once), eager)
    bounded = {"capacity": Capacity.factor(1.5)}  # smaller buffers, the same rows
    assert_same(train_in_whole_steps(ctx, recipe, captured=True, once=True, **bounded), eager)
