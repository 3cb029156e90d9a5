"""The cache of quantized weights: one quantization per change, and nothing kept of what is gone."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from gemm.problem import Problem, problem
from mxep.gemm import BACKENDS, QuantizedWeight, Recipe, WeightCache, grouped_mm, quantize_weight, weights
from mxep.gemm.backends.reference import Reference
from mxep.gemm.weights import mark_derived
from mxep.quant import MXTensor
from ranks import distributed

MX = Recipe.mxfp8()
REFERENCE = BACKENDS["reference"]


def step(p: Problem, w: Tensor, cache: WeightCache | None, recipe: Recipe = MX) -> Tensor:
    a = p.a.detach().requires_grad_()
    out = grouped_mm(a, w, p.group_ends, recipe=recipe, weight_cache=cache)
    out.backward(p.dy)
    assert a.grad is not None
    return torch.cat((out.detach()[: p.live], a.grad[: p.live]), 1)


def test_micro_batches_share_one_quantization() -> None:
    p, cache = problem(), WeightCache()
    w = nn.Parameter(p.w.clone())
    results = [step(p, w, cache) for _ in range(3)]
    assert (cache.hits, cache.misses) == (2, 1)
    assert all(torch.equal(result, step(p, w, None)) for result in results)


def test_an_optimizer_step_makes_a_new_quantization() -> None:
    p, cache = problem(), WeightCache()
    w = nn.Parameter(p.w.clone())
    foreach, fused = torch.optim.AdamW([w], foreach=True), torch.optim.AdamW([w], fused=True)
    for optimizer in (torch.optim.SGD([w], 0.1), foreach, fused, torch.optim.AdamW([w])):
        cache.clear()
        step(p, w, cache)
        optimizer.step()
        after = step(p, w, cache)
        assert (cache.hits, cache.misses) == (0, 2)
        assert torch.equal(after, step(p, w, None))


def test_new_memory_under_the_same_parameter_is_noticed() -> None:
    p, cache = problem(), WeightCache()
    w = nn.Parameter(p.w.clone())
    step(p, w, cache)
    w.data = -p.w
    assert torch.equal(step(p, w, cache), step(p, w, None))
    assert cache.misses == 2


def test_views_of_a_parameter_hit_and_follow_its_changes() -> None:
    p, cache = problem(), WeightCache()
    both = nn.Parameter(torch.cat((p.w, -p.w)))
    first, second = (step(p, both[part], cache) for part in (slice(0, 4), slice(4, 8)))
    assert torch.equal(first, -second)
    step(p, both[:4], cache)
    assert (cache.hits, cache.misses) == (1, 2)
    with torch.no_grad():
        both.mul_(2)
    assert torch.equal(step(p, both[:4], cache), step(p, both[:4], None))
    assert cache.misses == 3


def test_each_recipe_has_its_own_entry() -> None:
    p, cache = problem(), WeightCache()
    for name in ("mxfp8", "mxfp8_32x32", "mxfp8_floor", "fp8"):
        assert torch.equal(step(p, p.w, cache, Recipe.named(name)), step(p, p.w, None, Recipe.named(name)))
    assert (cache.hits, cache.misses) == (0, 4)
    step(p, p.w, cache, Recipe.named("mxfp8_wgrad_bf16_e5m2"))
    assert cache.hits == 1, "wgrad and the gradient's format have no part in a weight's codes"


def test_forward_alone_does_not_quantize_columns() -> None:
    p, cache = problem(), WeightCache()
    with torch.no_grad():
        grouped_mm(p.a, p.w, p.group_ends, recipe=MX, weight_cache=cache)
    assert cache.get(p.w, MX, REFERENCE, cols=False).cols is None
    half = cache.nbytes
    assert half == p.w.numel() * 33 // 32
    step(p, p.w, cache)
    assert cache.nbytes == 2 * half
    assert (cache.hits, cache.misses) == (1, 2)
    assert cache.get(p.w, MX, REFERENCE, cols=False).cols is not None


def test_memory_is_visible_and_freed_with_the_weight() -> None:
    cache = WeightCache()
    w = torch.randn(2, 64, 32)
    cache.get(w, MX, REFERENCE)
    assert cache.nbytes == 2 * (w.numel() + w.numel() // 32)
    cache.get(w, Recipe.mxfp8(weight_block="32x32"), REFERENCE)
    assert cache.nbytes == 2 * (w.numel() + w.numel() // 32) + w.numel() + w.numel() // 1024
    del w
    gc.collect()
    assert cache.nbytes == 0


def test_recipes_without_scales_and_inference_tensors_are_not_kept() -> None:
    p, cache = problem(), WeightCache()
    assert quantize_weight(p.w, Recipe.bf16()).rows is p.w
    step(p, p.w, cache, Recipe.bf16())
    with torch.inference_mode():
        w = p.w.clone()
        grouped_mm(p.a, w, p.group_ends, recipe=MX, weight_cache=cache)
        w.zero_()
        assert not grouped_mm(p.a, w, p.group_ends, recipe=MX, weight_cache=cache)[: p.live].any()
    assert (cache.hits, cache.misses, cache.nbytes) == (0, 0, 0)


def test_copies_and_pickles_are_empty() -> None:
    p, cache = problem(), WeightCache()
    step(p, p.w, cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (other.hits, other.misses, other.nbytes) == (0, 0, 0)
    cache.clear()
    assert (cache.hits, cache.misses, cache.nbytes) == (0, 0, 0)


def test_tiles_serve_both_products_with_the_same_codes() -> None:
    weight = quantize_weight(problem().w, Recipe.mxfp8(weight_block="32x32"))
    assert weight.rows is weight.cols
    assert isinstance(weight.rows, MXTensor)
    assert weight.rows.axis == (-2, -1)
    assert weight.nbytes == weight.rows.qdata.nbytes + weight.rows.scale.nbytes


def test_data_put_in_the_place_of_old_data_is_seen() -> None:
    w = torch.nn.Parameter(torch.ones(2, 32, 32, dtype=torch.bfloat16))
    cache = WeightCache()
    for doubled in (1.0, 2.0, 4.0, 8.0):
        assert cache.get(w, Recipe.mxfp8(), REFERENCE).rows.dequantize().eq(doubled).all()
        w.data = w.data * 2


class Hidden(torch.optim.Optimizer):
    """Writes so that no version counter moves, as kernels behind raw pointers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)


