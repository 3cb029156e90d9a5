"""quantize_weights_once: one quantization of a weight while it is open, never of old values, and nothing left after."""

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.utils.checkpoint import checkpoint

from gemm.problem import Problem, problem
from host_sync import no_host_sync
from mxep.gemm import BACKENDS, Recipe, grouped_mm, quantize_weights_once
from mxep.gemm.backends.reference import Reference
from mxep.gemm.quantize_once import rowwise_and_saved
from mxep.quant import MXTensor
from ranks import distributed

MX = Recipe.mxfp8()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")


def forward(p: Problem, w: Tensor, recipe: Recipe = MX, **options: Any) -> tuple[Tensor, Tensor]:
    a = p.a.detach().requires_grad_()
    return a, grouped_mm(a, w, p.offs, recipe=recipe, **options)


def step(p: Problem, w: Tensor, recipe: Recipe = MX, **options: Any) -> Tensor:
    """The output and the gradient of a of one forward and backward."""
    a, out = forward(p, w, recipe, **options)
    out.backward(p.dy)
    return both(p, a, out)


def both(p: Problem, a: Tensor, out: Tensor) -> Tensor:
    assert a.grad is not None
    valid = len(a) if a.is_cuda else p.valid  # no host sync
    return torch.cat((out.detach()[:valid], a.grad[:valid]), 1)


def on(device: Any = "cuda", **options: Any) -> Problem:
    p = problem(**({"unused": 0} | options))
    return Problem(*(x.to(device) for x in (p.a, p.w, p.dy, p.offs)))


def weight(p: Problem) -> nn.Parameter:
    return nn.Parameter(p.w.clone())


def test_nothing_of_a_rehearsals_meta_weights_is_held() -> None:
    w = problem().w.to("meta")
    with quantize_weights_once() as once:
        rowwise, saved = rowwise_and_saved(w, MX, BACKENDS["reference"], dgrad=True)
        assert saved.colwise(MX, BACKENDS["reference"]).is_meta
        assert rowwise.is_meta
        assert (once.quantizations, once.nbytes) == (0, 0)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32", "fp8_e5m2", "mxfp8_wgrad_bf16", "bf16"])
def test_micro_batches_share_one_quantization_and_get_the_same_bits(recipe: str) -> None:
    p, r = problem(), Recipe.named(recipe)
    w, alone = weight(p), weight(p)
    wanted = [step(p, alone, r) for _ in range(3)]
    with quantize_weights_once() as once:
        results = [step(p, w, r) for _ in range(3)]
        assert once.quantizations == {"bf16": 0, "mxfp8_32x32": 1}.get(recipe, 2)
    assert all(map(torch.equal, results, wanted))
    assert w.grad is not None
    assert alone.grad is not None
    assert torch.equal(w.grad, alone.grad)


def test_two_forwards_then_two_backwards_share_it() -> None:
    p = problem()
    w = weight(p)
    wanted = step(p, w)
    with quantize_weights_once() as once:
        micro_batches = [forward(p, w) for _ in range(2)]
        for a, out in micro_batches:
            out.backward(p.dy)
            assert torch.equal(both(p, a, out), wanted)
        assert once.quantizations == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_within_backward_shares_it(reentrant: bool) -> None:
    p = problem()
    w = weight(p)
    wanted = step(p, w)
    with quantize_weights_once() as once:
        for _ in range(2):
            a = p.a.detach().requires_grad_()
            product = functools.partial(grouped_mm, offs=p.offs, recipe=MX)
            out = checkpoint(lambda a: product(a, w), a, use_reentrant=reentrant)  # noqa: B023
            out.backward(p.dy)
            assert torch.equal(both(p, a, out), wanted)
        assert once.quantizations == 2


def test_a_backward_after_closing_quantizes_for_itself() -> None:
    p = problem()
    w = weight(p)
    wanted = step(p, w)
    with quantize_weights_once() as once:
        a, out = forward(p, w)
    out.backward(p.dy)
    assert torch.equal(both(p, a, out), wanted)
    assert (once.quantizations, once.nbytes) == (1, 0)


def test_each_step_quantizes_anew() -> None:
    p = problem()
    w = weight(p)
    for optimizer in (torch.optim.SGD([w], 0.1), torch.optim.AdamW([w], fused=True)):
        with quantize_weights_once() as once:
            before = step(p, w)
            assert once.quantizations == 2
        optimizer.step()
        with quantize_weights_once():
            after = step(p, w)
        assert not torch.equal(before, after)
        assert torch.equal(after, step(p, w))


