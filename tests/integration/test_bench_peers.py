"""peers.py: processes and reference, on a CPU; no peer but the baseline runs there."""

import json
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import peers
from mxep.integration.metrics import snr

TINY = peers.SHAPES["tiny"]


@pytest.fixture
def quick_start(monkeypatch):
    """Processes are forks of the fork server, which has imported torch, instead of interpreters that would."""
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)


def test_a_run_has_each_peers_figures_or_reason(tmp_path, monkeypatch, quick_start):
    for name in peers.CACHES:
        monkeypatch.setenv(name, "0")  # the run sets them
    run = ["--peers", "grouped_mm bf16", "mxep mxfp8, kept", "ScatterMoE bf16", "--shapes", "tiny", "--tokens", "48"]
    times = ["--seconds", "0.01", "--rounds", "2", "--limit", "200", "--device", "cpu", "--commit", "abc"]
    peers.main([*run, *times, "--out", str(tmp_path / "run.json")])
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["commit"] == "abc"
    assert {"torch", "triton"} <= result["versions"].keys()
    baseline, mxfp8, scattermoe = result["rows"]
    assert min(baseline["dB"].values()) > 40
    assert 20 < min(mxfp8["dB"].values()) < 26
    assert baseline["dB"].keys() == set(peers.RESULTS)
    assert "scattermoe" in scattermoe["error"]


def test_a_process_that_does_not_answer_in_time_is_ended_and_says_so(quick_start):
    process = peers.Process("mxep bf16", SimpleNamespace(device="cpu", limit=0.01))
    answer = process.ask("prepare", "tiny", 48, None)
    assert answer == {"error": "prepare: no answer within 0 s"}
    assert process.pool is None


def test_the_reference_is_what_autograd_finds_in_fp64():
    given = TINY.draw(40, torch.device("cpu"))
    leaves = given.x, given.weights, given.gate_up_proj, given.down_proj
    x, weights, w13, w2 = (each.double().requires_grad_() for each in leaves)
    gate, up = torch.einsum("td,tknd->tkn", x, w13[given.expert_ids.long()]).chunk(2, -1)
    y = torch.einsum("tkf,tkdf->tkd", F.silu(gate) * up, w2[given.expert_ids.long()])
    out = (y * weights[:, :, None]).sum(1)
    wanted = [out, *torch.autograd.grad(out, (x, weights, w13, w2), given.d_out.double())]
    found = peers.reference(given)
    assert list(found) == list(peers.RESULTS)
    for name, each in zip(peers.RESULTS, wanted):
        assert snr(each.detach(), found[name]) > 120, name


def test_an_unknown_peer_or_shape_ends_the_run_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--out", "x", "--shapes", "mixtral"])
    assert "Mixtral 8x7B" in capsys.readouterr().err
