"""The study of one scale an expert says what docs/lab/quant-kernels.md says of it, at smaller sizes."""

import pytest
import torch

from benchmarks import accuracy


def test_one_scale_an_expert_is_as_good_as_one_a_row_but_for_channels_of_small_rows(monkeypatch):
    for name, size in (("M", 64), ("N", 256), ("K", 256)):
        monkeypatch.setattr(accuracy, name, size)
    torch.manual_seed(0)
    rows = [[float(x) for x in line.split(" | ")[1:]] for line in accuracy.of_weights()[1:]]
    assert len(rows) == len(accuracy.weights())
    for forward, _, of_expert, _, dgrad, dgrad_of_expert, *_ in rows:
        assert of_expert == pytest.approx(forward, abs=0.05)
        assert dgrad_of_expert == pytest.approx(dgrad, abs=0.05)
        assert forward > 27 < dgrad
    assert all(of_expert == pytest.approx(worst, abs=0.3) for _, worst, _, of_expert, *_ in rows[:-1])
    assert rows[-1][3] < 15 < 20 < rows[-1][1], "rows of 16 binades lose channels"
