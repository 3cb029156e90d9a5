"""Where the regions of a buffer lie, and the numbers that ranks compare."""

import torch

from mxep.comms import NEW, describe_dispatch, new_dispatch
from mxep.comms.layout import CHANNELS, NUM_COUNTERS, Layout


def test_regions_of_a_layout_are_aligned_and_apart():
    layout = Layout(world_size=3, max_tokens=5, top_k=3, row_bytes=48)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    regions = [buffer[: CHANNELS * 3 * 8], buffer[layout.counters_start :][: NUM_COUNTERS * 8]]
    regions += [layout.rows(buffer), layout.ids(buffer), layout.values(buffer), layout.num_tokens(buffer)]
    ends = 0
    for region in regions:
        start = region.data_ptr() - buffer.data_ptr()
        assert start % 16 == 0
        assert start >= ends
        ends = start + region.numel() * region.element_size()
    assert ends <= layout.nbytes
    assert regions[2].shape == (15, 48)
    assert regions[3].shape == regions[4].shape == (3, 5, 3)
    other = Layout(world_size=3, max_tokens=50, top_k=1, row_bytes=64)
    places = (layout.counters_start, layout.rows_start)
    assert places == (other.counters_start, other.rows_start)


def test_numbers_of_layers_and_failures_fit_a_header_and_start_again() -> None:
    for layer, failures in ((1, 0), (65535, 0), (65536, 4095), (3, 4096 + 5)):
        number = new_dispatch(layer, failures)
        assert -(2**29) <= number < NEW
        assert f"layer {(layer - 1) % 65535 + 1}" in (said := describe_dispatch(number))
        assert (f"after {failures % 4096} " in said) == (failures > 0)
    assert new_dispatch(0, 5) == NEW
