"""The layer among the rest of torch.distributed: one gradient convention, DDP, FSDP2, clipping, checkpoints."""

import contextlib
import copy
import io
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ep.problem import share, whole
from mxep.ep import ExpertParallel, MoE, Router, clip_grad_norm_, data_parallel, parameter_groups
from ranks import Context, distributed

DIM, EXPERTS, TOKENS = 64, 8, 16


class Block(nn.Module):
    def __init__(self, ctx: Context, recipe: str = "mxfp8", dtype: torch.dtype = torch.bfloat16, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(DIM, DIM, dtype=dtype, device=ctx.device)
        router = Router(DIM, EXPERTS, 2, balance=True, device=ctx.device)
        options = {"num_shared_experts": 1, "max_tokens": TOKENS, "router": router} | options
        self.moe = MoE(DIM, 32, EXPERTS, 2, recipe=recipe, dtype=dtype, device=ctx.device, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.before(x))


def make(ctx: Context, mesh: DeviceMesh, recipe: str) -> Block:
    return Block(ctx, recipe, group=mesh)


def tokens(ctx: Context, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + ctx.rank)
    return torch.randn(TOKENS, DIM, generator=generator).to(ctx.device, torch.bfloat16)


def adamw(block: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameter_groups(block), lr=1e-2, foreach=True)


def step(ctx: Context, block: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """Forward, backward, optimizer; gradients of what every rank holds are averaged by hand. Returns the output."""
    out = block(tokens(ctx, number))
    out.float().square().mean().backward()
    for weight in block.parameters():
        if not isinstance(weight, DTensor):
            dist.all_reduce(weight.grad, group=ctx.group)
            weight.grad /= ctx.world_size
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


@distributed(4)
def test_a_checkpoint_of_one_degree_goes_on_at_another(ctx: Context) -> None:
    folder = Path("/dev/shm" if Path("/dev/shm").exists() else "/tmp") / f"mxep-test-{dist.get_rank(ctx.group)}"
    folders = [str(folder)]
    dist.broadcast_object_list(folders, src=dist.get_global_rank(ctx.group, 0), group=ctx.group)
    folder = Path(folders[0])
    ranks = dist.get_process_group_ranks(ctx.group)
    four = DeviceMesh.from_group(ctx.group, ctx.device.type)
    two = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep")) if len(ranks) == 4 else None
    assert two is not None
    first = make(ctx, four, "mxfp8")
    optimizer = adamw(first)
    for number in range(2):
        step(ctx, first, optimizer, number)
    try:
        model_state, optimizer_state = get_state_dict(first, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=ctx.group)

        second = make(ctx, two["ep"], "mxfp8")
        assert second.moe.experts.gate_up_proj.to_local().shape[0] == EXPERTS // 2
        other = adamw(second)
        model_state, optimizer_state = get_state_dict(second, other)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder, process_group=ctx.group)
        set_state_dict(second, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    finally:
        dist.barrier(ctx.group)
        if ctx.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    for (name, a), b in zip(first.named_parameters(), second.parameters()):
        assert torch.equal(whole(a), whole(b)), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[a][kind]), whole(other.state[b][kind])), f"{kind} of {name}"
    x = tokens(ctx, 5)
    with torch.no_grad():
        assert torch.equal(first(x), second(x))


# ── one convention ───────────────────────────────────────────────────────────────────────────────────────────────────


def by_hand(ctx: Context, **options) -> tuple[nn.Module, nn.Module]:
    block = Block(ctx, "bf16", torch.float32, group=ctx.group, **options)
    return block, block


def by_ddp(ctx: Context, **options) -> tuple[nn.Module, nn.Module]:
    block = Block(ctx, "bf16", torch.float32, group=ctx.group, **options)
    return block, data_parallel(block, process_group=ctx.group)


