"""Weights stored (E, K, N), given as their (E, N, K) views, are quantized from where they lie, byte for byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.quant import MXTensor, quantize, quantize_columns_with_amax, quantize_with_amax
from quant.exact import parts

TILES = (-2, -1)
E, N, K = 3, 96, 160


def stored(device: str = "cpu") -> Tensor:
    w = torch.randn(E, K, N, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    w[0, 3, 5], w[1, :, 7] = torch.nan, 0.0
    return w.to(device)


def later(w: Tensor) -> MXTensor:
    return quantize_columns_with_amax(w, quantize_with_amax(w)[1])


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda w: quantize(w),
    "columns": lambda w: quantize(w, axis=-2),
    "tiles": lambda w: quantize(w, axis=TILES),
    "a scale a row": lambda w: quantize(w, block_size=None),
    "a scale a column": lambda w: quantize(w, axis=-2, block_size=None),
    "rows with magnitudes": quantize_with_amax,
    "columns later": later,
}


class Seen(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.name(), args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_the_bytes_are_those_of_a_copy(way: str) -> None:
    view = stored().mT
    got, want = WAYS[way](view), WAYS[way](view.contiguous())
    for a, b in zip(parts(got), parts(want), strict=True):
        if a.dtype == torch.float32:
            a, b = a.nan_to_num(-1.0), b.nan_to_num(-1.0)  # magnitudes: any NaN will do
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    for a, b in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want]):
        if isinstance(b, MXTensor):
            assert (a.axis, a.block_size, a.shape, a.dtype) == (b.axis, b.block_size, b.shape, b.dtype)
            assert way == "tiles" or a.qdata.stride() == b.qdata.stride()  # contiguous along the blocks


@pytest.mark.parametrize("way", WAYS)
def test_ops_read_the_weight_where_it_lies(way: str) -> None:
    w = stored()
    with Seen() as seen:
        WAYS[way](w.mT)
    sources = [args[0] for name, args in seen.calls if name.startswith("mxep::")]
    assert sources
    assert all(x.is_contiguous() and x.data_ptr() == w.data_ptr() for x in sources)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_allocated_but_codes_and_scales(way: str) -> None:
    w = torch.randn(8, 1024, 2048, dtype=torch.bfloat16, device="cuda")
    WAYS[way](w.mT)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = WAYS[way](w.mT)
    kept = sum(x.nbytes for x in parts(got))
    rows_too = w.numel() if way == "columns later" else 0  # qdata along rows, which `later` makes and drops
    assert torch.cuda.max_memory_allocated() - before <= kept + rows_too + (1 << 20)


def test_the_gradient_passes_to_the_stored_weight() -> None:
    w = stored().nan_to_num().requires_grad_()
    seed = torch.randn(E, N, K, dtype=torch.bfloat16)
    (quantize(w.mT).dequantize() * seed).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, seed.mT)
