"""The benchmark of LoRA on whole models, on tiny ones and a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks import lora_model
from mxep.integration.transformers import FrozenExperts

TINY: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TINY |= {"vocab_size": 512, "num_experts_per_tok": 2}
SIZES = {
    "qwen3-30b": TINY | {"moe_intermediate_size": 32, "num_experts": 8},
    "gpt-oss-120b": TINY | {"intermediate_size": 64, "num_local_experts": 8},
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes the GPU")
@pytest.mark.parametrize(
    ("model", "kinds"),
    [("qwen3-30b", ["mxfp8", "fp8_block", "mxep_bf16", "grouped_mm"]), ("gpt-oss-120b", ["mxfp4", "fp8_row"])],
)
def test_it_trains_and_tells_what_it_measured(model: str, kinds: list[str], tmp_path: Path) -> None:
    how = ["--layers", "1", "--tokens", "64", "--length", "32", "--rank", "8", "--steps", "1", "--warmup", "1"]
    out = tmp_path / "found.json"
    rows = lora_model.main(
        ["--model", model, "--kinds", *kinds, "--sizes", json.dumps(SIZES[model]), "--out", str(out), *how]
    )
    assert json.loads(out.read_text())["rows"] == rows
    assert [row["kind"] for row in rows] == kinds
    for row in rows:
        assert row["losses"][1] < row["losses"][0], "the same batch again"
        assert row["tokens/s"] > 0


def test_experts_of_a_format_are_frozen_and_nothing_stays_on_meta() -> None:
    kind, own = lora_model.MODELS["qwen3-30b"]
    config = kind(**own | SIZES["qwen3-30b"] | {"num_hidden_layers": 2})
    model = lora_model.build(config, "mxfp4", torch.device("cpu"))
    assert sum(isinstance(each, FrozenExperts) for each in model.modules()) == 2
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
