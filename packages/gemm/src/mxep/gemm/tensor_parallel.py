"""linear over a tensor-parallel mesh: x, w and bias are DTensors, and each rank runs its GEMM as the recipe says.

    weight       x that each rank multiplies         out         gradients
    Shard(0)     all of x (gathered)                 Shard(-1)   dx: summed over ranks. dw, dbias: each rank its shard
    Shard(1)     the rank's shard, Shard(-1)         Partial     dx, dw: each rank its shard. bias is added to the sum
    Replicate    all of x, or its shard of tokens    as x        dw, dbias: summed over ranks if tokens are sharded

So `parallelize_module` with ColwiseParallel and RowwiseParallel works on converted models. With sequence parallelism,
use `QuantizedColwiseParallel` instead of ColwiseParallel. It quantizes each rank's tokens and then gathers qdata and
scales, half of bf16's bytes. Blocks of 32 do not cross ranks, so with MX scales each rank must hold a multiple of 32
features.

The number of tokens need not be a multiple of the number of ranks. With recipe "bf16" the number of features need not
be one, either. The last ranks then have fewer or none, as with torch.chunk. Uneven tokens are gathered unquantized.

N out features, K in features, B sequences of S tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from mxep.gemm.quantize_once import see_writes
from mxep.gemm.recipe import AUTO, Recipe, recipe_for
from mxep.quant import MXTensor


class QuantizedColwiseParallel(ColwiseParallel):
    """ColwiseParallel for a converted linear or a `Linear` whose input is sharded over tokens. Gathers it quantized.

    input_layouts: sharding of the module's input, such as Shard(1) for x (B, S, K). A plain tensor must have as many
        tokens on each rank. An unevenly sharded input must be a DTensor.
    output_layouts and other arguments: as for ColwiseParallel.
    """

    def __init__(self, *, input_layouts: Placement, output_layouts: Placement | None = None, **options: Any) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, **options)
        self.desired_input_layouts: Any = (input_layouts,)


def _misfit(features: int, ranks: int, recipe: Recipe) -> int:
    """Number of features of the first shard that does not fit the recipe's alignment; 0 if all shards fit."""
    first = -(-features // ranks)  # as torch.chunk shares them out
    shards = first, features % first if first else 0
    return next((shard for shard in shards if shard % recipe.group_alignment), 0)


def sharded_linear(
    linear: Callable[..., Tensor],
    x: Tensor,
    w: Any,
    bias: Any,
    *,
    main_grad: Tensor | None,
    recipe: Recipe | str,
    **options: Any,
) -> Tensor:
    """Compute `linear` of DTensors on a 1-D mesh. Returns a DTensor (..., N).

    Raises ValueError for other meshes, placements and shapes, and if shards do not fit the recipe. All ranks raise it.
    """
    mesh = w.device_mesh
    if mesh.ndim != 1:
        raise ValueError(f"w: got a DTensor on a mesh of {mesh.ndim} dimensions, want one, such as mesh['tp']")
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        raise ValueError(
            f"x: got a {type(x).__name__}, want a DTensor on w's mesh, {mesh}: parallelize_module(..., "
            "ColwiseParallel()) or RowwiseParallel() makes it one"
        )
    if bias is not None and not isinstance(bias, DTensor):
        raise ValueError(f"bias: got a {type(bias).__name__}, want a DTensor as w is")
    if w.dim() != 2 or not x.dim() or x.shape[-1] != w.shape[1]:
        raise ValueError(f"shapes: got x {tuple(x.shape)}, w {tuple(w.shape)}, want x (..., K) and w (N, K)")
    weight = w.placements[0]
    if type(weight) not in (Shard, Replicate):
        raise ValueError(f"w: got placement {weight}, want Shard(0), Shard(1) or Replicate()")
    if recipe == AUTO and weight.is_shard() and _misfit(w.shape[weight.dim], mesh.size(), Recipe.mxfp8()):
        recipe = Recipe.bf16()
    options["recipe"] = recipe = recipe_for(recipe, x, w.shape[0])  # by global sizes, so that all ranks agree
    if weight.is_shard() and (shard := _misfit(w.shape[weight.dim], mesh.size(), recipe)):
        axis, features = "NK"[weight.dim], w.shape[weight.dim]
        raise ValueError(
            f"w: {axis}: got {shard}, want a multiple of {recipe.group_alignment} for recipe {recipe.name}, of the "
            f"{features} features of {mesh.size()} ranks on each: use fewer ranks, or leave this linear unconverted "
            "(filter)"
        )
    last = x.dim() - 1
    given = x.placements[0]
    if type(given) is Shard:
        given = Shard(given.dim % x.dim())
    elif type(given) not in (Replicate, Partial):
        x, given = x.redistribute(mesh, [Replicate()]), Replicate()
    options["main_grad"] = getattr(main_grad, "_local_tensor", main_grad)
    see_writes(w)
    shape = torch.Size([*x.shape[:-1], w.shape[0]])
    if weight == Shard(0):
        bias = None if bias is None else bias.redistribute(mesh, [Shard(0)]).to_local()
        out = _local(linear, _gathered(x, given, recipe), w.to_local(), bias, options)
        return _whole(out, mesh, Shard(last), shape)
    if weight == Shard(1):
        rows = x if given == Shard(last) else x.redistribute(mesh, [Shard(last)])
        total = _whole(_local(linear, rows.to_local(), w.to_local(), None, options), mesh, Partial(), shape)
        return total if bias is None else total + bias
    if given == Shard(last) or not (given.is_shard() or given.is_replicate()):
        x, given = x.redistribute(mesh, [Replicate()]), Replicate()
    if given.is_shard() and main_grad is not None:
        raise ValueError(
            "main_grad: got one for a replicated w whose tokens are sharded, whose gradient is a sum over ranks: want "
            "none (del weight.main_grad), or x replicated"
        )
    reduced = [Partial() if given.is_shard() else Replicate()]
    local_w = w.to_local(grad_placements=reduced)
    local_bias = None if bias is None else bias.to_local(grad_placements=reduced)
    return _whole(_local(linear, x.to_local(), local_w, local_bias, options), mesh, given, shape)


def _local(linear: Callable[..., Tensor], x: Tensor, w: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Run this rank's GEMM. If this rank holds no features of w, run torch's, which gives empty or zero gradients."""
    if w.numel():
        return linear(x, w, bias, **options)
    dtype = options["out_dtype"] or x.dtype
    x = x.dequantize() if isinstance(x, MXTensor) else x
    w = w if options["main_grad"] is None else w.detach()
    return nn.functional.linear(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype))


def _whole(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> DTensor:
    """Make a DTensor of `shape` from each rank's part. from_local infers a wrong shape of uneven parts."""
    sizes: dict[str, Any] = {}
    if isinstance(placement, Shard) and shape[placement.dim] % mesh.size():
        stride = torch.empty(shape, device="meta", dtype=local.dtype).stride()
        sizes = {"shape": shape, "stride": stride}
    return DTensor.from_local(local, mesh, [placement], run_check=False, **sizes)


def _gathered(x: DTensor, given: Placement, recipe: Recipe) -> Tensor:
    """Gather all of x on this rank, quantized if tokens are evenly sharded. Backward sums the gradient over ranks."""
    mesh = x.device_mesh
    tokens = isinstance(given, Shard) and given.dim < x.dim() - 1
    quantizes = recipe.scaling != "none" and recipe.wgrad == "mx" and not torch.compiler.is_compiling()
    if tokens and quantizes and x.shape[given.dim] % mesh.size() == 0:  # type: ignore[attr-defined]
        local, dim = x.to_local(), given.dim  # type: ignore[attr-defined]
        gathered: Tensor = _GatherQuantized.apply(local, dim, mesh, recipe)  # type: ignore[no-untyped-call]
        return gathered
    if not given.is_replicate():
        x = x.redistribute(mesh, [Replicate()])
    return x.to_local(grad_placements=[Partial()])


class _GatherQuantized(torch.autograd.Function):
    """Quantize x, then gather it along an axis of tokens. Backward reduce-scatters the unquantized gradient."""

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
