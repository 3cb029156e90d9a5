"""The standard expert-parallel layer, the baseline of bench=layer: collectives, sizes read on the host, grouped mm.

    x (T, D)            spread: a row for each (token, expert) pair, by expert
      counts            all-to-all of rows per expert, and a device-to-host sync              (not on one rank)
    pairs (T K, D)      all-to-all, bf16                                                      (not on one rank)
    rows (R, D)         by expert, then source rank; each group padded with zeroes to a multiple of 16 rows, or more
      grouped mm        w13 (gate and up in one), SwiGLU in one kernel, w2
    pairs (T K, D)      the same way back
    out (T, D)          weighted sum of a token's pairs in fp32

Backward takes the same steps in reverse. Three steps are faster than in the standard implementations known to us: a
gather fills the groups and their padding; the gradient of spread is a gather and a sum; the weighted sum is one pass.
Pointwise work is compiled on CUDA.

T tokens of this rank, K experts for each, D model dim, F hidden dim, E experts in all, e on this rank, W ranks, R rows
with padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

T = TypeVar("T")
PAD = 16  # rows that FP8 tensor cores and aligned loads need

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""rows (R, D), w (e, N, D), offs (e,) int32 -> (R, N), differentiable."""


def bf16_product(rows: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(rows, w.mT, offs=offs)


def compiled(fn: Callable[..., T]) -> Callable[..., T]:
    """`fn`, compiled on CUDA for any number of rows and fixed widths, because division by a constant is fast.
    fullgraph=True raises at Dynamo's recompile_limit, so that no baseline silently runs eager."""

    @functools.cache
    def inner() -> Callable[..., T]:
        return torch.compile(fn, fullgraph=True, options={"compile_threads": 1})  # no room for a pool of compilers

    @functools.wraps(fn)
    def call(*tensors: Tensor) -> T:
        if not tensors[0].is_cuda or torch.compiler.is_compiling():  # then it is part of that graph
            return fn(*tensors)
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return inner()(*tensors)

    return call


@compiled
def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], with zeroes for index -1."""
    return torch.where(index[:, None] >= 0, rows[index.clamp_min(0)], 0)


@compiled
def sum_pairs(pairs: Tensor, inverse: Tensor) -> Tensor:
    """Sum each token's pairs in fp32: (T K, D) by expert, inverse (T, K) -> (T, D)."""
    return pairs[inverse].float().sum(1).to(pairs.dtype)


