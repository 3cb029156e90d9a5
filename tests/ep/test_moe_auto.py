"""Recipe "auto" of a layer: picked once, by max_tokens or the first call that trains, alike on all ranks."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from mxep.ep import ExpertParallel, MoE
from mxep.ep.moe import _log, rows_per_expert
from mxep.gemm import Recipe
from mxep.gemm.recipe import FIXED, LEAST
from ranks import Context, distributed

D, F, E, K = 64, 96, 4, 2
BF16, MXFP8 = Recipe.bf16(), Recipe.mxfp8()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """MXFP8 pays from 32 rows an expert on: of 64 tokens of one process, 32 of each of two."""
    patch.setitem(LEAST, "experts", 0.999 / (1 / 32 + 1 / D + 1 / F))
    patch.setitem(FIXED, "experts", 0.0)


def layer(recipe: str = "auto", **options) -> MoE:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return MoE(D, F, E, K, recipe=recipe, **{"dispatcher": "local", **options})


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_the_rows_of_an_expert_are_those_of_the_docstring() -> None:
    assert rows_per_expert(4096, 8, 2, 128) == 512


@pytest.mark.parametrize(("count", "picked"), [(63, BF16), (64, MXFP8)])
@pytest.mark.parametrize("shared", [0, 1])
def test_the_first_call_that_trains_picks_for_all(count: int, picked: Recipe, shared: int) -> None:
    moe, wanted = (layer(name, num_shared_experts=shared) for name in ("auto", picked.name))
    assert "recipe=auto" in repr(moe)
    out = moe(tokens(count))
    assert torch.equal(out, wanted(tokens(count)))
    assert moe.recipe == picked
    assert f"recipe={picked.name}" in repr(moe)
    for other in (8, 500):  # whatever comes later
        assert torch.equal(moe(tokens(other)), wanted(tokens(other)))
        assert moe.recipe == picked


@pytest.mark.parametrize(("max_tokens", "picked"), [(63, BF16), (64, MXFP8)])
def test_max_tokens_picks_before_any_call(max_tokens: int, picked: Recipe) -> None:
    assert layer(max_tokens=max_tokens).recipe == picked
    assert layer(max_tokens=max_tokens, dispatcher="symmetric").recipe == picked


def test_evaluation_before_training_computes_in_bf16_and_picks_nothing() -> None:
    moe = layer().eval()
    with torch.no_grad():
        assert torch.equal(moe(tokens(300)), layer("bf16")(tokens(300)))
        assert moe.recipe == "auto"
        moe.train()(tokens(0))
        assert moe.recipe == "auto", "no tokens"
        moe(tokens(300))  # as the forward of a reentrant checkpoint
    assert moe.recipe == MXFP8


@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_in_eval_mode_picks_where_gradients_are_wanted(grad: bool) -> None:
    """As a model that is fine-tuned in eval mode, without dropout."""
    moe = layer().eval()
    with torch.set_grad_enabled(grad):
        out = moe(tokens(300))
    assert moe.recipe == (MXFP8 if grad else "auto")
    assert torch.equal(out, layer("mxfp8" if grad else "bf16")(tokens(300)))


def test_sizes_that_mxfp8_does_not_take_get_bf16() -> None:
    moe = MoE(48, 96, E, K, recipe="auto", dispatcher="local", max_tokens=10**6)
    assert moe.recipe == BF16


def test_what_was_picked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _log.cache_clear()
    with caplog.at_level(logging.INFO, "mxep.ep"):
        for _ in range(2):
            layer(max_tokens=64)
    said = "recipe auto: mxfp8, as an expert gets 32 rows: with D 64 and F 96 MXFP8 pays from 32 on"
    assert [record.message for record in caplog.records] == [said]


def test_it_compiles_in_one_graph_once_it_is_picked() -> None:
    torch._dynamo.reset()
    known = layer(max_tokens=64, backend="reference")
    compiled = torch.compile(known, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tokens(64)), known(tokens(64)))
    late = layer(backend="reference")
    torch.compile(late, backend="aot_eager")(tokens(64))  # breaks, and picks
    assert late.recipe == MXFP8


@distributed(2)
def test_ranks_pick_alike_by_the_fullest_of_them(ctx: Context) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        ranks_pick_alike(ctx)


def ranks_pick_alike(ctx: Context) -> None:
    for fullest, picked in ((31, BF16), (32, MXFP8)):
        for dispatcher in ("symmetric", "all_to_all"):
            moe = layer(dispatcher=dispatcher, group=ctx.group, device=ctx.device)
            moe(tokens(fullest if ctx.rank else 5).to(ctx.device)).sum().backward()
            assert moe.recipe == picked, (fullest, dispatcher)
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    for how in ({}, {"max_tokens": 32}):
        moe = layer(device=ctx.device, max_tokens=None if how else 32)
        assert moe.recipe == ("auto" if how else BF16), "16 rows of one process"
        assert parallelize_module(moe, mesh, ExpertParallel(**how)).recipe == MXFP8, "32 of two"
    moe = layer(dispatcher="all_to_all", group=ctx.group, device=ctx.device, max_tokens=5 + 59 * ctx.rank)
    with pytest.raises(ValueError, match=r"payload: got rows of \[128, 66\] bytes, by rank, wanted the same"):
        moe(tokens(5).to(ctx.device))
    alone = dist.new_group([ctx.rank], use_local_synchronization=True)
    for how in ({"dispatcher": "local"}, {"group": alone}):
        wanted = "got 2 ranks, 1 of which share experts, want the same pick on all of them: set max_tokens=9 or more"
        with pytest.raises(ValueError, match=wanted):
            layer(device=ctx.device, **how)(tokens(9).to(ctx.device))
        assert layer(device=ctx.device, max_tokens=64, **how).recipe == MXFP8
