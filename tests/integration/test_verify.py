"""task=verify: passes on what is right, fails on what is not, and its reference is a layer indeed."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mxep.gemm import BACKENDS, Recipe
from mxep.integration import app, verify
from mxep.integration.metrics import snr
from mxep.integration.schema import CASES, Config
from mxep.integration.verify import (
    EXACT,
    WIDE,
    Check,
    Problem,
    Results,
    compare,
    levelled,
    make_problem,
    moe_layer,
    quantizers,
    report,
    wide_of,
)

TAMPERED = 3  # a token whose experts are all routed; an expert
SMALL = ("verify.tokens=48", "verify.dim=64", "verify.hidden_dim=64", "verify.experts=4", "verify.top_k=2")


def test_all_cases_pass_on_two_ranks_and_the_table_is_written(mxep, tmp_path: Path):
    finished = mxep("task=verify", *SMALL)
    assert finished.code == 0, finished.out + finished.err
    report = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert (report["ranks"], report["backend"], report["dim"]) == (2, "reference", 64)
    assert report["versions"]["torch"] == torch.__version__
    assert report["command"].startswith("mxep task=verify")
    results = report["sections"]["layers"]
    assert [result["case"] for result in results] == list(CASES)
    assert all(result["note"] == "pass" and result["margin"] >= 0 for result in results)
    assert {len(result["checks"]) for result in results} == {len(dataclasses.fields(Results))}
    assert len(re.findall(r"\bpass\b", finished.out)) == len(CASES)


def test_a_failed_case_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path, make_config):
    monkeypatch.setattr(
        app, "_on_ranks", lambda *_: {"bf16/local": [Check("out", 50.0, 45.0, 0), Check("dx", 44.9, 45.0, 1)]}
    )
    assert app._verify(make_config("task=verify"), tmp_path, {}) == 1
    out, err = capsys.readouterr()
    assert "FAIL" in out
    assert "1 of 1 lines failed" in err


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Results)])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_wrong_row_or_a_nan_in_any_result_fails_that_result(make_config, field: str, recipe: str):
    problem = make_problem(make_config(*SMALL), 0, 1.0)
    exact, quantized = moe_layer(problem), moe_layer(problem, quantizers(Recipe.named(recipe)))
    for wrong in (0.0, float("nan")):
        tampered = getattr(quantized, field).clone()
        tampered[TAMPERED] = wrong
        got = dataclasses.replace(quantized, **{field: tampered})
        assert [check.name for check in compare(got, exact, quantized, 0) if not check.passed] == [field]
    assert all(check.passed for check in compare(quantized, exact, quantized, 0))


def autograd_layer(problem: Problem) -> Results:
    """Every expert on every token, weighted: slow, obvious, and differentiated by torch."""
    leaves = [problem.x, problem.weights, problem.gate_up_proj, problem.down_proj]
    x, weights, w13, w2 = (leaf.double().requires_grad_() for leaf in leaves)
    gate, up = torch.einsum("td,efd->tef", x, w13).chunk(2, -1)
    y = torch.einsum("tef,edf->ted", F.silu(gate) * up, w2)
    chosen = F.one_hot(problem.expert_ids + 1, len(w2) + 1)[..., 1:]  # -1 chooses none
    out = torch.einsum("tke,tk,ted->td", chosen.double(), weights, y)
    out.backward(problem.d_out.double())
    gradients = [leaf.grad for leaf in (x, weights, w13, w2)]
    return Results(out.detach(), *gradients)


def test_the_exact_reference_is_what_autograd_computes(make_config: Callable[..., Config]):
    problem = make_problem(make_config(*SMALL), 1, 1.0)
    wanted, got = autograd_layer(problem), moe_layer(problem)
    for field in dataclasses.fields(Results):
        assert snr(getattr(wanted, field.name), getattr(got, field.name)) > 120, field.name


@pytest.mark.parametrize("wide", [1.0, WIDE])
def test_a_quantized_reference_has_the_noise_of_its_format(make_config: Callable[..., Config], wide: float):
    """What is small beside a block that is WIDE times as large has few bits left in a row of FP8, and all in MXFP8."""
    problem = make_problem(make_config("verify.tokens=128"), 0, wide)
    recipes = Recipe.fp8(), Recipe.mxfp8()
    exact, fp8, mxfp8 = (levelled(moe_layer(problem, q), wide) for q in (EXACT, *map(quantizers, recipes)))
    for name in (field.name for field in dataclasses.fields(Results)):
        of_mxfp8, of_fp8 = (snr(getattr(exact, name), getattr(each, name)) for each in (mxfp8, fp8))
        assert of_mxfp8 == pytest.approx(23.6, abs=1), name
        assert of_fp8 < 20 if wide > 1 else of_fp8 == pytest.approx(of_mxfp8, abs=0.3), name
    confused = compare(fp8, exact, mxfp8, 0)
    assert not any(check.passed for check in confused) or wide == 1


def test_levelled_results_are_those_of_gaussian_data(make_config: Callable[..., Config]):
    """To the bit: the factor is a power of two."""
    plain, wide = (moe_layer(make_problem(make_config(*SMALL), 0, factor)) for factor in (1.0, WIDE))
    for field in dataclasses.fields(plain):
        assert torch.equal(getattr(levelled(wide, WIDE), field.name), getattr(plain, field.name)), field.name


def test_data_are_wide_unless_a_backend_folds_and_the_report_says_which(monkeypatch: pytest.MonkeyPatch, make_config):
    assert [name for name, backend in BACKENDS.items() if wide_of(backend) == 1] == ["hopper"]
    monkeypatch.setattr(verify, "select", lambda name, _: BACKENDS[name])
    for backend, said in (("reference", "FP8 loses, MXFP8 does not"), ("hopper", "hopper folds MXFP8")):
        made = report(make_config("task=verify", f"backend={backend}", "parallel.device=cpu"), {})
        assert said in made.remarks[-1]
        assert made.about["wide"] == (WIDE if backend == "reference" else 1)


def test_a_nan_check_does_not_pass():
    assert not Check("out", float("nan"), 45.0, 0).passed
