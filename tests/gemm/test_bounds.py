"""Whatever offs holds, no kernel reads or writes outside its buffers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fences import fenced
from fences import fences as fences
from gemm.test_triton import small_tiles as small_tiles
from mxep.gemm.kernels import dot_scaled
from mxep.quant import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K = 64, 32, 64
Fences = Callable[[], list[tuple[int, ...]]]

bad_ends = pytest.mark.parametrize("ends", [(32, 64, 160), (-64, 160, 32)], ids=str)


def here(ends: tuple[int, ...]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def ones(*shape: int) -> tuple[Tensor, Tensor]:
    """qdata and scales between fences of NaN."""
    x = quantize(torch.ones(shape, device=DEVICE))
    return fenced(x.qdata.view(torch.uint8)).view(x.qdata.dtype), fenced(x.scale)


@bad_ends
@pytest.mark.parametrize("indexed", [False, True], ids=["rows", "index"])
def test_products_of_rows(
    ends: tuple[int, ...], indexed: bool, small_tiles: None, fences: Fences, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = fenced(torch.arange(M, dtype=torch.int32, device=DEVICE)) if indexed else None
    operands = *ones(M, K), index, *ones(3, N, K), here(ends), None
    monkeypatch.setattr(torch, "empty", torch.zeros)  # between fences; what is not written is finite
    out = dot_scaled.grouped_mm(*operands, torch.float32)
    assert fences() == []
    assert out.isfinite().all()


@bad_ends
def test_products_of_columns(ends: tuple[int, ...], small_tiles: None, fences: Fences) -> None:
    (x, x_scale), (y, y_scale) = ones(N, M), ones(K, M)
    out = torch.empty((len(ends), N, K), device=x.device)
    dot_scaled.grouped_wgrad(out, x.mT, x_scale.mT, y.mT, y_scale.mT, here(ends))
    assert fences() == []
    assert out.isfinite().all()
