"""A block that holds the layer compiles into one graph, and computes what it computes uncompiled, bit for bit."""

import itertools
import os
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mxep.comms import Capacity
from mxep.ep import (
    AllToAllDispatcher,
    LocalDispatcher,
    MoE,
    combine,
    dispatch,
    expert_mlp,
    make_dispatcher,
    run_experts,
    swiglu,
)
from mxep.ep.autograd import forward_op
from mxep.ep.dtensors import local_tensor
from mxep.ep.formats import LayerConfig, Needs, fake_plan, fake_saved, makes_rows_again
from mxep.ep.layer import ForwardInput, forward_pass
from mxep.gemm import Recipe, freeze, grouped_mm
from mxep.gemm.backends import Hopper
from mxep.gemm.backends.reference import Reference
from mxep.integration.launch import Rank, run_ranks
from mxep.quant import SwiGLU
from mxep.runtime.bundle import tensors_in
from ranks import distributed

DIM, TOKENS = 64, 40


class Block(torch.nn.Module):
    def __init__(self, ctx, **options) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"dim": DIM, "hidden_dim": 32, "num_experts": 4, "top_k": 2}
        self.moe = MoE(group=ctx.group, device=ctx.device, **sizes | options)
        for name, bias in self.named_parameters():
            if name.endswith("_bias"):
                torch.nn.init.normal_(local_tensor(bias.data))

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
RECIPES = "bf16", "fp8", "mxfp8", "mxfp8_32x32", "mxfp8_gate_up_fp8"
GPT_OSS = {"activation": SwiGLU(1.702, 0.5, 1.0, interleaved=True), "bias": True}


@pytest.mark.slow
@distributed(2)
def test_it_is_one_graph_and_the_same_bits(ctx) -> None:
    """Once without gradients, too. Of other numbers of tokens: the next test."""
    few_rows = {"recipe": "mxfp8_e5m2"} | FEW_ROWS
    gpt_oss = {"recipe": "mxfp8_gate_up_fp8", "max_tokens": 64, "num_shared_experts": 1} | GPT_OSS
    for options in (few_rows, gpt_oss):
        torch.compiler.reset()
        block = Block(ctx, **options)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert_same(results(block, compiled, ctx), results(block, block, ctx))
        if options is few_rows:
            with torch.no_grad():
                x = torch.ones(3, DIM, dtype=torch.bfloat16, device=ctx.device)
                assert torch.equal(compiled(x), block(x))
        block.moe.check()


def blocks(ctx, count: int, **options) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(Block(ctx, recipe="mxfp8", **options) for _ in range(count)))
    for block in model:
        block.moe.experts.down_proj.data.mul_(0.1)  # so that nothing overflows on the way through many
    return model


