"""The front page: its picture and figures are those of docs/results, its code runs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import front_page
from ranks import Context, distributed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
PAGE = (ROOT / "README.md").read_text()
TEXT = " ".join(PAGE.split())
LAYER, HUGGING_FACE, OWN = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def results(name: str, gpu: str = "h200") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}-{gpu}.json").read_text())
    return found


def test_the_picture_is_that_of_the_results() -> None:
    drawn = front_page.front_page(results("layer"), results("model"))
    assert drawn == (RESULTS / front_page.FILE).read_text(), "python integration/benchmarks/front_page.py docs/results"
    assert f"docs/results/{front_page.FILE}" in TEXT


def test_the_picture_has_every_figure() -> None:
    models = front_page.layer_rows(results("layer"))
    assert set(models) == front_page.NAMES.keys() - {"qwen3_30b_16_layers"}
    for rows in models.values():
        assert {row["what"] for row in rows} >= {"baseline bf16", "mxep bf16", "mxep mxfp8"}
        assert len({row["what"] for row in rows}) == len(rows), "a case twice"
    drawn = front_page.front_page(results("layer"), results("model"))
    for row in [row for rows in models.values() for row in rows]:
        assert f">{row['ms']:.1f}{front_page.times(row)}<" in drawn
    for row in results("model")["sections"]["model"]:
        there = f">{row['tokens/s'] / 1e3:.1f}k{front_page.times(row)}<" in drawn
        assert there == (row["what"] in front_page.SERIES)


def test_the_text_has_the_figures_of_the_results() -> None:
    rows = [row for rows in front_page.layer_rows(results("layer")).values() for row in rows]
    times = [row["x bf16"] for row in rows if row["what"] == "mxep mxfp8"]
    assert f"{min(times):.1f} to {max(times):.1f} times as fast" in TEXT
    found = [results(name)["sections"]["eager"] for name in ("eager-models", "eager-llama4-mixtral")]
    eager = {(row["model"], row["what"]): row for rows in found for row in rows}
    times = [row["x bf16"] for (_, what), row in eager.items() if what == "mxfp8/symmetric"]
    assert len(times) == 6
    assert f"{min(times):.1f} to {max(times):.1f} times on 2, called eagerly" in TEXT
    for model, name in (("mixtral_8x7b", "Mixtral"), ("llama4_scout", "Llama-4 Scout")):
        figures = [eager[model, what]["ms"] for what in ("baseline fp8", "mxfp8/symmetric")]
        assert f"{name} {{:.1f}} and {{:.1f}}".format(*figures) in TEXT

    two, deep, one = (
        {row["what"]: row for row in results(name)["sections"]["model"]} for name in ("model", "model-40", "model-1")
    )
    times = [x["mxep mxfp8"]["x bf16"] for x in (two, deep)]
    assert "16 layers: {:.2f} times on 2, to 40 layers: {:.2f} times".format(*times) in TEXT
    table = " ".join(line for line in PAGE.splitlines() if line.startswith(("| one H200", "| two")))
    for rows, base, whose in ((one, "transformers bf16", "theirs"), (two, "baseline bf16", "baseline")):
        ours = [rows[base]["ms"] / rows[what]["ms"] for what in ("mxep mxfp8", "mxep mxfp8, linear")]
        assert "| {:.2f} times; {:.2f}".format(*ours) in table
        assert (
            "| {:.1f} GiB ({}: {:.1f}) |".format(rows["mxep mxfp8"]["peak GiB"], whose, rows[base]["peak GiB"]) in table
        )

    deepseek = {row["what"]: row["ms"] for row in results("layer")["runs"][0]["sections"]["layer"]}
    assert f"({deepseek['fp8/symmetric']:.1f} ms on DeepSeek-V3, MXFP8 {deepseek['mxfp8/symmetric']:.1f})" in TEXT
    assert (
        f"takes {deepseek['standard fp8']:.1f} ms, mxep's MXFP8 layer {deepseek['mxfp8/symmetric']:.1f} (DeepSeek-V3, 4"
        in TEXT
    )
    runs = [run["sections"]["eager"] for run in results("small-batches")["runs"]]
    eager = {(row["shape"][0], row["what"]): row.get("ms", 0) for row in runs[0]}
    few = [eager[1024, what] for what in ("bf16/symmetric", "mxfp8/symmetric", "baseline bf16")]
    assert "mxep bf16 {:.2f} ms, MXFP8 {:.2f}, the bf16 baseline 3.6 to {:.1f}".format(*few[:2], few[2] + 0.05) in TEXT
    host = {row["what"]: row.get("ms", 0) for row in results("host", "h100")["runs"][-1]["sections"]["host"]}
    hosts = [host[what] for what in ("mxfp8/all_to_all", "baseline bf16", "mxfp8/symmetric")]
    assert "takes {:.2f} ms, the bf16 baseline {:.2f} and `symmetric` {:.2f}".format(*hosts) in TEXT
    titan = {
        (row.get("date"), row["model"], row["case"]): row["tokens_per_second"]
        for row in results("titan")["rows"]
        if row["compile"]
    }

    def times(date: str | None, model: str, case: str) -> float:
        return titan[date, model, case] / titan[date, model, "torchtitan"]

    many, too = (times("2026-11-24", "qwen3-30b", case) for case in ("mxfp8", "mxfp8-linear"))
    again, deepseek = (times("2026-11-25", model, "mxfp8") for model in ("qwen3-30b", "deepseek-16b"))
    assert f"Qwen3-30B-A3B cut to 10 layers: {many:.2f} times; with linears in MXFP8, too: {too:.2f}." in TEXT
    assert f"DeepSeek-V3 16B cut to 13 layers: {deepseek:.2f} times." in TEXT
    few, fp8 = (times(None, "qwen3-30b", case) for case in ("mxfp8", "torchtitan-fp8"))
    assert f"(12 layers): {few:.2f} and {again:.2f} times in two runs; torchao 0.16's FP8: {fp8:.2f}." in TEXT


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
