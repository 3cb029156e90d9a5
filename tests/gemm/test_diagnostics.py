"""fold_report tells what folding costs, and torch counts the FLOPs of every GEMM."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemm.problem import Problem, problem
from gemm.test_hopper import BACKEND as HOPPER
from mxep.gemm import (
    BACKENDS,
    Backend,
    convert,
    fold_report,
    grouped_mm,
    quantize_weights_once,
)
from mxep.gemm.backends.hopper import Hopper
from mxep.gemm.diagnostics import FoldedProduct
from mxep.quant import fold_with_stats, quantize

SHAPE = (2, 64, 128)
every_backend = pytest.mark.parametrize(
    "backend", [BACKENDS["reference"], BACKENDS["dequant"], HOPPER], ids=lambda backend: backend.name
)


class Experts(nn.Module):
    def __init__(self, p: Problem, backend: str | Backend) -> None:
        super().__init__()
        self.w, self.offs, self.backend = nn.Parameter(p.w.clone()), p.offs, backend

    def forward(self, x: Tensor) -> Tensor:
        return grouped_mm(x, self.w, self.offs, recipe="mxfp8", backend=self.backend)


def small() -> Problem:
    return problem((64, 32), n=64, k=128, unused=32)


def anti_aligned() -> Problem:
    """Half of the columns 2^20 larger in a, as much smaller in w: folding flushes what the other half needs."""
    p = small()
    up = torch.where(torch.arange(128) < 64, 2.0**10, 2.0**-10).bfloat16()
    p.a.mul_(up)
    p.w.div_(up)
    return p


@every_backend
def test_products_are_counted_by_module_forward_and_backward(backend: Backend) -> None:
    p = small()
    model = nn.ModuleDict({name: Experts(p, backend) for name in ("first", "second")})
    with fold_report(model) as report:
        for experts in model.values():
            for _ in range(2):
                experts(p.a.clone().requires_grad_()).backward(p.dy)
    assert set(report) == {(name, SHAPE, x) for name in model for x in ("forward", "dgrad", "wgrad")}
    assert all(found.calls == 2 and found.snr_db > 60 and found.flushed <= found.rounded for found in report.values())
    assert report["first", SHAPE, "forward"].elements == 2 * (p.valid * 128 + p.w.numel())
    assert "first 2x64x128 wgrad" in str(report)
    assert "exact" not in str(report)


@every_backend
def test_what_folding_loses_is_found_and_exact_backends_are_named(backend: Backend) -> None:
    p = anti_aligned()
    with fold_report() as report:
        Experts(p, backend)(p.a)
    (found,) = report.values()
    assert (found.module, found.product, found.weight) == ("Experts", "forward", SHAPE)
    stats = [fold_with_stats(quantize(p.a), offs=p.offs)[1], fold_with_stats(quantize(p.w))[1]]
    assert found.rounded == sum(int(x.changed) for x in stats)
    assert found.flushed == sum(int(x.flushed) for x in stats) > 0
    assert 19 <= found.spread <= 23
    assert found.snr_db < 20
    assert "exact: dequant or triton" in str(report)


def test_columns_of_a_weight_gradient_that_are_lost_show() -> None:
    p = anti_aligned()
    p.w.fill_(1)
    with fold_report() as report:
        Experts(p, "reference")(p.a.clone().requires_grad_()).backward(p.dy)
    assert report["Experts", SHAPE, "wgrad"].flushed >= p.valid * 64 * 0.9
    assert report["Experts", SHAPE, "wgrad"].snr_db < 20
    assert report["Experts", SHAPE, "dgrad"].snr_db > 60


class Plain(nn.Module):
    """Knows nothing of mxep."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w.mT, offs=offs)


@pytest.mark.parametrize("once", [False, True])
def test_products_of_converted_modules_have_their_names(once: bool) -> None:
    p = problem((64, 32), n=64, k=128, unused=0)
    model = convert(nn.Sequential(nn.Identity(), Plain(p.w)), "mxfp8")
    with fold_report(model) as report, quantize_weights_once() if once else contextlib.nullcontext():
        for _ in range(2):
            model[1](p.a.clone().requires_grad_(), p.offs).backward(p.dy)
    found = [(product.module, product.product, product.calls) for product in report.values()]
    assert found == [("1", "forward", 2), ("1", "dgrad", 2), ("1", "wgrad", 2)]


def test_nothing_stays_behind_and_unquantized_products_are_not_recorded() -> None:
    before = {name: vars(Hopper)[name] for name in ("forward", "dgrad", "prepare_wgrad", "wants_rowwise")}
    with contextlib.suppress(ZeroDivisionError), fold_report() as report:
        problem().run("bf16")
        assert not HOPPER.wants_rowwise
        raise ZeroDivisionError
    assert not report
    assert before == {name: vars(Hopper)[name] for name in before}


class Idle(Backend):
    """Multiplies nothing: all memory that is taken while it is watched is the report's."""

    name = "idle"

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None

    def forward(self, a: Tensor, w: Tensor, *_: Any, **options: Any) -> Tensor:
        return a

    def prepare_wgrad(self, dy: Tensor, a: Tensor, *_: Any) -> None:
        pass


def report_of(groups: int, trace: Path) -> tuple[list[FoldedProduct], int]:
    """Of groups that are alike: forward and wgrad, and the most bytes held at a time."""
    p = problem([64], n=96, unused=0)
    a, dy = (quantize(x.repeat(groups, 1)) for x in (p.a * torch.logspace(-6, 6, 128), p.dy))
    w, offs = quantize(p.w.repeat(groups, 1, 1)), 64 * torch.arange(1, groups + 1, dtype=torch.int32)
    with fold_report() as report, torch.profiler.profile(profile_memory=True) as profiler:
        Idle().forward(a, w, offs)
        Idle().prepare_wgrad(dy, a, offs)
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return list(report.values()), max(itertools.accumulate(sizes))


def test_it_takes_memory_for_one_group_at_a_time(tmp_path: Path) -> None:
    one, of_one = report_of(1, tmp_path / "1.json")
    four, of_four = report_of(4, tmp_path / "4.json")
    for single, several in zip(one, four, strict=True):
        counts = {"elements", "rounded", "flushed"}
        assert {name: 4 * getattr(single, name) for name in counts} == {name: getattr(several, name) for name in counts}
        assert (single.spread, single.snr_db) == (several.spread, several.snr_db)
        assert single.flushed
    assert of_four < 1.1 * of_one