@pytest.mark.slow
@distributed(1)  # graphs of ranks are alike: test_it_is_one_graph_and_the_same_bits
def test_layers_of_a_kind_compile_once_for_a_batch_and_once_for_any(ctx) -> None:
    model, plain = (blocks(ctx, 2, max_tokens=64, **GPT_OSS) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(fullgraph=True, backend=counter)
    for tokens in (TOKENS, TOKENS, 24, 56):
        assert_same(results(model, model, ctx, tokens), results(plain, plain, ctx, tokens))
    assert counter.frame_count == 2


@pytest.mark.slow
@distributed(2)
def test_blocks_under_fsdp2_and_checkpointing_compile_once(ctx) -> None:
    """And a whole model under FSDP2, with the breaks that torch makes for its hooks, has the same bits."""
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    counter = CompileCounterWithBackend("aot_eager")
    runs = []
    for compiled in (None, "blocks", "whole"):
        model = blocks(ctx, 2, dispatcher="local", dtype=torch.float32)  # as the router: FSDP wants one dtype
        for block in model:
            if compiled == "blocks":
                block.compile(fullgraph=True, backend=counter)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def checkpointed(x: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        fns = (torch.compile(model, backend="aot_eager"),) if compiled == "whole" else (model, model, checkpointed)
        runs.append([results(model, fn, ctx) for fn in fns])
    for eager, blockwise in zip(*runs[:2]):
        assert_same(*([t.to_local() if isinstance(t, DTensor) else t for t in one] for one in (blockwise, eager)))
    assert_same(*([t.to_local() if isinstance(t, DTensor) else t for t in one] for one in (runs[2][0], runs[0][0])))
    assert counter.frame_count == 1


@distributed(1, device="cpu")
def test_no_weight_gradient_is_computed_of_a_frozen_weight(ctx) -> None:
    block = Block(ctx, recipe="mxfp8", dispatcher="local")
    experts = block.moe.experts
    x, wgrad = torch.randn(TOKENS, DIM, dtype=torch.bfloat16), Reference.wgrad
    for trained in ((True, False), (False, True)):
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


def routed(layers: int, how: dict, biased: bool) -> tuple:
    """A function of x that is several layers of `run_experts`, and its leaves."""
    torch.manual_seed(0)
    shapes = {"weights": (TOKENS, 2), "proj": (4, 64, DIM), "down": (4, DIM, 32), "bias": (4, 64)}
    leaves = [{name: torch.randn(shape) * 0.1 for name, shape in shapes.items()} for _ in range(layers)]
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(TOKENS)])
    for layer in leaves:
        for name in layer:
            layer[name] = (layer[name] if name == "weights" else layer[name].bfloat16()).requires_grad_()

    def model(x: torch.Tensor) -> torch.Tensor:
        for each in leaves:
            given = torch.nn.functional.silu(x), ids, each["weights"], each["proj"], each["down"]
            out, _ = run_experts(*given, **how, gate_up_bias=each["bias"] if biased else None)
            x = x + out
        return x

    used = [part for layer in leaves for name, part in layer.items() if biased or name != "bias"]
    return model, used


@pytest.mark.parametrize(
    ("dispatcher", "biased"), [({"name": "local"}, True), ({"name": "symmetric", "max_tokens": 64}, False)], ids=str
)
def test_the_functional_is_one_graph_over_several_layers(dispatcher: dict, biased: bool) -> None:
    torch.compiler.reset()
    how = {"activation": GPT_OSS["activation"]} if biased else {}
    how |= {"dispatcher": make_dispatcher(num_experts=4, dim=DIM, **dispatcher), "recipe": Recipe.mxfp8()}
    model, leaves = routed(2, how, biased)
    counter = CompileCounterWithBackend("aot_eager")
    x, d_out = torch.randn(2, TOKENS, DIM).bfloat16()
    runs = []
    for fn in (model, torch.compile(model, fullgraph=True, backend=counter)):
        leaf = x.clone().requires_grad_()
        out = fn(leaf)
        runs.append([out.detach(), *torch.autograd.grad(out, [leaf, *leaves], d_out)])
    assert_same(*runs)
    assert counter.frame_count == 1


