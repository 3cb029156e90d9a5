"""An all-to-all's order of rows, joined rows and headers: kernels equal references, on a GPU or interpreted.

What a launcher allocates is filled with garbage first, so a number that no kernel writes shows.
"""

import pytest
import torch
from torch import Tensor

from comms.cases import assert_bitwise, content
from mxep.comms import NEW, compare_headers, join_rows, mark_headers, new_dispatch, plan_all_to_all
from mxep.comms import rows as comms_rows
from mxep.comms.kernels import all_to_all as kernels
from mxep.comms.kernels import rows as gather
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
    return torch.where(at < len(wrong), wrong[at.clamp(max=len(wrong) - 1)], ids)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts_per_rank", "num_ranks"),
    [
        (0, 8, 4, 4),
        (1, 1, 1, 1),
        (1, 8, 4, 1),
        (7, 6, 3, 2),
        (300, 8, 32, 4),
        (513, 1, 5, 3),
        (130, 3, 2, 33),
        (90, 5, 7, 64),
        (70, 8, 1, 256),
        (40, 8, 2, 300),
        (9, 40, 2, 1024),
        pytest.param(3000, 8, 16, 8, marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize("filled", [-1, -2, 0, 11, 12, 5])
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
    got, expected = gather.join_rows(*args), comms_rows.join_parts.reference(*args)
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
        assert_bitwise(gather.join_rows(*args), comms_rows.join_parts.reference(*args), "rows")
    nothing = torch.empty(0, 24, dtype=torch.uint8, device=DEVICE)
    args = nothing, None, torch.full((3,), -1, dtype=torch.int32, device=DEVICE), None, None, 0
    assert not gather.join_rows(*args).any()
    assert gather.join_rows(wide, None, index[:0], None, None, 0).shape == (0, 112)


def test_joined_rows_of_more_than_one_tile(monkeypatch):
    monkeypatch.setattr(gather, "TILE_BYTES", 256)
    args = content(0, 4, 24).to(DEVICE), content(1, 4, 4).to(DEVICE), INDEX.to(DEVICE).repeat(9), None
    args = *args, torch.tensor([5], dtype=torch.int32, device=DEVICE), 1
    assert_bitwise(gather.join_rows(*args), comms_rows.join_parts.reference(*args), "rows")


def header_case(width: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, sizes and number. Rows that are no headers differ from the word, and rows lie apart."""
    random = torch.Generator().manual_seed(blocks)
    sizes = torch.randint(1, 5, (blocks, 3), generator=random)
    rows = content(3, int(sizes[:, 0].sum()) + 2, width + 3)[:, :width]
    return rows.to(DEVICE), sizes.to(DEVICE), torch.tensor([2**29 - 5], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("width", [1, 3, 4, 16])
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 300])
def test_headers_equal_their_references(width, blocks):
    rows, sizes, number = header_case(width, blocks)
    marked = rows.clone()
    kernels.mark_headers(marked, sizes, number, 2)
    expected = rows.clone()
    mark_headers.reference(expected, sizes, number, 2)
    assert_bitwise(marked, expected, "marked")

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
    mark_headers.reference(rows, sizes, number, 1)
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
            mark_headers.reference(rows, sizes, number, step)
            mark_headers.reference(rows, sizes[:1], number.new_tensor([other]), step)
            got, expected = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
            kernels.compare_headers(rows, sizes, number, got, step)
            compare_headers.reference(rows, sizes, number, expected, step)
            assert_bitwise(got, expected, "found")
            if width >= 4 and step == 1:
                assert bool(got[0]) == differ(own, other), (own, other)


def test_a_cell_behind_the_word_is_not_compared():
    rows, sizes, number = header_case(16, 3)
    mark_headers.reference(rows, sizes, number, 1)
    rows[:, 4:] = 0xFF
    found = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    kernels.compare_headers(rows, sizes, number, found, 1)
    assert not found.any()
