"""The layer among the rest of torch.distributed: FSDP2 beside expert parallelism, checkpoints that change degree."""

import copy
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mxep.ep import ExpertParallel, MoE
from ranks import Context, distributed

DIM, EXPERTS, TOKENS = 64, 8, 16


class Block(nn.Module):
    def __init__(self, ctx: Context, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(DIM, DIM, dtype=torch.bfloat16, device=ctx.device)
        options = {"recipe": recipe, "num_shared_experts": 1, "dispatcher": "local", "device": ctx.device}
        self.moe = MoE(DIM, 32, EXPERTS, 2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.before(x))


def make(ctx: Context, mesh: DeviceMesh, recipe: str) -> Block:
    return parallelize_module(Block(ctx, recipe), mesh, {"moe": ExpertParallel(max_tokens=TOKENS)})


def tokens(ctx: Context, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + ctx.rank)
    return torch.randn(TOKENS, DIM, generator=generator).to(ctx.device, torch.bfloat16)


def whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def adamw(block: nn.Module) -> torch.optim.AdamW:
    """DTensors in a group of their own: the optimizer's foreach kernels, its default on GPUs, take no mix."""
    experts = [weight for weight in block.parameters() if isinstance(weight, DTensor)]
    others = [weight for weight in block.parameters() if not isinstance(weight, DTensor)]
    return torch.optim.AdamW([{"params": experts}, {"params": others}], lr=1e-2)


def step(ctx: Context, block: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """Forward, backward, optimizer; gradients of what every rank holds are averaged by hand. Returns the output."""
    out = block(tokens(ctx, number))
    out.float().square().mean().backward()
    for weight in block.parameters():
        if not isinstance(weight, DTensor):
            dist.all_reduce(weight.grad, group=ctx.group)
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


@distributed(4)
def test_fsdp2_over_data_parallel_ranks_equals_none(ctx: Context) -> None:
    """Experts are sharded over ep and, by FSDP2, over dp; everything else by FSDP2 over all ranks."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    plain = make(ctx, mesh["ep"], "mxfp8")
    sharded = copy.deepcopy(make(ctx, mesh["ep"], "mxfp8"))
    fully_shard(sharded.moe.experts, mesh=mesh["dp"], reshard_after_forward=True)
    world = DeviceMesh.from_group(ctx.group, ctx.device.type)
    fully_shard(sharded.moe.router, mesh=world)  # by itself, as it is fp32 and FSDP wants one dtype a group
    fully_shard(sharded, mesh=world)
    outs = []
    for block in (plain, sharded):
        out = block(tokens(ctx, 0))
        out.float().sum().backward()
        outs.append(out.detach())
    assert torch.equal(*outs)
    for (name, a), b in zip(plain.named_parameters(), sharded.named_parameters()):
        wanted, got = whole(a.grad), whole(b[1].grad)
        # Gradients of experts are sums over the ep ranks; over dp, and of the rest over all, FSDP averages.
        if "experts" in name:
            both = [torch.empty_like(wanted) for _ in range(2)]
            dist.all_gather(both, wanted, group=mesh["dp"].get_group())
        else:
            both = [torch.empty_like(wanted) for _ in range(4)]
            dist.all_gather(both, wanted, group=ctx.group)
        mean = torch.stack([each.float() for each in both]).mean(0)
        assert (got.float() - mean).norm() <= 2**-6 * mean.norm(), name
