"""Experts spread over ranks, by transformers itself and by our call, against one process; FSDP2 beside it."""

import copy
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from integration.tiny_models import TOKENS, step, tiny, token_ids, whole, worst
from mxep.comms import PeersDisagree
from mxep.ep import MoE
from mxep.gemm import Linear, Recipe, convert
from mxep.integration.metrics import snr
from mxep.integration.transformers import Implementation, check, expert_parallel, load_report, register, route_experts
from mxep.integration.transformers.experts import layers, own_expert_parallel
from ranks import Context, distributed


def of_mean_loss(ctx: Context, model: Any) -> dict[str, torch.Tensor]:
    """This rank's logits and whole gradients of a step on its two sequences, plain ones averaged by hand."""
    found = step(model, token_ids(2 * ctx.world_size).to(ctx.device).chunk(ctx.world_size)[ctx.rank])
    check(model)
    for name, grad in found.items():
        if name != "logits" and not isinstance(grad, DTensor):
            dist.all_reduce(grad, group=ctx.group)
            grad /= ctx.world_size
    return {name: whole(each) for name, each in found.items()}


def of_one_process(ctx: Context, model: Any) -> dict[str, torch.Tensor]:
    """The same of all ranks' sequences."""
    found = step(model.to(ctx.device), token_ids(2 * ctx.world_size).to(ctx.device))
    return found | {"logits": found["logits"].chunk(ctx.world_size)[ctx.rank]}


@distributed(2)
def test_a_loaded_model_spread_over_ranks_equals_one_process(ctx: Context, tmp_path: Path) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    runs = ("qwen3_moe", "bf16"), ("gpt_oss", "bf16"), ("llama4", "bf16"), ("gpt_oss", "mxfp8")
    for kind, recipe in runs:
        model = tiny(kind)
        wanted = of_one_process(ctx, copy.deepcopy(model))
        if kind == "llama4":
            route_experts(model, f"mxep_{recipe}")
        names = expert_parallel(model.to(ctx.device), mesh, f"mxep_{recipe}")
        assert len(names) == 2
        got = of_mean_loss(ctx, model)
        assert all(p.to_local().shape[0] == 2 for name, p in model.named_parameters() if ".experts." in name)
        lowest, name = worst(wanted, got)  # as in one process, and another order of sums over ranks
        assert lowest > (112 if recipe == "bf16" else 10), (kind, name)  # free routing: experts may flip
        report = load_report(model)
        assert list(report) == names
        rows = torch.tensor([each["rows"] - each["padding"] for each in report.values()], device=ctx.device)
        dist.all_reduce(rows, group=ctx.group)
        assert rows.tolist() == [2 * ctx.world_size * TOKENS * model.config.num_experts_per_tok] * 2
    what_cannot_be_spread_says_why_and_changes_nothing(ctx, mesh, tmp_path)


def what_cannot_be_spread_says_why_and_changes_nothing(ctx: Context, mesh: DeviceMesh, tmp_path: Path) -> None:
    model = tiny("qwen3_moe", num_experts=5)
    with pytest.raises(ValueError, match=r"mlp.experts: got 5 experts, want a multiple of the 2 ranks"):
        expert_parallel(model, mesh)
    with pytest.raises(ValueError, match=r"expert_parallel: expected a model with experts .*route_experts"):
        expert_parallel(tiny("llama4"), mesh)
    with pytest.raises(ValueError, match="got 'grouped_mm'"):
        expert_parallel(model, mesh, "grouped_mm")
    with pytest.raises(ValueError, match="1-D mesh"):
        expert_parallel(model, init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "ep")))
    other = DeviceMesh(ctx.device.type, [1 - ctx.rank], mesh_dim_names=("ep",))
    with pytest.raises(ValueError, match=rf"want a mesh with this rank, {ctx.rank}, got ranks \[{1 - ctx.rank}\]"):
        expert_parallel(model, other)
    if own_expert_parallel is not None:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="mxep_bf16")
        with pytest.raises(RuntimeError, match="requires 4 processes, but world_size is 2"):
            type(model).from_pretrained(tmp_path, config=model.config, distributed_config=config)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.config._experts_implementation == "eager"


