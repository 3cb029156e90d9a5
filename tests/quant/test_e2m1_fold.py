"""MXFP4 folded to E4M3 with one scale a row: the reference against float64, the kernel against the reference."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mxep.quant import E2M1, E4M3, MXTensor, fold, fold_with_stats, quantize, to_mxfp8
from mxep.quant.formats import pack, unpack
from mxep.quant.kernels import e2m1 as kernels
from quant import exact
from quant.exact import Bytes, assert_bytes, raw
from quant.opchecks import check_op
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = np.concatenate([VALUES, -VALUES])
NAN = 255


def hostile(rows: int, blocks: int, seed: int = 0, spread: int = 24, top: int = 120) -> MXTensor:
    """Any codes, scales `spread` binades apart, zero blocks of any byte, a few NaN blocks."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, blocks, 32), dtype=np.uint8)
    scale = rng.integers(max(0, top - spread), top, (rows, blocks), dtype=np.uint8)
    zero = rng.random((rows, blocks)) < 0.2
    codes[zero] &= 8
    scale[zero] = rng.choice([0, 60, 200], int(zero.sum()))
    scale[rng.random((rows, blocks)) < 0.3 / blocks] = NAN
    return tensor_of(codes.reshape(rows, -1), scale)


def tensor_of(codes: Bytes, scale: Bytes) -> MXTensor:
    return MXTensor.from_qdata_and_scales(pack(torch.from_numpy(codes)), torch.from_numpy(scale), torch.float32)


def folded_in_float64(mx: MXTensor) -> tuple[Bytes, Bytes]:
    """From the definition, a row at a time."""
    codes, scales = raw(unpack(mx.qdata)), raw(mx.scale).astype(int)
    out, out_scale = np.zeros(codes.shape, np.uint8), np.zeros((len(codes), 1), np.uint8)
    for r, (row, scale) in enumerate(zip(codes, scales)):
        blocks = row.reshape(-1, 32)
        if (scale == NAN).any():
            out[r], out_scale[r] = 0x7F, NAN
            continue
        live = (blocks & 7).any(1)
        top = int(max(scale[live], default=0)) - 6
        out_scale[r] = max(top, 0)
        shifted = VALUES[blocks] * 2.0 ** (scale - float(out_scale[r, 0]))[:, None]
        shifted = np.where(live[:, None], shifted, VALUES[blocks])
        out[r] = exact.nearest_codes(E4M3, shifted).reshape(-1)
    return out, out_scale


def check(mx: MXTensor) -> None:
    """The kernel's bytes on DEVICE against the reference's on the CPU."""
    want, want_scale = torch.ops.mxep.fold_e2m1(mx.qdata, mx.scale)
    moved = (
        MXTensor(*(part.to(DEVICE) for part in (mx.qdata, mx.scale)), None, -1, 32, mx.dtype)
        if DEVICE == "cuda"
        else mx
    )
    got, got_scale = kernels.fold_e2m1(moved.qdata, moved.scale)
    for a, b in ((got, want), (got_scale, want_scale)):
        assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
        assert_bytes(a.cpu(), raw(b))


def every_shift() -> MXTensor:
    """Every code beside a block of the largest, 0 to 40 binades apart; and at the low end of scales."""
    shifts = np.arange(41)
    codes = np.tile(np.arange(32) % 16, (len(shifts), 2)).astype(np.uint8)
    scales = [np.stack([np.full(41, top), np.maximum(top - shifts, 0)], 1) for top in (127, 254, 20, 7, 6, 5, 3, 1, 0)]
    return tensor_of(np.tile(codes, (len(scales), 1)), np.concatenate(scales).astype(np.uint8))


@pytest.mark.parametrize("seed", range(4))
def test_fold_equals_the_float64_derivation(seed: int) -> None:
    for mx in (every_shift(), hostile(30, 5, seed), hostile(30, 90, seed, spread=14), hostile(20, 3, seed, 40, 30)):
        qdata, scale = folded_in_float64(mx)
        got = fold(mx)
        assert (got.format, got.block_size, got.shape) == (E4M3, mx.shape[1], mx.shape)
        assert_bytes(got.scale, scale)
        assert_bytes(got.qdata, qdata)


def test_every_code_is_exact_within_14_binades_and_some_are_not_at_15() -> None:
    for apart in range(20):
        codes = np.tile(np.arange(32) % 16, (1, 2)).astype(np.uint8)
        mx = tensor_of(codes, np.array([[100, 100 - apart]], np.uint8))
        folded, stats = fold_with_stats(mx)
        assert torch.equal(folded.dequantize(), mx.dequantize()) is (apart <= 14)
        assert stats.exact.tolist() == [apart <= 14]
        assert (int(stats.changed) == 0) is (apart <= 14)
        assert stats.spread.tolist() == [apart]