def by_fsdp(ctx: Context, **options) -> tuple[nn.Module, nn.Module]:
    """Experts over ep, then over dp; the rest over all ranks."""
    mesh = init_device_mesh(ctx.device.type, (2, ctx.world_size // 2), mesh_dim_names=("dp", "ep"))
    block = Block(ctx, "bf16", torch.float32, group=mesh["ep"], **options)
    fully_shard(block.moe.experts, mesh=mesh["dp"])
    return block, fully_shard(block, mesh=DeviceMesh.from_group(ctx.group, ctx.device.type))


def by_fsdp_beside(ctx: Context, **options) -> tuple[nn.Module, nn.Module]:
    """Experts over all ranks, and so none of FSDP's business."""
    block = Block(ctx, "bf16", torch.float32, group=ctx.group, **options)
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    return block, fully_shard(block, mesh=mesh, ignored_params=set(block.moe.experts.parameters()))


@distributed(4, slow=[4], how=["by_hand", "by_ddp", "by_fsdp", "by_fsdp_beside"])
def test_sgd_with_clipping_on_all_ranks_is_that_of_one_process_on_the_whole_batch(ctx: Context, how) -> None:
    def train(block: nn.Module, model: nn.Module, clip, share: slice) -> list[float]:
        optimizer = torch.optim.SGD(parameter_groups(block), lr=0.5)
        norms = []
        for number in range(3):
            x = torch.randn(ctx.world_size, TOKENS, DIM, generator=torch.Generator().manual_seed(number))
            x = x[share].flatten(0, 1).to(ctx.device)
            for half in x.chunk(2):  # two micro-batches
                (model(half).sin() - half).square().mean().div(2).backward()
            if how == "by_hand" and model is not alone:
                for weight in block.parameters():
                    if not isinstance(weight, DTensor):
                        dist.all_reduce(weight.grad, group=ctx.group)
                        weight.grad /= ctx.world_size
            norms.append(float(clip(block.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    exact = {"backend": "reference"}  # the one that multiplies in fp32 on GPUs, too
    alone = Block(ctx, "bf16", torch.float32, dispatcher="local", max_tokens=None, **exact)
    start = copy.deepcopy(alone)
    wanted = train(alone, alone, torch.nn.utils.clip_grad_norm_, slice(None))
    assert min(wanted) > 0.05  # it does clip
    for dispatcher in ("symmetric", "all_to_all")[: 1 + (how == "by_hand")]:
        block, model = globals()[how](ctx, dispatcher=dispatcher, **exact)
        got = train(block, model, clip_grad_norm_, slice(ctx.rank, ctx.rank + 1))
        assert got == pytest.approx(wanted, rel=1e-5)
        for (name, a), b, before in zip(alone.named_parameters(), block.parameters(), start.parameters(), strict=True):
            moved = (a - before).norm()
            assert moved > 0, name
            assert (whole(b) - a).norm() < 1e-4 * moved, f"{dispatcher}: {name}"


@distributed(2)
def test_a_sum_of_losses_is_there_for_those_who_want_it(ctx: Context) -> None:
    grads = {}
    for reduction in ("mean", "sum"):
        block = Block(ctx, "bf16", torch.float32, group=ctx.group, gradient_reduction=reduction)
        block(tokens(ctx, 0).float()).square().mean().backward()
        grads[reduction] = [whole(p.grad) for p in block.parameters()]
    for (name, _), mean, total in zip(block.named_parameters(), *grads.values(), strict=True):
        torch.testing.assert_close(total, mean * (2 if "moe.experts" in name else 1), msg=name)


# ── clipping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_scaled_by_the_factor_unrounded(dtype: torch.dtype) -> None:
    weights = [torch.zeros(n, 64, dtype=dtype) for n in (3, 64)]
    grads = [torch.randn_like(weight) for weight in weights]
    for weight, grad in zip(weights, grads):
        weight.grad = grad.clone()
    norm = clip_grad_norm_(weights, 0.7)
    for weight, grad in zip(weights, grads):
        assert torch.equal(weight.grad, (grad.float() * (0.7 / (norm.double() + 1e-6)).float()).to(dtype))


@distributed(4)
def test_a_norm_counts_each_number_once_however_it_is_sharded(ctx: Context) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    world = DeviceMesh.from_group(ctx.group, ctx.device.type)

    def gradients(block: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(3)
        for weight in block.parameters():
            grad = torch.randn(weight.shape, generator=generator).to(ctx.device)
            if isinstance(weight, DTensor):
                grad = distribute_tensor(grad, weight.device_mesh, weight.placements)
            weight.grad = grad
        return block

    def blocks() -> dict[str, nn.Module]:
        made = {name: Block(ctx, dtype=torch.float32, group=mesh["ep"]) for name in ("ep", "ep and dp", "all")}
        fully_shard(made["ep and dp"].moe.experts, mesh=mesh["dp"])
        fully_shard(made["all"].moe.experts, mesh=mesh["dp"])
        fully_shard(made["all"], mesh=world)
        return made

    alone = gradients(Block(ctx, dtype=torch.float32, dispatcher="local", max_tokens=None))
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    for name, block in blocks().items():
        norm = clip_grad_norm_(gradients(block).parameters(), 0.5)
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0.0, msg=name)
        for a, b in zip(alone.parameters(), block.parameters()):
            torch.testing.assert_close(whole(b.grad), a.grad, rtol=1e-5, atol=0.0)
        norms = [torch.empty_like(norm) for _ in range(ctx.world_size)]
        dist.all_gather(norms, norm, group=ctx.group)
        assert len({float(each) for each in norms}) == 1


@distributed(2)
def test_clipping_takes_main_grads_and_returns_what_is_not_finite(ctx: Context) -> None:
    block = Block(ctx, group=ctx.group)
    experts = list(block.moe.experts.parameters())
    for weight in experts:
        weight.main_grad = torch.full(weight.to_local().shape, 3.0, device=ctx.device)
    numbers = sum(weight.numel() for weight in experts)
    norm = clip_grad_norm_(block.parameters(), 1.0)  # of all others there is none
    assert norm.item() == pytest.approx(3 * numbers**0.5, rel=1e-6)
    assert clip_grad_norm_(iter(experts), 1.0).item() == pytest.approx(1.0, rel=1e-5)
    if ctx.rank == 1:
        experts[0].main_grad[0, 0, 0] = float("inf")
    assert clip_grad_norm_(block.parameters(), 1e9).isinf()
    assert clip_grad_norm_(block.parameters(), 1.0).isnan()  # inf * 0, on all ranks


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_clipping_turns_no_gradient_around_or_into_nan(wrong: float) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with pytest.raises(ValueError, match="expected a max_norm of at least 0, got"):
        clip_grad_norm_([weight], wrong)
    assert torch.equal(weight.grad, torch.ones(3))


def test_two_kinds_of_gradients_of_a_parameter_are_not_clipped() -> None:
    moe = MoE(64, 32, 8, 2)
    moe(torch.randn(24, 64).bfloat16()).float().sum().backward()
    weight = moe.experts.down_proj
    weight.main_grad = weight.grad  # type: ignore[attr-defined]
    clip_grad_norm_(moe.parameters(), 1.0)
    weight.main_grad = weight.grad.float()  # type: ignore[attr-defined, union-attr]
    with pytest.raises(ValueError, match="has main_grad and grad: clip before one is copied"):
        clip_grad_norm_(moe.parameters(), 1.0)


# ── DistributedDataParallel ──────────────────────────────────────────────────────────────────────────────────────────


@distributed(2)
def test_ddp_takes_no_experts_by_mistake_and_leaves_the_routers_load_alone(ctx: Context) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        block = Block(ctx, dtype=dtype, group=ctx.group)
        before = [weight.to_local().clone() for weight in block.moe.experts.parameters()]
        with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor|sharding strategy"):
            DistributedDataParallel(block, process_group=ctx.group)
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, block.moe.experts.parameters()))
    block = Block(ctx, group=ctx.group)
    model = data_parallel(block, process_group=ctx.group)
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, block.moe.experts.parameters()))
    wanted = torch.zeros(EXPERTS, device=ctx.device, dtype=torch.int64)
    for number in range(3):
        x = tokens(ctx, number)
        with model.no_sync() if number == 0 else contextlib.nullcontext():
            model(x).sum().backward()
        ids, _ = block.moe.router.eval()(block.before(x))
        block.moe.router.train()
        wanted += torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert torch.equal(block.moe.router.load, wanted)


@distributed(4)
def test_ddp_over_ranks_that_hold_the_same_experts_is_refused(ctx: Context) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ValueError, match=r"moe.experts.gate_up_proj is spread over ranks .*fully_shard"):
        data_parallel(Block(ctx, group=mesh["ep"]), process_group=ctx.group)


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@distributed(2)
def test_state_dicts_go_through_files_and_from_one_process_to_many(ctx: Context) -> None:
    block = Block(ctx, group=ctx.group)
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    other = Block(ctx, group=ctx.group)
    for weight in other.parameters():
        share(weight.detach()).zero_()
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for weight in other.parameters():
        share(weight.detach()).zero_()
    alone = Block(ctx, dispatcher="local", max_tokens=None)
    full = alone.state_dict() if ctx.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full, options=options)
    for a, b in zip(alone.parameters(), other.parameters()):
        assert torch.equal(a, whole(b))
    moved = other.to(torch.float32)
    moved.moe.experts.requires_grad_(False)
    assert {p.dtype for p in moved.parameters()} == {torch.float32}
    assert copy.deepcopy(moved).moe.experts.down_proj.placements == other.moe.experts.down_proj.placements


