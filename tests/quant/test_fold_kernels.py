"""The fold kernel gives the bytes of the reference: formats, blocks, indices, strides, groups."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.quant import E5M2, MXFormat
from mxep.quant.kernels import fold as kernels
from quant.exact import FORMATS
from quant.inputs import hostile, slots
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int]


def to_device(x: Tensor) -> Tensor:
    """x on DEVICE with its strides, in a copy of its whole buffer."""
    storage = x.view(torch.uint8).untyped_storage()
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage).to(DEVICE).view(torch.uint8)  # type: ignore[call-overload]
    size = x.dtype.itemsize
    first, strides = x.storage_offset() * size, [stride * size for stride in x.stride()]
    if size == 1:
        return buffer.as_strided(x.shape, strides, first).view(x.dtype)
    return x.to(DEVICE)


def check(*args: Any) -> None:
    """The kernel's results on DEVICE against the op's on the CPU: valid rows bit for bit."""
    offs = args[3]
    valid = None if offs is None else int(offs[-1])
    want = torch.ops.mxep.fold(*args)
    moved = [to_device(arg) if isinstance(arg, Tensor) else arg for arg in args]
    got = kernels.fold(*moved)  # type: ignore[arg-type]
    for a, b in zip(got, want):
        assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
        if valid is not None:
            a, b = a[:valid], b[:valid]
        assert torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8))


@both_formats
def test_every_code_under_every_shift(fmt: MXFormat) -> None:
    shifts = torch.arange(0, 128)
    every = torch.arange(256, dtype=torch.uint8).expand(len(shifts), 256)
    one = torch.ones(len(shifts), 256).to(fmt.dtype).view(torch.uint8)
    for low in (0, 1, 126):
        scale = torch.full((len(shifts), 16), low, dtype=torch.uint8)
        scale[:, 8:] = (low + shifts)[:, None]
        qdata = torch.cat([every, one], 1).view(fmt.dtype)
        check(qdata, scale.view(torch.float8_e8m0fnu), None, None)


@both_formats
@pytest.mark.parametrize("length", [32, 96, 192, 576])
def test_rows_of_any_length(fmt: MXFormat, length: int) -> None:
    for seed in range(3):
        check(*hostile(fmt, (13, length), seed=seed, spread=40), None, None)


@pytest.mark.parametrize(
    ("block_size", "length"), [(64, 128), (96, 192), (128, 128), (384, 384), (24, 48), (10, 30), (7, 21)]
)
def test_blocks_of_any_length(block_size: int, length: int) -> None:
    check(*hostile(FORMATS[0], (9, length), block_size), None, None)


@both_formats
@pytest.mark.parametrize("ends", [[0, 0], [3, 3], [7, 40], [11, 57]])
def test_indexed_slots_in_groups(fmt: MXFormat, ends: list[int]) -> None:
    index = torch.randint(-1, 20, (57,), generator=torch.Generator().manual_seed(0)).int()
    index[3] = -1
    index[ends[-1] :] = 10**9  # neither read nor written
    qdata, scale = slots(*hostile(fmt, (20, 224)))
    check(qdata, scale, index, torch.tensor(ends, dtype=torch.int32))
    check(qdata, scale, index[: ends[-1]], None)


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 4, 16])
def test_rows_at_any_address(spare: int) -> None:
    qdata, scale = slots(*hostile(FORMATS[0], (6, 224)), spare)
    check(qdata, scale, None, None)
    check(qdata[:, 32:], scale[:, 1:], None, None)


@pytest.mark.parametrize("tuning", [(512, 256, 1), (512, 512, 2), (256, 64, 64), (4096, 512, 3)])
def test_any_tile_and_any_number_of_programs(tuning: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("TILE_ELEMENTS", "WARP_ELEMENTS", "PROGRAMS_PER_SM"), tuning):
        monkeypatch.setattr(kernels, name, value)
    qdata, scale = hostile(FORMATS[0], (37, 256))
    ends = torch.tensor([8, 31], dtype=torch.int32)
    check(qdata, scale, None, ends)


def test_weights_and_what_is_stored_turned() -> None:
    check(*hostile(E5M2, (3, 5, 64)), None, None)
    qdata, scale = hostile(E5M2, (3, 64, 64), 64)
    check(qdata.mT, scale.expand(3, 64, 2).contiguous(), None, None)
    check(qdata[:, :5], scale.expand(3, 64, 2).contiguous()[:, :5], None, None)


def test_nothing_to_fold() -> None:
    qdata, scale = hostile(FORMATS[0], (4, 64))
    none = torch.zeros(0, dtype=torch.int32)
    check(qdata[:0], scale[:0], None, None)
    check(qdata, scale, none, None)
    check(qdata[:0], scale[:0], torch.full((3,), -1, dtype=torch.int32), None)


def test_rows_far_apart() -> None:
    """Offsets beyond 2**31 bytes, where a GPU has the memory."""
    if DEVICE == "cpu":
        pytest.skip("needs 3 GB")
    qdata, scale = hostile(FORMATS[0], (8, 64))
    buffer = torch.empty(8, 3 * 2**28, dtype=torch.uint8, device=DEVICE)
    buffer[:, :64], buffer[:, 64:66] = qdata.view(torch.uint8).to(DEVICE), scale.view(torch.uint8).to(DEVICE)
    index = torch.tensor([7, 0, 5], dtype=torch.int32)
    folded, byte = kernels.fold(
        buffer[:, :64].view(qdata.dtype), buffer[:, 64:66].view(scale.dtype), index.to(DEVICE), None
    )
    want, want_byte = torch.ops.mxep.fold(qdata, scale, index, None)
    assert torch.equal(folded.view(torch.uint8).cpu(), want.view(torch.uint8))
    assert torch.equal(byte.view(torch.uint8).cpu(), want_byte.view(torch.uint8))
