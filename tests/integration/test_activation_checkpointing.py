"""train.activation_checkpointing: less memory, the same bits."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from integration.test_micro_batches import SMALL, gradients
from integration.test_train import make_trainer, needs_gpu
from mxep.integration import train
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.schema import Config
from mxep.integration.train import make_model


def bytes_kept(rank: Rank, config: Config, folder: Path) -> int:
    """What a forward keeps for its backward, outside of what a checkpoint computes again; without weights."""
    trainer = make_trainer(rank, config, folder)
    weights = {p.data_ptr() for p in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.model.loss(*trainer._batch(trainer.text.train, 0, 0))
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_checkpointed_blocks_have_the_loss_gradients_and_loads_of_others_bit_for_bit(
    make_config: Callable[..., Config], tmp_path: Path, recipe: str
):
    given = f"recipe={recipe}", "train.compare=false", "parallel.ranks=2", "train.micro_batches=2"
    found = []
    for checkpointing in ("false", "true"):
        # With the auxiliary loss, whose gradient comes into a block by another way than its output.
        more = f"train.activation_checkpointing={checkpointing}", "model.transformers.router_aux_loss_coef=0.1"
        config = make_config(*SMALL, *given, *more)
        found.append(run_ranks(gradients, (config, tmp_path), world_size=2, timeout=60, device="cpu"))
    for (wanted, quantized), (got, again) in zip(*found):
        assert got.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
        assert quantized == again


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_checkpointed_blocks_keep_less(make_config: Callable[..., Config], tmp_path: Path, device: str):
    kept = []
    for checkpointing in ("false", "true"):
        given = f"train.activation_checkpointing={checkpointing}", f"parallel.device={device}"
        config = make_config(*SMALL, *given, "recipe=bf16", "parallel.ranks=1")
        kept += run_ranks(bytes_kept, (config, tmp_path), world_size=1, timeout=60, device=device)
    assert kept[1] < 0.5 * kept[0], kept


def refusal(rank: Rank, config: Config, folder: Path) -> str:
    """Of a model without blocks."""
    from mxep.integration.transformers import model

    with mock.patch.object(model, "GradientCheckpointingLayer", int), pytest.raises(ConfigError) as error:
        make_trainer(rank, config, folder)
    return str(error.value)


@pytest.mark.parametrize("key", ["parallel.fsdp", "train.activation_checkpointing", "train.compile"])
def test_a_model_whose_blocks_are_not_known_is_refused(make_config: Callable[..., Config], tmp_path: Path, key: str):
    config = make_config(*SMALL, "recipe=bf16", "parallel.ranks=1", f"{key}=true")
    (message,) = run_ranks(refusal, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert message == f"{key}: leave it out: qwen3_moe has no blocks that transformers names"


def weights_alive(rank: Rank, config: Config, folder: Path) -> list[int]:
    """How many weights of models before are there when a job of two runs makes a model."""
    made: list[weakref.ref[object]] = []
    alive = []

    def remember(*args: Any) -> object:
        alive.append(sum(weight() is not None for weight in made))
        model = make_model(*args)
        made.extend(map(weakref.ref, model.parameters()))
        return model

    gc.disable()  # but for what train() collects
    with mock.patch.object(train, "make_model", remember):
        train.train(rank, config, str(folder), {})
    gc.enable()
    return alive


def test_a_run_gives_its_memory_back_to_the_next(make_config: Callable[..., Config], tmp_path: Path):
    given = "train.steps=1", "train.checkpoint_every=null", "train.activation_checkpointing=true", "parallel.fsdp=true"
    config = make_config(*SMALL, *given, "parallel.ranks=2")
    assert run_ranks(weights_alive, (config, tmp_path), world_size=2, timeout=60, device="cpu") == [[0, 0]] * 2
