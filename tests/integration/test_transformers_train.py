"""`mxep model=...` of transformers: it trains on one process and on more, resumes, starts from a folder, or refuses."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from composed import composed
from integration.test_train import losses, make_trainer, needs_gpu, train_stop_and_resume
from integration.tiny_models import tiny, whole
from mxep.gemm import Recipe
from mxep.integration import checkpoint as checkpoints
from mxep.integration.config import ConfigError, resolve, restore, to_json
from mxep.integration.launch import Rank
from mxep.integration.schema import Config
from mxep.integration.train import Outcome, train
from mxep.integration.transformers.model import CausalLM
from ranks import run_again

MODELS = {
    "qwen3_moe_tiny": 0.6e6,
    "qwen3_moe_200m": 205e6,
    "qwen3_30b_a3b": 30.5e9,
    "deepseek_v3_proxy": 16e9,
    "mixtral_8x7b": 46.7e9,
}
SMALL = ("model=qwen3_moe_tiny", "model.dim=32", "model.hidden_dim=32", "model.experts=4", "optimizer.warmup=2")


DEEPSEEK = (
    *("model.layers=2", "model.dim=32", "model.hidden_dim=32", "model.heads=2", "model.experts=8", "model.top_k=2"),
    *("model.transformers.intermediate_size=32", "model.transformers.kv_lora_rank=16"),
    *("model.transformers.qk_nope_head_dim=16", "model.transformers.qk_rope_head_dim=16"),
    "model.transformers.vocab_size=256",
)
MIXTRAL = (
    *("model.layers=2", "model.dim=64", "model.hidden_dim=64", "model.heads=4"),
    *("model.transformers.num_key_value_heads=2", "model.transformers.vocab_size=256"),
)


def train_alone(rank: Rank, config: Config, folder: Path) -> Outcome:
    return train(rank, config, str(folder), {})


def test_two_ranks_train_as_one_and_resume_bit_for_bit(prepared: Callable[..., Config], tmp_path: Path):
    given = *SMALL, "train.steps=6", "train.checkpoint_every=2", "parallel.device=cpu"
    alone = prepared(*given, "parallel.ranks=1", "recipe=bf16", "train.steps=3", "train.checkpoint_every=null")
    one = run_again(train_alone, (alone, tmp_path), world_size=1, timeout=120, device="cpu")[0]
    spread = prepared(*given, "parallel.ranks=2")
    whole, half, rest = run_again(train_stop_and_resume, (spread, tmp_path), world_size=2, timeout=120, device="cpu")[0]
    assert [run.steps for run in half.runs] == [6, 3]
    assert losses(rest) == losses(whole)
    assert [run.valid_loss for run in rest.runs] == [run.valid_loss for run in whole.runs]
    for run in whole.runs:
        assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 0.5
        assert len(run.metrics[-1]["expert_loads"]) == spread.model.layers
    for key in ("loss", "grad_norm"):
        got, wanted = (torch.tensor([row[key] for row in out.runs[0].metrics][:3]) for out in (whole, one))
        # A wrong scale of any gradient shows in the norm at once: a factor of 2 or 4. Rounding stays under a percent.
        assert got.sub(wanted).abs().div(wanted).max() < 1e-2, key


def start_from(rank: Rank, config: Config, folder: Path) -> tuple[dict[str, torch.Tensor], float, float]:
    """The weights that a trainer starts with, by the model's own names, and its first losses. It saves the second."""
    trainer = make_trainer(rank, config, folder)
    weights = {name: whole(weight).clone() for name, weight in trainer.model.model.state_dict().items()}
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    return weights, *(row["loss"] for row in trainer.metrics)


