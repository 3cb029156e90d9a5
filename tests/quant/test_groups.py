"""Padding of groups: where every row goes, what lies in the gaps, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxep.quant import MXTensor, pad_groups, quantize, unpad_groups, valid_rows
from quant.inputs import gaussian
from quant.opchecks import check_op


def padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def test_the_example_of_the_docstring() -> None:
    x = torch.arange(1.0, 6.0).view(5, 1)
    groups = pad_groups(x, torch.tensor([3, 0, 2]), alignment=4)
    assert groups.offs.tolist() == [4, 4, 8]
    assert groups.row_index.tolist() == [0, 1, 2, -1, 3, 4, -1, -1] + [-1] * 8
    assert groups.rows.flatten().tolist()[:8] == [1, 2, 3, 0, 4, 5, 0, 0]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    spare=st.integers(0, 5),
    alignment=st.sampled_from([1, 3, 16, 32]),
    wide=st.booleans(),
)
def test_groups_lie_at_multiples_with_zero_rows_between(
    sizes: list[int], spare: int, alignment: int, wide: bool
) -> None:
    valid = sum(sizes)
    x = gaussian(valid + spare, 3)
    x[valid:] = float("nan")
    group_sizes = torch.tensor(sizes, dtype=torch.int64 if wide else torch.int32)
    groups = pad_groups(x, group_sizes, alignment=alignment)
    capacity = padded(valid + spare + len(sizes) * (alignment - 1), alignment)
    assert groups.rows.shape == (capacity, 3)
    assert groups.row_index.shape == (capacity,)
    assert groups.offs.dtype == groups.row_index.dtype == torch.int32
    start, source = 0, 0
    for size, end in zip(sizes, groups.offs.tolist()):
        assert end == start + padded(size, alignment)  # an empty group takes no row
        assert torch.equal(groups.rows[start : start + size], x[source : source + size])
        assert not groups.rows[start + size : end].any()
        start, source = end, source + size
    back = unpad_groups(groups.rows, groups.row_index, num_rows=valid + spare)
    assert torch.equal(back[:valid], x[:valid])
    assert not back[valid:].any()


def test_unpad_reads_no_row_that_is_padding() -> None:
    x = gaussian(7, 4)
    groups = pad_groups(x, torch.tensor([2, 5]), alignment=8)
    poisoned = torch.where(groups.row_index[:, None] < 0, float("nan"), groups.rows)
    assert torch.equal(unpad_groups(poisoned, groups.row_index, num_rows=7), x)


def test_gradients_of_pad_and_unpad_are_each_other() -> None:
    x = gaussian(7, 4).double().requires_grad_()
    sizes = torch.tensor([2, 0, 4])  # the last row is in no group

    def pad(x: Tensor) -> Tensor:
        return pad_groups(x, sizes, alignment=4).rows

    index = pad_groups(x, sizes, alignment=4).row_index
    y = gaussian(index.shape[0], 4).double().requires_grad_()
    assert torch.autograd.gradcheck(pad, (x,))
    assert torch.autograd.gradcheck(lambda y: unpad_groups(y, index, num_rows=7), (y,))


@pytest.mark.parametrize("indexed", [False, True])
def test_an_mxtensor_is_padded_by_its_index_without_a_copy(indexed: bool) -> None:
    mx = quantize(gaussian(6, 64))
    x = mx
    if indexed:
        index = torch.tensor([4, -1, 0, 0, 5], dtype=torch.int32)
        x = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, mx.dtype, row_index=index)
    sizes = torch.tensor([2, 3])
    groups, plain = pad_groups(x, sizes, alignment=4), pad_groups(x.dequantize(), sizes, alignment=4)
    assert isinstance(groups.rows, MXTensor)
    assert groups.rows.qdata.data_ptr() == mx.qdata.data_ptr()
    assert torch.equal(groups.offs, plain.offs)
    assert torch.equal(groups.rows.dequantize(), plain.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_any_dtype_is_padded(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0], [2.0], [4.0]]).to(dtype)
    groups = pad_groups(x, torch.tensor([1, 2]), alignment=2)
    assert groups.rows.dtype == dtype
    assert not groups.rows[1:2].view(torch.uint8).any()
    back = unpad_groups(groups.rows, groups.row_index, num_rows=3)
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_no_row_at_all_and_rows_of_no_group() -> None:
    groups = pad_groups(gaussian(0, 4), torch.tensor([0, 0]), alignment=4)
    assert groups.offs.tolist() == [0, 0]
    assert groups.rows.shape == (8, 4)
    assert unpad_groups(groups.rows, groups.row_index, num_rows=0).shape == (0, 4)
    assert unpad_groups(gaussian(0, 4), torch.zeros(0, dtype=torch.int32), num_rows=2).tolist() == [[0.0] * 4] * 2


def test_live_rows_is_the_last_group_end_or_the_capacity() -> None:
    assert valid_rows(None, 7) == 7
    assert valid_rows(torch.tensor([2, 5], dtype=torch.int32), 7) == 5
    assert valid_rows(torch.empty(2, dtype=torch.int32, device="meta"), 7) == 7  # no other device is asked
    with pytest.raises(ValueError, match=r"offs\[-1\]: got 8, want 0 to 7"):
        valid_rows(torch.tensor([2, 8], dtype=torch.int32), 7)


def test_group_ops_pass_opcheck() -> None:
    sizes = torch.tensor([2, 0, 3])
    x = gaussian(6, 4)
    groups = pad_groups(x, sizes, alignment=4)
    check_op(torch.ops.mxep.pad_index, sizes, 6, 4)
    check_op(torch.ops.mxep.pad_rows, x, groups.row_index)
    check_op(torch.ops.mxep.unpad_rows, groups.rows, groups.row_index, 6)


def test_bad_arguments_say_what_they_got_and_what_is_wanted() -> None:
    x, sizes = gaussian(4, 2), torch.tensor([1, 3])
    with pytest.raises(ValueError, match=r"x: got shape \(4,\), want \(M, D\)"):
        pad_groups(x[:, 0], sizes, alignment=4)
    with pytest.raises(ValueError, match="alignment: got 0, want at least 1"):
        pad_groups(x, sizes, alignment=0)
    with pytest.raises(ValueError, match=r"group_sizes: got torch\.float32 .*want int32 or int64"):
        pad_groups(x, sizes.float(), alignment=4)
    with pytest.raises(ValueError, match=r"got \[1, 4\], want sizes >= 0 that sum to at most 4 rows"):
        pad_groups(x, torch.tensor([1, 4]), alignment=4)
    with pytest.raises(ValueError, match=r"got \[-1, 3\], want sizes >= 0"):
        pad_groups(x, torch.tensor([-1, 3]), alignment=4)
    with pytest.raises(ValueError, match="blocked along axis -2, want -1"):
        pad_groups(quantize(gaussian(32, 2), axis=-2), sizes, alignment=4)
    index = pad_groups(x, sizes, alignment=4).row_index
    with pytest.raises(ValueError, match=r"y: got shape \(12,\), want \(C, D\)"):
        unpad_groups(torch.zeros(12), index, num_rows=4)
    with pytest.raises(ValueError, match=r"row_index: got torch\.int64 .*want int32 of shape \(12,\)"):
        unpad_groups(torch.zeros(12, 2), index.long(), num_rows=4)
    with pytest.raises(ValueError, match="num_rows: got -1, want at least 0"):
        unpad_groups(torch.zeros(12, 2), index, num_rows=-1)
