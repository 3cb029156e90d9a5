"""Products are replayed, with held weights too: on the CPU, which stands for a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mxep.gemm import grouped_mm, product
from records_on_cpu import assert_replays_are_alike, replays_on_the_cpu

M, N, K, GROUPS = 64, 32, 64, 2


@pytest.fixture(autouse=True)
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with replays_on_the_cpu(monkeypatch):
        yield


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32", "fp8", "bf16"])
@pytest.mark.parametrize("held", [False, True])
def test_replayed_products_have_the_bits_of_the_others(recipe: str, held: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(GROUPS, N, K).bfloat16().requires_grad_()
    offs = torch.tensor([32, 64], dtype=torch.int32)
    before = product.forward.replays, product.backward.replays

    def step(a: Tensor) -> list[Tensor]:
        a = a.clone().requires_grad_()
        out = grouped_mm(a, w, offs, recipe=recipe)
        return [out.detach(), *torch.autograd.grad(out, (a, w), torch.ones_like(out))]

    assert_replays_are_alike(step, [torch.randn(M, K).bfloat16() for _ in range(5)], held=held)
    assert product.forward.replays >= before[0] + 3  # or 4, of a kind that was seen before
    assert product.backward.replays >= before[1] + 3
