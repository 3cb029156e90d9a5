"""Text and batches: a batch depends on (seed, step) alone, held-out text is never trained on."""

from pathlib import Path

import pytest
import torch

from mxep.integration.data import HELD_OUT, Text, make_batch, read_text
from mxep.integration.schema import DataConfig


def load_text(path: str | None, *, max_bytes: int = 10**6, length: int) -> Text:
    return read_text(DataConfig(path, max_bytes, 1, length))


def test_ranks_share_the_batch_that_one_rank_would_take(text: Path):
    train = load_text(str(text), length=32).train
    whole = make_batch(train, seed=1, step=5, batch=8, length=32)
    shares = [make_batch(train, seed=1, step=5, batch=8, length=32, rank=rank, ranks=4) for rank in range(4)]
    for i in range(2):
        assert torch.equal(torch.cat([share[i] for share in shares]), whole[i])


def test_targets_are_the_inputs_one_byte_further(text: Path):
    train = load_text(str(text), length=32).train
    inputs, targets = make_batch(train, seed=0, step=0, batch=3, length=32)
    assert inputs.shape == targets.shape == (3, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


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
