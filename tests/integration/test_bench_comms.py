"""bench=comms: counts bytes as they are, and one rank's failure is all ranks'."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import comms, script
from benchmarks.comms import CALLS, Shape, Traffic, routing
from benchmarks.timer import Alternative
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank
from mxep.integration.report import Report
from ranks import run_again

HEADLINE, SMALL = Shape(24, 64, 8, 2), Shape(16, 32, 4, 1)
SHAPES = "bench.shapes={headline:[[24,64,8,2],[16,32,4,1],[16,32,3,1]],skew:[[24,64,8,2]]}"
ALWAYS = {*CALLS, "gloo bf16", "gloo bf16, combine"}
EVERYTHING = ALWAYS | {f"{name}, {comms.FEW} SMs" for name in CALLS}


def leaving(shape: Shape, skew: float = 0.0) -> dict[str, int]:
    """Rows that leave the rank of 2 which sends most, counted one by one: for tokens, and for pairs; back likewise."""
    tokens, pairs = [0, 0], [0, 0]
    for rank in range(2):
        ids = routing(shape.tokens, shape.experts, shape.top_k, skew, torch.Generator().manual_seed(1000 + rank))
        for chosen in ids.tolist():
            away = sum(expert * 2 // shape.experts != rank for expert in chosen)
            tokens[rank] += away > 0
            pairs[rank] += away
    # What one of two ranks sends, the other sends back: the largest is the same.
    return {"tokens": max(tokens), "pairs": max(pairs)}


def test_everything_is_measured_on_two_cpu_ranks_from_end_to_end(mxep, tmp_path: Path):
    out = tmp_path / "out.json"
    on_cpu = ("task=bench", "bench=comms", "bench.device=cpu", "parallel.ranks=2", "parallel.timeout=120")
    finished = mxep(*on_cpu, SHAPES, f"bench.out={out}", "bench.commit=abc1234")
    assert finished.code == 0, finished.out + finished.err
    results = json.loads(out.read_text())
    assert {"what", "device", "versions", "date", "command", "seconds", "ceilings", "commit"} <= results.keys()
    assert (results["what"], results["ceilings"]) == ("mxep comms, 2 ranks", {"NVLink GB/s": comms.WIRE})
    by_shape = {
        (section, tuple(row["shape"])): [other for other in rows if other["shape"] == row["shape"]]
        for section, rows in results["sections"].items()
        for row in rows
    }
    (uneven,) = by_shape.pop(("headline", (16, 32, 3, 1)))
    assert uneven["note"] == "3 experts are not the same number on each rank"
    wanted = {("headline", HEADLINE): EVERYTHING, ("headline", SMALL): EVERYTHING}
    wanted |= {("skew", HEADLINE): ALWAYS}
    assert {key: {row["what"] for row in rows} for key, rows in by_shape.items()} == wanted
    for (section, shape), rows in by_shape.items():
        sent = leaving(Shape(*shape), comms.SKEWS[section])
        us = {row["what"]: row["us"] for row in rows}
        for row in rows:
            what = row["what"]
            assert (row["ranks"], row["skew"]) == (2, comms.SKEWS[section])
            row_bytes = shape[1] + shape[1] // 32 if "mxfp8" in what else 2 * shape[1]
            apart = what.startswith("gloo")
            assert row["wire bytes"] == sent["pairs" if apart else "tokens"] * row_bytes
            assert row["wire GB/s"] == pytest.approx(row["wire bytes"] / row["us"] / 1e3, rel=1e-3)
            assert row["of wire"] == pytest.approx(row["wire GB/s"] / comms.WIRE, rel=1e-3)
            peer = "gloo bf16, combine" if "combine" in what else "gloo bf16"
            assert row["x bf16"] == pytest.approx(us[peer] / us[what], rel=1e-3)
    assert "combine bf16, 32 SMs" in finished.out


def test_traffic_counts_a_token_once_a_rank_and_a_pair_each_time():
    ids = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [1, -1]]])  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
    traffic = Traffic.of(ids, experts=4)
    assert traffic == Traffic(tokens=[[1, 1], [2, 1]], pairs=[[2, 2], [2, 1]])
    lopsided = Traffic(tokens=[[9, 1, 0], [4, 9, 5], [1, 2, 9]], pairs=[[9, 2, 0], [8, 9, 5], [2, 4, 9]])
    assert (lopsided.leaving(), lopsided.leaving(combine=True)) == ((9, 13), (5, 10))
    assert (lopsided.most_pairs, lopsided.capacity(10), lopsided.capacity(19)) == (19, 1.9, 1.25)


def test_routing_draws_different_experts_and_skew_prefers_the_first():
    shape = Shape(4096, 32, 8, 3)
    for skew in (0.0, 1.0):
        ids = routing(shape.tokens, shape.experts, shape.top_k, skew, torch.Generator().manual_seed(0))
        assert ids.dtype == torch.int32
        assert (ids.sort(1).values.diff(dim=1) > 0).all()
        share = ids[:, 0].bincount(minlength=8) / len(ids)
        popularity = torch.arange(1, 9) ** -skew
        # The first of a draw without replacement has these probabilities; sigma of a share is below 0.5 / 64.
        assert torch.allclose(share, popularity / popularity.sum(), atol=4 * 0.5 / 64)


def fail_on_one(rank: Rank) -> dict[str, dict[str, object]]:
    transport = comms.open_transport(rank)

    def fail() -> None:
        if rank.rank == 1:
            raise KeyError("mine alone")

    def sleepy() -> None:
        time.sleep(0.004 * rank.rank)

    alternatives = {"fails": Alternative(lambda: [fail]), "works": Alternative(lambda: [sleepy])}
    found = comms.make_timer(rank.device, lambda: transport.barrier("bench")).compare(alternatives)
    transport.close()
    return found


def test_a_failure_of_one_rank_is_known_to_all_and_the_slowest_rank_counts():
    ranks = run_again(fail_on_one, world_size=2, device="cpu", timeout=60)
    assert ranks[0] == ranks[1]
    assert ranks[0]["fails"] == {"error": "rank 1: KeyError: 'mine alone'"}
    assert ranks[0]["works"]["us"] >= 4000


def test_one_rank_alone_is_refused(make_config):
    config = make_config("task=bench", "bench=comms").bench
    with pytest.raises(ConfigError, match="wants at least 2 ranks, got 1"):
        list(comms.measure(script.Bench(Rank(0, 1, torch.device("cpu")), config, 0, Report("", {}, {}))))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="measures at least two GPUs")
def test_on_gpus_everything_has_figures_in_a_graph(mxep, tmp_path: Path):
    shapes = "{headline:[[256,512,16,2],[256,512,16,1]],skew:[[256,512,16,2]]}"
    finished = mxep("task=bench", "bench=comms", "parallel.ranks=2", f"bench.shapes={shapes}")
    assert finished.code == 0, finished.out + finished.err
    sections = json.loads((tmp_path / "run" / "bench.json").read_text())["sections"]
    for rows in sections.values():
        assert all(0 < row["us"] < 1e4 and "note" not in row for row in rows)
