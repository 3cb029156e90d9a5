"""The Triton kernels that quantize equal their references bit for bit: on a GPU, or interpreted without one."""

import pytest
import torch
from torch import Tensor

from mxep.quant import (
    BLOCK,
    E4M3,
    E5M2,
    MXFormat,
    ScaleMode,
    ops,
    quantize,
    quantize_columns_with_amax,
    quantize_joined,
    quantize_with_amax,
)
from mxep.quant.kernels import quantize as kernels
from mxep.quant.kernels import requantize
from mxep.quant.quantize import _requantize
from quant import exact
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(32, 32), (64, 96), (160, 288), (2, 32, 64)]
"""(rows, columns): less than a tile, whole tiles and a bit, a batch."""
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers over many binades, with a zero block, an Inf and a NaN among them where there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1), generator=generator))
    flat = x.view(-1, x.shape[-1])
    flat[1, :32] = 0
    flat[3, 5], flat[7, 1] = float("nan"), -float("inf")
    return x.to(dtype)


def hostile() -> Tensor:
    x = exact.hostile_rows()
    return torch.cat([x, torch.zeros(-x.shape[0] % 32, 32)])


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want):
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        exact.assert_bytes(one.cpu(), exact.raw(other))


@pytest.mark.parametrize("block_size", [32, 96])
@pytest.mark.parametrize("tokens", [0, 1, 20, 48])
def test_rows_with_room_for_more_are_those_without(tokens: int, block_size: int) -> None:
    x = numbers(48, 96)[:tokens]
    got = kernels.quantize_into_room(x.to(DEVICE), 48, E4M3.dtype, "rceil", block_size)
    assert [len(part) for part in got] == [48, 48]
    firsts = tuple(part[:tokens].contiguous() for part in got)
    assert_same(firsts, ops.quantize_rows(x, E4M3.dtype, "rceil", block_size))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("mode", list(ScaleMode))
def test_every_mode_and_format_on_hostile_blocks(fmt: MXFormat, mode: ScaleMode) -> None:
    x = hostile()
    how = fmt.dtype, mode.value, BLOCK
    assert_same(kernels.quantize_rows(x.to(DEVICE), *how), ops.quantize_rows(x, *how))
    assert_same(kernels.quantize_columns(x.to(DEVICE), *how), ops.quantize_columns(x, *how))
    transposed = x.mT.contiguous()
    assert_same(kernels.quantize_columns(transposed.to(DEVICE), *how), ops.quantize_columns(transposed, *how))
    assert_same(kernels.quantize_2d(x.to(DEVICE), *how), ops.quantize_2d(x, *how))


@pytest.mark.parametrize(("shape", "dtype"), [*zip(SHAPES, 2 * DTYPES), *((SHAPES[2], x) for x in DTYPES[:2])], ids=str)
def test_shapes_that_fill_no_tile(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(*shape, dtype=dtype)
    how = E4M3.dtype, "rceil", BLOCK
    assert_same(kernels.quantize_rows(x.to(DEVICE), *how), ops.quantize_rows(x, *how))
    assert_same(kernels.quantize_columns(x.to(DEVICE), *how), ops.quantize_columns(x, *how))
    assert_same(kernels.quantize_2d(x.to(DEVICE), *how), ops.quantize_2d(x, *how))


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 96, 192])
def test_blocks_of_any_length(block_size: int) -> None:
    x = numbers(48, 48) if block_size == 1 else numbers(192, 192)
    how = E4M3.dtype, "rceil", block_size
    assert_same(kernels.quantize_rows(x.to(DEVICE), *how), ops.quantize_rows(x, *how))
    assert_same(kernels.quantize_columns(x.to(DEVICE), *how), ops.quantize_columns(x, *how))


def test_a_row_longer_than_registers_hold_is_read_twice() -> None:
    x = numbers(9, 2 * kernels.LONGEST + 100)
    how = E4M3.dtype, "rceil", x.shape[1]
    assert_same(kernels.quantize_rows(x.to(DEVICE), *how), ops.quantize_rows(x, *how))


