"""RMSNorm and quantization in one pass: the composed reference bit for bit, by kernels, too; float64's gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mxep.quant import E4M3, E5M2, MXFormat, MXTensor, quantize, rms_norm_quantize
from mxep.quant.kernels import rms_norm as kernels
from mxep.quant.rms_norm import rms_norm_backward_op, rms_norm_quantize_op
from mxep.quant.shapes import RMS_NORM_PARTS
from mxep.quant.swiglu import tree_sum
from quant.opchecks import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def problem(rows: int, D: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy (rows, D) with rows of other sizes, weight (D,) around 1."""
    random = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(rows, D, generator=random) * torch.logspace(-3, 3, rows)[:, None] for _ in range(2))
    return x.to(dtype), dy.to(dtype), (1 + torch.randn(D, generator=random) / 4).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("fmt", "block_size"), [(E4M3, 32), (E4M3, None), (E5M2, 32)])
def test_it_is_quantize_of_the_fp32_norm(fmt: MXFormat, block_size: int | None, dtype: torch.dtype) -> None:
    x, _, weight = problem(7, 96, dtype)
    values = x.float()
    mean = tree_sum(values * values) * torch.tensor(1 / 96)
    rstd = 1 / (mean + EPS).sqrt()
    h = (values * rstd[:, None]) * weight.float()
    torch.testing.assert_close(h, F.rms_norm(values, (96,), weight.float(), EPS))
    got, want = (
        rms_norm_quantize(x, weight, eps=EPS, fmt=fmt, block_size=block_size),
        quantize(h, fmt=fmt, block_size=block_size),
    )
    assert (got.dtype, got.shape, got.block_size) == (dtype, x.shape, block_size or 96)
    assert same(got.qdata, want.qdata)
    assert same(got.scale, want.scale)


@pytest.mark.parametrize("leading", [(5,), (2, 3), (0,), (2, 300)])
def test_gradients_are_those_of_float64(leading: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(*leading, 64, generator=random) for _ in range(2))
    weight = torch.rand(64, generator=random)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = rms_norm_quantize(x, weight, eps=EPS)
    assert isinstance(out, MXTensor)
    assert out.shape == x.shape
    got = torch.autograd.grad(out.dequantize(), leaves, dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(F.rms_norm(exact[0], (64,), exact[1], EPS), exact, dy.double())
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_gradient_may_come_quantized_and_keeps_dtypes() -> None:
    x, dy, weight = problem(40, 64)
    leaves = [x.requires_grad_(), weight.float().requires_grad_()]
    mx = quantize(dy)
    got = torch.autograd.grad(rms_norm_quantize(*leaves, eps=EPS), leaves, mx)
    want = torch.autograd.grad(rms_norm_quantize(*leaves, eps=EPS).dequantize(), leaves, mx.dequantize())
    assert [g.dtype for g in got] == [torch.bfloat16, torch.float32]
    assert all(same(a, b) for a, b in zip(got, want))


KERNEL_CASES = [
    (3, 32, 32, {}),
    (5, 96, 32, {}),
    (5, 96, 96, {}),
    (2, 768, 32, {}),
    (2, 1280, 1280, {"THREAD_ELEMENTS": 1}),
    (RMS_NORM_PARTS + 2, 64, 32, {}),
]


@pytest.mark.parametrize(("rows", "D", "block_size", "tuning"), KERNEL_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_have_the_references_bits(
    rows: int, D: int, block_size: int, tuning: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in tuning.items():
        monkeypatch.setattr(kernels, name, value)
    x, dy, weight = problem(rows, D, dtype)
    how: Any = EPS, E4M3.dtype, "rceil", block_size
    want = rms_norm_quantize_op.reference(x, weight, *how)
    got = kernels.rms_norm_quantize(x.to(DEVICE), weight.to(DEVICE), *how)
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    want = rms_norm_backward_op.reference(dy, x, weight, want[2])
    got = kernels.rms_norm_backward(dy.to(DEVICE), x.to(DEVICE), weight.to(DEVICE), got[2])
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_special_values_stay_in_their_row() -> None:
    x, _, weight = problem(4, 64)
    x[0, 3], x[1, 5], x[2] = torch.nan, torch.inf, 0
    reference = rms_norm_quantize_op.reference(x, weight, EPS, E4M3.dtype, "rceil", 32)
    assert (reference[1][:2].view(torch.uint8) == 255).any(1).all()
    assert not reference[0][2].float().any()
    assert reference[0][3].float().isfinite().all()
    got = kernels.rms_norm_quantize(x.to(DEVICE), weight.to(DEVICE), EPS, E4M3.dtype, "rceil", 32)
    assert all(same(a, b) for a, b in zip(got[:2], reference[:2]))


def test_ops_are_ops() -> None:
    x, dy, weight = problem(5, 64)
    check_op(torch.ops.mxep.rms_norm_quantize, x, weight, EPS, E4M3.dtype, "rceil", 32)
    check_op(torch.ops.mxep.rms_norm_backward, dy, x, weight, torch.rand(5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.randn(4, 40)}, r"got shape \(4, 40\), want axis -1 a multiple of the block, 32"),
        ({"x": torch.ones(4, 64, dtype=torch.int32)}, "rms_norm_quantize: got dtype torch.int32"),
        ({"weight": torch.ones(32)}, r"weight: got torch.float32 \(32,\) on cpu, want floating point \(D,\)"),
        ({"fmt": "E3M4"}, "fmt: got 'E3M4', want E4M3 or E5M2"),
    ],
)
def test_wrong_use_says_what_is_wanted(change: dict[str, Any], says: str) -> None:
    x = change.get("x", torch.randn(4, 64))
    given = {"x": x, "weight": torch.ones(x.shape[1]), "eps": EPS} | change
    with pytest.raises(ValueError, match=says):
        rms_norm_quantize(given.pop("x"), given.pop("weight"), **given)
