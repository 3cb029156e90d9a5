"""Tokens: a BPE of the text's own or one from a file, alike on all ranks, kept with the run; losses in nats a byte."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer

from integration.conftest import TINY, Finished
from integration.test_train import losses, make_trainer, train_stop_and_resume
from mxep.integration import checkpoint
from mxep.integration.app import register
from mxep.integration.config import ConfigError, prepare, to_json
from mxep.integration.data import Text, read_text, vocabulary_of
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.schema import Config, configs_dir


@pytest.fixture
def prepared(text: Path) -> Callable[..., Config]:
    """prepared(*arguments) -> the config of a command on a tiny text."""

    def prepare_(*arguments: str) -> Config:
        register()
        given = [*TINY, f"data.path={text}", *arguments]
        with initialize_config_dir(str(configs_dir()), version_base="1.3"):
            return prepare(compose("config", given), given)[0]

    return prepare_


def read(rank: Rank, config: Config) -> Text:
    return read_text(config.data)


def test_all_ranks_read_the_tokens_of_one_bpe_which_are_the_text(prepared: Callable[..., Config], text: Path):
    config = prepared("data.vocabulary=300", "parallel.ranks=2")
    first, second = run_ranks(read, (config,), world_size=2, timeout=60, device="cpu")
    assert first.tokenizer == second.tokenizer
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.valid, second.valid)
    tokenizer = Tokenizer.from_str(first.tokenizer)
    assert tokenizer.get_vocab_size() == 300
    assert int(first.train.max()) < 300
    raw = text.read_bytes()
    size = len(raw) // 16
    wanted = raw[: 15 * size] + raw[16 * size :]  # the 16th chunk is held out
    assert tokenizer.decode(first.train.tolist()) == wanted.decode()
    assert tokenizer.decode(first.valid.tolist()) == raw[15 * size : 16 * size].decode()
    assert first.bytes_per_token == len(raw) / (len(first.train) + len(first.valid)) > 1.5


def test_a_sixteenth_is_held_out_of_letters_of_several_bytes_too(prepared: Callable[..., Config], tmp_path: Path):
    file = tmp_path / "letters.txt"
    file.write_text("".join(f"\u0441\u043b\u043e\u0432\u043e {i * i % 97} " for i in range(4000)))
    found = read_text(prepared(f"data.path={file}", "data.vocabulary=300").data)
    assert 0.05 < len(found.valid) / (len(found.train) + len(found.valid)) < 0.075


def test_entropy_is_of_tokens_in_nats_a_byte(prepared: Callable[..., Config]):
    found = read_text(prepared("data.vocabulary=300").data)
    share = torch.bincount(torch.cat((found.train, found.valid))).double()
    share = share[share > 0] / share.sum()
    assert found.entropy * found.bytes_per_token == pytest.approx(-(share * share.log()).sum().item())


def test_bpe_of_256_tokens_is_bytes(prepared: Callable[..., Config]):
    """So a run on it has the losses of bytes, but for which number a byte has."""
    tokens, plain = (read_text(prepared(*more).data) for more in (["data.vocabulary=256"], []))
    assert tokens.bytes_per_token == plain.bytes_per_token == 1
    assert tokens.entropy == pytest.approx(plain.entropy)
    assert len(tokens.train) == len(plain.train)


def first_step(rank: Rank, config: Config, folder: Path) -> dict[str, float]:
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    return trainer.metrics[0] | {"valid": trainer.validate(), "bytes_per_token": trainer.text.bytes_per_token}


@pytest.mark.parametrize("model", ["tiny", "qwen3_moe_tiny"])
def test_a_models_vocabulary_follows_and_losses_are_in_nats_a_byte(
    prepared: Callable[..., Config], tmp_path: Path, model: str
):
    config = prepared(f"model={model}", "data.vocabulary=300", "recipe=bf16", "parallel.ranks=1")
    if model != "tiny":
        assert config.model.transformers["vocab_size"] == 300
    (row,) = run_ranks(first_step, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert row["token_loss"] == pytest.approx(torch.log(torch.tensor(300.0)).item(), rel=0.02)  # it knows nothing yet
    assert row["loss"] == pytest.approx(row["token_loss"] / row["bytes_per_token"])
    assert row["valid"] == pytest.approx(row["loss"], rel=0.2)  # after a step


def test_a_file_is_read_once_while_a_config_is_checked_and_anew_once_it_changed(
    prepared: Callable[..., Config], tmp_path: Path
):
    file = tmp_path / "tokenizer.json"
    found = {"model": {"vocab": {str(i): i for i in range(300)}}, "added_tokens": []}
    for size in (300, 301):
        file.write_text(json.dumps(found))
        with mock.patch.object(json, "loads", side_effect=json.loads) as loads:
            config = prepared("model=qwen3_moe_tiny", f"data.tokenizer={file}")
        assert config.model.transformers["vocab_size"] == size
        assert sum("added_tokens" in call.args[0] for call in loads.call_args_list) == 1
        found["added_tokens"].append({"id": 300})


def test_a_run_on_tokens_resumes_bit_for_bit_with_the_tokenizer_of_its_checkpoint(
    prepared: Callable[..., Config], tmp_path: Path
):
    given = "parallel.ranks=2", "train.steps=4", "train.checkpoint_every=3", "train.compare=false"
    config = prepared("data.vocabulary=300", *given)
    whole, _, rest = run_ranks(train_stop_and_resume, (config, tmp_path), world_size=2, timeout=60, device="cpu")[0]
    assert losses(rest) == losses(whole)
    saved = checkpoint.find(tmp_path / "half")["mxfp8"]
    kept = (saved / checkpoint.TOKENIZER).read_text()
    assert (tmp_path / "half" / checkpoint.TOKENIZER).read_text() == kept
    other = json.loads(kept)
    other["model"]["merges"] = other["model"]["merges"][::-1]
    (saved / checkpoint.TOKENIZER).write_text(json.dumps(other))
    resumed = prepared(f"resume={saved}", "parallel.ranks=2")
    assert (resumed.data.tokenizer, resumed.data.vocabulary) == (str(saved / checkpoint.TOKENIZER), None)
    assert vocabulary_of(resumed.data) == 300
    assert checkpoint.same_text(to_json(config)["data"], dataclasses.asdict(resumed.data))
    assert json.loads(read_text(resumed.data).tokenizer)["model"]["merges"] == other["model"]["merges"]
    with pytest.raises(ConfigError, match=r"data\.vocabulary: the checkpoint that resume names says what tokens are"):
        prepared(f"resume={saved}", "data.vocabulary=400")


def test_a_tokenizer_of_a_file_is_read(prepared: Callable[..., Config], tmp_path: Path):
    made = read_text(prepared("data.vocabulary=290").data)
    file = tmp_path / "tokenizer.json"
    file.write_text(made.tokenizer)
    config = prepared("model=qwen3_moe_tiny", f"data.tokenizer={file}")
    assert config.model.transformers["vocab_size"] == 290
    again = read_text(config.data)
    assert torch.equal(again.train, made.train)
    cutting = Tokenizer.from_file(str(file))
    cutting.enable_truncation(16)
    cutting.enable_padding(length=16)
    cutting.save(str(file))
    assert torch.equal(read_text(prepared(f"data.tokenizer={file}").data).train, made.train)
    larger = prepared("model=qwen3_moe_tiny", f"data.tokenizer={file}", "model.transformers.vocab_size=512")
    assert larger.model.transformers["vocab_size"] == 512


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.vocabulary=255"], "data.vocabulary: got 255, wanted at least 256"),
        (["data.vocabulary=300", "data.tokenizer=x"], "data.vocabulary and data.tokenizer: got both, wanted one"),
        (["data.tokenizer=/no/such"], "data.tokenizer: /no/such: FileNotFoundError"),
        (
            ["model=qwen3_moe_tiny", "data.vocabulary=300", "model.transformers.vocab_size=299"],
            "model.transformers.vocab_size must be at least 300, one for each token of the data, got 299",
        ),
    ],
)
def test_what_does_not_fit_is_named(prepared: Callable[..., Config], given: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepared(*given)


def test_without_the_library_it_says_what_to_install(prepared: Callable[..., Config], monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tokenizers" else find(name))
    prepared()
    with pytest.raises(ConfigError, match=re.escape("pip install 'mxep-integration[tokenizers]'")):
        prepared("data.vocabulary=300")


def test_more_tokens_than_the_text_has_pairs_are_refused(prepared: Callable[..., Config]):
    with pytest.raises(
        RuntimeError, match=r"data.vocabulary: got 100000, wanted at most \d+: the text has no more pairs"
    ):
        read_text(prepared("data.vocabulary=100000").data)


def test_the_command_trains_on_tokens(mxep: Callable[..., Finished], text: Path, tmp_path: Path):
    given = "train.steps=4", "train.checkpoint_every=2", "train.compare=false", "parallel.ranks=1"
    done = mxep(*TINY, f"data.path={text}", "data.vocabulary=300", *given)
    assert done.code == 0, done.err
    again = mxep(f"resume={tmp_path / 'run'}", f"hydra.run.dir={tmp_path / 'more'}", "train.steps=6")
    assert again.code == 0, again.err
    assert "another text" not in again.err
    (run,) = json.loads((tmp_path / "more" / "summary.json").read_text())["runs"]
    assert run["steps"] == 6
