"""The report counts what folds really do, of every layout, both ways, and as a command."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from mxep.quant import MXTensor, fold_with_stats, quantize, to_mxfp8
from mxep.quant import fold_report as subject
from mxep.quant.checkpoint import QuantizedCheckpoint
from mxep.quant.fold_report import Direction, count, main, report, text_of
from quant.checkpoints import EXPERTS, HIDDEN, KINDS, WIDTH, save, values, write
from quant.inputs import fold_for_dgrad_with_stats
from quant.test_e2m1_fold import hostile

FOLDING = [kind for kind, (fmt, *_) in KINDS.items() if fmt in ("mxfp4", "mxfp8")] + ["ue8m0", "deepseek-v4.1-dense"]


def assert_counts(found: tuple[Direction, Direction], mx: MXTensor) -> None:
    """Those of the folds themselves."""
    values = mx.dequantize(torch.float32).double()
    for at, (folded, stats) in zip(found, (fold_with_stats(mx), fold_for_dgrad_with_stats(mx))):
        assert (at.total, at.exact) == (stats.exact.numel(), int(stats.exact.sum()))
        assert (at.elements, at.changed) == (mx.numel(), int(stats.changed))
        assert at.spread == int(stats.spread.max())
        if not bool(values.isnan().any()):
            error = (folded.dequantize(torch.float32).double() - values).square().sum()
            assert at.error == pytest.approx(float(error), rel=1e-6)
            if any(each.changed for each in found):
                assert at.signal == pytest.approx(float(values.square().sum()), rel=1e-6)


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1"])
@pytest.mark.parametrize("spread", [0, 2, 9, 30])
def test_counts_are_those_of_the_folds(fmt: str, spread: int) -> None:
    x = values(2, 40, 96, seed=spread, spread=spread)
    mx = quantize(x.float(), fmt=fmt)
    assert_counts(count(mx), mx)


@pytest.mark.parametrize("seed", range(3))
def test_counts_of_hostile_codes_nan_blocks_and_scales(seed: int) -> None:
    mx = hostile(30, 6, seed, spread=20)
    for each in (mx, to_mxfp8(mx)):
        forward, dgrad = count(each)
        stats = fold_with_stats(each)[1], fold_for_dgrad_with_stats(each)[1]
        for at, expected in zip((forward, dgrad), stats):
            assert (at.exact, at.changed) == (int(expected.exact.sum()), int(expected.changed))


def test_every_row_of_normal_mxfp4_is_exact_and_no_element_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subject, "values_of", lambda qdata: torch.zeros(qdata.shape) if not qdata.numel() else pytest.fail("looked")
    )
    forward, dgrad = count(quantize(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), fmt="E2M1"))
    assert (forward.exact, dgrad.exact, forward.changed, dgrad.changed) == (64, 3, 0, 0)
    assert forward.snr == dgrad.snr == float("inf")


@pytest.mark.parametrize("kind", FOLDING)
def test_the_report_sums_the_weights_of_a_kind(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, shards=2, spread=9)
    checkpoint = QuantizedCheckpoint(tmp_path)
    kinds = {each.name: each for each in report(checkpoint)}
    stacked = kind.startswith("gpt-oss")
    names = ["gate_up_proj", "down_proj"] if stacked else [f"*.{w}.weight" for w in ("w1", "w2", "w3")]
    assert kinds.keys() == {f"model.layers.*.mlp.experts.{name}" for name in names}
    for each in kinds.values():
        weights = [w for w in checkpoint.weights.values() if w.name.split(".")[-2:] == each.name.split(".")[-2:]]
        assert each.weights == len(weights) == (1 if stacked else EXPERTS)
        total = Direction(), Direction()
        for weight in weights:
            for a, b in zip(total, count(to_mxfp8(weight.read()))):  # type: ignore[arg-type]
                a.add(b)
        for found, expected in zip((each.forward, each.dgrad), total):
            assert vars(found) == pytest.approx(vars(expected))
        n, k = each.shape[-2:]
        assert total[0].total == EXPERTS * n
        assert total[1].total == EXPERTS * k // 32
        assert 0 < total[0].changed < total[0].elements


def test_other_scales_are_not_folded(tmp_path: Path) -> None:
    for kind, forward, dgrad in (
        ("deepseek-v3", False, False),
        ("qwen3-fp8", False, False),
        ("ct-fp8-row", True, False),
        ("ct-fp8-tensor", True, False),
    ):
        write(tmp_path / kind, kind)
        for each in report(QuantizedCheckpoint(tmp_path / kind)):
            assert ((each.forward is not None), (each.dgrad is not None)) == (forward, dgrad)
            if each.forward is not None:
                assert each.forward.exact == each.forward.total == EXPERTS * each.shape[0]


def test_scales_of_rows_and_tensors_fold_if_they_are_powers_of_two(tmp_path: Path) -> None:
    qdata = torch.full((40, 96), 1.5).to(torch.float8_e4m3fn)
    rows = torch.tensor([0.25, 2.0**-20]).repeat(20)[:, None]  # no column of both is exact
    tensor = {"b.weight": qdata.clone(), "b.weight_scale": rows[0].clone()}
    save(tmp_path, {"a.weight": qdata, "a.weight_scale": rows, **tensor}, {})
    for kind, exact in zip(report(QuantizedCheckpoint(tmp_path)), (0, 3), strict=True):
        assert kind.forward is not None
        assert kind.dgrad is not None
        assert (kind.forward.exact, kind.dgrad.exact, kind.dgrad.total) == (40, exact, 3)


def test_experts_of_a_stack_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "gpt-oss")
    sizes, tensor = [], QuantizedCheckpoint.tensor

    def watched(self: QuantizedCheckpoint, name: str, part: slice | None = None) -> torch.Tensor:
        read = tensor(self, name, part)
        sizes.append(read.shape[0])
        return read

    monkeypatch.setattr(QuantizedCheckpoint, "tensor", watched)
    report(QuantizedCheckpoint(tmp_path))
    assert sizes == [1] * (2 * 2 * EXPERTS)


def test_the_table_says_how_many_rows_are_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "gpt-oss")
    assert main([str(tmp_path), "--only", "*down_proj"]) == 0
    named, header, line = capsys.readouterr().out.splitlines()
    assert named == f"{tmp_path}: mxfp4"
    assert header.split()[:4] == ["kind", "format", "weights", "shape"]
    rows, columns = EXPERTS * HIDDEN, EXPERTS * WIDTH // 32
    assert line.split() == [
        *("model.layers.*.mlp.experts.down_proj", "mxfp4", "1", "3", "x", "288", "x", "160"),
        *(str(rows), "of", str(rows), "(100%)", "none", str(columns), "of", str(columns), "(100%)", "none"),
    ]


def test_shares_are_rounded_down_and_changes_have_an_snr() -> None:
    kind = subject.Kind("a", "mxfp8", (4, 32), 1, Direction(10_000, 9_999, 320_000, 1, 1e10, 1.0), None)
    cells = [cell.strip() for cell in text_of([kind]).splitlines()[1].split("  ") if cell]
    assert cells == ["a", "mxfp8", "1", "4 x 32", "9999 of 10000 (99.9%)", "1 (3.1e-06), 100.0 dB", "not folded", "-"]


def test_json_lines_have_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "modelopt", spread=9)
    assert main([str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["name"].split(".")[-2] for line in lines} == {"w1", "w2", "w3"}
    assert all(line["forward"]["exact"] < line["forward"]["total"] for line in lines)


def test_the_command_names_what_it_does_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, {"a.qweight": torch.zeros(2, 2).int()}, {})
    assert main([str(tmp_path)]) == 1
    assert "fold_report: a.qweight: expected" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 1
    save(tmp_path / "plain", {"a": torch.ones(2)}, {})
    assert main([str(tmp_path / "plain")]) == 0
    assert "no quantization in config.json\nno quantized weight matches *" in capsys.readouterr().out


def test_it_runs_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "deepseek-v4")
    monkeypatch.setattr(sys, "argv", ["fold_report", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mxep.quant.fold_report")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("mxep.quant.fold_report", run_name="__main__")
    assert not ended.value.code
    assert "experts.*.w2.weight" in capsys.readouterr().out