@compiled
def weigh(pairs: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """`sum_pairs`, weighted by weights (T, K)."""
    return (pairs[inverse].float() * weights[:, :, None]).sum(1).to(pairs.dtype)


@compiled
def weigh_backward(
    d_out: Tensor, pairs: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of pairs and of weights in `weigh`."""
    top_k = weights.shape[1]
    d_pairs = (d_out[order // top_k].float() * weights.flatten()[order][:, None]).to(pairs.dtype)
    return d_pairs, (pairs[inverse].float() * d_out[:, None].float()).sum(-1)


@compiled
def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class BaselineLayer:
    """w13: (e, 2F, D), gate first. w2: (e, D, F). group: None for this process alone. pad: each group is padded to a
    multiple of this many rows."""

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        product: Product = bf16_product,
        pad: int = PAD,
    ) -> None:
        self.w13, self.w2, self.group, self.product, self.pad = w13, w2, group, product, pad
        self.ranks = dist.get_world_size(group) if group is not None else 1

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x (T, D), ids (T, K) int32, weights (T, K) fp32 -> (T, D)."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device, dtype=torch.int64)
        inverse = inverse.view(ids.shape)
        pairs = _Take.apply(x, order // ids.shape[1], inverse)  # type: ignore[no-untyped-call]
        groups = self._groups(flat[order])
        if self.ranks > 1:
            pairs = _AllToAll.apply(pairs, groups.sent, groups.arrived, self.group)  # type: ignore[no-untyped-call]
        rows = _Take.apply(pairs, groups.index, groups.position)  # type: ignore[no-untyped-call]
        h = swiglu(self.product(rows, self.w13, groups.offs))
        rows = self.product(h, self.w2, groups.offs)
        pairs = _Take.apply(rows, groups.position, groups.index)  # type: ignore[no-untyped-call]
        if self.ranks > 1:
            pairs = _AllToAll.apply(pairs, groups.arrived, groups.sent, self.group)  # type: ignore[no-untyped-call]
        out: Tensor = _Weigh.apply(pairs, weights, order, inverse)  # type: ignore[no-untyped-call]
        return out

    def _groups(self, sorted_ids: Tensor) -> Groups:
        experts, pad = len(self.w13), self.pad
        bounds = torch.arange(experts * self.ranks + 1, dtype=sorted_ids.dtype, device=sorted_ids.device)
        counts = torch.searchsorted(sorted_ids, bounds).diff()  # (E,)
        if self.ranks == 1:  # no sync for sizes: room for the most padding
            most = len(sorted_ids) + experts * (pad - 1)
            return Groups.of(counts.view(1, experts), len(sorted_ids), -(-most // pad) * pad, [], [], alignment=pad)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        host = torch.cat((counts.view(self.ranks, experts).sum(1), received)).tolist()
        sent, theirs = host[: self.ranks], host[self.ranks :]
        arrived = [sum(theirs[r * experts : (r + 1) * experts]) for r in range(self.ranks)]
        rows = sum(-(-sum(theirs[j::experts]) // pad) * pad for j in range(experts))
        return Groups.of(received.view(self.ranks, experts), sum(arrived), rows, sent, arrived, alignment=pad)


@dataclass(frozen=True)
class Groups:
    """The row of each arrived pair. Pairs arrive by source rank, then expert. Rows are by expert.

    index: (R,) int64, pair of a row, -1 for padding. position: (pairs,) int64, row of a pair. offs: (e,) int32.
    sent, arrived: number of pairs to and from each rank.

    Example, PAD 4, 2 sources: counts [[1, 2], [2, 0]] are rows [0, 3, 4, -, 1, 2, -, -], offs [4, 8].
    """

    index: Tensor
    position: Tensor
    offs: Tensor
    sent: list[int]
    arrived: list[int]

    @staticmethod
    def of(
        counts: Tensor, pairs: int, rows: int, sent: list[int], arrived: list[int], *, alignment: int = PAD
    ) -> Groups:
        """counts: (W, e), pairs from each rank for each expert."""
        sizes = counts.sum(0)
        padded = (sizes + alignment - 1) // alignment * alignment
        offs = padded.cumsum(0)
        lies = counts.flatten().cumsum(0) - counts.flatten()
        goes = (offs - padded + counts.cumsum(0) - counts).flatten()
        here = torch.arange(pairs, device=counts.device, dtype=torch.int64)
        position = here + (goes - lies).repeat_interleave(counts.flatten(), output_size=pairs)
        index = torch.full((rows,), -1, device=counts.device, dtype=torch.int64)
        index[position] = here
        return Groups(index, position, offs.int(), sent, arrived)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], arrived: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.sent, ctx.arrived, ctx.group = sent, arrived, group
        return _move(rows, sent, arrived, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        return _move(d_rows, ctx.arrived, ctx.sent, ctx.group), None, None, None


def _move(rows: Tensor, sent: list[int], arrived: list[int], group: dist.ProcessGroup | None) -> Tensor:
    moved = rows.new_empty(sum(arrived), rows.shape[1])
    dist.all_to_all_single(moved, rows.contiguous(), arrived, sent, group=group)
    return moved


class _Take(torch.autograd.Function):
    """`take` by an index. inverse: (rows,), or (T, K) with the results that are summed in a row's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return take(rows, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_taken: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return (sum_pairs if inverse.dim() == 2 else take)(d_taken, inverse), None, None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(pairs, weights, order, inverse)
        return weigh(pairs, weights, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return *weigh_backward(d_out, *ctx.saved_tensors), None, None