def test_what_no_graph_takes_says_why_and_breaks_it_where_that_may_be() -> None:
    of = {"dispatcher": LocalDispatcher(4), "recipe": Recipe.mxfp8()}
    main_grads = torch.zeros(4, 64, DIM), torch.zeros(4, DIM, 32)
    cases = [
        ({"main_grads": main_grads}, "main_grad is memory that backward adds to"),
        ({"dispatcher": AllToAllDispatcher(4)}, "the dispatcher learns its sizes at run time"),
        ({"backend": Reference()}, "recipe and backend must be what their names give"),
        ({"recipe": Recipe.named("mxfp8_wgrad_bf16")}, "recipe mxfp8_wgrad_bf16 has weight gradients of unquantized"),
    ]
    for change, reason in cases:
        added = change.pop("main_grads", ())
        model, leaves = routed(1, of | change, False)
        for weight, main_grad in zip(leaves[1:], added):
            weight.main_grad = main_grad
        x = torch.randn(TOKENS, DIM).bfloat16().requires_grad_()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=f"run_experts is in no graph: {reason}"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        torch.compiler.reset()
        runs = []
        for fn in (model, torch.compile(model, backend="aot_eager")):
            for part in (x, *leaves, *main_grads):
                part.grad = None
            fn(x).backward(x.detach())
            grads = [part.grad for part in (x, *leaves)]
            runs.append([part.clone() for part in (*grads, *main_grads) if part is not None])
            for main_grad in main_grads:
                main_grad.zero_()
        assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
        assert (leaves[1].grad is None) is bool(added)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_composed_functions_break_the_graph_and_keep_their_bits(recipe: str) -> None:
    torch.compiler.reset()
    of, generator = {"recipe": Recipe.named(recipe)}, torch.Generator().manual_seed(0)
    carried = {"dispatcher": make_dispatcher("local", 4, dim=DIM)} | of
    shapes = (TOKENS, DIM), (TOKENS, 2), (4, 64, DIM), (4, DIM, 32)
    x, weights, proj, down = (torch.randn(shape, generator=generator) for shape in shapes)
    ids = torch.randint(4, (TOKENS, 2), generator=generator, dtype=torch.int32)

    def in_two(x, weights, proj, down):
        rows, row_weight, routing = dispatch(x * 2, ids, weights, **carried)
        y = expert_mlp(rows, proj, down, routing.plan.offs, row_weight=row_weight, **of)
        return combine(y, routing, **carried) + 1

    def in_four(x, weights, proj, down):
        rows, row_weight, routing = dispatch(x * 2, ids, weights, **carried)
        ends = routing.plan.offs
        gate_up = grouped_mm(rows, proj, ends, out_dtype=torch.bfloat16, **of)
        h = swiglu(gate_up, row_weight, ends, **of)
        return combine(grouped_mm(h, down, ends, out_dtype=torch.bfloat16, **of), routing, **carried) + 1

    runs = []
    for layer in (in_two, torch.compile(in_two if recipe == "bf16" else in_four, backend="aot_eager")):
        given = [t.clone().requires_grad_() for t in (x.bfloat16(), weights, proj.bfloat16(), down.bfloat16())]
        out = layer(*given)
        out.backward(x.bfloat16())
        runs.append([out.detach(), *(t.grad for t in given)])
    assert_same(*runs)


@pytest.mark.parametrize("dispatcher", [{}, {"dispatcher": "local"}])
def test_a_schema_gives_the_shapes_that_the_layer_saves(dispatcher: dict) -> None:
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16)
    for recipe, (top_k, max_tokens) in itertools.product(RECIPES, ((1, 256), (2, 48))):
        sizes = dispatcher or {"max_tokens": max_tokens, "capacity": Capacity.factor(1.5)}
        moe = MoE(DIM, 96, 4, top_k, recipe=recipe, **sizes)
        ids, weights = (found.detach() for found in moe.router(x))
        names = moe.dispatcher.key, recipe, "auto", 1.0, None, 0.5
        proj, down = moe.experts.gate_up_proj.detach(), moe.experts.down_proj.detach()
        four = [torch.randn(4, *shape, dtype=x.dtype) for shape in ((8, DIM), (192, 8), (8, 96), (DIM, 8))]
        frozen = [freeze(w, "mxfp4").parts for w in (proj, down)]
        cases = [([proj, down], [1, 1, 0, 0], (*needs, False, False)) for needs in ((True, False), (False, True))]
        cases.append(([*frozen[0], *frozen[1], *four], [3, 3, 0, 4], (False, False, False, True)))
        for parameters, counts, needs in cases:
            again = makes_rows_again(moe.dispatcher, moe.recipe, Needs(*needs), top_k)
            saved = forward_op(x, weights, ids, parameters, counts, *names, [*needs], True, again, False)
            with FakeTensorMode() as mode:
                one, two, three, *others = map(mode.from_tensor, (x, weights, ids, *parameters))
                fake = forward_op(one, two, three, others, counts, *names, [*needs], True, again, False)
            assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in saved]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_schema_knows_a_backend_that_folds(recipe: str) -> None:
    moe, x = MoE(DIM, 96, 4, 2, recipe=recipe, dispatcher="local"), torch.randn(TOKENS, DIM, dtype=torch.bfloat16)
    config, needs = LayerConfig(moe.recipe, Hopper(), SwiGLU()), Needs(True, True, False)
    ids, weights = moe.router(x)
    given = x, ids, weights.detach(), moe.experts.gate_up_proj.detach(), moe.experts.down_proj.detach()
    tensors = ForwardInput(x, given[2], ids, *given[3:])
    made = forward_pass(tensors, None, dispatcher=moe.dispatcher, config=config, needs=needs)
    saved = tensors_in(made.saved)
    with FakeTensorMode() as mode:
        x, ids, weights, *experts = map(mode.from_tensor, given)
        plan = fake_plan(ids, weights, moe.dispatcher, config)
        fake = tensors_in(fake_saved(x, plan, tuple(experts), config, True, copied=False))
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in saved]


