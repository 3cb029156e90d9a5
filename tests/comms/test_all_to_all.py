"""Order of an all-to-all's rows, headers, slots of nodes: kernels equal references, on a GPU or interpreted.

What a launcher allocates is filled with garbage first, so a number that no kernel writes shows.
"""

import pytest
import torch
from torch import Tensor

from comms.cases import assert_bitwise, content
from mxep.comms import (
    NEW,
    compare_headers,
    new_dispatch,
    pick_values,
    plan_all_to_all,
    plan_slots,
    read_tables,
)
from mxep.comms.kernels import all_to_all as kernels
from mxep.comms.layout import differ
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("sizes", "ids", "token", "tables", "position", "rows", "sums")


def weights_like(ids: Tensor) -> Tensor:
    return torch.arange(1, ids.numel() + 1, dtype=torch.float32, device=ids.device).view(ids.shape)


def check_plan(ids: Tensor, experts_per_rank: int, num_ranks: int) -> None:
    args = ids.to(DEVICE), weights_like(ids).to(DEVICE), experts_per_rank, num_ranks, 2**33 + 7
    got = kernels.plan_all_to_all(*args)
    for name, one, other in zip(FIELDS, got, plan_all_to_all.reference(*args), strict=True):
        assert_bitwise(one, other, name)


def test_the_example_of_the_docstring():
    ids = torch.tensor([[3, 0], [-1, 2]], dtype=torch.int32)
    sizes, valid, token, tables, position, rows, sums = plan_all_to_all(ids, weights_like(ids), 2, 2, 99)
    assert sizes.tolist() == [[2, 0, 99], [3, 0, 99]]
    assert valid.equal(ids)
    assert token.tolist() == [-1, 0, -1, 0, 1, -1]
    assert tables.view(torch.int32)[:, 0].tolist() == [-1, 0, -1, 3, 2, -1]
    assert tables.view(torch.float32)[:, 1].tolist() == [0, 2, 0, 1, 4, 3]
    assert position.tolist() == [[3, 1], [-1, 4]]
    assert rows.tolist() == [[-1, 1], [3, -1], [-1, 4], [-1, -1]]
    assert sums.tolist() == [[0, 1], [2, -1]]


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """Twins, -1 and invalid ids among them."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=random, dtype=torch.int32)
    wrong = torch.tensor([-2, experts, -(2**31), 2**31 - 1], dtype=torch.int32)
    at = torch.randint(0, 30 * len(wrong), ids.shape, generator=random)
    return torch.where(at < len(wrong), wrong[at.clamp(max=len(wrong) - 1)], ids).to(DEVICE)


# Tokens, top-k, experts a rank, ranks.
SIZES = [(0, 8, 4, 4), (1, 1, 1, 1), (1, 8, 4, 1), (7, 6, 3, 2), (300, 8, 32, 4), (513, 1, 5, 3), (130, 3, 2, 33)]
SIZES += [(90, 5, 7, 64), (40, 8, 2, 300), (9, 40, 2, 1024), pytest.param(3000, 8, 16, 8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("tokens", "top_k", "experts_per_rank", "num_ranks"), SIZES)
def test_the_plan_equals_its_reference(tokens, top_k, experts_per_rank, num_ranks):
    check_plan(random_ids(tokens, top_k, experts_per_rank * num_ranks), experts_per_rank, num_ranks)


def test_the_plan_of_many_tiles_a_program_and_many_programs(monkeypatch):
    """As of large batches: a program has several tiles, and earlier programs' counts are summed in several reads."""
    monkeypatch.setattr(kernels, "TILE_COUNTS", 32)
    monkeypatch.setattr(kernels, "MOST_CHUNKS", 5)
    monkeypatch.setattr(kernels, "COUNTS_AT_ONCE", 64)
    monkeypatch.setattr(kernels, "COUNT_TILE", 32)
    check_plan(random_ids(111, 4, 12), 3, 4)
    monkeypatch.setattr(kernels, "MOST_CHUNKS", 50)
    ids = random_ids(300, 4, 12)
    ids[::7] = 2**31 - 1  # invalid ids of more programs than are ranks
    check_plan(ids, 3, 4)