def test_an_optimizer_that_writes_behind_the_version_is_seen() -> None:
    p, cache = problem(), WeightCache()
    w = nn.Parameter(p.w.clone())
    step(p, w, cache)
    version = w._version
    Hidden([w], {}).step()
    assert w._version == version
    assert torch.equal(step(p, w, cache), step(p, w, None))
    assert (cache.hits, cache.misses) == (0, 2)


def test_only_caches_that_live_listen_to_optimizers() -> None:
    before = len(hooks)
    caches = [WeightCache(), copy.deepcopy(WeightCache())]
    gc.collect()
    assert len(hooks) == before + 2
    del caches
    gc.collect()
    assert len(hooks) == before


@distributed(1, device="cpu")
def test_the_local_part_of_a_dtensor_is_seen_to_change_by_optimizers(ctx: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    p, cache = problem(), WeightCache()
    w = nn.Parameter(distribute_tensor(p.w.clone(), mesh, [Shard(0)]))
    for options in ({"foreach": True}, {"fused": True}, {}):
        cache.clear()
        for _ in range(2):
            step(p, w.to_local(), cache)
        assert cache.hits == 1
        torch.optim.AdamW([w], lr=0.1, **options).step()  # neither w nor its local tensor need count a version
        assert torch.equal(step(p, w.to_local(), cache), step(p, w.to_local(), None))


def test_a_derived_weight_is_kept_by_its_source() -> None:
    p, cache = problem(), WeightCache()
    w = nn.Parameter(p.w.float())

    def get(w: Tensor, cast: Tensor, path: str) -> Tensor:
        mark_derived(cast, w, path)
        return cache.get(cast, MX, REFERENCE).rows.dequantize()

    first = get(w, w.bfloat16(), "bf16")
    assert get(w, w.bfloat16(), "bf16").equal(first)
    assert get(w, w.bfloat16()[:, :32], "half").shape != first.shape
    assert (cache.hits, cache.misses) == (1, 2)
    written = w.bfloat16()
    mark_derived(written, w, "bf16")
    assert cache.get(written.mul_(2), MX, REFERENCE) is None
    assert get(w, w.bfloat16(), "bf16").equal(first)
    assert (cache.hits, cache.misses) == (2, 2), "what was written to is neither kept nor found"
    with torch.no_grad():
        w.mul_(2)
    assert get(w, w.bfloat16(), "bf16").equal(2 * first)
    del w, written
    gc.collect()
    assert cache.nbytes == 0


def test_a_captured_graph_quantizes_and_leaves_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, w = WeightCache(), torch.randn(2, 64, 32)
    for warm in (False, True):
        monkeypatch.setattr(weights, "_capturing", lambda w: True)
        assert cache.get(w, MX, REFERENCE) is None
        assert (cache.hits, cache.misses, cache.nbytes) == (0, int(warm), 8448 * warm)
        monkeypatch.setattr(weights, "_capturing", lambda w: False)
        assert cache.get(w, MX, REFERENCE) is not None
    assert (cache.hits, cache.misses) == (1, 1)


class Doubling(Reference):
    """Another backend that kept the name of the one it derives from."""

    def quantize_weight(self, w: Tensor, recipe: Recipe, *, cols: bool) -> QuantizedWeight:
        return super().quantize_weight(2 * w, recipe, cols=cols)


def test_backends_of_one_name_have_entries_of_their_own() -> None:
    cache, w = WeightCache(), torch.ones(2, 64, 32)
    for backend, value in ((REFERENCE, 1), (Doubling(), 2), (REFERENCE, 1)):
        assert cache.get(w, MX, backend).rows.dequantize().eq(value).all()
    assert (cache.hits, cache.misses) == (1, 2)


def test_the_cache_shows_memory_and_hit_rate() -> None:
    cache, w = WeightCache(), torch.randn(2, 64, 32)
    assert cache.hit_rate == 0
    for _ in range(4):
        cache.get(w, MX, REFERENCE)
    assert cache.hit_rate == 0.75
    assert repr(cache) == "WeightCache(1 weights, 8448 bytes, 3 hits, 1 misses (75%))"