@distributed(2, device="cpu")
def test_a_fused_optimizer_steps_as_in_one_process_where_weights_are_stored_transposed(ctx: Context) -> None:
    """It goes through weight and gradient in the order of memory, and CPUs check no strides."""
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    wanted, model = tiny("gpt_oss", "mxep_bf16"), tiny("gpt_oss")
    expert_parallel(model, mesh, "mxep_bf16")
    before = {name: whole(p).detach().clone() for name, p in model.named_parameters() if ".experts." in name}
    for each in (wanted, model):  # all ranks have the same tokens
        step(each)
        experts = [p for name, p in each.named_parameters() if name in before]
        torch.optim.AdamW(experts, lr=10.0, eps=1.0, weight_decay=0.0, fused=True).step()
    for name, old in before.items():
        own: Any = model.get_parameter(name)
        assert own.grad.to_local().stride() == own.to_local().stride(), name
        assert snr(wanted.get_parameter(name) - old, whole(own) - old) > 100, name


@distributed(2)
def test_a_batch_that_is_too_large_says_what_to_set_and_the_environment_sets_it(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    ids = token_ids(4).to(ctx.device)
    longest = ids.numel()
    model = tiny("qwen3_moe").to(ctx.device)
    expert_parallel(model, mesh, "mxep_bf16")
    model(input_ids=ids[:2])
    with pytest.raises((ValueError, PeersDisagree), match=f"set max_tokens={longest} or more") as caught:
        _ = model(input_ids=ids if ctx.rank else ids[:2]), check(model)
    assert caught.type is (ValueError if ctx.rank else PeersDisagree)
    dist.barrier(ctx.group)
    os.environ["MXEP_MAX_TOKENS"] = str(longest)
    model = tiny("qwen3_moe").to(ctx.device)
    expert_parallel(model, mesh, "mxep_bf16")
    for batch in (ids[:2], ids):
        model(input_ids=batch)
        check(model)
    dispatcher = next(layers(model))[1].dispatcher
    assert dispatcher.max_tokens == longest
    register(Implementation("mxep_5k", Recipe.bf16(), max_tokens=5000))
    expert_parallel(model := tiny("qwen3_moe").to(ctx.device), mesh, "mxep_5k")
    assert next(layers(model))[1].dispatcher.max_tokens == 5000, "what code says comes first"
    os.environ["MXEP_MAX_TOKENS"] = "8k"
    with pytest.raises(ValueError, match="MXEP_MAX_TOKENS: got '8k', want the most tokens"):
        expert_parallel(tiny("qwen3_moe"), mesh, "mxep_bf16")


@distributed(2)
def test_ranks_generate_texts_of_other_lengths(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    model = tiny("qwen3_moe").to(ctx.device).eval()
    lengths = {"min_new_tokens": 3 + 6 * ctx.rank, "max_new_tokens": 3 + 6 * ctx.rank, "do_sample": False}
    ids = token_ids(2, seed=ctx.rank).to(ctx.device)
    wanted = copy.deepcopy(model).generate(input_ids=ids, **lengths)
    os.environ["MXEP_MAX_TOKENS"] = "1024"  # beams are more sequences than there are texts
    expert_parallel(model, mesh, "mxep_bf16")
    for options in ({}, {"synced_gpus": None}, {"num_beams": 2}):
        got = model.generate(input_ids=ids, **lengths, **options)
        assert got.shape == wanted.shape
        assert "num_beams" in options or torch.equal(got, wanted)
    of_mean_loss(ctx, model)  # nothing is out of step
    copied = copy.deepcopy(model)
    assert copied.generate.args[0].__self__ is copied


@distributed(2, device="cpu")
def test_errors_of_torch_that_people_meet_are_on_the_page(ctx: Context) -> None:
    page = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text().partition("## In any package")[0]
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    model = tiny("qwen3_moe")
    whole_weights = copy.deepcopy(model.state_dict())
    expert_parallel(model, mesh, "mxep_bf16")
    step(model)
    layer = MoE(64, 32, 4, 2, group=ctx.group, dtype=torch.float32)
    mistakes = {
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "foreach": lambda: torch.optim.AdamW(model.parameters(), foreach=True).step(),
        "DistributedDataParallel": lambda: DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), layer)),
        "DTensor as x": lambda: layer(distribute_tensor(torch.ones(8, 64), mesh, [Replicate()])),
        "load_state_dict": lambda: model.load_state_dict(whole_weights),
    }
    for name, mistake in mistakes.items():
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as caught:
            mistake()
        op = re.search(r"aten\.\w+\.\w+ got mixed", str(caught.value))[0]
        assert op in page, (name, op)


