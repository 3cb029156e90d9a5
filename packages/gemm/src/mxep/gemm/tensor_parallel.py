"""linear over a tensor-parallel mesh: DTensors in, a DTensor out, as F.linear of them, but each rank by a recipe.

    weight          x on each rank                  out           gradients
    Shard(0)        all of it: gathered, quantized  Shard(-1)     dx reduced over ranks, dw and dbias of the shard
    Shard(1)        Shard(-1)                       Partial       dx of the shard, dw of the shard; bias added after
    Replicate       Replicate, or Shard of tokens   as x          dw, dbias reduced over ranks where tokens are sharded

So `parallelize_module` with ColwiseParallel and RowwiseParallel works on converted models. Where x comes sharded over
tokens (sequence parallel) and the weight is Shard(0), qdata and scales are gathered, half of bf16's bytes. That takes a
style that leaves x as it is: `QuantizedColwiseParallel`. Blocks of 32 do not cross ranks: features that a rank holds
are a multiple of 32 with MX scales.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor


class QuantizedColwiseParallel(ColwiseParallel):
    """ColwiseParallel of a converted linear or a `Linear` whose input is sharded over tokens and gathered as MXFP8.

    Args:
        input_layouts: how the module's plain input is sharded, Shard(1) of (B, S, K). Others: as for ColwiseParallel.
    """

    def __init__(self, *, input_layouts: Placement, output_layouts: Placement | None = None, **options: Any) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, **options)
        self.desired_input_layouts: Any = (input_layouts,)


def sharded_linear(
    linear: Callable[..., Tensor], x: Tensor, w: Any, bias: Any, *, main_grad: Tensor | None, **how: Any
) -> Tensor:
    """`linear` of DTensors on a 1-D mesh; see the module. ValueError for other meshes and placements."""
    mesh = w.device_mesh
    if mesh.ndim != 1:
        raise ValueError(f"w: got a DTensor on a mesh of {mesh.ndim} dimensions, want one, such as mesh['tp']")
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        raise ValueError(
            f"x: got a {type(x).__name__}, want a DTensor on w's mesh, {mesh}: parallelize_module(..., "
            "ColwiseParallel()) or RowwiseParallel() makes it one"
        )
    if how["quantized_weight"] is not None:
        raise ValueError("quantized_weight: got one for a DTensor, want none: use quantize_weights_once()")
    last = x.dim() - 1
    weight, given = w.placements[0], x.placements[0]
    if isinstance(given, Shard):
        given = Shard(given.dim % x.dim())
    how["main_grad"] = None if main_grad is None else getattr(main_grad, "_local_tensor", main_grad)
    if weight.is_shard(0):
        if bias is not None:
            if not isinstance(bias, DTensor):
                raise ValueError(f"bias: got a {type(bias).__name__}, want a DTensor as w is")
            bias = bias.redistribute(mesh, [Shard(0)]).to_local()
        out = linear(_gathered(x, given, how["recipe"]), w.to_local(), bias, **how)
        return DTensor.from_local(out, mesh, [Shard(last)], run_check=False)
    if weight.is_shard(1):
        rows = x if given == Shard(last) else x.redistribute(mesh, [Shard(last)])
        out = linear(rows.to_local(), w.to_local(), None, **how)
        total = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        return total if bias is None else total + bias
    if not weight.is_replicate():
        raise ValueError(f"w: got placement {weight}, want Shard(0), Shard(1) or Replicate()")
    if given == Shard(last) or not (given.is_shard() or given.is_replicate()):
        x, given = x.redistribute(mesh, [Replicate()]), Replicate()
    reduced = [Partial() if given.is_shard() else Replicate()]
    local_w, local_bias = (part if part is None else part.to_local(grad_placements=reduced) for part in (w, bias))
    return DTensor.from_local(linear(x.to_local(), local_w, local_bias, **how), mesh, [given], run_check=False)


def _gathered(x: DTensor, given: Placement, recipe: Recipe) -> Tensor:
    """All of x on this rank; its gradient is summed over ranks. Sharded tokens of equal parts travel quantized."""
    mesh = x.device_mesh
    if isinstance(given, Shard) and given.dim < x.dim() - 1 and recipe.scaling != "none" and recipe.wgrad == "mx":
        local = x.to_local()
        if not torch.compiler.is_compiling() and local.shape[given.dim] * mesh.size() == x.shape[given.dim]:
            gathered: Tensor = _GatherQuantized.apply(local, given.dim, mesh, recipe)  # type: ignore[no-untyped-call]
            return gathered
    if not given.is_replicate():
        x = x.redistribute(mesh, [Replicate()])
    return x.to_local(grad_placements=[Partial()])


class _GatherQuantized(torch.autograd.Function):
    """Quantize, then gather along an axis of tokens; backward sums over ranks and scatters, unquantized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh: DeviceMesh, recipe: Recipe) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        mx = recipe.quantize_rows(x)
        assert isinstance(mx, MXTensor)
        parts = (part.view(torch.uint8).contiguous() for part in (mx.qdata, mx.scale))
        qdata, scale = (collectives.wait_tensor(collectives.all_gather_tensor(p, dim, (mesh, 0))) for p in parts)
        return mx.with_parts(qdata.view(mx.qdata.dtype), scale.view(mx.scale.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.dequantize() if isinstance(grad, MXTensor) else grad
        part = collectives.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.dim, (ctx.mesh, 0))
        return collectives.wait_tensor(part), None, None, None