def test_training_starts_from_a_folder_and_goes_on_without_it(prepared: Callable[..., Config], tmp_path: Path):
    source, folder = tiny(vocab_size=256), tmp_path / "source"
    source.save_pretrained(folder)
    given = "recipe=bf16", "parallel.ranks=1", "parallel.device=cpu", "train.steps=2"
    config = prepared(*given, f"model.pretrained={folder}")
    assert (config.model.dim, config.model.experts, config.model.layers, config.model.shared_experts) == (64, 4, 2, 0)
    assert prepared(*given, f"model.pretrained={folder}", "model.layers=1").model.transformers["num_hidden_layers"] == 1
    ((weights, _, second),) = run_again(start_from, (config, tmp_path), world_size=1, timeout=120, device="cpu")
    wanted = source.state_dict()
    assert wanted.keys() == weights.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)

    shutil.rmtree(folder)
    checkpoint = str(checkpoints.find(tmp_path)["bf16"])
    resumed = prepared("parallel.ranks=1", "parallel.device=cpu", "train.checkpoint_every=null", f"resume={checkpoint}")
    assert (resumed.model.pretrained, resumed.model.transformers) == (None, config.model.transformers)
    (rest,) = run_again(go_on, (resumed, tmp_path, checkpoint), world_size=1, timeout=120, device="cpu")
    assert [row["loss"] for row in rest.runs[0].metrics][1:] == [second]


