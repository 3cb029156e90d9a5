"""dgrad's fold: other blocks meet along N than along K, and where all fit, dgrad's GEMM is that of the values."""

import pytest
import torch
from torch import Tensor

from mxep.quant import (
    E2M1,
    E4M3,
    MXTensor,
    fold,
    fold_for_dgrad,
    fold_with_stats,
    quantize,
    quantize_blocks,
    to_mxfp8,
)
from mxep.quant.fold import column_scales
from mxep.quant.kernels import fold as kernels
from quant.exact import assert_bytes, raw
from quant.inputs import fold_for_dgrad_with_stats, gaussian
from quant.poison import poisoned_allocations as poisoned_allocations


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1", "E5M2"])
def test_it_has_one_scale_for_each_32_columns_of_an_expert_and_the_same_values(fmt: str) -> None:
    w = quantize(gaussian(3, 64, 96), fmt=fmt)
    folded, stats = fold_for_dgrad_with_stats(w)
    assert (folded.shape, folded.axis, folded.block_size) == ((3, 64, 96), -2, 64)
    assert folded.qdata.mT.is_contiguous()
    assert folded.scale.shape == (3, 1, 96)
    assert bool((raw(folded.scale).reshape(3, 3, 32) == raw(folded.scale).reshape(3, 3, 32)[..., :1]).all())
    assert bool(stats.exact.all())
    assert stats.exact.shape == stats.spread.shape == (3, 3)
    assert torch.equal(folded.dequantize(), w.dequantize())
    assert_bytes(fold_for_dgrad(w).qdata, raw(folded.qdata))


