"""Sums of groups of rows: the kernel's equal the reference's bit for bit, and both are the sums."""

import pytest
import torch
from torch import Tensor

from mxep.quant import E5M2, MXTensor, group_sums, quantize
from mxep.quant.kernels import groups as kernels
from quant.opchecks import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (0, 33, 1, 0, 64, 100, 0)
OFFS = torch.tensor(SIZES).cumsum(0).int()


def problem(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different magnitudes, and NaN behind the last group."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(210, width, generator=generator) * torch.logspace(-3, 3, 210)[:, None]
    x[OFFS[-1] :] = torch.nan
    return x.to(dtype)


def operands(x: Tensor) -> tuple[Tensor, Tensor | None, int]:
    return (x.qdata, x.scale, x.block_size) if isinstance(x, MXTensor) else (x, None, 1)


CASES = [
    problem(5), problem(130, torch.bfloat16), problem(96, torch.float16), problem(7, torch.float64),
    quantize(problem(64)), quantize(problem(160), fmt=E5M2), quantize(problem(192), block_size=None),
    quantize(problem(192).bfloat16(), block_size=64),
]  # fmt: skip


@pytest.mark.parametrize("x", CASES, ids=lambda x: f"{type(x).__name__} {x.dtype} {x.shape[1]}")
def test_the_kernel_equals_the_reference_and_both_are_the_sums(x: Tensor) -> None:
    got = group_sums(x, OFFS)
    values = (x.dequantize() if isinstance(x, MXTensor) else x).double()
    parts = values[: OFFS[-1]].split(SIZES)
    # A sum of n fp32 numbers is off by n roundings of the sum of their magnitudes at most.
    for sums, part in zip(got, parts, strict=True):
        assert ((sums - part.sum(0)).abs() <= len(part) * 2.0**-24 * part.abs().sum(0)).all()
    moved = (part.to(DEVICE) if isinstance(part, Tensor) else part for part in (*operands(x), OFFS))
    assert torch.equal(kernels.group_sums(*moved).cpu(), got)


def test_the_order_is_that_of_the_docstring() -> None:
    x = problem(3)[:64]
    lanes = [x[r] + x[32 + r] for r in range(32)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:])]
    assert torch.equal(group_sums(x, torch.tensor([64]).int())[0], lanes[0])


def test_rows_by_an_index_and_columns_are_dequantized() -> None:
    mx = quantize(problem(64)[: OFFS[-1]])
    index = torch.arange(len(mx)).flip(0).int()
    picked = MXTensor(mx.qdata, mx.scale, index, -1, 32, torch.float32)
    assert torch.equal(group_sums(picked, OFFS), group_sums(mx.dequantize().flip(0), OFFS))


def test_opcheck_and_errors() -> None:
    check_op(torch.ops.mxep.group_sums, problem(6)[: OFFS[-1]], None, 1, OFFS)
    mx = quantize(problem(64)[: OFFS[-1]])
    check_op(torch.ops.mxep.group_sums, mx.qdata, mx.scale, 32, OFFS)
    with pytest.raises(ValueError, match="want int32 of shape"):
        group_sums(problem(6), OFFS.long())
