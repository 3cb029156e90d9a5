"""The code of docs/guides/transformers.md runs as it stands: alone block after block, and under several ranks."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from integration.tiny_models import tiny
from mxep.integration.transformers.experts import own_expert_parallel
from ranks import Context, distributed

PAGE = Path(__file__).parents[2] / "docs/guides/transformers.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
ON_RANKS = [block for block in BLOCKS if block.startswith("# torchrun")]


@pytest.mark.usefixtures("one_thread")
def test_code_for_one_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if block not in ON_RANKS:
            exec(compile(block, str(PAGE), "exec"), names)
    assert "mxep/busiest" in names["trainer"].state.log_history[0]


@pytest.mark.slow
@distributed(4)
def test_code_for_ranks_runs(ctx: Context, tmp_path: Path) -> None:
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    if ctx.rank == 0:
        tiny("qwen3_moe", vocab_size=256).save_pretrained(tmp_path)
    dist.barrier(ctx.group)
    os.chdir(tmp_path)
    names = {"FOLDER": str(tmp_path), "DEVICE": ctx.device.type}
    assert len(ON_RANKS) == 3
    for block in ON_RANKS:
        if "DistributedConfig" not in block or own_expert_parallel is not None:
            exec(compile(block, str(PAGE), "exec"), names)
    dist.barrier(ctx.group)
    assert (tmp_path / "trained" / "model.safetensors").exists()
