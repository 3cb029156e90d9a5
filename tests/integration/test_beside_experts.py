"""What of a transformers model is not expert: compiled, multiplied in MXFP8, sharded, or all of it at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.test_micro_batches import SMALL, gradients
from integration.test_train import make_trainer
from mxep.gemm import converted
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.metrics import snr
from mxep.integration.schema import Config

ATTENTION = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qkvo"]
GIVEN = ("parallel.ranks=2", "parallel.device=cpu", "train.compare=false", "model.transformers.head_dim=32")


def gradients_by_eager_compilers(
    rank: Rank, configs: list[Config], folder: Path
) -> list[tuple[dict[str, Any], list[str]]]:
    """Of each, and what was compiled, without inductor, which has no part in this."""
    seen: list[str] = []
    compile_ = torch.compile

    def listed(forward: Any) -> Any:
        seen.append(type(forward.__self__).__name__)
        return compile_(forward, backend="aot_eager", fullgraph=True)

    torch.compile = listed  # type: ignore[assignment]
    found = []
    for config in configs:
        seen.clear()
        found.append((gradients(rank, config, folder)[0], seen.copy()))
    return found


def run(
    make_config: Callable[..., Config], folder: Path, *given: tuple[str, ...]
) -> list[tuple[dict[str, Any], list[str]]]:
    configs = [make_config(*SMALL, *GIVEN, *more) for more in given]
    return run_ranks(gradients_by_eager_compilers, (configs, folder), world_size=2, timeout=200, device="cpu")[0]


@pytest.mark.parametrize("more", [(), ("recipe.linear=mxfp8", "parallel.fsdp=true", "train.micro_batches=2")])
def test_compiled_parts_have_the_gradients_of_others(
    make_config: Callable[..., Config], tmp_path: Path, more: tuple[str, ...]
):
    given = "recipe=mxfp8", *more
    (wanted, none), (got, compiled) = run(make_config, tmp_path, given, (*given, "train.compile=true"))
    assert none == []
    assert compiled == 2 * ["Qwen3MoeAttention", "Qwen3MoeRMSNorm", "Qwen3MoeRMSNorm"]
    assert got.keys() == wanted.keys()
    for name, found in got.items():
        assert torch.equal(found, wanted[name]) or snr(wanted[name], found) > 30, name


def names_converted(rank: Rank, config: Config, folder: Path) -> list[str]:
    return [*converted(make_trainer(rank, config, folder).model.model)]


def test_linears_beside_experts_are_multiplied_by_their_own_recipe(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config(*SMALL, *GIVEN, "recipe=mxfp8_linear")
    assert run_ranks(names_converted, (config, tmp_path), world_size=2, timeout=60, device="cpu")[0] == ATTENTION
    (plain, _), (got, _) = run(make_config, tmp_path, ("recipe=mxfp8",), ("recipe=mxfp8_linear",))
    found = {name: snr(plain[f"model.{name}"], got[f"model.{name}"]) for name in ATTENTION}
    assert all(10 < each < 40 for each in found.values()), found
