"""The ops by themselves: opcheck, no reads from the device, and what gather and sum do with odd indices."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from comms.cases import assert_bitwise, payload
from mxep.comms import direct, exchange, gather_rows, plan, rows, sum_slots
from mxep.comms.layout import Layout

LAYOUT = Layout(world_size=2, max_tokens=3, top_k=2, row_bytes=32, num_rows=10)
IDS = torch.tensor([[0, 3], [-1, 1], [2, 2]], dtype=torch.int32)
SLOT_ROWS = torch.tensor([[0, 3], [-1, 1], [2, -2], [-2, -2], [-1, -1], [4, 5]], dtype=torch.int32)


def peers() -> list[torch.Tensor]:
    return [torch.full((LAYOUT.nbytes,), 255, dtype=torch.uint8) for _ in range(2)]


def parts() -> list[torch.Tensor]:
    return [payload(0, 3, 20), payload(1, 3, 5)]


def calls():
    layout, pointers, weights = LAYOUT.ints(), torch.zeros(2, dtype=torch.int64), torch.rand(3, 2)
    tables = IDS[None].repeat(2, 1, 1), torch.rand(2, 3, 2), torch.tensor([3, 1], dtype=torch.int32)
    return {
        "put_rows": (exchange.put_rows, (peers(), pointers, parts(), IDS, weights, layout, 1, 2)),
        "put_rows again": (exchange.put_rows, (peers(), pointers, parts(), IDS, None, layout, 1, 2)),
        "put_sums": (
            exchange.put_sums,
            (peers(), pointers, torch.randn(8, 16).bfloat16(), SLOT_ROWS, torch.rand(8), layout, 1),
        ),
        "put_sums only": (exchange.put_sums, (peers(), pointers, torch.randn(8, 8), SLOT_ROWS, None, layout, 0)),
        "values_home": (exchange.values_home, (torch.zeros_like(peers()[0]), IDS, layout, 2)),
        "put_tables": (direct.put_tables, (peers(), pointers, IDS, weights, layout, 1)),
        "put_rows_to_groups": (
            direct.put_rows_to_groups,
            (peers(), pointers, parts(), SLOT_ROWS.view(2, 3, 2), layout, 1),
        ),
        "make_plan": (plan.plan_rows, (*tables, 2, 2, 4, 16, 4)),
        "gather_rows": (rows.gather_parts, (parts(), torch.tensor([2, -1, 0, 0], dtype=torch.int32))),
        "sum_slots": (rows.add_rows, (torch.randn(8, 5).bfloat16(), SLOT_ROWS)),
    }


@pytest.mark.parametrize("name", calls())
def test_opcheck(name):
    op, args = calls()[name]
    opcheck(op, args)


@pytest.mark.parametrize("name", calls())
def test_a_reference_never_reads_from_the_device(name):
    op, args = calls()[name]
    mode = FakeTensorMode()

    def fake(value):
        if isinstance(value, list):
            return [fake(one) for one in value]
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    with mode:  # raises on .item(), boolean masks and anything else whose shape or value depends on data
        op._init_fn(*[fake(arg) for arg in args])


def test_gather_makes_zero_rows_where_there_is_no_row():
    source = payload(3, 4, 6)
    (rows_of_index,) = gather_rows((source,), torch.tensor([2, -1, 0, -2, 2], dtype=torch.int32))
    zero = torch.zeros(6, dtype=torch.uint8)
    assert_bitwise(rows_of_index, torch.stack((source[2], zero, source[0], zero, source[2])), "rows")


def test_gather_from_nothing_makes_zero_rows():
    (rows_of_index,) = gather_rows((torch.empty(0, 3),), torch.tensor([-1, -1], dtype=torch.int32))
    assert_bitwise(rows_of_index, torch.zeros(2, 3), "rows")


def test_slots_are_summed_in_fp32_and_rounded_once():
    big_and_small = torch.tensor([[256.0], [1.0], [1.0], [float("nan")]]).bfloat16()
    slot_rows = torch.tensor([[0, 1, 2], [1, -1, -1], [-1, -2, -1]], dtype=torch.int32)
    # bf16 steps by 2 above 256: adding 1 twice with rounding between would stay at 256.
    assert_bitwise(sum_slots(big_and_small, slot_rows), torch.tensor([[258.0], [1.0], [0.0]]).bfloat16(), "sums")


def test_put_rows_touches_only_slots_that_are_needed():
    buffers, layout = peers(), LAYOUT.ints()
    exchange.put_rows(buffers, torch.zeros(2, dtype=torch.int64), parts(), IDS, None, layout, 1, 2)
    packed = torch.cat(parts(), 1)
    for rank, tokens in enumerate(((0, 1), (0, 2))):
        slots = LAYOUT.rows(buffers[rank])[: LAYOUT.num_slots]
        for slot in range(LAYOUT.num_slots):
            wanted = packed[slot - 3] if slot - 3 in tokens else torch.full((25,), 255, dtype=torch.uint8)
            assert_bitwise(slots[slot, :25], wanted, f"slot {slot} of rank {rank}")
        assert (buffers[rank][LAYOUT.rows(buffers[rank]).numel() :] == 255).all(), "tables stay home"


def test_regions_of_a_layout_are_aligned_and_apart():
    layout = Layout(world_size=3, max_tokens=5, top_k=3, row_bytes=48, num_rows=17)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    regions = [layout.rows(buffer), layout.ids(buffer), layout.values(buffer), layout.num_tokens(buffer)]
    ends = 0
    for region in regions:
        start = region.data_ptr() - buffer.data_ptr()
        assert start % 16 == 0
        assert start >= ends
        ends = start + region.numel() * region.element_size()
    assert ends <= layout.nbytes
    assert regions[0].shape == (20, 48)
    assert regions[1].shape == regions[2].shape == (3, 5, 3)
