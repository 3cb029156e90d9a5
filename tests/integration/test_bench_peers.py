"""peers.py: processes, reference and table, on a CPU; no peer but the baseline runs there."""

import json
import multiprocessing

import pytest
import torch
from torch.nn import functional as F

from benchmarks import peer_layers, peer_table, peers
from mxep.integration.metrics import snr

TINY = peer_layers.SHAPES["tiny"]


@pytest.fixture
def quick_start(monkeypatch):
    """Processes are forks of the fork server, which has imported torch, instead of interpreters that would."""
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)


def test_a_run_has_one_json_and_one_table_with_each_peers_figures_or_reason(tmp_path, monkeypatch, quick_start):
    for name in peers.CACHES:
        monkeypatch.setenv(name, "0")  # the run sets them
    run = ["--peers", "grouped_mm bf16;mxep mxfp8, kept;Liger bf16", "--shapes", "tiny", "--tokens", "48"]
    times = ["--seconds", "0.01", "--rounds", "2", "--limit", "200", "--device", "cpu", "--commit", "abc"]
    peers.main(["layers", *run, *times, "--out", str(tmp_path / "run.json")])
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["commit"] == "abc"
    assert {"torch", "triton"} <= result["versions"].keys()
    baseline, mxfp8, liger = result["layers"]
    assert min(baseline["dB"].values()) > 40
    assert 20 < min(mxfp8["dB"].values()) < 26
    assert baseline["dB"].keys() == set(peer_layers.RESULTS)
    assert "liger_kernel" in liger["error"]

    peers.main(["table", str(tmp_path / "run.json"), "--out", str(tmp_path / "page")])
    table = (tmp_path / "page.md").read_text()
    assert table.count("| grouped_mm bf16 | ") == table.count("| **mxep mxfp8, kept** | ") == 1
    assert f"| Liger bf16 | {liger['error']} |" in table
    assert table.count(" | abc |\n") == 3
    assert "grouped_mm bf16" in (tmp_path / "page.svg").read_text()


def test_a_process_that_does_not_answer_in_time_is_ended_and_says_so(tmp_path, quick_start):
    process = peers.Process("mxep bf16", "cpu", tmp_path)
    answer = process.ask(0.01, "prepare", "tiny", 48, None)
    assert answer == {"error": "prepare: no answer within 0 s"}
    assert process.pool is None


def test_the_reference_is_what_autograd_finds_in_fp64():
    given = peer_layers.Inputs.draw(TINY, 40, torch.device("cpu"))
    x, weights, w13, w2 = (each.double().requires_grad_() for each in (given.x, given.weights, given.w13, given.w2))
    gate, up = torch.einsum("td,tknd->tkn", x, w13[given.ids.long()]).chunk(2, -1)
    y = torch.einsum("tkf,tkdf->tkd", F.silu(gate) * up, w2[given.ids.long()])
    out = (y * weights[:, :, None]).sum(1)
    wanted = [out, *torch.autograd.grad(out, (x, weights, w13, w2), given.d_out.double())]
    found = peer_layers.reference(given)
    assert list(found) == list(peer_layers.RESULTS)
    for name, each in zip(peer_layers.RESULTS, wanted):
        assert snr(each.detach(), found[name]) > 120, name


def row(peer, ms, db, kept):
    rows = {"shape": "s", "tokens": 8, "rows an expert": 4.0, "spread": 0.0, "TF": 1.0, "peak": kept}
    return rows | {"peer": peer, "ms": ms, "kept": kept << 20, "dB": dict.fromkeys(peer_layers.RESULTS, db)}


def test_the_table_says_first_where_a_peer_that_is_as_exact_is_ahead():
    rows = [
        row("peer bf16", 2.0, 50.0, 4),
        row("mxep bf16", 3.0, 49.0, 3),
        row("mxep mxfp8", 1.0, 23.0, 1),
        row("peer fp8", 1.5, 23.5, 2),
        row("mxep mxfp8, kept", 0.5, 23.0, 5),
    ]
    result = {"device": "d", "driver": None, "commit": "c", "versions": {}, "layers": rows}
    faster, keeps = peer_table.markdown([result]).partition("### ")[0].split("**")[2::2]
    assert faster.split("\n- ")[1:] == ["s, 8: peer bf16 2.00, mxep bf16 3.00\n\n"]
    assert keeps.split() == ["-", "nowhere"]
    groups = peer_table.grouped(rows)
    assert [[each["peer"] for each in group] for group in groups] == [
        ["peer bf16", "mxep bf16"],
        ["mxep mxfp8, kept", "mxep mxfp8", "peer fp8"],
    ]


def test_a_later_run_replaces_times_and_an_error_replaces_none():
    failed = {key: each for key, each in row("peer", 0.0, 50.0, 4).items() if key != "ms"} | {"error": "late"}
    runs = [
        {"commit": "old", "layers": [row("peer", 2.0, 50.0, 4), row("mxep bf16", 3.0, 49.0, 3)]},
        {"commit": "new", "layers": [failed, row("mxep bf16", 1.0, 49.0, 3)]},
    ]
    found = peer_table.by_cell(runs)["s", 8]
    assert [(each["peer"], each["ms"], each["commit"]) for each in found] == [
        ("peer", 2.0, "old"),
        ("mxep bf16", 1.0, "new"),
    ]


def test_a_peer_more_exact_than_anything_of_ours_is_not_compared_in_silence():
    rows = [row("peer", 2.0, 30.0, 4), row("mxep mxfp8", 1.0, 23.0, 1)]
    assert peer_table.losses("s", rows, "ms", ".2f", 1.0) == ["- s: nothing of ours is as exact as peer (30.0 dB)"]


def test_an_unknown_peer_or_shape_ends_the_run_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        peers.main(["layers", "--shapes", "mixtral"])
    assert "Mixtral 8x7B" in capsys.readouterr().err