@distributed(4)
def test_fsdp2_of_a_block_on_meta_draws_the_weights_that_one_process_draws(ctx: Context) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    world = DeviceMesh.from_group(ctx.group, ctx.device.type)

    def moe(device, **options) -> MoE:
        torch.manual_seed(0)
        return MoE(DIM, 32, EXPERTS, 2, num_shared_experts=1, device=device, **options)

    for placement in (Shard(0), Shard(1)):
        sharded = moe("meta", group=mesh["ep"])
        fully_shard(sharded.experts, mesh=mesh["dp"], shard_placement_fn=lambda _, placement=placement: placement)
        fully_shard(sharded.router, mesh=world)
        fully_shard(sharded, mesh=world)
        sharded.to_empty(device=ctx.device)
        torch.manual_seed(0)
        for module in sharded.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for (name, a), b in zip(moe(ctx.device, dispatcher="local").named_parameters(), sharded.parameters()):
            assert torch.equal(a, whole(b)), name


@distributed(4)
def test_an_expert_mesh_and_fsdp_that_know_nothing_of_each_other_are_refused(ctx: Context) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises((TypeError, ValueError, AssertionError)):  # by torch
        fully_shard(Block(ctx, group=ctx.group), mesh=DeviceMesh.from_group(ctx.group, ctx.device.type))
    with pytest.raises(ValueError, match="1-D mesh"):
        Block(ctx, group=mesh)
    with pytest.raises(ValueError, match="serves 1 ranks, the mesh has 2"):
        Block(ctx, group=mesh["ep"], dispatcher="local", max_tokens=None)


@distributed(1)
def test_only_whole_layers_are_sharded(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    with pytest.raises(ValueError, match="holds all its experts, got Linear"):
        parallelize_module(nn.ModuleDict({"moe": nn.Linear(2, 2)}), mesh, {"moe": ExpertParallel()})