def logits_of(rank: Rank, config: Config, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return make_trainer(rank, config, folder).model(ids).logits.detach()


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_a_model_has_the_logits_of_transformers(
    prepared: Callable[..., Config], tmp_path: Path, kind: str, window: int | None
):
    source = tiny(kind, vocab_size=256, sliding_window=window, use_sliding_window=window is not None)
    ids = torch.arange(48).view(2, 24)
    source.save_pretrained(tmp_path / "source")
    given = "recipe=bf16", "train.precision=32-true", "parallel.ranks=1", "parallel.device=cpu"
    config = prepared(*given, f"model.pretrained={tmp_path / 'source'}")
    (got,) = run_again(logits_of, (config, tmp_path, ids), world_size=1, timeout=120, device="cpu")
    torch.testing.assert_close(got, source(ids).logits, rtol=1e-4, atol=1e-4)


def go_on(rank: Rank, config: Config, folder: Path, checkpoint: str) -> Outcome:
    return train(rank, config, str(folder), {"bf16": checkpoint})


@needs_gpu
@pytest.mark.parametrize("how", ["drawn", "pretrained"])
def test_on_gpus_it_learns(prepared: Callable[..., Config], tmp_path: Path, how: str):
    ranks = min(2, torch.cuda.device_count())
    given = "parallel.device=cuda", f"parallel.ranks={ranks}", "train.steps=20", "train.checkpoint_every=10"
    tiny(vocab_size=256).save_pretrained(tmp_path / "source")
    named = f"model.pretrained={tmp_path / 'source'}" if how == "pretrained" else "model=qwen3_moe_tiny"
    out = run_again(train_alone, (prepared(named, *given), tmp_path), world_size=ranks, timeout=200, device="cuda")[0]
    for run in out.runs:
        assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 0.5


@needs_gpu
def test_on_gpus_the_command_trains_whatever_its_fork_server_imported(text: Path, tmp_path: Path):
    given = f"data.path={text}", "data.batch=4", "train.steps=2", "train.checkpoint_every=null"
    command = [
        sys.executable,
        "-m",
        "mxep.integration.app",
        "model=qwen3_moe_tiny",
        *given,
        f"hydra.run.dir={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert " on cuda" in done.stderr


def bias_of_a_step(rank: Rank, config: Config, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    trainer = make_trainer(rank, config, folder)
    router, seen = trainer.model.routers[0], []
    with mock.patch.object(router, "update_bias", side_effect=lambda rate: seen.append(router.load.clone())):
        trainer.train_step()
    router.update_bias(config.model.balance_rate)
    assert not router.load.any()
    return router.bias, seen[0]


def test_a_deepseek_moves_its_routers_biases_towards_balance(prepared: Callable[..., Config], tmp_path: Path):
    given = "model=deepseek_v3_proxy", *DEEPSEEK, "recipe=bf16", "train.precision=bf16-true"
    config = prepared(*given, "parallel.ranks=2", "parallel.device=cpu")
    results = run_again(bias_of_a_step, (config, tmp_path), world_size=2, timeout=120, device="cpu")
    load = sum(load for _, load in results)
    for bias, _ in results:
        assert torch.equal(bias, config.model.balance_rate * torch.sign(load.float().mean() - load))


@pytest.mark.parametrize("name", MODELS)
def test_full_sizes_are_those_of_the_models(prepared: Callable[..., Config], name: str):
    config = prepared(f"model={name}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model.transformers))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(
        MODELS[name], rel=0.1 if "tiny" in name else 0.01
    )
    assert prepared(f"model={name}", "model.layers=2").model.transformers["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["model.transformers.vocab_size=255"], "must be at least 256, one for each token of the data, got 255"),
        (["model.transformers.num_experts=6"], "model.experts: got 8, but model.transformers has 6: wanted the same"),
        (["+model.transformers.tie_word_embeddings=true"], "tie_word_embeddings: got true, wanted false"),
        (["+model.transformers.attn_implementation=a/b"], "model.transformers.attn_implementation: wanted no such key"),
        (["model.transformers.model_type=null"], "model.transformers: got no model_type"),
        (["model.experts=7"], "model.experts must be a multiple of 2"),
        (["model.pretrained=/no/such"], "model.pretrained: /no/such/config.json: FileNotFoundError"),
    ],
)
def test_what_does_not_fit_is_named(prepared: Callable[..., Config], given: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepared("model=qwen3_moe_tiny", "parallel.device=cpu", *given)


def test_routers_without_a_bias_refuse_a_rate(prepared: Callable[..., Config], tmp_path: Path):
    config = prepared("model=qwen3_moe_tiny", "model.balance_rate=0.1", "parallel.ranks=1", "parallel.device=cpu")
    (message,) = run_again(refusal, (config, tmp_path), world_size=1, timeout=120, device="cpu")
    assert message.startswith("model.balance_rate: got 0.1, want 0: routers of qwen3_moe have no bias")


def test_the_dispatcher_has_the_nodes_per_token_of_the_config(prepared: Callable[..., Config], tmp_path: Path):
    given = "model=qwen3_moe_tiny", "dispatcher=hierarchical", "dispatcher.nodes_per_token=3", "parallel.ranks=2"
    config = prepared(*given, "parallel.device=cpu")
    for message in run_again(refusal, (config, tmp_path), world_size=2, timeout=120, device="cpu"):
        assert message.startswith("nodes_per_token: got 3, wanted 1 to 1, the nodes")


def test_on_gpus_fp32_wants_the_reference_backend(prepared: Callable[..., Config]):
    given = "model=qwen3_moe_tiny", "parallel.device=cuda", "parallel.ranks=1", "train.precision=32-true"
    for backend in ("auto", "dequant"):
        config = prepared(*given, f"backend={backend}")
        with pytest.raises(ConfigError, match=f"32-true: got backend={backend}, want backend=reference"):
            CausalLM(config, Recipe.named("bf16"), None, torch.device("cuda"))


def refusal(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(ValueError, match="got") as error:
        make_trainer(rank, config, folder)
    return str(error.value)


def test_a_checkpoint_cannot_have_the_command_interpolate_or_download(prepared: Callable[..., Config]):
    saved = to_json(prepared("model=qwen3_moe_tiny"))
    saved["model"]["transformers"]["rope_parameters"] = {"rope_type": "${oc.env:HOME}"}
    with pytest.raises(ConfigError, match=r"model.transformers: got .*, wanted plain text"):
        restore(composed("model=small"), saved, [])
    saved["model"]["transformers"] |= {"rope_parameters": None, "attn_implementation": "some/kernel"}
    with pytest.raises(ConfigError, match="attn_implementation: wanted no such key"):
        resolve(restore(composed("model=small"), saved, []))


def test_more_layers_than_the_folder_has_are_refused(prepared: Callable[..., Config], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"model.layers: got 3, but .*config.json has 2"):
        prepared(f"model.pretrained={tmp_path}", "model.layers=3")
    with pytest.raises(ConfigError, match="leave it out"):
        prepared(f"model.pretrained={tmp_path}", f"resume={tmp_path}")
