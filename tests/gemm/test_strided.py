"""Vectors may be columns of a table: no kernel may read their neighbours."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import Problem, indexed, problem
from gemm.test_blackwell import decoded as decoded
from gemm.test_hopper import BACKEND as HOPPER
from mxep.gemm import BACKENDS, grouped_mm
from mxep.gemm.kernels import dot_scaled
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def column(x: Tensor) -> Tensor:
    """x as the first column of a table whose second would be read as the next element, were it packed."""
    return torch.stack((x, torch.full_like(x, 7)), -1)[..., 0]


def here(backend: str) -> Problem:
    p, device = problem(n=96, k=160), torch.device("cpu") if backend == "blackwell" else DEVICE
    p.a[70:75], p.dy[70:75] = 0, 0
    return Problem(*(x.to(device) for x in (p.a, p.w, p.dy, p.offs)))


@pytest.mark.usefixtures("decoded")
@pytest.mark.parametrize("backend", [*BACKENDS])
def test_ends_and_bias_and_index_may_be_strided(backend: str) -> None:
    p = here(backend)
    chosen = HOPPER if backend == "hopper" else BACKENDS[backend]
    bias = torch.randn(p.w.shape[:2], device=p.a.device)
    a, dy = (indexed(quantize(x.cpu()), valid=p.valid).to(p.a.device) for x in (p.a, p.dy))
    assert isinstance(a, MXTensor)
    assert isinstance(dy, MXTensor)
    packed = Problem(a, p.w, dy, p.offs)
    strided = Problem(with_column(a), p.w, with_column(dy), column(p.offs))
    results = []
    for q, b in ((packed, bias), (strided, column(bias))):
        w = q.w.clone().requires_grad_()
        x = q.a.detach().requires_grad_()
        out = grouped_mm(x, w, q.offs, recipe="mxfp8", backend=chosen, bias=b)
        results.append([out[: p.valid], *torch.autograd.grad(out, (x, w), q.dy)])
        results[-1][1] = results[-1][1][: p.valid]
    assert all(torch.equal(x, y) for x, y in zip(*results))


def with_column(x: MXTensor) -> MXTensor:
    assert x.row_index is not None
    options: dict[str, Any] = {"block_size": x.block_size, "row_index": column(x.row_index)}
    return MXTensor.from_qdata_and_scales(x.qdata, x.scale, x.dtype, **options)


def wgrad(y: MXTensor, x: MXTensor, offs: Tensor) -> Tensor:
    dw = torch.empty((len(offs), y.shape[1], x.shape[1]), device=DEVICE)
    dot_scaled.grouped_wgrad(dw, y.qdata, y.scale, x.qdata, x.scale, offs)
    return dw


def test_the_launchers_of_dot_scaled_take_strided_vectors() -> None:
    p = here("triton")
    a, dy, w = quantize(p.a), quantize(p.dy), quantize(p.w)
    y, x = (Recipe.mxfp8().along_tokens(each, p.offs) for each in (dy, a))
    assert isinstance(w, MXTensor)
    assert isinstance(x, MXTensor)
    assert isinstance(y, MXTensor)
    index = torch.arange(len(p.a), device=DEVICE, dtype=torch.int32).flip(0)
    for products in zip(
        *(
            (
                dot_scaled.grouped_mm(a.qdata, a.scale, of(index), w.qdata, w.scale, of(p.offs), None, torch.float32)[
                    : p.valid
                ],
                wgrad(y, x, of(p.offs)),
            )
            for of in (lambda v: v, column)
        )
    ):
        assert torch.equal(*(each.view(torch.int32) for each in products))
