"""quantize_weights_once_a_step: weights are quantized once in each step of an optimizer, which clears them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mxep.gemm import Recipe, linear, quantize_once, quantize_weights_once, quantize_weights_once_a_step


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    if quantize_once._open is not None:
        quantize_once._open.close()


def weights(count: int = 1) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(64, 128, generator=generator).bfloat16()) for _ in range(count)]


def micro_batches(ws: list[nn.Parameter], count: int, recipe: Recipe | None = None) -> list[Tensor]:
    """Forward and backward of each; their outputs and gradients of inputs."""
    found = []
    for seed in range(count):
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
        outs = [linear(x, w, recipe=recipe or Recipe.mxfp8()) for w in ws]
        sum(out.float().square().mean() for out in outs).backward()  # type: ignore[union-attr]
        found += [*(out.detach() for out in outs), x.grad]
    return found


def sgd(ws: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(ws, lr=0.5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_micro_batches_is_one_quantization_each_way(count: int) -> None:
    ws, alone = weights(), weights()
    optimizer, plain = sgd(ws), sgd(alone)
    expected = []
    for _ in range(3):
        expected.append(micro_batches(alone, count))
        plain.step()
        plain.zero_grad()
    once = quantize_weights_once_a_step()
    for step in range(3):
        assert all(map(torch.equal, micro_batches(ws, count), expected[step]))
        assert once.quantizations == 2 * (step + 1)
        assert once.nbytes > 0
        optimizer.step()
        assert once.nbytes == 0
        optimizer.zero_grad()


def test_a_closure_may_compute_the_gradients_within_the_step() -> None:
    ws, alone = weights(), weights()
    optimizer, plain = sgd(ws), sgd(alone)

    def two_steps(ws: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found: list[Tensor] = []

        def closure() -> float:
            found.extend(micro_batches(ws, 1))
            return 0.0

        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step(closure)
            found.extend(micro_batches(ws, 1))
        return found

    expected = two_steps(alone, plain)
    quantize_weights_once_a_step()
    assert all(map(torch.equal, two_steps(ws, optimizer), expected))


def test_weights_may_change_between_the_closures_of_a_step() -> None:
    """As LBFGS changes them."""
    ws, alone = weights(1), weights(1)

    def two_steps(ws: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found: list[Tensor] = []

        def closure() -> float:
            optimizer.zero_grad()
            found.extend(micro_batches(ws, 2))
            return float(ws[0].detach().float().square().sum())

        for _ in range(2):
            optimizer.step(closure)
        return found

    expected = two_steps(alone, torch.optim.LBFGS(alone, lr=1e-2, max_iter=3))
    optimizer = torch.optim.LBFGS(ws, lr=1e-2, max_iter=3)
    quantize_weights_once_a_step()
    found = two_steps(ws, optimizer)
    assert len(found) > 4
    assert all(map(torch.equal, found, expected))


def test_closed_it_holds_nothing() -> None:
    ws = weights()
    optimizer = sgd(ws)
    once = quantize_weights_once_a_step()
    micro_batches(ws, 2)
    with quantize_weights_once():  # joins it
        once.close()
        assert quantize_once._open is once
    assert quantize_once._open is None
    assert once.nbytes == 0
    before = once.quantizations
    once.close()
    optimizer.step()
    micro_batches(ws, 1)
    assert once.quantizations == before