@pytest.mark.parametrize("filled", [-1, -2, 0, 11, 12])
def test_the_plan_where_all_pairs_are_alike(filled):
    """None routed, all invalid, all to one rank, and twins."""
    check_plan(torch.full((150, 3), filled, dtype=torch.int32), 3, 4)


def test_the_plan_of_pairs_in_all_orders():
    """Two tokens' ranks in any order, so that each place of a token's ranks is met."""
    every = torch.cartesian_prod(*[torch.arange(-1, 4)] * 3).int()
    check_plan(every, 1, 4)
    check_plan(every.flip(0)[:, [0, 0, 1, 2]].contiguous(), 1, 3)


def test_the_plan_reads_tables_of_any_strides():
    wide = random_ids(50, 8, 12).to(DEVICE)
    ids, weights = wide[:, ::2], weights_like(wide)[:, 1::2]
    got = kernels.plan_all_to_all(ids, weights, 3, 4, 5)
    for name, one, other in zip(FIELDS, got, plan_all_to_all.reference(ids, weights, 3, 4, 5), strict=True):
        assert_bitwise(one, other, name)


def header_case(width: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, sizes and number. Rows that are no headers differ from the word, and rows lie apart."""
    random = torch.Generator().manual_seed(blocks)
    sizes = torch.randint(1, 5, (blocks, 3), generator=random)
    rows = content(3, int(sizes[:, 0].sum()) + 2, width + 3)[:, :width]
    return rows.to(DEVICE), sizes.to(DEVICE), torch.tensor([2**29 - 5], dtype=torch.int32, device=DEVICE)


def mark_headers(rows: Tensor, sizes: Tensor, number: Tensor, step: int) -> None:
    """Write the header word, or what of it fits into a row, into the first row of each block."""
    word = (number * 4 + step).view(torch.uint8)
    rows[sizes[:, 0].cumsum(0) - sizes[:, 0], :4] = word[: rows.shape[1]]


@pytest.mark.parametrize(("width", "blocks"), [(1, 3), (3, 300), (4, 1), (16, 2), (16, 300)])
def test_headers_equal_their_references(width, blocks):
    rows, sizes, number = header_case(width, blocks)
    marked = rows.clone()
    mark_headers(marked, sizes, number, 2)

    def compared(rows: Tensor, found: Tensor, step: int = 2) -> Tensor:
        got, expected = found.clone(), found.clone()
        kernels.compare_headers(rows, sizes, number, got, step)
        compare_headers.reference(rows, sizes, number, expected, step)
        assert_bitwise(got, expected, "found")
        return got

    nothing = torch.zeros(1 + blocks, dtype=torch.int32, device=DEVICE)
    assert not compared(marked, nothing).any()
    assert compared(rows, nothing)[0] == 1
    other = compared(marked, nothing, 3)
    assert other[0] == 1
    if width >= 4:
        assert (other[1:] == number * 4 + 2).all()
    assert compared(rows, other).equal(other), "the first that differed stays"


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("block", [0, 2])
def test_one_bit_of_one_header_differs(block, byte):
    rows, sizes, number = header_case(16, 3)
    mark_headers(rows, sizes, number, 1)
    head = int(sizes[:block, 0].sum())
    rows[head, byte] ^= 4
    found = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    kernels.compare_headers(rows, sizes, number, found, 1)
    word = int(number) * 4 + 1
    words = [word] * 3
    words[block] ^= 4 << (8 * byte)
    assert found.tolist() == [1, *torch.tensor(words).int().tolist()]


@pytest.mark.parametrize("width", [2, 16])
@pytest.mark.parametrize("step", [1, 2])
def test_a_new_dispatch_of_a_layer_without_a_number_is_like_any_other_new_one(width, step):
    """What differs is what `layout.differ` says, if rows have room for the word."""
    numbers = [NEW, new_dispatch(1, 0), new_dispatch(2, 0), new_dispatch(1, 3), 5, 0]
    for own in numbers:
        for other in numbers:
            rows, sizes, number = header_case(width, 3)
            number.fill_(own)
            mark_headers(rows, sizes, number, step)
            mark_headers(rows, sizes[:1], number.new_tensor([other]), step)
            got, expected = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
            kernels.compare_headers(rows, sizes, number, got, step)
            compare_headers.reference(rows, sizes, number, expected, step)
            assert_bitwise(got, expected, "found")
            if width >= 4 and step == 1:
                assert bool(got[0]) == differ(own, other), (own, other)


def test_a_cell_behind_the_word_is_not_compared():
    rows, sizes, number = header_case(16, 3)
    mark_headers(rows, sizes, number, 1)
    rows[:, 4:] = 0xFF
    found = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    kernels.compare_headers(rows, sizes, number, found, 1)
    assert not found.any()


# ── slots of nodes ──


def check_slots(
    ids: Tensor, num_nodes: int, num_slots: int, experts_per_node: int, counts: tuple[int, ...] = (3, 4, 5)
):
    weights = torch.arange(1, ids.numel() + 1, dtype=torch.float32, device=DEVICE).view(ids.shape)
    sizes = num_nodes, num_slots, experts_per_node, num_nodes * experts_per_node
    got_counts, expected_counts = torch.tensor([counts, counts], device=DEVICE)
    got = kernels.plan_slots(ids, weights, got_counts, *sizes)
    expected = plan_slots.reference(ids, weights, expected_counts, *sizes)
    for name, one, other in zip(("ids", "slots", "tokens", "tables"), got, expected, strict=True):
        assert_bitwise(one, other, name)
    assert got_counts.tolist() == expected_counts.tolist()
    return got, got_counts


# Tokens, top-k, nodes, slots of each, experts a node.
SLOTS = [(0, 8, 2, 1, 4), (1, 1, 1, 1, 1), (300, 8, 2, 300, 16), (300, 8, 2, 100, 16), (513, 6, 3, 1, 7)]
SLOTS += [(257, 1, 4, 60, 2), (130, 5, 33, 11, 3), (40, 8, 300, 2, 2), (7, 40, 2, 5, 2)]


@pytest.mark.parametrize(("tokens", "top_k", "num_nodes", "num_slots", "experts_per_node"), SLOTS)
def test_slots_equal_their_reference(tokens, top_k, num_nodes, num_slots, experts_per_node):
    check_slots(random_ids(tokens, top_k, num_nodes * experts_per_node), num_nodes, num_slots, experts_per_node)


@pytest.mark.parametrize("filled", [-1, -2, 0, 11, 12])
@pytest.mark.parametrize("num_slots", [1, 300])
def test_slots_where_all_pairs_are_alike(filled, num_slots):
    ids = torch.full((300, 3), filled, dtype=torch.int32, device=DEVICE)
    _, counts = check_slots(ids, 3, num_slots, 4)
    routed = 0 <= filled < 12
    lost = 3 * (300 - num_slots) if routed else 0
    assert counts.tolist() == [300 if routed else 3, 4 + lost, 5 + (0 if routed or filled == -1 else 900)]


def test_the_most_tokens_for_a_node_are_kept():
    ids = torch.zeros(5, 2, dtype=torch.int32, device=DEVICE)
    assert check_slots(ids, 2, 5, 2, (9, 0, 0))[1].tolist() == [9, 0, 0]


def test_slots_of_many_tiles_a_program_and_many_programs(monkeypatch):
    """As of large batches: a program has several tiles, and earlier programs' counts are summed in several reads."""
    monkeypatch.setattr(kernels, "NODE_TILE", 16)
    monkeypatch.setattr(kernels, "FLAT_TILE", 32)
    monkeypatch.setattr(kernels, "MOST_CHUNKS", 5)
    monkeypatch.setattr(kernels, "COUNTS_AT_ONCE", 8)
    ids = random_ids(111, 4, 12)
    for num_slots in (111, 30):
        check_slots(ids, 3, num_slots, 4)
    monkeypatch.setattr(kernels, "MOST_CHUNKS", 50)
    ids[::7] = 2**31 - 1
    check_slots(ids, 3, 30, 4)


def test_slots_of_batches_whose_products_pass_32_bits(monkeypatch):
    """n C > 2^32: 70,000 tokens of one node for 65,000 slots."""
    monkeypatch.setattr(kernels, "NODE_TILE", 1 << 14)  # fewer tiles, as interpreted ones take their time
    monkeypatch.setattr(kernels, "MOST_TOKENS", 1 << 14)
    ids = torch.zeros(70_000, 1, dtype=torch.int32, device=DEVICE)
    (_, slots, *_), counts = check_slots(ids, 1, 65_000, 1, (0, 0, 0))
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
