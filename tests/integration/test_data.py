"""Texts as bytes and as tokens: sources, held-out chunks, batches, tokenizers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from integration.test_train import losses, make_trainer, train_stop_and_resume
from mxep.integration import checkpoint
from mxep.integration.config import ConfigError, to_json
from mxep.integration.data import HELD_OUT, Text, make_batch, read_text, vocabulary_of
from mxep.integration.launch import Rank
from mxep.integration.schema import Config, DataConfig
from ranks import run_again


def load_text(path: str | None, *, max_bytes: int = 10**6, length: int) -> Text:
    return read_text(DataConfig(path, max_bytes, 1, length))


def test_ranks_share_the_batch_that_one_rank_would_take(text: Path):
    train = load_text(str(text), length=32).train
    whole = make_batch(train, seed=1, step=5, batch=8, length=32)
    shares = [make_batch(train, seed=1, step=5, batch=8, length=32, rank=rank, ranks=4) for rank in range(4)]
    for i in range(2):
        assert torch.equal(torch.cat([share[i] for share in shares]), whole[i])


def test_batches_differ_by_seed_and_step_and_repeat(text: Path):
    train = load_text(str(text), length=32).train
    first, again, other_step, other_seed = (
        make_batch(train, seed=seed, step=step, batch=4, length=32)[0]
        for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_step)
    assert not torch.equal(first, other_seed)


def test_every_16th_chunk_is_held_out(tmp_path: Path):
    file = tmp_path / "bytes.txt"
    file.write_bytes(bytes(i // 10 % 256 for i in range(16 * 160)))  # chunks of 160 bytes
    text = load_text(str(file), length=8)
    raw = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    assert torch.equal(text.valid, raw[160 * (HELD_OUT - 1) : 160 * HELD_OUT])
    assert torch.equal(text.train, raw[: 160 * (HELD_OUT - 1)])


def test_entropy_of_equally_frequent_bytes_is_their_logarithm(tmp_path: Path):
    file = tmp_path / "bytes.txt"
    file.write_bytes(bytes(range(64)) * 100)
    assert load_text(str(file), length=8).entropy == pytest.approx(6 * 0.6931471805599453)


def test_a_folder_is_read_in_sorted_order_without_tests_up_to_the_cap(tmp_path: Path):
    for name, byte in (("b.py", b"b"), ("a.py", b"a"), ("tests/c.py", b"c"), ("d.bin", b"d")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(byte * 2000)
    text = load_text(str(tmp_path), max_bytes=3200, length=8)
    assert bytes(text.train[:1900].tolist()) == b"a" * 1900
    assert len(text.train) + len(text.valid) == 3200
    assert set(text.train.tolist()) == set(b"ab")


def test_the_standard_library_is_found():
    text = load_text(None, length=128)
    assert len(text.train) + len(text.valid) == 10**6
    assert 2 < text.entropy < 4


def test_a_text_that_is_too_short_is_refused(tmp_path: Path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="got 5 bytes, wanted at least"):
        load_text(str(tmp_path / "short.txt"), length=32)


@pytest.mark.parametrize("windows", [1, 2, 5])
def test_windows_begin_anywhere_and_the_last_one_ends_with_the_last_token(windows: int):
    length = 8
    text = torch.arange(length + windows, dtype=torch.int32)
    starts, ends = set(), set()
    for step in range(20):
        inputs, targets = make_batch(text, seed=0, step=step, batch=8, length=length)
        assert (inputs.shape, targets.shape) == ((8, length), (8, length))
        assert torch.equal(targets, inputs + 1)
        starts |= set(inputs[:, 0].tolist())
        ends |= set(targets[:, -1].tolist())
    assert starts == set(range(windows))
    assert max(ends) == length + windows - 1


def read(rank: Rank, config: Config) -> Text:
    return read_text(config.data)


def test_all_ranks_read_the_tokens_of_one_bpe_which_are_the_text(prepared: Callable[..., Config], text: Path):
    config = prepared("data.vocabulary=300", "parallel.ranks=2")
    first, second = run_again(read, (config,), world_size=2, timeout=60, device="cpu")
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
    (row,) = run_again(first_step, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert row["token_loss"] == pytest.approx(torch.log(torch.tensor(300.0)).item(), rel=0.02)  # it knows nothing yet
    assert row["loss"] == pytest.approx(row["token_loss"] / row["bytes_per_token"])
    assert row["valid"] == pytest.approx(row["loss"], rel=0.2)  # after a step


def test_a_run_on_tokens_resumes_bit_for_bit_with_the_tokenizer_of_its_checkpoint(
    prepared: Callable[..., Config], tmp_path: Path
):
    given = "parallel.ranks=2", "train.steps=4", "train.checkpoint_every=3", "train.compare=false"
    config = prepared("model=tiny", "data.vocabulary=300", *given)
    whole, _, rest = run_again(train_stop_and_resume, (config, tmp_path), world_size=2, timeout=60, device="cpu")[0]
    assert losses(rest) == losses(whole)
    saved = checkpoint.find(tmp_path / "half")["mxfp8"]
    kept = (saved / checkpoint.TOKENIZER).read_text()
    assert (tmp_path / "half" / checkpoint.TOKENIZER).read_text() == kept
    resumed = prepared(f"resume={saved}", "parallel.ranks=2")
    assert (resumed.data.tokenizer, resumed.data.vocabulary) == (str(saved / checkpoint.TOKENIZER), None)
    assert vocabulary_of(resumed.data) == 300
    assert checkpoint.same_text(to_json(config)["data"], dataclasses.asdict(resumed.data))
    assert read_text(resumed.data).tokenizer == kept
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


def test_more_tokens_than_the_text_has_pairs_are_refused(prepared: Callable[..., Config]):
    with pytest.raises(
        ValueError, match=r"data.vocabulary: got 100000, wanted at most \d+: the text has no more pairs"
    ):
        read_text(prepared("data.vocabulary=100000").data)
