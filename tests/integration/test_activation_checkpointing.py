"""train.activation_checkpointing: less memory, the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from integration.test_micro_batches import SMALL, gradients
from integration.test_train import make_trainer, needs_gpu
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.schema import Config


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
