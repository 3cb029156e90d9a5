"""The dequantize kernel gives the values of the reference: formats, blocks, indices, strides, dtypes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.quant import E2M1, E4M3, E5M2, MXFormat, quantize
from mxep.quant.kernels import requantize as kernels
from quant.inputs import slots
from quant.poison import poisoned_allocations as poisoned_allocations
from quant.test_fold_kernels import to_device

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def hostile(*shape: int, fmt: MXFormat = E4M3, block: int = 32) -> tuple[Tensor, Tensor]:
    """Any bytes, and any scales: NaN codes, NaN blocks, results beyond each dtype and below it."""
    generator = torch.Generator().manual_seed(sum(shape))
    width = shape[-1] // fmt.elements_per_byte
    qdata = torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (*shape[:-1], shape[-1] // block), dtype=torch.uint8, generator=generator)
    return qdata.view(fmt.dtype), scale.view(torch.float8_e8m0fnu)


def check(op: str, *given: Any) -> None:
    want: Tensor = getattr(torch.ops.mxep, op)(*given)
    got: Tensor = getattr(kernels, op)(*(to_device(x) if isinstance(x, Tensor) else x for x in given)).cpu()
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
    assert torch.equal(got.isnan(), want.isnan())
    bits = torch.int16 if want.itemsize == 2 else torch.int32
    same = got.contiguous().view(bits) == want.view(bits)
    assert bool((same | want.isnan()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "block"), [((5, 96), 32), ((3, 7, 1040), 16), ((2, 64), 64), ((9, 2080), 2080)])
def test_rows(dtype: torch.dtype, shape: tuple[int, ...], block: int, poisoned_allocations) -> None:
    fmt = (E4M3, E5M2)[(DTYPES.index(dtype) + shape[0]) % 2]
    check("dequantize", *hostile(*shape, fmt=fmt, block=block), 1, block, None, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_an_index_from_slots(dtype: torch.dtype, poisoned_allocations) -> None:
    index = torch.tensor([3, -1, 0, 3, 6, -1, 2, 1, 5, 4, -1], dtype=torch.int32)
    check("dequantize", *slots(*hostile(7, 160)), 1, 32, index, dtype)
    check("dequantize", *hostile(7, 160, fmt=E2M1), 1, 32, index, dtype)


def test_blocks_along_n_and_in_tiles_where_they_lie(poisoned_allocations) -> None:
    x = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for axis in (-2, (-2, -1)):
        mx = quantize(x, axis=axis)
        check("dequantize", mx.qdata, mx.scale, *mx.block_shape, None, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (3, 7, 1088), (1, 32)])
def test_e2m1(dtype: torch.dtype, shape: tuple[int, ...], poisoned_allocations) -> None:
    check("dequantize", *hostile(*shape, fmt=E2M1), 1, 32, None, dtype)


def test_nothing_is_nothing() -> None:
    assert kernels.dequantize(*hostile(0, 64), 1, 32, None, torch.bfloat16).shape == (0, 64)
