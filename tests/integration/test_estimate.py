"""task=estimate: its formulas against the code's own shapes and real routings, its errors against what was measured."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import estimate as task
from benchmarks.comms import Traffic, routing
from benchmarks.estimate import Layout, fit, read
from benchmarks.layer_cases import MX, Shape
from composed import composed
from mxep.comms import Capacity
from mxep.integration.config import ConfigError, prepare
from mxep.integration.schema import Config

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RATES = [str(RESULTS / f"{name}-h200.json") for name in ("layer", "host")]
DEEPSEEK = {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256}
DEEPSEEK |= {"num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_shared_experts": 1}


def prepared(*overrides: str) -> Config:
    given = ["task=estimate", f"estimate.rates=[{','.join(RATES)}]", *overrides]
    return prepare(composed(*given), given)[0]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 32])
def test_an_even_routing_sends_what_is_expected(ranks: int):
    shape, node = Shape(2000, 64, 32, 64, 6), min(ranks, 4)
    ids = torch.stack([routing(shape.tokens, 64, 6, 0.0, torch.Generator().manual_seed(rank)) for rank in range(ranks)])
    drawn = Traffic.of(ids, shape.experts)
    pairs, even, worst = (
        Layout(shape, ranks, f"mxfp8/{name}", capacity, node=node)
        for name, capacity in (
            ("all_to_all", Capacity.worst_case()),
            ("hierarchical", Capacity.factor(1.0)),
            ("hierarchical", Capacity.worst_case()),
        )
    )
    assert pairs.most_pairs == pytest.approx(drawn.most_pairs, rel=0.05)
    assert pairs.leaving() == pytest.approx(drawn.leaving(), rel=0.05)
    row = 2 * (shape.dim + shape.dim // 32 + 2 * shape.dim)
    near, far = pairs.wire
    of_pairs = [
        [sum(row[q] for q in range(ranks) if q != r and q // node == r // node)] for r, row in enumerate(drawn.pairs)
    ]
    assert near == pytest.approx(row * sum(map(sum, of_pairs)) / ranks, rel=0.05)
    assert near + far == pytest.approx(row * pairs.leaving()[1])
    nodes = ids.div(shape.experts // ranks * node, rounding_mode="floor")
    needed = torch.stack([(nodes == one).any(2) for one in range(ranks // node)], 2)  # (W, T, nodes)
    here = torch.arange(ranks) // node
    across = (needed.sum((1, 2)) - needed[torch.arange(ranks), :, here].sum(1)).double().mean().item()
    inside, outside = even.wire
    assert outside == pytest.approx(row * across, rel=0.02)  # as many slots as an even routing needs
    assert worst.wire[1] == row * shape.tokens * (ranks // node - 1)
    counted = (
        sum(map(sum, drawn.tokens))
        - sum(drawn.tokens[r][q] for r in range(ranks) for q in range(r % node, ranks, node))
    ) / ranks
    assert inside == pytest.approx(row * counted, rel=0.02)


def test_times_of_mxep_are_those_measured_within_10_percent_at_full_size() -> None:
    """docs/guides/scaling.md. Few rows an expert, or what the host launches, may be off by more."""
    rows = read(RATES)
    rates, off = fit(rows), {}
    for row in (*rows, *read([str(RESULTS / "eager-models-h200.json")])):
        if row["section"] in ("layer", "eager") and row["what"] in (MX, "bf16/symmetric") and "ms" in row:
            layout = Layout(Shape(*row["shape"]), row["ranks"], row["what"])
            off[row["section"], row["model"], row["ranks"], row["what"]] = (
                sum(rates.stages(layout).values()) / 1e3 / row["ms"] - 1
            )
    assert len({model for _, model, ranks, _ in off if ranks == 4}) == 6
    assert len(off) >= 24
    assert max(map(abs, off.values())) < 0.10, off


@pytest.mark.parametrize(
    ("given", "sizes", "layers"),
    [
        (DEEPSEEK, (7168, 2048, 256, 8), 58),
        (
            {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
            | {"num_experts_per_tok": 8, "num_hidden_layers": 48, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
            (2048, 768, 128, 8),
            23,
        ),
        (
            {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
            | {"num_hidden_layers": 32},
            (4096, 14336, 8, 2),
            32,
        ),
        (
            {
                "text_config": {"hidden_size": 5120, "intermediate_size": 8192, "num_local_experts": 16}
                | {
                    "num_experts_per_tok": 1,
                    "num_hidden_layers": 48,
                    "interleave_moe_layer_step": 2,
                    "moe_layers": None,
                }
            },
            (5120, 8192, 16, 1),
            24,
        ),
    ],
    ids=["deepseek", "qwen3", "mixtral", "llama4"],
)
def test_a_config_of_transformers_is_read(tmp_path: Path, given: dict, sizes: tuple[int, ...], layers: int):
    (tmp_path / "config.json").write_text(json.dumps(given))
    for model in (tmp_path, tmp_path / "config.json"):
        assert task.model_of(prepared(f"estimate.model={model}")) == (Shape(8192, *sizes), layers)


def test_the_tables_are_80_wide_and_mark_what_is_extrapolated(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    sizes = "estimate.nodes=64", "estimate.layers=4", "dispatcher.capacity=factor"
    config = prepared(f"estimate.model={tmp_path}", *sizes)
    report = task.estimate(config)
    console = Console(width=80, record=True, file=io.StringIO())
    report.show(console)
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    rows = {row["layout"]: row for row in report.sections["layouts"].rows}
    assert sum("best" in row for row in rows.values()) == 3
    assert rows["mxfp8/all_to_all 256"]["note"].removeprefix("best ") == "~"
    assert rows["mxfp8/symmetric 4"]["net MB"] == 0 < rows["mxfp8/all_to_all 16"]["net MB"]
    for row in rows.values():
        assert sum(row["stages"].values()) == pytest.approx(1e3 * row["ms"], rel=1e-3)
        assert sum(row["memory"].values()) == pytest.approx(row["GiB"], rel=1e-3)


def test_gate_up_kept_in_fp8_is_half_of_it_and_more_of_swiglu():
    given = "model.dim=4096", "model.hidden_dim=1536", "model.experts=128", "model.top_k=8", "estimate.layers=3"
    recipes = "estimate.recipes=[mxfp8,mxfp8_gate_up_fp8]"
    rows = {row["layout"]: row for row in task.estimate(prepared(*given, recipes)).sections["layouts"].rows}
    plain, kept = rows["mxfp8/symmetric 8"], rows["mxfp8/symmetric, gate_up_fp8 8"]
    assert (plain["recipe"], kept["recipe"]) == ("mxfp8", "mxfp8_gate_up_fp8")
    assert 0.5 < kept["memory"]["kept"] / plain["memory"]["kept"] < 0.7
    assert kept["GiB"] < plain["GiB"]
    assert kept["stages"]["GEMMs"] == plain["stages"]["GEMMs"]
    assert kept["stages"]["SwiGLU"] == pytest.approx(18 / 14 * plain["stages"]["SwiGLU"], rel=1e-3)


def test_a_faster_network_and_fewer_rows_cost_less():
    def ms(*overrides: str) -> dict[str, float]:
        given = "model.dim=4096", "model.hidden_dim=1536", "model.experts=128", "model.top_k=8", "estimate.nodes=4"
        report = task.estimate(prepared(*given, "estimate.recipes=[mxfp8]", *overrides))
        return {row["layout"]: row["ms"] for row in report.sections["layouts"].rows}

    changed = "network=100", "nvlink=900"
    plain, (network, nvlink) = ms(), (ms(f"estimate.{each}") for each in changed)
    factor = "dispatcher=hierarchical", "dispatcher.capacity=factor", "dispatcher.factor=1.25"
    bounded = [ms(*factor, f"dispatcher.nodes_per_token={most}")["mxfp8/hierarchical 32"] for most in (1, 2, 4)]
    assert bounded[0] < bounded[1] < bounded[2] == ms(*factor)["mxfp8/hierarchical 32"]
    for name in ("all_to_all", "hierarchical"):
        assert plain[f"mxfp8/{name} 32"] > network[f"mxfp8/{name} 32"]
    assert plain["mxfp8/hierarchical 32"] > nvlink["mxfp8/hierarchical 32"]
    assert plain["mxfp8/symmetric 8"] == network["mxfp8/symmetric 8"] > nvlink["mxfp8/symmetric 8"]


SMALL = "model.dim=2048", "model.hidden_dim=768", "model.experts=128", "model.top_k=8", "estimate.recipes=[mxfp8]"


def rows_of(*overrides: str) -> tuple[dict[str, Any], str]:
    """Rows of layouts by name, and the sentence."""
    report = task.estimate(prepared(*SMALL, *overrides))
    return {row["layout"]: row for row in report.sections["layouts"].rows}, report.about["sentence"]


def test_states_are_sharded_over_copies_where_they_do_not_fit_whole():
    given = "model.layers=48", "estimate.nodes=4", "estimate.micro_batches=2"
    whole, _ = rows_of(*given, "estimate.fsdp=false")
    sharded, sentence = rows_of(*given, "estimate.fsdp=true")
    name = "mxfp8/symmetric 8"  # 4 copies
    for what in ("weights", "gradients", "optimizer"):
        assert sharded[name]["memory"][what] == pytest.approx(whole[name]["memory"][what] / 4, rel=1e-4)
    of_layer = 3 * 16 * 2048 * 768 * 2 / task.GIB
    assert sharded[name]["memory"]["gathered"] == pytest.approx(3 * of_layer, rel=1e-4)
    # Two gathers a micro-batch and a scatter a step, where two passes of a ring made the sum: 5 for 2.
    assert sharded[name]["grad ms"] == pytest.approx(2.5 * whole[name]["grad ms"], rel=1e-4)
    assert "32 copies" not in sentence
    assert re.match(r"EP \d+ inside a node, \d+ copies sharded by FSDP2, fits with [\d.]+ GiB \(", sentence)
    where_needed, _ = rows_of(*given, f"estimate.memory={whole[name]['GiB'] - 1}")
    assert (whole[name]["fsdp"], where_needed[name]["fsdp"], "fsdp" in where_needed[name]["note"]) == (
        False,
        True,
        True,
    )
    assert sharded["mxfp8/all_to_all 32"] == whole["mxfp8/all_to_all 32"], "one copy"
    assert whole[name] == rows_of(*given)[0][name], "it fits"


def test_what_does_not_fit_is_never_the_best():
    rows, sentence = rows_of("model.layers=48", "estimate.memory=20")
    assert not any("best" in row or "best" in row["note"] for row in rows.values())
    assert all("over" in row["note"] for row in rows.values())
    least = min(rows.values(), key=lambda row: row["GiB"])
    assert sentence.startswith(f"Nothing fits in 20 GiB; the least is EP {least['EP']} inside a node")
    assert f"takes {least['GiB']:.1f} GiB" in sentence


def test_it_runs_anywhere_by_the_rates_of_h200s(mxep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    finished = mxep("task=estimate", *SMALL)
    assert finished.code == 0, finished.err
    said = " ".join(finished.out.partition("\nEP ")[2].split())
    assert re.match(r"\d inside a node, \d cop.*, fits with [\d.]+ GiB", said)


def test_a_tiny_model_takes_some_memory():
    report = task.estimate(prepared("model.dim=64", "model.hidden_dim=64", "model.experts=8", "estimate.layers=1"))
    best = re.findall(r"fits with (\d+) MiB", report.about["sentence"])
    assert best
    assert all(0 < int(mib) < 103 for mib in best)


def test_layouts_are_tried_whatever_the_runs_own_ranks_are():
    """Nothing of these fits 3 ranks, which task=estimate does not start."""
    config = prepared("parallel.ranks=3", "model.experts=128", "data.batch=8", "dispatcher=local", "parallel.ep=3")
    assert task.estimate(config).about["sentence"].startswith("EP ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("estimate.recipes=[int8]", "estimate.recipes: got 'int8', wanted some of bf16; fp8; mxfp8"),
        ("estimate.recipes=[]", "estimate.recipes: got '[]', wanted some of bf16; fp8; mxfp8"),
        ("estimate.network=0", "estimate.network: got 0.0: Input should be greater than 0"),
    ],
)
def test_mistakes_are_told(override: str, message: str):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        prepared(override)


def test_a_model_without_experts_and_rates_without_stages_are_told(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="n_routed_experts or num_experts"):
        task.estimate(prepared(f"estimate.model={tmp_path}"))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xe1")
    with pytest.raises(ConfigError, match=r"estimate\.model: UnicodeDecodeError: .*: wanted JSON"):
        task.estimate(prepared(f"estimate.model={tmp_path}"))
    with pytest.raises(ConfigError, match=r"estimate\.model: FileNotFoundError: .*nowhere.*: wanted JSON"):
        task.estimate(prepared("estimate.model=nowhere"))
    with pytest.raises(ValueError, match="no section stages"):
        task.estimate(prepared(f"estimate.rates=[{RESULTS / 'host-h200.json'}]"))
