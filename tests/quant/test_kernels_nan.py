"""NaNs of any sign and payload, and infinities, come out of every kernel as out of its reference: their blocks are NaN.

A maximum that compares integers, or that loses NaNs between threads, would leave a block finite.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.quant import ScaleMode, ops
from mxep.quant.fold import _fold_for_wgrad, fold_op
from mxep.quant.kernels import fold, requantize, swiglu
from mxep.quant.kernels import quantize as kernels
from mxep.quant.quantize import _requantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATTERNS = [0x7FC0, -0x40, 0x7F81, -0x7F, 0x7FFF, -1, 0x7F80, -0x80]
"""Of bf16: NaN, -NaN, signalling NaNs with a payload, NaNs of ones, Inf, -Inf. fp32 has 16 zeros, or ones, more."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def special(dtype: torch.dtype, N: int = 64, K: int = 96) -> Tensor:
    """x (N, K), of which rows 0, 5, 10, ... have one value each that is no number, in columns 3, 24, 45, ...
    of them."""
    x = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for i, pattern in enumerate(PATTERNS):
        bits = pattern if dtype == torch.bfloat16 else pattern << 16 | (0xABC if pattern & 0x7F else 0)
        x.view(whole)[5 * i, (3 + 21 * i) % K] = bits
    return x


def same(got: Any, want: Any) -> bool:
    """Bit for bit, but for NaNs of results in bf16 and fp32."""
    got = got.cpu()
    if want.dtype in (torch.bfloat16, torch.float32):
        return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def cases(x: Tensor) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """(name, kernel, reference, arguments)."""
    y, z = x.flip(0), -x
    for size in (32, 48, x.shape[1]):
        yield f"rows of {size}", kernels.quantize_rows, ops.quantize_rows.reference, (x, E4M3, "rceil", size)
    for i, mode in enumerate(ScaleMode):
        for dtype in (E4M3, E5M2):
            how = dtype, mode.value, 32
            if (dtype == E5M2) == i % 2:
                yield f"columns, {mode}", kernels.quantize_columns, ops.quantize_columns.reference, (x, *how)
            else:
                yield f"2-D, {mode}", kernels.quantize_2d, ops.quantize_2d.reference, (x, *how)
    for size in (16, 32, 48, x.shape[0]):
        of_blocks = x[: len(x) // size * size]
        arguments = of_blocks, E4M3, "rceil", size
        yield f"columns of {size}", kernels.quantize_columns, ops.quantize_columns.reference, arguments
    for parts in ((x, None, None), (x, y, z)):
        how = E4M3, "rceil"
        yield "a scale a row", kernels.quantize_per_row, ops.quantize_per_row.reference, (*parts, *how)
        amax = torch.cat([part.float() for part in parts if part is not None]).abs().amax(0)
        # What torch's maximum gives for NaN may have a sign.
        rceil, floor = ScaleMode.RCEIL, ScaleMode.FLOOR
        for given, mode in ((amax, rceil), (-amax, floor), (torch.where(amax.isnan(), -amax, amax), rceil)):
            arguments = *parts, given, E4M3, mode.value
            yield f"{mode} of amax", kernels.quantize_per_column, ops.quantize_per_column.reference, arguments
    for last in (None, z):
        arguments = x, y, last, E4M3, "rceil"
        yield "joined", kernels.quantize_joined_rows, ops.quantize_joined_rows.reference, arguments
    qdata, scale = ops.quantize_rows.reference(x, E4M3, "rceil", 32)
    qdata.view(torch.uint8)[1, 5] = 0xFF  # -NaN in a block whose scale is a number
    ends = torch.tensor([32, 64], dtype=torch.int32)
    yield "fold", fold.fold, fold_op.reference, (qdata, scale, None, None)
    pair = qdata, scale, None
    yield "fold for wgrad", fold.fold_for_wgrad, _fold_for_wgrad.reference, (*pair, *pair, ends, 1)
    for blocks in ((1, 32), (32, 1)):
        parts = (qdata, scale) if blocks == (1, 32) else (qdata[:, :64], scale.new_ones(2, 64))
        arguments = *parts, *blocks, None, None, E4M3, "rceil"
        yield "requantize", requantize.requantize, _requantize.reference, arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_agree_with_references_about_what_is_no_number(dtype: torch.dtype) -> None:
    for name, kernel, reference, arguments in cases(special(dtype)):
        want = reference(*arguments)
        got = kernel(*(a.to(DEVICE, copy=True) if isinstance(a, Tensor) else a for a in arguments))
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert same(a, b), (name, i)


@pytest.mark.parametrize(
    "quantized", [(E4M3, "rceil", 32, False), (E4M3, "rceil", 0, False), (E4M3, "rceil", 32, True)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_swiglu_agrees_with_its_reference_about_what_is_no_number(dtype: torch.dtype, quantized: Any) -> None:
    gate_up, d_h = special(dtype, 38, 128), special(dtype, 38, 64)
    weight = torch.ones(38)
    weight[36:] = torch.tensor([-0x400000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    to, mode, size, folded = quantized
    activation = [1.702, 7.0, 1.0, 1.0] if dtype == torch.float32 else None
    how = to, mode, size or 64, folded, activation, None
    want = torch.ops.mxep.swiglu(gate_up, weight, None, *how)
    got = swiglu.swiglu(gate_up.to(DEVICE), weight.to(DEVICE), None, *how)
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    outs = [torch.empty(gate_up.shape, dtype=to, device=device) for device in ("cpu", DEVICE)]
    scaled = mode, size or 128, folded, to, activation, *[None] * 3
    rest = torch.ops.mxep.swiglu_backward(d_h, gate_up, weight, None, outs[0], *scaled)
    given = d_h.to(DEVICE), gate_up.to(DEVICE), weight.to(DEVICE), None, outs[1]
    more = swiglu.swiglu_backward(*given, *scaled)
    assert same(outs[1], outs[0])
    assert all(same(a, b) for a, b in zip(more, rest, strict=True))