class Hidden(torch.optim.Optimizer):
    """Writes so that no version counter moves, as kernels behind raw pointers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)


def test_an_optimizer_that_steps_within_it_raises_before_it_writes() -> None:
    p = problem()
    w = weight(p)
    for optimizer in (torch.optim.SGD([w], 0.1), Hidden([w], {})):
        message = r"stepped within quantize_weights_once.*close it before"
        step(p, w)
        with pytest.raises(RuntimeError, match=message), quantize_weights_once():
            optimizer.step()
        assert torch.equal(w, p.w)
        optimizer.step()  # the exception closed it
        with torch.no_grad():
            w.copy_(p.w)


def test_a_weight_written_to_within_it_raises_at_its_next_use() -> None:
    p = problem()
    w = weight(p)
    with quantize_weights_once():
        a, out = forward(p, w)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match=r"weight \(4, 96, 128\) was written to.*close it before"):
            forward(p, w)
    assert torch.equal(step(p, w), step(p, nn.Parameter(2 * p.w)))
    assert out.requires_grad
    assert a.grad is None


def test_other_memory_under_the_same_parameter_is_another_weight() -> None:
    p = problem()
    w = weight(p)
    module = nn.ParameterList([w])
    with quantize_weights_once() as once:
        for value in (p.w, -p.w, 2 * p.w):
            w.data = value
            assert torch.equal(step(p, w), step(p, value))
        module.float()
        assert torch.equal(step(p, w), step(p, w.detach().clone()))
        held = once.nbytes
        gc.collect()
        step(p, -p.w)
        assert once.nbytes <= held + 2 * w.numel() * 33 // 32, "what lost its memory goes"


def test_parameters_may_be_swapped_within_it() -> None:
    p = problem()
    module = nn.ParameterList([weight(p)])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with quantize_weights_once():
            step(p, module[0])
            module.float()
            assert torch.equal(step(p, module[0]), step(p, p.w.float()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_views_share_and_different_views_do_not() -> None:
    p = problem()
    pair = nn.Parameter(torch.cat((p.w, -p.w)))
    with quantize_weights_once() as once:
        first, second = (step(p, pair[part]) for part in (slice(0, 4), slice(4, 8)))
        assert torch.equal(first, -second)
        assert once.quantizations == 4
        for alias in (pair[:4], pair.detach()[:4], pair.view(2, *p.w.shape)[0]):
            assert torch.equal(step(p, alias), first)
        assert once.quantizations == 4


def test_each_recipe_and_backend_has_its_own() -> None:
    p = problem()
    with quantize_weights_once() as once:
        for name in ("mxfp8", "mxfp8_32x32", "mxfp8_floor", "fp8"):
            alone = step(p, p.w.clone(), Recipe.named(name))
            assert torch.equal(step(p, p.w, Recipe.named(name)), alone)
        made = once.quantizations
        step(p, p.w, Recipe.named("mxfp8_e5m2_wgrad_bf16"))
        assert once.quantizations == made, "wgrad and the gradient's format have no part in a weight's qdata"
        assert torch.equal(step(p, p.w, backend=Doubling()), step(p, 2 * p.w))


class Doubling(Reference):
    """Another backend that kept the name of the one it derives from."""

    def quantize_weight_rowwise(
        self, w: Tensor, recipe: Recipe, *, with_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return super().quantize_weight_rowwise(2 * w, recipe, with_amax=with_amax)

    def quantize_weight_colwise(self, w: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Tensor:
        return super().quantize_weight_colwise(2 * w, recipe, amax)


def test_memory_is_visible_and_freed_with_the_weight_and_at_the_end() -> None:
    p = problem()
    way = p.w.numel() * 33 // 32
    with quantize_weights_once() as once:
        with torch.no_grad():
            grouped_mm(p.a, p.w, p.offs, recipe=MX)
        assert once.nbytes == way, "forward alone wants no cols"
        step(p, p.w)
        assert once.nbytes == 2 * way
        for _ in range(3):
            step(p, p.w.float().bfloat16())  # as a cast in a model's forward
        gc.collect()
        step(p, p.w.float().bfloat16())
        assert once.nbytes <= 6 * way
    assert once.nbytes == 0


def test_what_inference_quantized_serves_training() -> None:
    p = problem()
    for recipe in (MX, Recipe.named("mxfp8_32x32"), Recipe.fp8()):
        w = weight(p)
        wanted = step(p, w, recipe)
        with quantize_weights_once() as once:
            with torch.inference_mode():
                grouped_mm(p.a, w, p.offs, recipe=recipe)
                own = p.w.clone()
                grouped_mm(p.a, own, p.offs, recipe=recipe)
            made = once.quantizations
            assert torch.equal(step(p, w, recipe), wanted)
            assert once.quantizations - made == (0 if recipe.weight_block == "32x32" else 1)


def test_an_inner_one_joins_and_the_outermost_forgets() -> None:
    p, listening = problem(), len(hooks)
    with quantize_weights_once() as outer:
        with quantize_weights_once() as inner:
            assert inner is outer
            assert len(hooks) == listening + 1
            step(p, p.w)
        step(p, p.w)
        assert outer.quantizations == 2
        with pytest.raises(RuntimeError, match="close it before"):
            torch.optim.SGD([weight(p)], 0.1).step()
    assert len(hooks) == listening
    torch.optim.SGD([weight(p)], 0.1).step()
    with quantize_weights_once() as other:
        step(p, p.w)
        assert other.quantizations == 2


def test_it_is_open_on_all_threads() -> None:
    p = problem()
    results: list[Tensor] = []
    with quantize_weights_once() as once:
        threads = [threading.Thread(target=lambda: results.append(step(p, p.w))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert once.quantizations == 2
    assert len(results) == 4
    assert all(torch.equal(result, step(p, p.w)) for result in results)


@distributed(1, device="cpu")
def test_local_parts_of_dtensors_share_and_may_move(ctx: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    p = problem()
    module = nn.ParameterList([nn.Parameter(distribute_tensor(p.w.clone(), mesh, [Shard(0)]))])
    for options in ({"foreach": True}, {"fused": True}):
        with quantize_weights_once() as once:
            for _ in range(2):
                result = step(p, module[0].to_local())
            assert once.quantizations == 2
        assert torch.equal(result, step(p, module[0].to_local()))
        torch.optim.AdamW(module.parameters(), lr=0.1, **options).step()
    with quantize_weights_once():
        step(p, module[0].to_local())
        module.float()
        step(p, module[0].to_local())


@distributed(2, reshard=[True, False])
def test_what_fsdp2_gathers_again_is_quantized_once_a_step(ctx: Any, reshard: bool) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    p = on(ctx.device)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(p.w.clone())

        def forward(self, a: Tensor) -> Tensor:
            return grouped_mm(a, self.w, p.offs, recipe=MX)

    model, wanted = Layer(), Layer()
    fully_shard(model, mesh=DeviceMesh.from_group(ctx.group, ctx.device.type), reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, wanted)]
    for _ in range(3):
        with quantize_weights_once() as once:
            for _ in range(3):
                outs = [m(p.a) for m in (model, wanted)]
                assert torch.equal(outs[0][: p.valid], outs[1][: p.valid])
                for out in outs:
                    out.backward(p.dy)
            assert once.quantizations == 2, "rows alone: a wants no gradient"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_tiles_serve_both_products_with_the_same_codes() -> None:
    recipe, backend = Recipe.mxfp8(weight_block="32x32"), BACKENDS["reference"]
    rowwise, saved = rowwise_and_saved(problem().w, recipe, backend, dgrad=True)
    assert saved.colwise(recipe, backend) is rowwise
    assert isinstance(rowwise, MXTensor)
    assert rowwise.axis == (-2, -1)


def test_a_recipe_without_scales_makes_nothing_of_a_weight() -> None:
    w = problem().w
    assert BACKENDS["reference"].quantize_weight_rowwise(w, Recipe.bf16(), with_amax=True) == (w, None)
    assert BACKENDS["reference"].quantize_weight_colwise(w, Recipe.bf16()) is w


# ── on a GPU: streams and graphs ─────────────────────────────────────────────────────────────────────────────────────


def captured(work: Callable[[], Any], stream: torch.cuda.Stream, **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, **options):
        result = work()
    return graph, result


@needs_gpu
def test_a_graph_of_micro_batches_and_the_optimizer_follows_the_weights() -> None:
    p = on()
    w, alone = weight(p), weight(p)
    optimizer, other = (torch.optim.SGD([each], lr=0.5) for each in (w, alone))
    stream, made = torch.cuda.Stream(), []

    def work() -> Tensor:
        w.grad = None
        with quantize_weights_once() as once:
            step(p, w)
            out = step(p, w)
            made.append(once.quantizations)
        optimizer.step()
        return out

    start = w.detach().clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles kernels
    torch.cuda.synchronize()
    graph, out = captured(work, stream)
    assert made == [2, 2]
    with torch.no_grad():
        w.copy_(start)
    for _ in range(3):
        graph.replay()
        alone.grad = None
        step(p, alone)
        assert torch.equal(out, step(p, alone))
        other.step()
        assert torch.equal(w, alone)


@needs_gpu
def test_graphs_of_first_and_further_micro_batches_captured_under_one() -> None:
    p = on()
    w = weight(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(p, w)
    torch.cuda.synchronize()
    with quantize_weights_once() as once:
        with torch.cuda.stream(stream):
            step(p, w)
        assert once.quantizations == 2
        first, out = captured(lambda: step(p, w), stream)
        assert once.quantizations == 4, "what was made eagerly is no graph's"
        further, again = captured(lambda: step(p, w), stream, pool=first.pool())
        assert once.quantizations == 4
    for factor in (1.0, -2.0):
        with torch.no_grad():
            w.copy_(factor * p.w)
        wanted = step(p, w)
        for graph, result in ((first, out), (further, again), (further, again)):
            result.zero_()
            graph.replay()
            assert torch.equal(result, wanted)


@needs_gpu
def test_what_one_stream_quantized_another_waits_for() -> None:
    p = on(sizes=(2048, 2048), n=2048, k=2048)
    w = weight(p)
    wanted = step(p, w)
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (slow, fast):
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with quantize_weights_once() as once:
            with torch.cuda.stream(slow):
                torch.cuda._sleep(100_000_000)
                step(p, w)
            with torch.cuda.stream(fast):
                result = step(p, w)
            assert once.quantizations == 2
        torch.randn(4 * w.numel(), device="cuda")  # takes the memory of what was held
        torch.cuda.synchronize()
        assert torch.equal(result, wanted)


@needs_gpu
def test_nothing_waits_for_the_host_within_it() -> None:
    p = on()
    w = weight(p)
    step(p, w)
    torch.cuda.synchronize()
    with no_host_sync(), quantize_weights_once():
        for _ in range(2):
            step(p, w)


@needs_gpu
def test_backends_on_the_gpu_share_it_folded_or_not() -> None:
    p = on()
    for name, backend in BACKENDS.items():
        if name == "reference" or backend.unsupported_reason(p.a.device) is not None:
            continue
        w = weight(p)
        wanted = step(p, w, backend=name)
        with quantize_weights_once() as once:
            assert all(torch.equal(step(p, w, backend=name), wanted) for _ in range(2))
            assert once.quantizations == 2


class Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def test_a_weight_whose_adapter_comes_and_goes_is_as_it_was() -> None:
    """As PEFT's do in each forward, on experts; a reference pass switches them off (DPO)."""
    p = problem()
    layer = nn.Module()
    layer.w = nn.Parameter(p.w.clone(), requires_grad=False)
    for recipe in (MX, Recipe.fp8(), Recipe.named("mxfp8_32x32")):
        wanted = step(p, layer.w, recipe)
        with quantize_weights_once() as once:
            for _ in range(2):
                assert torch.equal(step(p, layer.w, recipe), wanted)
                version = layer.w._version
                torch.nn.utils.parametrize.register_parametrization(layer, "w", Scaled())
                assert not torch.equal(step(p, layer.w, recipe), wanted)
                torch.nn.utils.parametrize.remove_parametrizations(layer, "w", leave_parametrized=False)
                assert layer.w._version != version, "else this tests nothing"
            held = once.nbytes
            assert torch.equal(step(p, layer.w, recipe), wanted)
            assert once.nbytes == held
            layer.w[0, 0, 0] += 100.0
            with pytest.raises(RuntimeError, match="was written to within"):
                forward(p, layer.w, recipe)
        layer.w.copy_(p.w)
