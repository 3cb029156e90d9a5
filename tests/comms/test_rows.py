"""Rows that are gathered, joined and summed: kernels equal references, on a GPU or interpreted."""

import pytest
import torch

from comms.cases import assert_bitwise, content
from mxep.comms import gather_rows, join_rows, rows, sum_slots
from mxep.comms.kernels import rows as gather
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_gather_makes_zero_rows_where_there_is_no_row():
    source = content(3, 4, 6)
    (rows_of_index,) = gather_rows((source,), torch.tensor([2, -1, 0, -2, 2], dtype=torch.int32))
    zero = torch.zeros(6, dtype=torch.uint8)
    assert_bitwise(rows_of_index, torch.stack((source[2], zero, source[0], zero, source[2])), "rows")


def test_gather_without_an_index_makes_dense_copies():
    wide = content(3, 4, 6).to("cuda" if torch.cuda.is_available() else "cpu")
    (copy,) = gather_rows((wide[:, 1:4],), None)
    assert copy.is_contiguous()
    assert_bitwise(copy, wide[:, 1:4], "rows")
    copy.zero_()
    assert_bitwise(wide.cpu(), content(3, 4, 6), "source")


def test_gather_from_nothing_makes_zero_rows():
    (rows_of_index,) = gather_rows((torch.empty(0, 3),), torch.tensor([-1, -1], dtype=torch.int32))
    assert_bitwise(rows_of_index, torch.zeros(2, 3), "rows")


def test_slots_are_summed_in_fp32_and_rounded_once():
    big_and_small = torch.tensor([[256.0], [1.0], [1.0], [float("nan")]]).bfloat16()
    slot_rows = torch.tensor([[0, 1, 2], [1, -1, -1], [-1, -2, -1]], dtype=torch.int32)
    # bf16 steps by 2 above 256: adding 1 twice with rounding between would stay at 256.
    assert_bitwise(sum_slots(big_and_small, slot_rows), torch.tensor([[258.0], [1.0], [0.0]]).bfloat16(), "sums")


@pytest.mark.parametrize("name", ["gather_rows", "sum_slots"])
def test_the_kernels_equal_their_references_whatever_the_strides(name):
    """On a GPU, or interpreted. Indices are every other column; a part has no columns; rows are cut from wider ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    index = torch.tensor([[2, 9, 3], [-1, 9, 1], [0, 9, -2], [-2, 9, -1]], dtype=torch.int32, device=device)[:, ::2]
    if name == "gather_rows":
        wide = content(0, 4, 40).to(device)
        payload = [wide[:, 3:11], wide[:, 8:32], wide[:, :0], torch.randn(4, 20, device=device)]
        calls = [(part, which, None) for which in (index[:, 0].contiguous(), None) for part in payload]
        pairs = [(gather.gather_rows(*call), rows.gather_part.reference(*call)) for call in calls]
    else:
        summands = torch.randn(4, 37, device=device).bfloat16()[:, :21]
        pairs = [(gather.sum_slots(summands, index), rows.sum_slots.reference(summands, index))]
    for got, wanted in pairs:
        assert_bitwise(got, wanted, name)


INDEX = torch.tensor([2, -1, 0, -2, 3, 3, -1], dtype=torch.int32)


@pytest.mark.parametrize(
    "widths", [(64,), (64, 8), (24, 6), (3, 2), (1, 1, 1), (2, 40), (0, 8), (7,), (12, 4), (2064, 65)]
)
@pytest.mark.parametrize("table", [0, 8, 5])
@pytest.mark.parametrize("number", [None, 2**29 - 2, -1 - 2**27])
def test_joined_rows_equal_their_reference(widths, table, number):
    payload = [content(i, 4, width).to(DEVICE) for i, width in enumerate(widths)]
    beside = content(7, len(INDEX), table).to(DEVICE) if table else None
    of = None if number is None else torch.tensor([number], dtype=torch.int32, device=DEVICE)
    other = torch.cat(payload[1:], 1) if len(payload) > 1 else None
    args = payload[0], other, INDEX.to(DEVICE), beside, of, 3
    got, expected = gather.join_rows(*args), rows.join_parts.reference(*args)
    assert_bitwise(got, expected, "rows")
    assert_bitwise(join_rows(payload, INDEX.to(DEVICE), beside, of, 3), expected, "rows")
    assert got.shape[1] % 16 == 0
    used = sum(widths)
    assert_bitwise(got[2, 4:used], torch.cat([part[0] for part in payload])[4:used], "a row")
    if number is None:
        assert not got[1, :used].any()
    else:
        assert got[[1, 3, 6], :4].contiguous().view(torch.int32).flatten().tolist() == [4 * number + 3] * 3
        assert not got[1, 4:used].any()


def test_joined_rows_of_any_strides_and_of_no_rows():
    wide = content(0, 4, 100).to(DEVICE)
    index = INDEX.to(DEVICE)
    for part, other in (
        (wide[:, 3:20], wide[:, 32:64]),
        (wide[:, 2:18], None),
        (wide[:, ::2], wide[:, 4:8]),
        (wide[:1].expand(4, 100), None),
        (wide[:, :4].expand(4, 4)[:, :1], wide[:, 1:2]),
    ):
        args = part, other, index, content(1, len(INDEX), 40).to(DEVICE)[:, 8:16], None, 0
        assert_bitwise(gather.join_rows(*args), rows.join_parts.reference(*args), "rows")
    nothing = torch.empty(0, 24, dtype=torch.uint8, device=DEVICE)
    args = nothing, None, torch.full((3,), -1, dtype=torch.int32, device=DEVICE), None, None, 0
    assert not gather.join_rows(*args).any()
    assert gather.join_rows(wide, None, index[:0], None, None, 0).shape == (0, 112)


def test_joined_rows_of_more_than_one_tile(monkeypatch):
    monkeypatch.setattr(gather, "TILE_BYTES", 256)
    args = content(0, 4, 24).to(DEVICE), content(1, 4, 4).to(DEVICE), INDEX.to(DEVICE).repeat(9), None
    args = *args, torch.tensor([5], dtype=torch.int32, device=DEVICE), 1
    assert_bitwise(gather.join_rows(*args), rows.join_parts.reference(*args), "rows")
