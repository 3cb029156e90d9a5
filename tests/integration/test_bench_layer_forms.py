"""The script that compares forms of the layer compares steps of the same inputs: on a CPU that stands for a GPU."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from benchmarks import layer_forms
from mxep.ep import experts
from mxep.gemm.backends import Hopper

CPU = torch.device("cpu")


@contextmanager
def capturing(**_: str) -> Iterator[mock.Mock]:
    yield mock.Mock()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_forms, "capturing", capturing)
    for name in ("Stream", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def test_what_a_graph_reads_lives_as_long_as_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    read, grad = [], torch.autograd.grad

    def spy(out, leaves, d_out):
        read[:] = map(weakref.ref, (*leaves, d_out))
        return grad(out, leaves, d_out)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    captured = layer_forms.capture("as it is", (8, 64, 64, 4, 2), 1, CPU)
    gc.collect()
    assert len(read) == 5
    assert all(each() is not None for each in read)
    assert captured.inputs[0] is read[0]()


@pytest.mark.parametrize("form", ["again", "without folded", "composed"])
def test_forms_differ_in_weight_gradients_alone(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(Hopper, "unsupported_reason", lambda *_: None)  # by its ops' references
    for module in (experts, layer_forms):
        monkeypatch.setattr(module, "select", lambda *_: Hopper())
    forms = layer_forms.FORMS[0], form
    one, other = (layer_forms.capture(each, (256, 128, 128, 4, 2), 1, CPU).results for each in forms)
    differing = set() if form == "again" else {"gate_up_proj", "down_proj"}
    assert layer_forms.other_bits(other, one).keys() == differing
    other[1].view(torch.int16)[3, :16] += 1
    assert layer_forms.other_bits(other, one)["dx"] == 16 / (256 * 128)
