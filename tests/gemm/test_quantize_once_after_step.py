"""quantize_after_step: weights are quantized once a step, right after it, and micro-batches quantize none."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mxep.gemm import (
    QuantizedOnce,
    Recipe,
    linear,
    linear_together,
    quantize_after_step,
    quantize_once,
    quantize_weights_once,
    quantize_weights_once_a_step,
)


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
    once = quantize_after_step(optimizer)
    for step in range(3):
        before = once.quantizations
        found = micro_batches(ws, count)
        assert once.quantizations - before == (2 if step == 0 else 0), "the optimizer's step has quantized"
        assert all(map(torch.equal, found, expected[step]))
        optimizer.step()
        assert once.quantizations == 2 * (step + 2)
        optimizer.zero_grad()


def test_only_ways_and_weights_that_were_used_are_quantized() -> None:
    ws = weights(3)
    ws[1].requires_grad_(False)
    optimizer = sgd(ws)
    once = quantize_after_step(optimizer)
    with torch.no_grad():
        linear(torch.ones(32, 128, dtype=torch.bfloat16), ws[0], recipe=Recipe.mxfp8())
    micro_batches(ws[1:2], 1)
    assert once.quantizations == 3
    optimizer.step()
    assert once.quantizations == 6


def test_joined_weights_and_two_dimensional_blocks_stay_as_they_are_used() -> None:
    ws, alone = weights(2), weights(2)
    optimizer, plain = sgd(ws), sgd(alone)

    def run(ws: list[nn.Parameter]) -> Tensor:
        x = torch.ones(32, 128, dtype=torch.bfloat16)
        outs = linear_together(x, ws, recipe=Recipe.mxfp8())
        outs += (linear(x, ws[0], recipe=Recipe.named("mxfp8_32x32")),)
        torch.cat(outs).float().square().mean().backward()
        return torch.cat(outs).detach()

    run(alone)
    plain.step()
    expected = run(alone)
    once: QuantizedOnce = quantize_after_step(optimizer)
    run(ws)
    made = once.quantizations
    optimizer.step()
    after = once.quantizations
    assert after == 2 * made
    assert torch.equal(run(ws), expected)
    assert once.quantizations == after


@pytest.mark.parametrize("after", [True, False])
def test_a_closure_may_compute_the_gradients_within_the_step(after: bool) -> None:
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
    if after:
        quantize_after_step(optimizer)
    else:
        quantize_weights_once_a_step()
    assert all(map(torch.equal, two_steps(ws, optimizer), expected))


@pytest.mark.parametrize("after", [True, False])
def test_weights_may_change_between_the_closures_of_a_step(after: bool) -> None:
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
    if after:
        quantize_after_step(optimizer)
    else:
        quantize_weights_once_a_step()
    found = two_steps(ws, optimizer)
    assert len(found) > 4
    assert all(map(torch.equal, found, expected))


def test_a_weight_of_no_optimizer_is_quantized_when_it_is_used() -> None:
    ws = weights(2)
    optimizer = sgd(ws[:1])
    once = quantize_after_step(optimizer)
    micro_batches(ws, 1)
    optimizer.step()
    assert once.quantizations == 4 + 2
    micro_batches(ws, 1)
    assert once.quantizations == 6 + 2


def test_memory_does_not_grow_from_step_to_step() -> None:
    ws = weights()
    optimizer = sgd(ws)
    once = quantize_after_step(optimizer)
    held = []
    for _ in range(3):
        micro_batches(ws, 2)
        optimizer.step()
        held.append(once.nbytes)
    assert held[0] == held[1] == held[2] > 0


def test_closed_it_holds_nothing_and_its_optimizer_quantizes_no_more() -> None:
    ws = weights()
    optimizer = sgd(ws)
    once = quantize_after_step(optimizer)
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