def test_low_scales_do_not_wrap_and_zero_blocks_do_not_count() -> None:
    codes = np.zeros((4, 64), np.uint8)
    codes[1:, :32] = 7
    codes[3, 40] = 1
    mx = tensor_of(codes, np.array([[0, 0], [3, 0], [100, 254], [3, 0]], np.uint8))
    folded, stats = fold_with_stats(mx)
    assert raw(folded.scale)[:, 0].tolist() == [0, 0, 94, 0]
    assert torch.equal(folded.dequantize(), mx.dequantize())
    assert bool(stats.exact.all())


def test_a_nan_block_makes_nan_of_its_row_which_is_not_exact() -> None:
    mx = tensor_of(np.ones((2, 64), np.uint8), np.array([[100, 255], [100, 100]], np.uint8))
    folded, stats = fold_with_stats(mx)
    assert bool(folded.dequantize()[0].isnan().all())
    assert stats.exact.tolist() == [False, True]


def test_it_is_the_fold_of_the_same_values_in_mxfp8() -> None:
    mx = hostile(40, 6)
    wide = to_mxfp8(mx)
    assert (wide.format, wide.block_size, wide.dtype) == (E4M3, 32, torch.float32)
    assert torch.equal(wide.dequantize().nan_to_num(7), mx.dequantize().nan_to_num(7))
    for a, b in ((fold(mx), fold(wide)), (fold_with_stats(mx)[0], fold(mx))):
        assert_bytes(a.qdata, raw(b.qdata))
        assert_bytes(a.scale, raw(b.scale))


def test_columns_indices_groups_and_other_blocks_fold_too() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    columns = fold(quantize(x, fmt=E2M1, axis=-2))
    assert (columns.axis, columns.block_size) == (-2, 64)
    assert torch.equal(columns.dequantize(), quantize(x, fmt=E2M1, axis=-2).dequantize())
    mx = quantize(x, fmt=E2M1)
    index = torch.tensor([5, -1, 0], dtype=torch.int32)
    picked = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, torch.float32, row_index=index)
    assert torch.equal(fold(picked).dequantize(), picked.dequantize())
    offs = torch.tensor([10, 20], dtype=torch.int32)
    assert torch.equal(fold(mx, offs=offs).dequantize()[:20], mx.dequantize()[:20])
    by_16 = quantize(x, fmt=E2M1, block_size=16)
    assert torch.equal(fold(by_16).dequantize(), by_16.dequantize())
    assert torch.equal(
        to_mxfp8(quantize(x, fmt=E2M1, axis=-2)).dequantize(), quantize(x, fmt=E2M1, axis=-2).dequantize()
    )


def test_the_kernel_at_every_code_and_shift() -> None:
    check(every_shift())


@pytest.mark.parametrize("width", [32, 96, 160, 768, 2880])
def test_the_kernel_on_rows_of_any_length(width: int) -> None:
    for seed, spread in enumerate((8, 14, 40)):
        check(hostile(5, width // 32, seed, spread))


def test_the_kernel_reads_experts_strided_rows_and_odd_addresses() -> None:
    mx = hostile(12, 6)
    check(MXTensor(mx.qdata.view(2, 6, 96), mx.scale.view(2, 6, 6), None, -1, 32, torch.bfloat16))
    check(mx[::2])
    check(mx[:, 64:])
    buffer = torch.zeros(12 * 96 + 3, dtype=torch.uint8)
    odd = buffer[3:].view(12, 96)
    odd.copy_(mx.qdata.view(torch.uint8))
    check(MXTensor(odd.view(E2M1.dtype), mx.scale, None, -1, 32, torch.bfloat16))
    check(mx[:0])


def test_the_kernel_with_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS_PER_SM", 2)
    check(hostile(77, 3))


def test_ops_pass_opcheck() -> None:
    mx = quantize(torch.randn(6, 128, generator=torch.Generator().manual_seed(2)), fmt=E2M1)
    check_op(torch.ops.mxep.fold_e2m1.default, mx.qdata, mx.scale)


def test_a_compiled_fold_has_the_same_bytes() -> None:
    def values(x: Tensor) -> Tensor:
        return fold(quantize(x, fmt="E2M1")).dequantize()

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.compile(values, fullgraph=True, backend="aot_eager")(x), values(x))
