"""A rank is killed in the middle of training: the others name it by themselves, in time, and end."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mxep.integration import launch
from mxep.integration.data import read_text
from mxep.integration.launch import Rank, RanksFailed, run_ranks
from mxep.integration.mesh import Mesh
from mxep.integration.model import recipes
from mxep.integration.schema import Config
from mxep.integration.train import Trainer

DIES_AT = 10  # a replay, where steps are captured
TIMEOUT = 5.0
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")


class Mortal(Trainer):
    """Rank 1 dies before step DIES_AT, when the others are on their way into it."""

    def _batch(self, *which: object) -> tuple[torch.Tensor, torch.Tensor]:
        if self.step == DIES_AT:
            if self.rank.rank == 1:
                (self.folder / "died").write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
        return super()._batch(*which)


def train_until_rank_1_dies(rank: Rank, config: Config, folder: Path) -> None:
    trainer = Mortal(
        rank, config, recipes(config)[-1], Mesh.make(config.ep, rank.device), read_text(config.data), folder
    )
    assert (trainer.graphs is not None) == bool(config.train.graph)
    try:
        trainer.run()
    finally:
        (folder / f"ended-{rank.rank}").write_text("")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def test_survivors_of_a_training_run_name_the_rank_that_was_killed_within_the_timeout(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
):
    monkeypatch.setattr(launch, "GRACE", 100.0)  # or the caller would end the survivors before they noticed
    ranks = 2 if device == "cpu" else min(4, torch.cuda.device_count())
    config = make_config(
        *(f"parallel.device={device}", f"parallel.ranks={ranks}", f"dispatcher.timeout={TIMEOUT}"),
        *("train.steps=100000", "train.checkpoint_every=5", f"train.graph={str(device == 'cuda').lower()}"),
    )
    with pytest.raises(RanksFailed) as failure:
        run_ranks(train_until_rank_1_dies, (config, tmp_path), world_size=ranks, timeout=200, device=device)
    assert sorted(failure.value.ranks) == list(range(ranks))
    message = str(failure.value)
    assert "rank 1 was killed by SIGKILL before it returned" in message
    died = (tmp_path / "died").stat().st_mtime
    for survivor in set(range(ranks)) - {1}:
        assert re.search(rf"PeerTimeout: rank {survivor} waited {TIMEOUT:g} s .* for rank 1 \(last seen", message)
        assert (tmp_path / f"ended-{survivor}").stat().st_mtime - died < TIMEOUT + 5
    assert not multiprocessing.active_children()
    assert [path.name for path in (tmp_path / "mxfp8").iterdir()] == [f"step-{DIES_AT:06d}"]