def assert_per_row(moved: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, mode: str) -> None:
    """Rows with magnitudes, and columns of these, of x and of what lies on DEVICE."""
    *want, amax = ops.quantize_per_row(x, None, None, dtype, mode)
    *got, found = kernels.quantize_per_row(moved, None, None, dtype, mode)
    assert_same(got, want)
    torch.testing.assert_close(found.cpu(), amax, rtol=0, atol=0, equal_nan=True)
    want = ops.quantize_per_column(x, None, None, amax, dtype, mode)
    assert_same(want, ops.quantize_columns(x, dtype, mode, x.shape[-2]) if x.numel() else want)
    assert_same(kernels.quantize_per_column(moved, None, None, found, dtype, mode), want)


@pytest.mark.parametrize(
    ("rows", "batch", "dtype"),
    [
        *(((40, 24), (), torch.bfloat16), ((3, 17, 136), (3,), torch.float32), ((64, 8, 5), (2, 2), torch.bfloat16)),
        *(((96, 0), (3,), torch.float32), ((0, 32), (), torch.bfloat16)),
    ],
    ids=str,
)
def test_parts_below_each_other_are_quantized_as_one(
    rows: tuple[int, ...], batch: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may hold the largest of a column; results are poisoned."""
    monkeypatch.setattr(kernels, "ROWS_PER_PROGRAM", 8)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(*batch, n, 96, generator=generator).to(dtype) * 2.0 ** (4 * i) for i, n in enumerate(rows)]
    parts[-1].view(-1, 96)[-1:, -1:] = -float("inf")
    x, y, z = (*parts, None)[:3]
    moved = [part if part is None else part.to(DEVICE) for part in (x, y, z)]
    how = E4M3.dtype, "rceil"
    *want, amax = ops.quantize_per_row(torch.cat(parts, -2), None, None, *how)
    *got, found = kernels.quantize_per_row(*moved, *how)
    assert_same(got, want)
    torch.testing.assert_close(found.cpu(), amax, rtol=0, atol=0)
    want = ops.quantize_per_column(torch.cat(parts, -2), None, None, amax, *how)
    assert_same(kernels.quantize_per_column(*moved, found, *how), want)


def test_parts_with_rows_longer_than_registers_hold_are_joined() -> None:
    x, y = numbers(9, kernels.LONGEST + 100, seed=1), numbers(11, kernels.LONGEST + 100, seed=2)
    *want, amax = ops.quantize_per_row(torch.cat((x, y)), None, None, E4M3.dtype, "rceil")
    *got, found = kernels.quantize_per_row(x.to(DEVICE), y.to(DEVICE), None, E4M3.dtype, "rceil")
    assert_same(got, want)
    torch.testing.assert_close(found.cpu(), amax, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("mode", list(ScaleMode))
def test_rows_of_one_scale_and_columns_of_two_reads_in_every_mode(fmt: MXFormat, mode: ScaleMode) -> None:
    x = hostile()  # every kind of number; NaN or Inf makes its row and its column NaN
    x[:, 1:] = x[:, 1:].nan_to_num(1, 1, 1)
    assert_per_row(x.to(DEVICE), x, fmt.dtype, mode.value)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *zip([(1, 16), (40, 96), (3, 70, 136), (2, 37, 600), (130, 1)], 2 * DTYPES),
        *(((40, 96), torch.bfloat16), ((3, 70, 136), torch.float32)),
    ],
    ids=str,
)
def test_rows_of_one_scale_and_columns_of_two_reads(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1, shape[-1])[-1, -1] = -float("inf")
    assert_per_row(x.to(DEVICE), x, E4M3.dtype, "rceil")
    monkeypatch.setattr(kernels, "ROWS_PER_PROGRAM", 8)
    assert_per_row(x.to(DEVICE), x, E4M3.dtype, "rceil")


@pytest.mark.parametrize(("widths", "dtype"), [*zip([(96, 32), (64, 48, 40), (100, 1, 7)], 2 * DTYPES[:2])], ids=str)
def test_rows_of_one_scale_of_matrices_side_by_side(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = numbers(40, sum(widths), dtype=dtype)
    for fmt in (E4M3, E5M2):
        want = ops.quantize_rows(whole, fmt.dtype, "rceil", whole.shape[1])
        for longest in (kernels.LONGEST, 64):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "LONGEST", longest)
                x, y, z = (*(part.to(DEVICE) for part in whole.split(widths, 1)), None)[:3]
                assert_same(kernels.quantize_joined_rows(x, y, z, fmt.dtype, "rceil"), want)
        assert_same(ops.quantize_joined_rows(x, y, z, fmt.dtype, "rceil"), want)


def test_any_number_of_matrices_side_by_side() -> None:
    whole = torch.randn(40, 96)
    want = quantize(whole, block_size=None)
    for widths in ((96,), (64, 32), (32, 32, 32), (24, 24, 24, 24)):
        got = quantize_joined(whole.split(widths, 1))
        assert (got.block_size, got.dtype) == (96, torch.float32)
        assert_same((got.qdata, got.scale), (want.qdata, want.scale))
    with pytest.raises(ValueError, match=r"quantize_joined: got parts \(1, 2, 3\), want \(N, K\) each"):
        quantize_joined([torch.zeros(1, 2, 3)])


def test_any_number_of_matrices_below_each_other() -> None:
    whole = torch.randn(2, 96, 40)
    rows, amax = quantize_with_amax(whole)
    columns = quantize(whole, axis=-2, block_size=None)
    for heights in ((96,), (64, 32), (32, 32, 32), (24, 24, 24, 24)):
        stacked, found = quantize_with_amax(whole.split(heights, 1))
        assert torch.equal(found, amax)
        for got, want in ((stacked, rows), (quantize_columns_with_amax(whole.split(heights, 1), amax), columns)):
            assert (got.axis, got.block_size, got.dtype) == (want.axis, want.block_size, torch.float32)
            assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
            assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
    for parts in (
        [],
        [torch.zeros(3)],
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [torch.zeros(2, 3), torch.zeros(1, 2, 3)],
    ):
        with pytest.raises(ValueError, match=r"quantize_with_amax: got parts .*, want \(..., N of each, K\)"):
            quantize_with_amax(parts)
    with pytest.raises(ValueError, match=r"amax: got torch.float32 \(2, 41\)"):
        quantize_columns_with_amax([whole, whole], torch.zeros(2, 41))


def test_programs_of_a_weight_are_busy_to_the_end() -> None:
    """On 132 SMs with 3 programs of 4 rows at once each: 64 experts of 1536 rows, one matrix, many short ones."""
    assert kernels._steps(64, 1536, 4, 396) == 64, "6 programs an expert, 384 in all"
    assert kernels._steps(1, 2048, 4, 396) == kernels.LEAST_ROWS // 4
    assert kernels._steps(4, 16384, 4, 132) == 42, "98 programs a matrix, 392 in all: three times what fits"
    assert kernels._steps(512, 8, 4, 396) == 4


def test_rows_of_one_scale_longer_than_registers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LONGEST", 128)
    x = numbers(2, 40, 192)
    assert_per_row(x.to(DEVICE), x, E4M3.dtype, "rceil")


def test_rows_of_one_scale_turned_sliced_and_empty() -> None:
    buffer = numbers(70, 200)
    for x in (buffer[3:67, 7:199], buffer.mT[:192, :64], torch.empty(0, 32, 64)):
        moved = torch.as_strided(buffer.to(DEVICE), x.shape, x.stride(), x.storage_offset())
        assert_per_row(moved, x, E4M3.dtype, "rceil")


def test_columns_of_an_odd_length() -> None:
    x = numbers(3, 101, 40)
    how = E4M3.dtype, "rceil", 101
    assert_same(kernels.quantize_columns(x.to(DEVICE), *how), ops.quantize_columns(x, *how))


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_square_tiles(block_size: int) -> None:
    x = numbers(256, 384)
    how = E4M3.dtype, "rceil", block_size
    assert_same(kernels.quantize_2d(x.to(DEVICE), *how), ops.quantize_2d(x, *how))


def test_square_tiles_of_another_size_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="48 x 48"):
        kernels.quantize_2d(numbers(96, 96).to(DEVICE), E4M3.dtype, "rceil", 48)


def test_turned_sliced_and_misaligned_inputs() -> None:
    buffer = numbers(70, 200)
    how = E4M3.dtype, "rceil", BLOCK
    for x in (buffer[3:67, 7:199], buffer.mT[:192, :64], torch.as_strided(buffer, (32, 64), (64, 1), 1)):
        moved = torch.as_strided(buffer.to(DEVICE), x.shape, x.stride(), x.storage_offset())
        assert_same(kernels.quantize_rows(moved, *how), ops.quantize_rows(x, *how))
        assert_same(kernels.quantize_columns(moved, *how), ops.quantize_columns(x, *how))
        assert_same(kernels.quantize_2d(moved, *how), ops.quantize_2d(x, *how))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32), (32, 0)], ids=str)
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    how = E4M3.dtype, "rceil", BLOCK
    assert_same(kernels.quantize_rows(x.to(DEVICE), *how), ops.quantize_rows(x, *how))
    assert_same(kernels.quantize_columns(x.to(DEVICE), *how), ops.quantize_columns(x, *how))
    assert_same(kernels.quantize_2d(x.to(DEVICE), *how), ops.quantize_2d(x, *how))


def requantized(mx_parts: tuple[Tensor, Tensor], *args: object, valid: int | None = None) -> None:
    """The kernel equals the reference on qdata and scale of `mx_parts`, in the first `valid` rows."""
    want = _requantize(*mx_parts, *args)
    moved = [part.to(DEVICE) if isinstance(part, Tensor) else part for part in (*mx_parts, *args)]
    for part, original in zip(moved, mx_parts):  # .to() keeps strides only of dense tensors
        assert part.stride() == original.stride()
    got = requantize.requantize(*moved)  # type: ignore[arg-type]
    if valid is not None:
        got, want = ((qdata[:, :valid].contiguous(), scale[: valid // 32]) for qdata, scale in (got, want))
    assert_same(got, want)


def test_requantize_from_every_way() -> None:
    x = numbers(160, 96)
    for dtype, to in ((E4M3.dtype, E4M3.dtype), (E4M3.dtype, E5M2.dtype), (E5M2.dtype, E4M3.dtype)):
        along_rows = ops.quantize_rows(x, dtype, "rceil", BLOCK)
        transposed, scale = ops.quantize_columns(x, dtype, "floor", BLOCK)
        along_columns = transposed.mT, scale
        requantized(along_rows, 1, 32, None, None, to, "rceil")
        requantized(along_columns, 32, 1, None, None, to, "floor")
        requantized(ops.quantize_2d(x, dtype, "rceil", BLOCK), 32, 32, None, None, to, "rceil")
        requantized(ops.quantize_rows(x, dtype, "rceil", 96), 1, 96, None, None, to, "rceil")
        requantized(ops.quantize_rows(x, dtype, "rceil", 8), 1, 8, None, None, to, "rceil")


def test_requantize_in_a_batch() -> None:
    requantized(ops.quantize_rows(numbers(3, 64, 96), E4M3.dtype, "rceil", BLOCK),
                1, 32, None, None, E4M3.dtype, "rceil")  # fmt: skip


def test_requantize_gathers_rows_and_stops_after_the_last_group() -> None:
    qdata, scale = ops.quantize_rows(numbers(50, 96), E4M3.dtype, "rceil", BLOCK)
    index = torch.randint(-1, 50, (320,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    index[200:] = 1 << 30  # where nobody may look
    ends = torch.tensor([64, 64, 192], dtype=torch.int32)
    requantized((qdata, scale), 1, 32, index, ends, E4M3.dtype, "rceil", valid=192)


@pytest.mark.parametrize("dtype", [E4M3.dtype, E5M2.dtype], ids=str)
def test_requantize_takes_every_code_under_every_scale(dtype: torch.dtype) -> None:
    qdata = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None].expand(256, 8).contiguous()
    requantized((qdata, scale), 1, 32, None, None, E4M3.dtype, "rceil")
