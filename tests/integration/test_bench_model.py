"""bench=model: rows of every kind of experts, compared with the baseline's before they are timed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from mxep.integration.bench.model import BASELINE, CASES, LEAST_SNR, PLAIN

SHAPE = [32, 1, 64, 32, 8, 2]
ON_CPU = ("task=bench", "bench=model", "bench.device=cpu", "parallel.timeout=300", "bench.models=[tiny]")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_kind_of_experts_is_compared_and_timed(mxep, tmp_path: Path, ranks: int) -> None:
    out, shape = tmp_path / "out.json", f"+bench.shapes.tiny={json.dumps([SHAPE])}"
    finished = mxep(*ON_CPU, shape, f"parallel.ranks={ranks}", f"bench.out={out}", "bench.commit=abc1234")
    assert finished.code == 0, finished.out + finished.err
    rows = {row["what"]: row for row in json.loads(out.read_text())["sections"]["model"]}
    assert list(rows) == list(CASES)
    if ranks > 1:
        assert rows.pop("transformers bf16")["note"] == "on one rank alone"
    for name, row in rows.items():
        assert row["tokens/s"] == pytest.approx(32 * ranks / row["ms"] * 1e3, rel=1e-3)
        assert row["x bf16"] == pytest.approx(rows[BASELINE]["ms"] / row["ms"], rel=1e-3)
        assert (row["dB"] >= LEAST_SNR) == (name != PLAIN), "the check would find experts that do nothing"
    assert rows[BASELINE]["dB"] > rows["mxep bf16"]["dB"] > rows["mxep mxfp8"]["dB"] > rows["mxep mxfp8, linear"]["dB"]
