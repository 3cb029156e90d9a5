"""Weights stored (e, K, N), as gpt-oss's are: their gradients lie as they do, so that sums of them are fast."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from mxep.ep import accumulate_in_place, run_experts
from mxep.ep.dispatchers import LocalDispatcher, SymmetricDispatcher
from mxep.ep.dtensors import local_tensor, local_weight
from mxep.gemm.backends.base import Backend
from mxep.runtime.replay import no_replays
from ranks import Context, distributed

E, K, D, F, SIZES = 4, 2, 64, 96, (33, 64, 17)


class Stored(nn.Module):
    """gate_up (E, D, 2F) and down (E, F, D), or the same weights as (E, 2F, D) and (E, D, F)."""

    def __init__(
        self, dispatcher: Any, *, transposed: bool, recipe: str, mesh: Any = None, device: Any = "cpu"
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.transposed, self.dispatcher, self.recipe = transposed, dispatcher, recipe
        for name, shape in (("gate_up", (E, 2 * F, D)), ("down", (E, D, F))):
            w = (torch.randn(shape, generator=random) * shape[-1] ** -0.5).to(device, torch.bfloat16)
            w = w.mT.contiguous() if transposed else w
            self.register_parameter(name, nn.Parameter(w if mesh is None else distribute_tensor(w, mesh, [Shard(0)])))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        proj = (local_weight(w, transposed=self.transposed) for w in (self.gate_up, self.down))
        out, _ = run_experts(x, ids, weights, *proj, dispatcher=self.dispatcher, recipe=self.recipe)
        return out


def gradients(layer: Stored, *, in_place: bool = False, rank: int = 0, call: Any = None) -> list[Tensor]:
    """Of gate_up (E, 2F, D) and down (E, D, F), after three micro-batches."""
    random = torch.Generator().manual_seed(rank)
    with accumulate_in_place() if in_place else nullcontext():
        for n in SIZES:
            x = torch.randn(n, D, generator=random).to(layer.down.device, torch.bfloat16)
            weights, ids = torch.rand(n, E, generator=random).to(x.device).topk(K)
            (layer if call is None else call)(x, ids.int(), weights).square().sum().backward()
    return [local_tensor(w.grad).mT if layer.transposed else local_tensor(w.grad) for w in layer.parameters()]


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses to which the next weight gradients are added; 0 where one is returned."""
    added, plain = [], Backend.wgrad

    def wgrad(self: Backend, *args: Any, accumulate_into: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        added.append(0 if accumulate_into is None else accumulate_into.data_ptr())
        return plain(self, *args, accumulate_into=accumulate_into, **kwargs)

    monkeypatch.setattr(Backend, "wgrad", wgrad)
    return added


@distributed(1, 2, recipe=["bf16", "mxfp8", "fp8", "mxfp8_wgrad_bf16"])
def test_gradients_have_the_bits_of_other_storage_and_the_strides_of_the_weights(ctx: Context, recipe: str) -> None:
    def layer(transposed: bool) -> Stored:
        dispatcher = SymmetricDispatcher(E, dim=D, group=ctx.group, max_tokens=64)
        mesh = torch.distributed.DeviceMesh.from_group(ctx.group, ctx.device.type)
        return Stored(dispatcher, transposed=transposed, recipe=recipe, mesh=mesh, device=ctx.device)

    wanted, stored = gradients(layer(False), rank=ctx.rank), layer(True)
    strides: list[tuple[int, ...]] = []
    for w in stored.parameters():
        w.register_hook(lambda grad: strides.append(local_tensor(grad).stride()))
    found, adding = [gradients(stored, rank=ctx.rank)], layer(True)
    with pytest.MonkeyPatch.context() as patches, no_replays():  # a replay calls no GEMM
        added = spy(patches)
        found.append(gradients(adding, rank=ctx.rank, in_place=True))
    sums = {local_tensor(w.grad).data_ptr() for w in adding.parameters()}
    assert {*added} == ({0} if "wgrad_bf16" in recipe else {0, *sums}), "the first micro-batch has no sum to add to"
    for got, in_place, want in zip(*found, wanted, strict=True):
        assert want.any()
        assert torch.equal(got, want)
        assert torch.equal(in_place, want)
    assert {*strides} == {local_tensor(w).stride() for w in stored.parameters()}


def test_a_compiled_layer_returns_gradients_of_the_same_strides() -> None:
    layers = [Stored(LocalDispatcher(E, max_tokens=64), transposed=True, recipe="mxfp8") for _ in range(2)]
    wanted = gradients(layers[0])
    compiled = torch.compile(layers[1], backend="aot_eager")
    for got, want in zip(gradients(layers[1], call=compiled), wanted, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
