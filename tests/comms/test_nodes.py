"""Slots of tokens that cross to other nodes: kernels equal references, on a GPU or interpreted.

What a launcher allocates is filled with garbage first, so a number that no kernel writes shows.
"""

import pytest
import torch
from torch import Tensor

from comms.cases import assert_bitwise
from mxep.comms import pick_values, plan_slots, read_tables
from mxep.comms.kernels import all_to_all as kernels
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("ids", "slots", "tokens", "tables")


def random_ids(tokens: int, top_k: int, experts: int) -> Tensor:
    """Twins, -1 and invalid ids among them."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=random, dtype=torch.int32)
    wrong = torch.tensor([-2, experts, -(2**31), 2**31 - 1], dtype=torch.int32)
    at = torch.randint(0, 30 * len(wrong), ids.shape, generator=random)
    return torch.where(at < len(wrong), wrong[at.clamp(max=len(wrong) - 1)], ids).to(DEVICE)


def check(ids: Tensor, num_nodes: int, num_slots: int, experts_per_node: int, counts: tuple[int, ...] = (3, 4, 5)):
    weights = torch.arange(1, ids.numel() + 1, dtype=torch.float32, device=DEVICE).view(ids.shape)
    sizes = num_nodes, num_slots, experts_per_node, num_nodes * experts_per_node
    got_counts, expected_counts = torch.tensor([counts, counts], device=DEVICE)
    got = kernels.plan_slots(ids, weights, got_counts, *sizes)
    expected = plan_slots.reference(ids, weights, expected_counts, *sizes)
    for name, one, other in zip(FIELDS, got, expected, strict=True):
        assert_bitwise(one, other, name)
    assert got_counts.tolist() == expected_counts.tolist()
    return got, got_counts


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_nodes", "num_slots", "experts_per_node"),
    [
        (0, 8, 2, 1, 4),
        (1, 1, 1, 1, 1),
        (300, 8, 2, 300, 16),
        (300, 8, 2, 100, 16),
        (513, 6, 3, 1, 7),
        (257, 1, 4, 60, 2),
        (130, 5, 33, 11, 3),
        (40, 8, 300, 2, 2),
        (7, 40, 2, 5, 2),
    ],
)
def test_slots_equal_their_reference(tokens, top_k, num_nodes, num_slots, experts_per_node):
    check(random_ids(tokens, top_k, num_nodes * experts_per_node), num_nodes, num_slots, experts_per_node)


@pytest.mark.parametrize("filled", [-1, -2, 0, 11, 12])
@pytest.mark.parametrize("num_slots", [1, 100, 300])
def test_slots_where_all_pairs_are_alike(filled, num_slots):
    ids = torch.full((300, 3), filled, dtype=torch.int32, device=DEVICE)
    _, counts = check(ids, 3, num_slots, 4)
    routed = 0 <= filled < 12
    lost = 3 * (300 - num_slots) if routed else 0
    assert counts.tolist() == [300 if routed else 3, 4 + lost, 5 + (0 if routed or filled == -1 else 900)]


def test_the_most_tokens_for_a_node_are_kept():
    ids = torch.zeros(5, 2, dtype=torch.int32, device=DEVICE)
    assert check(ids, 2, 5, 2, (9, 0, 0))[1].tolist() == [9, 0, 0]


def test_slots_of_many_tiles_a_program_and_many_programs(monkeypatch):
    """As of large batches: a program has several tiles, and earlier programs' counts are summed in several reads."""
    monkeypatch.setattr(kernels, "NODE_TILE", 16)
    monkeypatch.setattr(kernels, "FLAT_TILE", 32)
    monkeypatch.setattr(kernels, "MOST_CHUNKS", 5)
    monkeypatch.setattr(kernels, "COUNTS_AT_ONCE", 8)
    ids = random_ids(210, 4, 12)
    for num_slots in (210, 50, 3):
        check(ids, 3, num_slots, 4)
    monkeypatch.setattr(kernels, "MOST_CHUNKS", 50)
    ids[::7] = 2**31 - 1
    check(ids, 3, 50, 4)


def test_slots_of_batches_whose_products_pass_32_bits():
    """n C > 2^32: 70,000 tokens of one node for 65,000 slots."""
    ids = torch.zeros(70_000, 1, dtype=torch.int32, device=DEVICE)
    (_, slots, *_), counts = check(ids, 1, 65_000, 1, (0, 0, 0))
    assert int((slots >= 0).sum()) == 65_000
    assert counts.tolist() == [70_000, 5_000, 0]


@pytest.mark.parametrize("rows", [0, 1, 400])
@pytest.mark.parametrize("top_k", [1, 6])
def test_tables_are_read_as_they_were_written(rows, top_k):
    ids = random_ids(rows, top_k, 12).clamp(-1, 11)
    weights = torch.rand(rows, top_k, device=DEVICE)
    tables = torch.cat((ids + 1, weights.view(torch.int32)), 1).view(torch.uint8)
    wide = torch.cat((tables, tables), 1)[:, : tables.shape[1]]
    for given in (tables, wide):
        got, expected = kernels.read_tables(given, 4, 5), read_tables.reference(given, 4, 5)
        assert torch.equal(got[0], torch.where((ids >= 4) & (ids < 9), ids - 4, -1))
        assert torch.equal(got[1], weights)
        assert all(map(torch.equal, got, expected))
        assert all(one.is_contiguous() for one in got)


@pytest.mark.parametrize(("tokens", "top_k", "num_nodes"), [(0, 4, 2), (1, 1, 1), (300, 6, 3)])
def test_values_are_those_of_each_pairs_node(tokens, top_k, num_nodes):
    ids = random_ids(tokens, top_k, 4 * num_nodes).clamp(-1, 4 * num_nodes - 1)
    slots = torch.randint(-1, 20, (tokens, num_nodes), dtype=torch.int32, device=DEVICE)
    values = torch.rand(20, top_k, device=DEVICE)
    got = kernels.pick_values(values, slots, ids, 4)
    assert_bitwise(got, pick_values.reference(values, slots, ids, 4), "values")
    for t, k in ((t, k) for t in range(min(tokens, 20)) for k in range(top_k)):
        expert = int(ids[t, k])
        slot = int(slots[t, expert // 4]) if expert >= 0 else -1
        assert got[t, k] == (values[slot, k] if slot >= 0 else 0)
