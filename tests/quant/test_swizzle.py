"""The 128 x 4 blocked layout, against the published formula for the offset of element (r, c)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxep.quant import MXTensor, gather_swizzled, quantize, swizzle_scales
from quant.inputs import ends_of
from quant.opchecks import check_op


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def offset(r: int, c: int, cols: int) -> int:
    """cuBLAS: tiles of 128 x 4 row-major over the padded matrix, in a tile (r % 32) * 16 + (r / 32) * 4 + c."""
    tiles_per_row = padded(cols, 4) // 4
    tile = r // 128 * tiles_per_row + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def by_formula(scale: Tensor) -> Tensor:
    rows, cols = scale.shape
    out = torch.zeros(padded(rows, 128) * padded(cols, 4), dtype=torch.uint8)
    for r in range(rows):
        out[[offset(r, c, cols) for c in range(cols)]] = scale[r]
    return out


shapes = st.tuples(st.integers(0, 300), st.integers(1, 9))


@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_every_byte_lies_where_the_formula_says_and_padding_is_zero(shape: tuple[int, int]) -> None:
    scale = noise(*shape)
    swizzled = swizzle_scales(scale)
    assert swizzled.shape == (padded(shape[0], 128), padded(shape[1], 4))
    assert torch.equal(swizzled.flatten(), by_formula(scale))


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5), cols=st.integers(1, 9), spare=st.integers(0, 140))
def test_per_group_is_each_group_alone_one_after_another(sizes: list[int], cols: int, spare: int) -> None:
    valid = sum(sizes)
    scale, ends = noise(valid + spare, cols), ends_of(*sizes)
    alone = [swizzle_scales(part).flatten() for part in scale[:valid].split(sizes)]
    swizzled = swizzle_scales(scale, offs=ends)
    assert swizzled.shape == (padded(valid + spare + 127 * len(sizes), 128), padded(cols, 4))
    used = sum(len(part) for part in alone)
    assert torch.equal(swizzled.flatten()[:used], torch.cat(alone))


def test_rows_past_the_last_group_do_not_matter() -> None:
    scale, ends = noise(300, 5), ends_of(70, 0, 130)
    poisoned = scale.clone()
    poisoned[200:] = 255
    used = (128 + 256) * 8
    swizzled = swizzle_scales(poisoned, offs=ends)
    assert torch.equal(swizzled.flatten()[:used], swizzle_scales(scale, offs=ends).flatten()[:used])


def test_the_example_of_the_docstring() -> None:
    scale = (torch.arange(128).view(-1, 1) + torch.zeros(4, dtype=torch.int64)).to(torch.uint8)
    flat = swizzle_scales(scale).flatten().tolist()
    assert flat[:20] == [0] * 4 + [32] * 4 + [64] * 4 + [96] * 4 + [1] * 4


def test_a_batch_of_weights_is_each_matrix_alone() -> None:
    scale = noise(3, 140, 6)
    for whole, part in zip(swizzle_scales(scale), scale):
        assert torch.equal(whole, swizzle_scales(part))


def test_scales_of_an_mxtensor_go_in_as_they_are_columns_too() -> None:
    mx = quantize(torch.randn(160, 96, generator=torch.Generator().manual_seed(0)), axis=-2)
    swizzled = swizzle_scales(mx.scale.mT)  # blocked along its columns: the operand is (96, 160)
    assert swizzled.dtype == torch.float8_e8m0fnu
    assert swizzled.shape == (128, 8)
    strided = mx.scale.view(torch.uint8)
    assert torch.equal(swizzle_scales(strided).flatten(), by_formula(strided.contiguous()))


def test_without_an_index_gather_swizzled_swizzles_the_scales() -> None:
    mx = quantize(torch.randn(160, 96, generator=torch.Generator().manual_seed(0)))
    for one, other in zip(gather_swizzled(mx), (mx.qdata, swizzle_scales(mx.scale))):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_rows_are_picked_and_swizzled_group_by_group() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    index = torch.randint(-1, 50, (256,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    index[192:] = 1 << 30  # past the last group: not read
    ends, valid = ends_of(32, 0, 160), 192
    mx = quantize(torch.where(index[:valid, None] >= 0, x[index[:valid].clamp(min=0).long()], 0))
    want = swizzle_scales(mx.scale, offs=ends)[: 128 * 3]
    indexed = MXTensor.from_qdata_and_scales(
        *(getattr(quantize(x), part) for part in ("qdata", "scale")), row_index=index
    )
    qdata, scale = gather_swizzled(indexed, offs=ends)
    assert torch.equal(qdata[:valid].view(torch.uint8), mx.qdata.view(torch.uint8))
    assert torch.equal(scale[: 128 * 3].view(torch.uint8), want.view(torch.uint8))


def test_swizzle_ops_pass_opcheck() -> None:
    scale, ends = noise(130, 5), ends_of(40, 60)
    for offs in (None, ends):
        check_op(torch.ops.mxep.swizzle_scales, scale, offs)
    check_op(torch.ops.mxep.swizzle_scales, scale.clamp(max=254).view(torch.float8_e8m0fnu), None)
    x = torch.randn(130, 64)
    mx, index = quantize(x), torch.arange(-1, 99, dtype=torch.int32)
    for row_index in (None, index):
        for offs in (None, ends):
            check_op(torch.ops.mxep.gather_swizzled, mx.qdata, mx.scale, row_index, offs)


def test_bad_arguments_say_what_they_got_and_what_is_wanted() -> None:
    scale = noise(128, 4)
    with pytest.raises(ValueError, match=r"scale: got dtype torch\.float32, want"):
        swizzle_scales(scale.float())
    with pytest.raises(ValueError, match=r"got shape \(128,\), want \(\.\.\., rows, cols\)"):
        swizzle_scales(scale[:, 0])
    with pytest.raises(ValueError, match=r"got shape \(2, 64, 4\), want \(rows, columns\)"):
        swizzle_scales(scale.view(2, 64, 4), offs=ends_of(64))
    with pytest.raises(ValueError, match="got 129, want 0 to 128"):
        swizzle_scales(scale, offs=ends_of(129))
    with pytest.raises(ValueError, match="want an MXTensor"):
        gather_swizzled(quantize(torch.zeros(32, 32), axis=-2))
