"""Expert weights as DTensors, sharded by experts over the ep mesh: each rank holds ``E / W`` of them.

E experts in all, W ranks.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mxep.gemm.quantize_once import see_writes


def ep_mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the 1-D mesh of the group's ranks, for tensors on `device`. Not collective."""
    kind = device.type
    # A layer for GPUs may be built on the CPU or on meta, and moved later.
    if kind in ("cpu", "meta"):
        kind = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group) else "cpu"
    return DeviceMesh.from_group(group, kind, mesh_dim_names=("ep",))


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of a 1-D mesh. Raises ValueError if the mesh has more dimensions, or lacks this rank."""
    if mesh.ndim != 1:
        raise ValueError(f"experts want a 1-D mesh, such as mesh['ep'], got {mesh.ndim} dimensions")
    if mesh.get_coordinate() is None:
        raise ValueError(f"experts want a mesh with this rank, {dist.get_rank()}, got ranks {mesh.mesh.tolist()}")
    return mesh.get_group()


def mesh_of(x: Tensor) -> DeviceMesh | None:
    return x.device_mesh if isinstance(x, DTensor) else None


def local_experts(num_experts: int, mesh: DeviceMesh) -> range:
    """Ids of the experts that this rank holds, if num_experts are spread over the ranks of a 1-D mesh."""
    here = num_experts // mesh.size()
    return range(mesh.get_local_rank() * here, (mesh.get_local_rank() + 1) * here)


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group. Raises ValueError if this rank is not in it (`new_group` returns a special value there)."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: expected a process group with this rank, {dist.get_rank()}, got {group!r}"
            + (", torch's NON_GROUP_MEMBER: only its ranks make and call what uses it" if group == -100 else "")
        )
    return group


def empty_share(
    shape: tuple[int, ...],
    mesh: DeviceMesh | None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Make an uninitialised tensor of `shape` (E, ...). With a mesh it is a DTensor sharded on dimension 0."""
    if mesh is None:
        return torch.empty(shape, device=device, dtype=dtype)
    local = torch.empty(shape[0] // mesh.size(), *shape[1:], device=device, dtype=dtype)
    # from_local would move `local` itself to the mesh's device.
    spec = DTensor.from_local(local.to("meta"), mesh, [Shard(0)], run_check=False)._spec
    return DTensor(local, spec, requires_grad=False)


def check_not_fsdp(experts: nn.Module, what: str) -> None:
    """Raise ValueError if FSDP2 has sharded the experts, because a shard then is not this rank's experts."""
    from torch.distributed.fsdp import FSDPModule  # imported here: it is slow, and rarely needed

    mesh = next((p.device_mesh for p in experts.parameters() if isinstance(p, DTensor)), None)
    if isinstance(experts, FSDPModule) or (mesh is not None and mesh.ndim != 1):
        raise ValueError(f"{what}: expected experts before fully_shard, got experts that FSDP2 has sharded")


_OrNone = TypeVar("_OrNone", Tensor, Tensor | None)


def local_tensor(x: _OrNone) -> _OrNone:
    """Return this rank's part of `x`, not a copy; None for None. It is differentiable only under torch.compile."""
    if not isinstance(x, DTensor):
        return x
    if torch.compiler.is_compiling():
        return x.to_local()
    see_writes(x)
    return x._local_tensor


class Share:
    """A weight that an autograd node used, and the DTensor's version counter at that time."""

    def __init__(self, weight: Tensor) -> None:
        # The node outlives the tensors that autograd saves, so it must not keep plain weights alive.
        self._weight = weight if isinstance(weight, DTensor) else None
        # Inference tensors have no version counter.
        self._version = None if self._weight is None or weight.is_inference() else weight._version
        self.dtype = weight.dtype

    def check(self) -> None:
        """Raise RuntimeError if a DTensor has changed since the node used it.

        Autograd's own check reads the local tensor's version, which in-place operations on a DTensor do not change.
        (Optimizers' foreach and fused kernels do not change the DTensor's version, either.)
        """
        if self._weight is not None and self._version is not None and self._weight._version != self._version:
            raise RuntimeError(
                f"an expert weight of shape {tuple(self._weight.shape)} has been modified by an inplace operation "
                f"between forward and backward: got version {self._weight._version}, wanted {self._version}"
            )

    def gradient(self, local: Tensor | None) -> Tensor | None:
        """The weight's gradient, from this rank's part of it: a DTensor if the weight is one."""
        if local is None or self._weight is None:
            return local
        return DTensor(_laid_out_as(self._weight._local_tensor, local), self._weight._spec, requires_grad=False)


def _laid_out_as(own: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` with the strides of `own`, because fused optimizers read both in memory order.

    For plain tensors autograd ensures equal strides, but not for DTensors.
    """
    return grad if grad.stride() == own.stride() else torch.empty_like(own, dtype=grad.dtype).copy_(grad)


def local_weight(weight: _OrNone, *, transposed: bool = False) -> _OrNone:
    """Return this rank's part of `weight`, differentiable; None for None. The gradient becomes a DTensor like `weight`.

    transposed: True to swap the last two dimensions. `accumulate_in_place` works with that, but not with `weight.mT`.

    This function takes half the host time of `DTensor.to_local`. If there is no gradient, it makes no zeros.
    """
    if weight is None or not (transposed or isinstance(weight, DTensor)):
        return weight
    if torch.compiler.is_compiling():
        local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        return local.mT if transposed else local  # type: ignore[no-any-return]
    return _Local.apply(weight, transposed)  # type: ignore[no-any-return, no-untyped-call]


def weight_behind(node: Any) -> tuple[Any, bool]:
    """Find the parameter whose gradient passes through this autograd node.

    Returns (the parameter or None, True if `local_weight` transposed it).
    """
    transposed = isinstance(node, _Local._backward_cls) and node.transposed  # type: ignore[attr-defined]
    return getattr(node.next_functions[0][0] if transposed else node, "variable", None), transposed


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, transposed: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.share, ctx.transposed = Share(weight), transposed
        local = local_tensor(weight)
        return local.mT if transposed else local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.share.check()
        return ctx.share.gradient(grad.mT if ctx.transposed and grad is not None else grad), None


@torch.no_grad()
def init_normal_(weight: Tensor, std: float, *, per_expert: bool = False) -> None:
    """Fill `weight` with normal numbers of mean 0. The result does not depend on how `weight` is sharded.

    The seed is drawn from the CPU's default generator. If its state is equal on all ranks, so is the weight.
    per_expert: True if `weight` is (E, ...), to use one seed per expert. A rank then draws only its own experts.
    """
    local = local_tensor(weight)
    if local.is_meta or isinstance(local, FakeTensor):
        return
    seed = int(torch.randint(2**62, (), device="cpu"))
    offset: tuple[int, ...] = (0,) * weight.dim()
    if isinstance(weight, DTensor):
        _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    generator = torch.Generator(local.device)
    # Without per_expert, the whole weight counts as one expert.
    pieces, shape = (local, weight.shape[1:]) if per_expert else (local[None], weight.shape)
    first, offset = (offset[0], offset[1:]) if per_expert else (0, offset)
    for i, piece in enumerate(pieces):
        generator.manual_seed(seed + first + i)
        drawn = torch.randn(shape, device=local.device, generator=generator, dtype=torch.float32) * std
        for dim, (start, length) in enumerate(zip(offset, piece.shape)):
            drawn = drawn.narrow(dim, min(start, drawn.shape[dim]), length)
        piece.copy_(drawn)
