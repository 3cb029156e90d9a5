"""MXTensor as a container: what it checks, how it turns, slices, gathers, and what it refuses."""

import functools

import pytest
import torch
from torch import Tensor

from mxep.quant import E5M2, MXTensor, quantize
from quant import exact, inputs
from quant.exact import assert_bytes, raw

TILES = (-2, -1)
E8M0 = torch.float8_e8m0fnu
axes = pytest.mark.parametrize("axis", [-1, -2, TILES])

gaussian = functools.partial(inputs.gaussian, dtype=torch.bfloat16)


def assert_same(a: MXTensor, b: MXTensor) -> None:
    """Same qdata, scales, axis, block and outer dtype."""
    assert (a.axis, a.block_size, a.dtype, a.shape) == (b.axis, b.block_size, b.dtype, b.shape)
    assert_bytes(a.qdata, raw(b.qdata))
    assert_bytes(a.scale, raw(b.scale))


def random_qdata(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def scales(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8).view(E8M0)


def index(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_it_looks_like_what_was_quantized() -> None:
    mx = quantize(gaussian(4, 64), fmt=E5M2)
    assert isinstance(mx, Tensor)
    assert (mx.shape, mx.dtype, mx.device, mx.axis, mx.block_size) == (
        (4, 64),
        torch.bfloat16,
        torch.device("cpu"),
        -1,
        32,
    )
    assert mx.format is E5M2
    assert mx.row_index is None
    assert (mx.qdata.dtype, mx.qdata.shape) == (torch.float8_e5m2, (4, 64))
    assert (mx.scale.dtype, mx.scale.shape) == (E8M0, (4, 2))


def test_repr_tells_all_but_the_values() -> None:
    mx = MXTensor.from_qdata_and_scales(random_qdata(8, 64), scales(8, 2), row_index=index(0, 0, -1))
    assert repr(mx) == (
        "MXTensor(shape=(3, 64), E4M3, axis=-1, block_size=32, rows of 8, dtype=torch.bfloat16, device=cpu)"
    )
    assert "axis=(-2, -1)" in repr(quantize(gaussian(32, 32), axis=TILES))
    assert "requires_grad=True" in repr(mx.detach().requires_grad_())
    assert "device=meta" in repr(mx.to("meta"))


@axes
@pytest.mark.parametrize("as_bytes", [False, True])
def test_from_qdata_and_scales_takes_apart_and_puts_together(axis: int, as_bytes: bool) -> None:
    mx = quantize(gaussian(64, 96), axis=axis)
    scale = mx.scale.view(torch.uint8) if as_bytes else mx.scale
    again = MXTensor.from_qdata_and_scales(mx.qdata, scale, torch.bfloat16, axis=axis)
    assert_same(again, mx)
    assert again.qdata.data_ptr() == mx.qdata.data_ptr()
    assert again.scale.data_ptr() == mx.scale.data_ptr()


@pytest.mark.parametrize("orig_dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_original_dtype_is_the_outer_one(orig_dtype: torch.dtype) -> None:
    mx = MXTensor.from_qdata_and_scales(random_qdata(2, 32), scales(2, 1), orig_dtype)
    assert mx.dtype == mx.dequantize().dtype == orig_dtype


def of_shape(got: str, want: str) -> str:
    return rf"scales: got .* of shape \({got}\) on .*, want .* of shape \({want}\)"


ONE_BLOCK, TWO_BLOCKS = (random_qdata(2, 32), scales(2, 1)), (random_qdata(2, 64), scales(2, 2))


@pytest.mark.parametrize(
    ("qdata", "scale", "options", "message"),
    [
        (torch.zeros(2, 32), scales(2, 1), {}, r"torch.float32: want torch.float8_e4m3fn"),
        (random_qdata(32), scales(1), {}, r"\(32,\).*two axes"),
        (random_qdata(2, 48), scales(2, 1), {}, r"\(2, 48\).*multiple of the block, 32"),
        (random_qdata(2, 64), scales(2, 1), {}, of_shape("2, 1", "2, 2")),
        (random_qdata(2, 64), scales(1, 2), {}, of_shape("1, 2", "2, 2")),
        (random_qdata(2, 64), scales(2, 2, 1), {}, of_shape("2, 2, 1", "2, 2")),
        (random_qdata(64, 32), scales(64, 1), {"axis": -2}, of_shape("64, 1", "2, 32")),
        (random_qdata(64, 32), scales(64, 1), {"axis": TILES}, of_shape("64, 1", "2, 1")),
        (*TWO_BLOCKS, {"block_size": None}, of_shape("2, 2", "2, 1")),
        (random_qdata(2, 32), torch.ones(2, 1), {}, r"scales: got torch.float32 .*, want torch.float8_e8m0fnu"),
        (random_qdata(2, 32), scales(2, 1).to("meta"), {}, r"scales: got .* on meta, want .* on cpu"),
        (*ONE_BLOCK, {"orig_dtype": torch.float64}, r"orig_dtype: got torch.float64"),
        (*ONE_BLOCK, {"axis": 3}, r"axis: got 3"),
        (*ONE_BLOCK, {"block_size": 0}, r"block_size: got 0"),
        (*ONE_BLOCK, {"row_index": torch.zeros(1).long()}, r"row_index: got torch.int64"),
        (*ONE_BLOCK, {"row_index": index(0)[None]}, r"row_index: got torch.int32 of shape \(1, 1\)"),
        (*ONE_BLOCK, {"row_index": index(0).to("meta")}, r"row_index: got .* on meta, want .* on cpu"),
        (random_qdata(1, 2, 32), scales(1, 2, 1), {"row_index": index(0)}, r"row_index: got qdata \(1, 2, 32\)"),
        (random_qdata(32, 2), scales(1, 2), {"row_index": index(0), "axis": -2}, r"blocked along -2, want.*along -1"),
    ],
)
def test_from_qdata_and_scales_names_got_and_wanted(
    qdata: Tensor, scale: Tensor, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MXTensor.from_qdata_and_scales(qdata, scale, **options)


def test_the_constructor_checks_the_same_and_what_the_function_above_allows() -> None:
    qdata, scale = TWO_BLOCKS
    for parts, message in (
        ((torch.zeros(2, 32), scales(2, 1), None, -1, 32), r"qdata: got torch.float32: want torch.float8_e4m3fn"),
        ((qdata, scale.view(torch.uint8), None, -1, 32), r"scales: got torch.uint8"),
        ((qdata, None, None, -1, 32), r"scales: got a NoneType, want a tensor"),
        ((qdata, scale, None, 1, 32), r"axis: got 1, want -1, -2 or \(-2, -1\)"),
        ((qdata, scale, None, -1, None), r"block_size: got None"),
    ):
        with pytest.raises(ValueError, match=message):
            MXTensor(*parts, torch.bfloat16)


def test_strided_row_views_of_a_slot_buffer_are_read_in_place() -> None:
    """Codes and scales of a token lie side by side in one row, as they come over the wire."""
    mx = quantize(gaussian(6, 64))
    slots = torch.zeros(6, 80, dtype=torch.uint8)
    slots[:, :64], slots[:, 64:66] = mx.qdata.view(torch.uint8), mx.scale.view(torch.uint8)
    view = MXTensor.from_qdata_and_scales(slots[:, :64].view(torch.float8_e4m3fn), slots[:, 64:66])
    assert view.qdata.data_ptr() == slots.data_ptr()
    assert torch.equal(view.dequantize(), mx.dequantize())
    assert not view.is_contiguous()
    dense = view.materialize()
    assert dense.qdata.is_contiguous()
    assert dense.scale.is_contiguous()
    assert_same(dense, mx)
    picked = MXTensor.from_qdata_and_scales(view.qdata, view.scale, row_index=index(4, -1, 4))
    assert torch.equal(picked.dequantize(), torch.stack([mx.dequantize()[4], torch.zeros(64), mx.dequantize()[4]]))


def test_a_row_index_picks_rows_and_minus_one_is_a_row_of_zeros() -> None:
    mx = quantize(gaussian(8, 64))
    picked = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index(7, -1, 0, 0))
    assert picked.shape == (4, 64)
    assert picked.is_contiguous()
    want = mx.dequantize()[[7, 0, 0, 0]]
    want[1] = 0
    assert torch.equal(picked.dequantize(), want)
    dense = picked.materialize()
    assert dense.row_index is None
    assert torch.equal(dense.dequantize(), want)
    assert raw(dense.qdata)[1].sum() == raw(dense.scale)[1].sum() == 0


def test_a_row_of_zeros_is_zero_even_beside_nan_slots() -> None:
    mx = quantize(torch.full((2, 32), float("nan")))
    picked = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index(-1, 1))
    assert torch.equal(picked.dequantize().isnan().all(1), torch.tensor([False, True]))
    assert torch.equal(picked.dequantize()[0], torch.zeros(32))


def test_an_index_into_no_slots_gives_zero_rows() -> None:
    picked = MXTensor.from_qdata_and_scales(random_qdata(0, 32), scales(0, 1), row_index=index(-1, -1))
    assert torch.equal(picked.dequantize(), torch.zeros(2, 32))
    assert picked[:0].dequantize().shape == (0, 32)
    assert picked.materialize().shape == (2, 32)


@axes
def test_materialize_copies_only_where_needed_and_stores_along_the_blocks(axis: int) -> None:
    mx = quantize(gaussian(64, 96), axis=axis)
    assert mx.materialize().qdata.data_ptr() == mx.qdata.data_ptr()
    other = mx.qdata.contiguous() if axis == -2 else mx.qdata.mT.contiguous().mT, mx.scale
    scattered = MXTensor.from_qdata_and_scales(*other, axis=axis)
    assert scattered.qdata.stride() != mx.qdata.stride()
    dense = scattered.materialize()
    assert_same(dense, mx)
    assert dense.qdata.stride() == mx.qdata.stride()


@axes
def test_turning_is_the_transpose_and_turns_back(axis: int) -> None:
    mx = quantize(gaussian(2, 64, 96), axis=axis)
    transposed = mx.mT
    assert transposed.shape == (2, 96, 64)
    assert transposed.axis == {-1: -2, -2: -1}.get(axis, TILES)
    assert torch.equal(transposed.dequantize(), mx.dequantize().mT)
    assert transposed.qdata.data_ptr() == mx.qdata.data_ptr()
    assert_same(transposed.mT, mx)
    for other in (mx.transpose(-1, -2), mx.transpose(1, 2), mx.transpose(2, -2), mx.permute(0, 2, 1)):
        assert_same(other, transposed)
    matrix = mx[0]
    for other in (matrix.t(), matrix.T, matrix.mT, matrix.transpose(0, 1)):
        assert_same(other, transposed[0])


def test_only_the_last_two_axes_turn() -> None:
    mx = quantize(gaussian(2, 64, 96))
    for turn in (lambda: mx.transpose(0, 1), lambda: mx.permute(1, 0, 2), lambda: mx.permute(0, 0, 2)):
        with pytest.raises(NotImplementedError, match=r"aten\.(transpose|permute).*only its last two axes"):
            turn()
    for same in (mx.transpose(1, 1), mx.permute(0, 1, 2)):
        assert_same(same, mx)
    indexed = MXTensor.from_qdata_and_scales(random_qdata(2, 32), scales(2, 1), row_index=index(1))
    with pytest.raises(NotImplementedError, match=r"row index cannot be transposed: call .materialize\(\)"):
        indexed.t()


def test_an_axis_that_it_does_not_have_is_refused() -> None:
    mx, wrong = quantize(gaussian(64, 96)), torch.tensor([0])
    for use in (lambda: mx.transpose(0, 5), lambda: mx.permute(0, 3), lambda: mx.index_select(2, wrong)):
        with pytest.raises(IndexError, match=r"Dimension out of range \(expected to be in range of \[-2, 1\], but got"):
            use()


@pytest.mark.parametrize("rows", [slice(3, 9), slice(None), slice(5, 5), slice(-4, None), slice(2, 99), slice(1, 9, 3)])
def test_rows_slice_anywhere_without_a_copy(rows: slice) -> None:
    mx = quantize(gaussian(12, 64))
    part = mx[rows]
    assert torch.equal(part.dequantize(), mx.dequantize()[rows])
    assert part.qdata.untyped_storage().data_ptr() == mx.qdata.untyped_storage().data_ptr()
    assert_same(part, quantize(gaussian(12, 64)[rows]))


def test_slicing_an_indexed_tensor_slices_its_index() -> None:
    mx = quantize(gaussian(8, 64))
    picked = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index(7, -1, 0, 3))
    assert picked[1:3].row_index.tolist() == [-1, 0]
    assert picked[1:3].qdata.data_ptr() == mx.qdata.data_ptr()
    assert torch.equal(picked[1:3].dequantize(), picked.dequantize()[1:3])
    assert torch.equal(picked[:, 32:].dequantize(), picked.dequantize()[:, 32:])


@axes
def test_blocked_axes_slice_by_whole_blocks(axis: int) -> None:
    mx = quantize(gaussian(96, 128), axis=axis)
    assert torch.equal(mx[32:64, 64:].dequantize(), mx.dequantize()[32:64, 64:])
    with pytest.raises(ValueError, match=r"got \[16:48:1\].*multiples of its block, 32"):
        mx[:, 16:48] if axis == -1 else mx[16:48]
    with pytest.raises(ValueError, match=r"got \[0:32:2\]"):
        mx[:, 0:32:2] if axis == -1 else mx[0:32:2]


def test_narrow_and_batches_select_and_slice() -> None:
    mx = quantize(gaussian(3, 64, 96), axis=-2)
    assert torch.equal(mx.narrow(0, 1, 2).dequantize(), mx.dequantize()[1:])
    assert torch.equal(mx[2].dequantize(), mx.dequantize()[2])
    assert torch.equal(mx[-1, :, 5:7].dequantize(), mx.dequantize()[-1, :, 5:7])


def test_tiles_serve_both_orientations() -> None:
    w = gaussian(64, 96)
    tiles, transposed = quantize(w, axis=TILES), quantize(w.mT.contiguous(), axis=TILES)
    rows, columns = tiles.along(-1), tiles.along(-2)
    assert (rows.axis, rows.scale.shape) == (-1, (64, 3))
    assert (columns.axis, columns.scale.shape) == (-2, (2, 96))
    assert rows.qdata.data_ptr() == columns.qdata.data_ptr() == tiles.qdata.data_ptr()
    assert_same(columns, transposed.along(-1).mT)
    assert_same(rows, transposed.along(-2).mT)
    for view in (rows, columns, tiles.along(1), tiles.along(0)):
        assert torch.equal(view.dequantize(), tiles.dequantize())
    assert_same(tiles.along(0), columns)
    dense = columns.materialize()
    assert dense.qdata.stride() == (1, 64)
    assert_same(dense, columns)


def test_along_of_batches_and_of_blocks() -> None:
    w = gaussian(2, 64, 96)
    assert_same(quantize(w, axis=TILES).along(-2)[1], quantize(w[1], axis=TILES).along(-2))
    rows = quantize(w)
    assert rows.along(-1) is rows
    with pytest.raises(ValueError, match=r"along: got blocks along -1, want 2-D blocks or axis -2: requantize"):
        rows.along(-2)
    with pytest.raises(ValueError, match=r"along"):
        rows.along(TILES)


@axes
def test_copies_and_aliases_keep_everything(axis: int) -> None:
    mx = quantize(gaussian(64, 96), axis=axis)
    for same in (mx.detach(), mx.clone(), mx.to("cpu"), mx.view(64, 96), mx.view_as(mx), mx.data):
        assert_same(same, mx)
    assert mx.clone().qdata.data_ptr() != mx.qdata.data_ptr()
    assert mx.clone().qdata.stride() == mx.qdata.stride()
    assert mx.detach().qdata.data_ptr() == mx.qdata.data_ptr()
    assert mx.mT.contiguous().is_contiguous()
    assert_same(mx.mT.contiguous(), mx.mT)


def test_copies_keep_the_row_index() -> None:
    picked = MXTensor.from_qdata_and_scales(random_qdata(4, 32), scales(4, 1), row_index=index(3, -1))
    copy = picked.clone()
    assert copy.row_index.tolist() == [3, -1]
    assert copy.row_index.data_ptr() != picked.row_index.data_ptr()
    assert picked.to("meta").row_index.device.type == "meta"


def test_to_moves_all_parts_but_does_not_cast() -> None:
    mx = quantize(gaussian(4, 64))
    moved = mx.to("meta")
    assert moved.qdata.device.type == moved.scale.device.type == moved.device.type == "meta"
    assert moved.dequantize().device.type == "meta"
    assert mx.to(torch.bfloat16) is mx
    with pytest.raises(NotImplementedError, match=r"_to_copy.*call .dequantize\(torch.float32\)"):
        mx.float()


def test_dequantize_gives_what_was_asked_for() -> None:
    mx = quantize(gaussian(4, 64))
    assert mx.dequantize().dtype == torch.bfloat16
    assert torch.equal(mx.dequantize(torch.float32), mx.dequantize().float())
    assert quantize(gaussian(64, 64), axis=-2).dequantize().is_contiguous()
    with pytest.raises(ValueError, match=r"dequantize: got dtype torch.float64"):
        mx.dequantize(torch.float64)


def test_dequantize_rounds_once_to_the_nearest() -> None:
    """2**-133 is the smallest bf16: values below its half vanish, above it round."""
    bytes_ = torch.tensor([[32, 40, 48, 49] + [0] * 28], dtype=torch.uint8).view(torch.float8_e4m3fn)
    mx = MXTensor.from_qdata_and_scales(bytes_, torch.zeros(1, 1, dtype=torch.uint8))
    values = exact.values(mx.format, raw(mx.qdata), raw(mx.scale))
    want = torch.from_numpy(values).to(torch.float32).to(torch.bfloat16)
    assert torch.equal(mx.dequantize(), want)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("aten.add.Tensor", lambda mx: mx + 1),
        ("aten.mm.default", lambda mx: mx @ mx.mT),
        ("aten.mm.default", lambda mx: torch.ones(3, 4, dtype=torch.bfloat16) @ mx),
        ("aten.sum.default", lambda mx: mx.sum()),
        ("aten.index.Tensor", lambda mx: mx[torch.tensor([0, 1])]),
        ("aten.zero_.default", lambda mx: mx.zero_()),
        ("aten.view.default", lambda mx: mx.view(2, 128)),
        ("aten.select.int", lambda mx: mx[0]),
    ],
)
def test_ops_it_does_not_know_raise_by_name(name: str, use: object) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}.*dequantize"):
        use(quantize(gaussian(4, 64)))


def test_leading_axes_are_reshaped_without_moving_a_byte() -> None:
    x = torch.randn(2, 3, 5, 64)
    mx = quantize(x)
    rows = mx.reshape(-1, 64)
    assert (rows.shape, rows.axis, rows.block_size) == ((30, 64), -1, 32)
    assert rows.qdata.data_ptr() == mx.qdata.data_ptr()
    assert torch.equal(rows.dequantize(), quantize(x.view(30, 64)).dequantize())
    assert torch.equal(rows.view(3, 10, 64).dequantize().view_as(x), mx.dequantize())
    for wrong in ((2, 3, 64, 5), (2, 3, 320), (1920,)):
        with pytest.raises(NotImplementedError, match="its blocks have no such shape"):
            mx.view(*wrong)
    with pytest.raises(NotImplementedError, match="its blocks have no such shape"):
        quantize(torch.randn(2, 32, 64), axis=-2).view(64, 64)