def test_each_block_column_is_shifted_to_its_largest_scale() -> None:
    """Against the definition, element by element."""
    scale = torch.randint(100, 125, (1, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codes = torch.randint(0, 0x7F, (1, 40, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes[0, :, 32:64][scale[0, :, 1] > 118] = 0  # zero blocks do not count
    w = MXTensor.from_qdata_and_scales(codes.view(E4M3.dtype), scale, torch.float32)
    folded = fold_for_dgrad(w)
    for j in range(3):
        block = slice(32 * j, 32 * j + 32)
        live = codes[0, :, block].bool().any(1)
        top = int(scale[0, live, j].max())
        assert set(raw(folded.scale)[0, 0, block].tolist()) == {top}
        shifted = w.dequantize()[0, :, block].double() * 2.0 ** (127 - top)
        assert_bytes(folded.qdata[0, :, block], raw(shifted.float().to(E4M3.dtype)))


def test_norms_of_rows_matter_to_dgrad_alone() -> None:
    """Rows 20 binades apart: each keeps its blocks together, so forward is exact, and dgrad is not.

    Of E4M3 forward changes an element in subnormals: a block may lie a binade below its row's largest.
    """
    x = gaussian(256, 256)
    x[::2] *= 2.0**-20
    for fmt in (E4M3, E2M1):
        w = quantize(x, fmt=fmt)
        assert int(fold_with_stats(w)[1].changed) == (1 if fmt is E4M3 else 0)
        folded, stats = fold_for_dgrad_with_stats(w)
        assert not stats.exact.any()
        differ = int((folded.dequantize() != w.dequantize()).sum())
        assert differ == int(stats.changed) > 10_000
        assert bool((stats.spread >= 19).all())


def test_outlier_blocks_in_all_rows_matter_to_forward_alone() -> None:
    x = gaussian(64, 128)
    x[:, :32] *= 2.0**20
    w = quantize(x, fmt=E2M1)
    assert not fold_with_stats(w)[1].exact.any()
    assert bool(fold_for_dgrad_with_stats(w)[1].exact.all())


def test_an_exact_fold_gives_the_gradient_of_the_dequantized_weight() -> None:
    w = quantize(gaussian(64, 96), fmt=E2M1)
    dy = gaussian(10, 64, seed=1)
    folded = fold_for_dgrad(w)
    scaled = (dy.double() @ folded.qdata.double()) * 2.0 ** (raw_exponents(folded.scale))
    torch.testing.assert_close(scaled, dy.double() @ w.dequantize(torch.float32).double(), rtol=1e-13, atol=0)
    forward = fold(w)
    assert torch.equal(forward.dequantize(), folded.dequantize())


def raw_exponents(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).double() - 127


def test_block_fp8_has_the_same_condition_in_both_directions_for_square_blocks() -> None:
    x = gaussian(256, 256)
    x[:128, :128] *= 2.0**-20
    mx = to_mxfp8(quantize_blocks(x, scale_dtype=torch.float8_e8m0fnu))
    rows, columns = fold_with_stats(mx)[1].exact, fold_for_dgrad_with_stats(mx)[1].exact
    assert rows.tolist() == [False] * 128 + [True] * 128
    assert columns.tolist() == [False] * 4 + [True] * 4


def test_a_nan_block_makes_nan_of_its_columns() -> None:
    x = gaussian(32, 64)
    x[3, 40] = torch.nan
    folded, stats = fold_for_dgrad_with_stats(quantize(x))
    assert bool(folded.dequantize()[:, 32:].isnan().all())
    assert not folded.dequantize()[:, :32].isnan().any()
    assert stats.exact.tolist() == [True, False]


def test_bad_arguments_say_what_they_got() -> None:
    with pytest.raises(ValueError, match=r"expected an MXTensor, got a Tensor: quantize it"):
        fold_for_dgrad(gaussian(2, 32))  # type: ignore[arg-type]
    for mx in (quantize(gaussian(32, 32), axis=-2), quantize(gaussian(2, 64), block_size=None)):
        with pytest.raises(ValueError, match=r"expected blocks of 32 along K and no row index, got MXTensor"):
            fold_for_dgrad(mx)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_columns(mx: MXTensor, column_scale: Tensor) -> None:
    """The kernel's bytes on DEVICE against the reference's on the CPU."""
    given = mx.qdata, mx.scale, column_scale
    want = torch.ops.mxep.fold_columns(*given)
    got = kernels.fold_columns(*(x.to(DEVICE) for x in given))
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
    assert_bytes(got.cpu(), raw(want))


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1", "E5M2"])
@pytest.mark.parametrize("shape", [(2, 96, 160), (1, 40, 32), (1, 33, 64), (3, 8, 256)])
def test_the_kernel_gives_the_bytes_of_the_reference(fmt: str, shape: tuple[int, ...], poisoned_allocations) -> None:
    norms = 2.0 ** torch.randint(-12, 12, (shape[0], shape[1], 1), generator=torch.Generator().manual_seed(1))
    w = quantize(gaussian(*shape) * norms, fmt=fmt)
    qdata, scale = w.qdata.clone(), w.scale.clone()
    qdata.view(torch.uint8)[0, 3, : 16 if fmt == "E2M1" else 32] = 0
    scale.view(torch.uint8)[0, 3, 0] = 200  # a zero block counts for nothing, whatever its scale
    scale.view(torch.uint8)[-1, 5, -1] = 255
    w = MXTensor.from_qdata_and_scales(qdata, scale, torch.float32)
    check_columns(w, column_scales(w))


def test_a_weight_that_was_folded_by_row_has_the_same_columns(poisoned_allocations) -> None:
    w = quantize(gaussian(2, 64, 96), fmt="E4M3")
    columns = column_scales(w)
    want = fold_for_dgrad(w)
    rowwise = fold(w)
    got = fold_for_dgrad(rowwise, columns)
    assert_bytes(got.qdata, raw(want.qdata))
    assert_bytes(got.scale, raw(want.scale))
    check_columns(rowwise, columns)


def test_every_code_and_every_shift_in_the_kernel(poisoned_allocations) -> None:
    shifts = torch.arange(64, dtype=torch.uint8)
    for fmt, codes in ((E4M3, 256), (E2M1, 128)):
        qdata = torch.arange(codes, dtype=torch.int32).to(torch.uint8).repeat(64, 1)[None]
        scale = (
            (100 + shifts)[None, :, None].expand(1, 64, 2 * qdata.shape[-1] // 32 if fmt is E2M1 else 8).contiguous()
        )
        w = MXTensor.from_qdata_and_scales(qdata.view(fmt.dtype), scale, torch.float32)
        # No block is above its column's scale, that of an E2M1 column in E4M3 being 2^6 smaller.
        for top in (163 if fmt is E4M3 else 157, 200, 255):
            check_columns(w, torch.full((1, scale.shape[-1]), top, dtype=torch.uint8).view(w.scale.dtype))


def test_rows_that_were_folded_to_a_much_larger_scale_come_back_up(poisoned_allocations) -> None:
    """A column of small blocks beside a large one: its codes are the smallest numbers of their rows."""
    for apart in range(19):
        w = quantize(torch.ones(1, 16, 64, dtype=torch.bfloat16), fmt="E4M3")
        scale = w.scale.clone()
        scale.view(torch.uint8)[..., 1] -= apart
        w = MXTensor.from_qdata_and_scales(w.qdata, scale, torch.float32)
        columns, rowwise = column_scales(w), fold(w)
        assert int(raw(columns)[0, 1]) == int(raw(columns)[0, 0]) - apart
        check_columns(rowwise, columns)
        check_columns(w, columns)
