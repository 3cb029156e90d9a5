"""bench=linear: its alternatives compute the same gradients, and every section has rows on a CPU."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import linear as bench
from benchmarks import script
from mxep.gemm import BACKENDS
from mxep.integration.metrics import snr
from mxep.integration.schema import Config


@pytest.mark.parametrize("shape", [(37, 64, 96), (37, 64, 96, 32)])
def test_alternatives_give_the_gradients_of_x_and_all_weights(shape: tuple[int, ...]):
    p = bench.Problem.gaussian(shape, torch.Generator().manual_seed(0))
    assert [tuple(w.shape) for w in p.weights] == [(n, 64) for n in (shape[2:] + shape[3:])]
    assert p.flop == 3 * 2 * 37 * 64 * sum(w.shape[0] for w in p.weights)
    leaves = [tensor.double().requires_grad_() for tensor in (p.x, *p.weights)]
    outs = [leaves[0] @ w.T for w in leaves[1:]]
    wanted = torch.autograd.grad(outs, leaves, [dy.double() for dy in p.gradients])
    makers = bench.steps(BACKENDS["reference"], several=len(shape) > 3)
    assert ("mxep mxfp8, together" in makers) == (len(shape) > 3)
    for name, make in makers.items():
        if name.startswith(("bf16", "mxep")):
            got = make(p)()
            assert all(snr(want, x) > 23 for want, x in zip(wanted, got, strict=True)), name


def test_every_section_has_rows_without_errors(make_config: Callable[..., Config]):
    config = make_config("task=bench", "bench=linear")
    config.bench.device, config.bench.backend = "cpu", "reference"
    config.bench.shapes = {
        "linear": [[64, 64, 96]],
        "qkv": [[64, 64, 96, 32]],
        "host": [[32, 64, 64]],
    }
    report = script.run_bench(None, config, quiet=True)
    assert set(report.sections) == set(bench.SECTIONS)
    for name, section in report.sections.items():
        assert section.rows, name
        assert not [row for row in section.rows if "error" in row], name
        measured = {row["what"]: row for row in section.rows if "us" in row}
        assert measured, name
        if name in ("linear", "qkv"):
            assert measured["bf16"]["x bf16"] == 1
            noted = {row["what"] for row in section.rows if "note" in row}
            assert noted == {"torchao rowwise", "scaled_mm row, products"}
        if name == "host":
            assert {"bf16", "mxep mxfp8"} <= measured.keys()
