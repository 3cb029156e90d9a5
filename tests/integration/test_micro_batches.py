"""Micro-batches are one batch: its loss, its gradients, its rows, its loads, one check and one step."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from integration.test_train import losses_and_norms, make_trainer, needs_gpu
from mxep.comms import CapacityExceeded
from mxep.gemm import quantize_weights_once
from mxep.integration import train
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.schema import Config

SMALL = (
    *("model=qwen3_moe_tiny", "model.dim=32", "model.hidden_dim=32", "model.experts=4", "data.batch=16"),
    "model.transformers.router_aux_loss_coef=0.0",  # is of a micro-batch: no mean of means
)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(rank: Rank, config: Config, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The mean loss of a first batch, its rows, loads and gradients; and how often weights were quantized."""
    trainer = make_trainer(rank, config, folder)
    opened = []

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with quantize_weights_once() as once:
            yield
            opened.append(once.quantizations)

    with mock.patch.object(train, "quantize_weights_once", watched):
        loss, rows = trainer._backward(*trainer._batch(trainer.text.train, config.seed, 0))
    trainer.gradients.reduce()
    dist.all_reduce(loss)
    found = {"loss": loss / rank.world_size, "routed": rows[train.COUNTS.index("routed")]}
    found |= {f"load {i}": router.load for i, router in enumerate(trainer.model.routers)}
    found |= {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    return found, sum(opened)


def gradients_of_each(rank: Rank, configs: list[Config], folder: Path) -> list[tuple[dict[str, torch.Tensor], int]]:
    return [gradients(rank, config, folder) for config in configs]


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2)])
def test_micro_batches_have_the_loss_and_the_gradients_of_one_batch(
    make_config: Callable[..., Config], tmp_path: Path, ranks: int, ep: int
):
    given = *SMALL, f"parallel.ranks={ranks}", f"parallel.ep={ep}", "parallel.device=cpu", "recipe=bf16"
    configs = [make_config(*given, "train.precision=32-true", f"train.micro_batches={number}") for number in (1, 2, 4)]
    results = run_ranks(gradients_of_each, (configs, tmp_path), world_size=ranks, timeout=60, device="cpu")
    for (wanted, _), *others in results:
        for number, (got, _) in zip((2, 4), others):
            assert got.keys() == wanted.keys()
            for name in wanted:
                # All is fp32, so only sums of a few hundred terms are in another order.
                error = (got[name] - wanted[name]).float().norm() / wanted[name].float().norm()
                assert error < 1e-5, (number, name, error)


def test_micro_batches_share_one_quantization_of_each_weight(make_config: Callable[..., Config], tmp_path: Path):
    given = *SMALL, "parallel.ranks=2", "train.compare=false"
    configs = [make_config(*given, f"train.micro_batches={number}") for number in (1, 2, 4)]
    results = run_ranks(gradients_of_each, (configs, tmp_path), world_size=2, timeout=60, device="cpu")[0]
    model = configs[0].model
    assert [found["routed"] for found, _ in results] == 3 * [8 * 32 * model.top_k * model.layers]
    assert [opened for _, opened in results] == [0, 4 * model.layers, 4 * model.layers]  # two weights, both ways


def overflow(rank: Rank, config: Config, folder: Path) -> tuple[str, bool]:
    """The error of a step whose rows overflow, and whether it left the weights alone."""
    trainer = make_trainer(rank, config, folder)
    before = [whole(p) for p in trainer.model.parameters()]
    with pytest.raises(CapacityExceeded) as error:
        trainer.train_step()
    return str(error.value), all(torch.equal(a, whole(b)) for a, b in zip(before, trainer.model.parameters()))


def test_rows_that_overflow_in_a_micro_batch_stop_the_step(make_config: Callable[..., Config], tmp_path: Path):
    how = "dispatcher.capacity=factor", "dispatcher.factor=0.3", "train.micro_batches=2"
    config = make_config(*SMALL, "recipe=bf16", "parallel.ranks=2", *how)
    for message, same in run_ranks(overflow, (config, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert "rows did not fit" in message
        assert same


def test_a_batch_that_micro_batches_do_not_divide_is_refused(make_config: Callable[..., Config]):
    wanted = (
        r"data.batch must be a multiple of 6 \(parallel.ranks times train.micro_batches\), got 16: try data.batch=18"
    )
    with pytest.raises(ConfigError, match=wanted):
        make_config("data.batch=16", "parallel.ranks=2", "train.micro_batches=3")
    with pytest.raises(ConfigError, match=r"train\.precision: got bf16-true, wanted bf16-mixed: only models of"):
        make_config("train.precision=bf16-true")


@needs_gpu
def test_a_cuda_graph_of_micro_batches_trains_as_calls_from_the_host_do(
    make_config: Callable[..., Config], tmp_path: Path
):
    ranks = min(2, torch.cuda.device_count())
    given = "train.compare=false", "train.steps=8", f"parallel.ranks={ranks}", "train.micro_batches=2"
    curves = []
    for graph in ("false", "true"):
        config = make_config(*given, "parallel.device=cuda", f"train.graph={graph}")
        results = run_ranks(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=120, device="cuda")
        curves.append(results[0])
    assert curves[0] == curves[1]
