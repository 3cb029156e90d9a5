"""The loss and gradients of a step, micro-batch after micro-batch, and what the step was, over all ranks.

    (b, S) of this rank -> N micro-batches (b / N, S) -> [ loss / N -> backward -> count rows ] -> loss, rows
    loss, gradient norm, rows and loads of this rank -> one reduction, one copy to the host -> a row of metrics

N micro-batches have the loss and the gradients of one batch: means of means over equally many tokens. They share one
quantization of each weight. Only what a model adds to the gradient of a batch as a whole, such as the auxiliary loss of
some routers, is each micro-batch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.gemm import quantize_weights_once

from .mesh import Mesh

COUNTS = ("routed", "sent", "valid", "padding", "dropped", "invalid")
"""Of `Routing.stats`, in the order of a vector of rows."""
KNOWN_TO_ALL = ("dropped", "invalid")
"""Of these: already sums over the ranks that share experts."""


def backward(model: Any, inputs: Tensor, targets: Tensor, micro_batches: int) -> tuple[Tensor, Tensor]:
    """The mean loss, 0-d, of ``micro_batches`` that this rank's batch is cut in, and its rows (len(COUNTS),) int64.

    Gradients are added to what there is. No host sync.
    """
    device = inputs.device
    loss = torch.zeros((), device=device, dtype=torch.float32)
    rows = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
    with quantize_weights_once() if micro_batches > 1 else contextlib.nullcontext():
        for micro_batch in cut(inputs, targets, micro_batches):
            share = model.loss(*micro_batch) / micro_batches
            rows += _rows(model)
            with torch.autograd.set_multithreading_enabled(False):  # a thread of its own costs the host more
                share.backward()
            loss += share.detach()
    return loss, rows


def cut(inputs: Tensor, targets: Tensor, micro_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(b, S) each -> so many pairs of (b / micro_batches, S)."""
    return zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)


def _rows(model: Any) -> Tensor:
    """Where the rows of the last forward went, over all layers."""
    stats = [moe.last_routing.stats() for moe in model.moes]
    return torch.stack([torch.stack([one[key] for one in stats]).sum() for key in COUNTS])


def measure(
    model: Any, mesh: Mesh, loss: Tensor, norm: Tensor, rows: Tensor, *, overflowed: bool, memory: int
) -> tuple[dict[str, Any], bool, int]:
    """A step's metrics over all ranks and layers, whether rows overflowed on any, and the most `memory` that any has.

    The same on all ranks: one reduction, one copy.
    """
    counts = rows.double()
    for key in KNOWN_TO_ALL:
        counts[COUNTS.index(key)] /= dist.get_world_size(mesh.ep)
    loads = torch.stack([router.load for router in model.routers])
    means = torch.stack((loss, norm, torch.full_like(norm, overflowed))).double() / mesh.ranks
    memories = torch.zeros(mesh.ranks, dtype=torch.float64, device=loss.device)
    memories[mesh.rank] = memory
    numbers = torch.cat((means, counts, memories))
    vector = torch.cat((numbers, loads.double().flatten()))
    dist.all_reduce(vector)
    mean_loss, mean_norm, lost, *values = vector[: len(numbers)].tolist()
    load = vector[len(numbers) :].view(loads.shape)
    busiest = (load.max(1).values / load.mean(1)).tolist()  # over the mean, of each layer
    row = {
        "loss": mean_loss,
        **{f"rows_{key}": round(value) for key, value in zip(COUNTS, values)},
        "expert_load": max(busiest),
        "expert_loads": busiest,
        "grad_norm": mean_norm,
    }
    return row, bool(lost), round(max(values[len(counts) :]))
