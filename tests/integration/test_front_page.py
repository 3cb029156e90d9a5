"""The front page: its picture and figures are those of docs/results, its code runs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import front_page
from ranks import Context, distributed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
PAGE = (ROOT / "README.md").read_text()
TEXT = " ".join(PAGE.split())
LAYER, HUGGING_FACE, OWN = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}-h200.json").read_text())
    return found


def test_the_picture_is_that_of_the_results() -> None:
    drawn = front_page.front_page(results("layer"), results("model"))
    assert drawn == (RESULTS / front_page.FILE).read_text(), "python tests/front_page.py docs/results"
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
        assert (f">{row['tokens/s'] / 1e3:.1f}k{front_page.times(row)}<" in drawn) == (
            row["what"] not in ("no experts", "mxep mxfp8, linear")  # other models
        )


def test_the_text_has_the_figures_of_the_results() -> None:
    rows = [row for rows in front_page.layer_rows(results("layer")).values() for row in rows]
    times = [row["x bf16"] for row in rows if row["what"] == "mxep mxfp8"]
    (model,) = (row for row in results("model")["sections"]["model"] if row["what"] == "mxep mxfp8")
    assert f"{min(times):.1f} to {max(times):.1f} times as fast" in TEXT
    assert f"a whole model {model['x bf16']:.2f} times on {model['ranks']}" in TEXT
    gib = {row["what"]: row["peak GiB"] for row in results("model")["sections"]["model"]}
    assert f"{gib['mxep mxfp8']:.1f} GiB in MXFP8, weights not counted, at {gib['baseline bf16']:.1f} with" in TEXT
    alone = {row["what"]: row for row in results("model-1")["sections"]["model"]}
    own, *ours = (alone[what]["ms"] for what in ("transformers bf16", "mxep mxfp8", "mxep mxfp8, linear"))
    assert f"makes {own / ours[0]:.2f} times the tokens/s that" in TEXT
    assert f"{own / ours[1]:.2f} times with attention's projections" in TEXT
    assert f"on one GPU {alone['mxep mxfp8']['graphs GiB']:.1f}" in TEXT
    assert alone["mxep mxfp8"]["peak GiB"] == pytest.approx(alone["baseline bf16"]["peak GiB"], rel=0.03)

    deepseek = {row["what"]: row["ms"] for row in results("layer")["runs"][0]["sections"]["layer"]}
    assert f"({deepseek['fp8/symmetric']:.1f} ms on DeepSeek-V3, MXFP8 {deepseek['mxfp8/symmetric']:.1f})" in TEXT
    assert f"{deepseek['standard fp8']:.1f} ms, mxep's MXFP8 layer {deepseek['mxfp8/symmetric']:.1f}" in TEXT
    runs = [run["sections"]["eager"] for run in results("small-batches")["runs"]]
    eager = {(row["shape"][0], row["what"]): row.get("ms", 0) for row in runs[0]}
    few = [eager[1024, what] for what in ("bf16/symmetric", "mxfp8/symmetric", "baseline bf16")]
    assert "mxep bf16 {:.2f} ms, MXFP8 {:.2f}, standard bf16 {:.2f}".format(*few) in TEXT
    eager = {(row["shape"][0], row["what"]): row.get("ms", 0) for row in runs[1]}
    hosts = [eager[4096, what] for what in ("mxfp8/all_to_all", "baseline bf16")]
    assert "{:.2f} ms in MXFP8, eager, where standard bf16 takes {:.2f}".format(*hosts) in TEXT
    gib = {row["what"]: row["peak GiB"] for row in results("layer")["runs"][0]["sections"]["memory"]}
    peaks = [gib[what] for what in ("mxfp8/symmetric, worst_case", "mxfp8/symmetric", "standard bf16")]
    assert "takes {:.1f} GiB, at 1.25 of the balanced load {:.1f}, standard bf16 {:.1f} ".format(*peaks) in TEXT

    titan = {
        row["case"]: row["tokens_per_second"]
        for row in results("titan")["rows"]
        if row["compile"] and row["layers"] == 12
    }
    times = [titan[case] / titan["torchtitan"] for case in ("mxfp8", "torchtitan-fp8")]
    pattern = (
        "makes {:.2f} times its own tokens/s with mxep's MXFP8 (Qwen3-30B-A3B cut to 12 layers, compiled), {:.2f} times"
    )
    assert pattern.format(*times) in TEXT


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
