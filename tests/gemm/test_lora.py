"""LoRA's three products: references against dense fp64, kernels against references."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gemm.test_functional_linear import draw
from mxep.gemm.backends.reference import parts_of
from mxep.gemm.kernels import lora as kernels
from mxep.gemm.lora import lora_expand, lora_shrink, lora_wgrad
from mxep.quant import E4M3, E5M2, MXTensor, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
SIZES = [0, 64, 32, 0, 96, 160]
CAPACITY = sum(SIZES) + 64
K, N, SCALE = 160, 96, 0.5


def slots(x: Tensor) -> MXTensor:
    """x quantized, in the rows of a receive buffer in another order; a quarter of the rows is empty."""
    mx = quantize(x, fmt=E4M3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    index = torch.argsort(order).int()
    index[::4] = -1
    width = x.shape[1]
    buffer = torch.empty(len(x), width + width // 32, dtype=torch.uint8)
    buffer[:, :width], buffer[:, width:] = mx.qdata[order].view(torch.uint8), mx.scale[order].view(torch.uint8)
    qdata, scale = buffer[:, :width].view(E4M3.dtype), buffer[:, width:].view(torch.float8_e8m0fnu)
    return MXTensor.from_qdata_and_scales(qdata, scale, x.dtype, block_size=32, row_index=index)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x,
    "fp32": lambda x: x.float(),
    "slots": slots,
    "row scales": lambda x: quantize(x, fmt=E4M3, block_size=None),
    "gradients": lambda x: quantize(x * 2.0**-20, fmt=E5M2),
}
in_turn = pytest.mark.parametrize(
    ("kind", "transposed", "rank"),
    [(kind, turned, (8, 24)[(i + turned) % 2]) for i, kind in enumerate(ROWS) for turned in (False, True)],
)
"""transposed: A is the transpose of a B. Any two of the three meet."""


def problem(kind: str, width: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """rows (CAPACITY, width), w (G, rank, width), inner (CAPACITY, rank), offs, and the dtype of inner."""
    rows = ROWS[kind](draw(CAPACITY, width))
    dtype = FP32 if kind == "fp32" else BF16
    offs = torch.tensor(SIZES).cumsum(0).int()
    return rows, draw(len(SIZES), rank, width, seed=2), draw(CAPACITY, rank, dtype=dtype, seed=3), offs, dtype


def groups(offs: Tensor) -> list[slice]:
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def values(x: Tensor) -> Tensor:
    return (x.dequantize(FP32) if isinstance(x, MXTensor) else x).double()


@pytest.mark.parametrize("kind", ROWS)
def test_references_are_the_dense_products(kind: str) -> None:
    rows, A, inner, offs, dtype = problem(kind, K, 8)
    B = draw(len(SIZES), N, 8, seed=4)
    shrunk = lora_shrink(*parts_of(rows), A, offs, SCALE, dtype)
    out = draw(CAPACITY, N, dtype=dtype, seed=5)
    d_A, before = torch.full_like(A, torch.nan), out.double()
    lora_expand(out, inner, B, offs)
    lora_wgrad(d_A, inner, *parts_of(rows), offs, SCALE)
    tolerance = {"rtol": 2**-7, "atol": 1e-4} if dtype == BF16 else {"rtol": 1e-4, "atol": 1e-4}
    for g, of_group in enumerate(groups(offs)):
        x, y = values(rows)[of_group], inner[of_group].double()
        torch.testing.assert_close(shrunk[of_group].double(), SCALE * x @ A[g].double().T, **tolerance)
        torch.testing.assert_close(out[of_group].double(), before[of_group] + y @ B[g].double().T, **tolerance)
        torch.testing.assert_close(d_A[g].double(), SCALE * y.T @ x, rtol=2**-7, atol=1e-4)
    assert torch.equal(out[offs[-1] :].double(), before[offs[-1] :])


def put(x: Tensor | None) -> Tensor | None:
    """x on the device, with its strides."""
    if x is None:
        return None
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    there.view(torch.uint8).copy_(x.view(torch.uint8)) if x.dtype.itemsize == 1 else there.copy_(x)
    return there


def poisoned(rows: Tensor, valid: int) -> Tensor:
    """Rows behind the valid ones: NaN."""
    if isinstance(rows, MXTensor):
        if rows.row_index is None:
            rows.qdata.view(torch.uint8)[valid:] = 0x7F
    else:
        rows[valid:] = torch.nan
    return rows


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Sums in another order."""
    scale = want.float().abs().max().item()
    torch.testing.assert_close(got.cpu(), want, rtol=2**-7 if dtype == BF16 else 1e-5, atol=2**-8 * scale)


@in_turn
def test_the_shrink_kernel_is_its_reference(kind: str, rank: int, transposed: bool) -> None:
    rows, A, _, offs, dtype = problem(kind, K, rank)
    A = A.mT.contiguous().mT if transposed else A
    want = lora_shrink(*parts_of(rows), A, offs, SCALE, dtype)
    parts = [put(part) for part in parts_of(poisoned(rows, int(offs[-1])))]
    got = kernels.lora_shrink(*parts, put(A), put(offs), SCALE, dtype)  # type: ignore[arg-type]
    near(got[: offs[-1]], want[: offs[-1]], dtype)


@pytest.mark.parametrize(
    ("dtype", "rank", "transposed"), [(BF16, 8, False), (BF16, 24, True), (FP32, 24, False), (FP32, 8, True)], ids=str
)
def test_the_expand_kernel_is_its_reference(dtype: torch.dtype, rank: int, transposed: bool) -> None:
    _, _, inner, offs, _ = problem("bf16" if dtype == BF16 else "fp32", K, rank)
    B = draw(len(SIZES), 300, rank, seed=4)
    B = B.mT.contiguous().mT if transposed else B
    out = draw(CAPACITY, 300, dtype=dtype, seed=5)
    got = put(out)
    lora_expand(out, inner, B, offs)
    inner[offs[-1] :] = torch.nan
    kernels.lora_expand(got, put(inner), put(B), put(offs))  # type: ignore[arg-type]
    near(got, out, dtype)  # type: ignore[arg-type]


@in_turn
def test_the_wgrad_kernel_is_its_reference(kind: str, rank: int, transposed: bool) -> None:
    rows, A, inner, offs, _ = problem(kind, K, rank)
    out_dtype = FP32 if transposed else BF16
    want = torch.full(A.shape, torch.nan, dtype=out_dtype)
    lora_wgrad(want, inner, *parts_of(rows), offs, SCALE)
    assert not want[0].any(), "an empty group has a gradient of zero"
    parts = [put(part) for part in parts_of(poisoned(rows, int(offs[-1])))]
    inner[offs[-1] :] = torch.nan
    got = torch.full(A.mT.shape if transposed else A.shape, torch.nan, dtype=out_dtype, device=DEVICE)
    kernels.lora_wgrad(got.mT if transposed else got, put(inner), *parts, put(offs), SCALE)  # type: ignore[arg-type]
    near(got.mT if transposed else got, want, out_dtype)
