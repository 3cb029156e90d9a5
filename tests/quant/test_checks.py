"""Formats and scale modes go by name, in every public function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep import quant
from mxep.quant import E5M2, ScaleMode
from quant.exact import parts


def x(columns: int = 64) -> Tensor:
    return torch.randn(64, columns, generator=torch.Generator().manual_seed(0))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantize": lambda **how: quant.quantize(x(), **how),
    "quantize_with_amax": lambda **how: quant.quantize_with_amax(x(), **how),
    "quantize_columns_with_amax": lambda **how: quant.quantize_columns_with_amax((x(), x()), torch.ones(64), **how),
    "requantize": lambda **how: quant.requantize(quant.quantize(x()), **how),
    "swiglu_quantize": lambda **how: quant.swiglu_quantize(x(), **how),
    "swiglu_backward_quantize": lambda **how: quant.swiglu_backward_quantize(x(32), x(), h_fmt=how.get("fmt"), **how),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names_mean_what_the_constants_do(name: str) -> None:
    got, want = FUNCTIONS[name](fmt="E5M2", mode="floor"), FUNCTIONS[name](fmt=E5M2, mode=ScaleMode.FLOOR)
    for a, b in zip(parts(got), parts(want), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"fmt: got 'E3M4', want E4M3 or E5M2"):
        FUNCTIONS[name](fmt="E3M4")
    with pytest.raises(ValueError, match=r"mode: got 'up', want one of \('floor', 'rceil'\)"):
        FUNCTIONS[name](mode="up")
