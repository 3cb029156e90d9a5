"""The front page: its picture and figures are those of docs/results, its code runs."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import front_page
from benchmarks.model import QWEN3
from mxep.integration.flops import flops_per_token
from ranks import Context, distributed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
PAGE = (ROOT / "README.md").read_text()
TEXT = " ".join(PAGE.split())
LAYER, HUGGING_FACE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(OWN,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/one-node.md").read_text(), re.S)


def results(name: str, gpu: str = "h200") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}-{gpu}.json").read_text())
    return found


def layers() -> list[dict[str, Any]]:
    return [results(name) for name in front_page.LAYERS]


def test_the_pictures_are_those_of_the_results() -> None:
    for file, drawn in front_page.pictures(RESULTS).items():
        assert drawn == (RESULTS / file).read_text(), "python integration/benchmarks/front_page.py docs/results"
    assert "docs/results/front-page.svg" in TEXT


def test_the_pictures_have_every_figure() -> None:
    pictures = front_page.pictures(RESULTS)
    models = front_page.by_model(row for each in layers() for row in each["sections"]["eager"])
    assert set(models) == front_page.NAMES.keys()
    for rows in models.values():
        assert {row["what"] for row in rows} >= {"baseline bf16", "mxep bf16", "mxep mxfp8"}
        assert len({row["what"] for row in rows}) == len(rows), "a case twice"
        for row in rows:
            assert f">{row['ms']:.1f}{front_page.times(row)}<" in pictures["front-page.svg"]
    (steps,) = front_page.by_model(results(front_page.MODEL)["sections"]["model"]).values()
    assert [row["what"] for row in steps] == ["baseline bf16", "mxep bf16", "mxep mxfp8"]
    for row in steps:
        assert f">{row['tokens/s a GPU'] / 1e3:.1f}k{front_page.times(row)}<" in pictures["front-page.svg"]
    assert pictures["losses.svg"].count("<polyline") == 6, "two means, a line at zero and three seeds"
    for row in results("peers-10", "h100")["rows"]:
        if row["tokens"] == front_page.PEER_TOKENS and "ms" in row and "235B" in row["shape"]:
            assert f">{row['ms']:.3g} ms, " in pictures["peers-h100.svg"]


def test_the_page_is_read_in_a_minute() -> None:
    assert len(re.sub(r"```.*?```", "", PAGE, flags=re.S).split()) <= 700


def test_the_text_has_the_figures_of_the_results() -> None:
    found = [each["sections"]["eager"] for each in layers()]
    times = [row["x bf16"] for rows in found for row in rows if row["what"] == "mxfp8/symmetric"]
    assert len(times) == 6
    assert f"six models, 2 H200s | {min(times):.1f} to {max(times):.1f} times as fast |" in TEXT

    steps = {row["what"]: row["TFLOP/s"] for row in results(front_page.MODEL)["sections"]["model"]}
    ours, theirs = steps["mxep mxfp8"], steps["baseline"]
    assert f"2 H200s | {ours:.0f} TFLOP/s per GPU | the same baseline: {theirs:.0f}, both after `optimize` |" in TEXT
    rows = [row for row in results("step-2gpu", "h100")["rows"] if "ms" in row and row["routing"] == "forced"]
    forced = {(row["kind"], row["layers"]): row["ms"] for row in reversed(rows)}  # the newest is first
    few, many = (forced["mxep_mxfp8 + optimize", layers] for layers in (8, 16))
    whole = many + 4 * (many - few)  # 32 layers more, 8 apart
    rate = flops_of_layers(48) * 8 * 8192 / 1e9 / whole
    assert f"48 layers, experts balanced by force | {rate:.0f} TFLOP/s per GPU | NVIDIA" in TEXT

    files = (results(f"peers-{run}", "h100")["rows"] for run in (2, 4, 10))  # a later one replaces times
    timed = [row for rows in files for row in rows if "30B" in row["shape"] and "ms" in row]
    peers = {(row["peer"], row["rows an expert"]): row["ms"] for row in timed}
    mine = "MXFP8 {:.2f} ms, bf16 {:.2f}".format(*(peers[f"mxep {recipe}", 2048] for recipe in ("mxfp8", "bf16")))
    names = {"SonicMoE": "SonicMoE bf16", "torchao FP8": "torchao fp8 row"}
    others = ", ".join(f"{name} {peers[peer, 2048]:.2f}" for name, peer in names.items())
    assert f"2048 rows each, one H100 | {mine} | on other H100s: {others} |" in TEXT

    lora = {(row["kind"], row["layers"]): row for row in results("lora-model", "h100")["rows"]}
    peaks = [lora[fmt, 48]["peak GiB"] for fmt in ("mxfp8", "mxfp4")]
    assert "| {:.0f} GiB in MXFP8, {:.0f} in MXFP4 |".format(*peaks) in TEXT


def flops_of_layers(layers: int) -> float:
    """FLOPs of a token in Qwen3-30B-A3B, sequences of 4096."""
    return sum(flops_per_token(SimpleNamespace(**QWEN3 | {"num_hidden_layers": layers}), 4096).values())


def test_the_layer_prints_losses_that_fall(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(LAYER, "README.md", "exec"), {"__name__": "example"})
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)


@pytest.mark.usefixtures("one_thread")
def test_the_code_for_hugging_face_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from integration.tiny_models import tiny

    tiny("qwen3_moe", vocab_size=256).save_pretrained(tmp_path)
    names: dict[str, Any] = {"FOLDER": str(tmp_path)}
    exec(compile(HUGGING_FACE, "README.md", "exec"), names)
    ids = names["torch"].arange(32)[None]
    assert names["model"](input_ids=ids, labels=ids).loss.isfinite()


@distributed(4)
def test_the_code_with_fsdp2_runs(ctx: Context) -> None:
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    dist.barrier(ctx.group)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(OWN.replace('"cuda"', f'"{ctx.device.type}"'), "README.md", "exec"), names)
    assert names["loss"].isfinite()