@distributed(2)
def test_a_spread_model_is_saved_whole_or_not_at_all(ctx: Context, tmp_path: Path) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    model = tiny("qwen3_moe")
    wanted = copy.deepcopy(model.state_dict())
    expert_parallel(model.to(ctx.device), mesh, "mxep_bf16")
    for given in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(ValueError, match=r"want whole weights .*get_model_state_dict.*on rank 0 save_pretrained"):
            model.save_pretrained(tmp_path / "part", **given)
    assert not (tmp_path / "part").exists()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ctx.rank == 0:
        model.save_pretrained(tmp_path / "whole", state_dict=state)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
        assert all(torch.equal(saved[name], value) for name, value in wanted.items())


@pytest.mark.slow
@distributed(4)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_loaded_model_beside_fsdp2_equals_one_process(ctx: Context, kind: str) -> None:
    model = tiny(kind)
    wanted = of_one_process(ctx, copy.deepcopy(model))
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    expert_parallel(model.to(ctx.device), mesh["ep"], "mxep_bf16")
    every = DeviceMesh.from_group(ctx.group, ctx.device.type)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    lowest, name = worst(wanted, of_mean_loss(ctx, model))
    assert lowest > 112, name


@pytest.mark.slow
@distributed(4)
@pytest.mark.skipif(own_expert_parallel is None, reason="this transformers has no expert parallelism to plug into")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_transformers_own_fsdp_and_ep_equal_one_process(ctx: Context, tmp_path: Path, kind: str) -> None:
    from transformers.distributed import DistributedConfig

    os.environ["LOCAL_RANK"] = str(ctx.rank)
    model = tiny(kind)
    if ctx.rank == 0:
        model.save_pretrained(tmp_path)
    dist.barrier(ctx.group)
    wanted = of_one_process(ctx, model)
    kinds = [(2, "mxep_bf16", None), (4, "mxep_bf16", None), (2, "mxep_mxfp8", None)]
    if kind == "qwen3_moe":
        kinds += [(2, "all_to_all", "mxep_bf16"), (1, "auto", "mxep_bf16")]  # FSDP2 alone is the last
    else:
        del kinds[1]
    for ep_size, name, experts in kinds:
        config = DistributedConfig(fsdp_size=4, ep_size=ep_size, ep_implementation=name)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, distributed_config=config, experts_implementation=experts
        )
        lowest, of = worst(wanted, of_mean_loss(ctx, model))
        assert lowest > ({"qwen3_moe": 10, "gpt_oss": 6}[kind] if name == "mxep_mxfp8" else 112), (ep_size, name, of)
        if (ep_size, name) != (2, "mxep_bf16"):
            continue
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.save_pretrained(tmp_path / "trained")
        dist.barrier(ctx.group)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
        for (of, parameter), other in zip(model.named_parameters(), again.parameters()):
            assert torch.equal(whole(parameter).cpu(), other), of
    config = DistributedConfig(tp_size=4, ep_size=4, ep_implementation="mxep_bf16")
    with pytest.raises(ValueError, match="got tp_size 4, want 1"):
        AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config)


@distributed(2, device="cpu", made_by=("convert", "Linear"))
def test_transformers_own_tensor_parallelism_fails_where_shards_do_not_fit(ctx: Context, made_by: str) -> None:
    sharded = pytest.importorskip("transformers.distributed.tensor_parallel")
    if not hasattr(sharded, "apply_tensor_parallelism"):
        pytest.skip("transformers shards otherwise")
    mesh = DeviceMesh.from_group(ctx.group, "cpu", mesh_dim_names=("tp",))
    x = torch.randn(4, 64)
    for features in (64, 96):
        model = nn.Sequential(nn.Linear(64, features, bias=False))
        wanted = model(x)
        if made_by == "convert":
            convert(model, "mxfp8")
        else:
            model[0] = Linear.from_linear(model[0], "mxfp8")
        plan = {"0.weight": "colwise_gather_output", "0": "colwise_gather_output"}
        name = "0.weight: " if made_by == "convert" else ""
        said = f"^{name}w: N: got 48, want a multiple of 32 .* the 96 features of 2 ranks on each: use fewer ranks, or"
        sharded.apply_tensor_parallelism(model, mesh, plan)
        with pytest.raises(ValueError, match=said) if features == 96 else nullcontext():
            assert snr(wanted, model(x)) > 20  # as each rank draws from one seed, its shard is of one weight