def test_layers_of_other_widths_share_a_dispatcher() -> None:
    moes = [MoE(DIM, hidden_dim, 4, 2, recipe="mxfp8", max_tokens=64) for hidden_dim in (32, 96)]
    assert moes[0].dispatcher is moes[1].dispatcher
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16)
    runs = []
    for layers in (moes, [torch.compile(moe, fullgraph=True, backend="aot_eager") for moe in moes]):
        leaf = x.clone().requires_grad_()
        outs = [layer(leaf) for layer in layers]
        for out, moe in zip(outs, moes):  # the first backward comes after the second forward
            moe.zero_grad()
            out.backward(x, retain_graph=True)
        runs.append([leaf.grad, *outs, *(p.grad.clone() for moe in moes for p in moe.parameters())])
    assert_same(runs[1], runs[0])


def cache_hits(rank: Rank, sizes: list[int]) -> list[int]:
    """Of layers with so many slots, how often inductor had a graph on disk. They compute what they do uncompiled."""
    torch._inductor.config.compile_threads = 1  # a few small kernels are compiled sooner than a pool has started
    hits = []
    for max_tokens in sizes:
        torch.manual_seed(0)
        moe = MoE(DIM, 32, 4, 1, recipe="mxfp8", max_tokens=max_tokens)
        x = torch.randn(24, DIM, dtype=torch.bfloat16)
        ids, weights = (found.detach() for found in moe.router(x))  # here, so that no kernel is compiled as C++
        before = counters["inductor"]["fxgraph_cache_hit"]
        runs = []
        for layer in (moe, torch.compile(moe, fullgraph=True)):
            moe.zero_grad()
            leaf = x.clone().requires_grad_()
            out = layer(leaf, expert_ids=ids, weights=weights)
            out.backward(x)
            runs.append((out, leaf.grad, *(p.grad.clone() for p in moe.experts.parameters())))
        for eager, compiled in zip(*runs):
            assert (eager - compiled).norm() <= 0.02 * eager.norm()
        hits.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    return hits


@pytest.mark.slow
@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="starts processes of its own")
def test_what_inductor_keeps_on_disk_serves_layers_of_the_same_sizes_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (first,), (same, other) = (
        run_ranks(cache_hits, (sizes,), world_size=1, device="cpu", timeout=250)[0] for sizes in ([64], [64, 32])
    )
    assert (first, other) == (0, 0)
    assert same > 0


@distributed(1, device="cuda")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_step_with_a_compiled_layer_and_its_optimizer_replays_as_a_cuda_graph(ctx, compiler: str) -> None:
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16, device=ctx.device)
    weights = []
    for captured in (False, True):
        block = Block(ctx, recipe="mxfp8", max_tokens=64)
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, capturable=True)
        layer = torch.compile(block, fullgraph=True, backend=compiler)

        def step(layer=layer, optimizer=optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)
            layer(x).float().square().mean().backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        run = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        for _ in range(3):
            run()
        block.moe.check()
        weights.append([p.detach().clone() for p in block.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights))


@pytest.mark.slow
@torch._inductor.config.patch(force_disable_caches=True)
def test_a_compiled_layer_without_tokens_makes_its_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, dispatch = [], LocalDispatcher.dispatch
    spy = lambda *args, **options: seen.append(0) or dispatch(*args, **options)  # noqa: E731
    monkeypatch.setattr(LocalDispatcher, "dispatch", spy)
    moe = MoE(32, 32, 4, 2, recipe="bf16", dispatcher="local")
    with torch.no_grad():
        out = torch.compile(lambda x: x + moe(x))(torch.empty(0, 32, dtype=torch.bfloat16))
    assert out.shape == (0, 32)
    assert len(seen) == 1
