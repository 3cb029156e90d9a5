"""The SwiGLU kernel equals its references bit for bit, d_row_weight included: on a GPU, or interpreted without one."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.quant import MXFormat, ScaleMode, SwiGLU, quantize
from mxep.quant.activation import PLAIN, sigmoid_pair
from mxep.quant.kernels import swiglu as kernels
from quant.exact import FORMATS
from quant.inputs import ends_of
from quant.poison import POISON
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = (fmt.dtype for fmt in FORMATS)
INF, NAN = math.inf, math.nan
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
FORWARD, BACKWARD, WITH_H = DIRECTIONS = "forward", "backward", "backward and h"
WIDTHS = [(32, {}), (96, {}), (96, {"THREAD_ELEMENTS": 1}), (768, {}), (1408, {"AHEAD": 2}), (256, {"AHEAD": 0})]
"""F, and how: one chunk, a chunk not full, three chunks, a last one not full, all of them loaded one or none ahead."""
MORE_WIDTHS = [*WIDTHS, (1, {}), (5, {}), (100, {})]


def in_turn(*cases: int) -> bool:
    """An option of a case, by its indices of all others: it and any two of those still meet in each way."""
    return sum(cases) % 2 == 1


def problem(rows: int, F: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """d_h, gate_up, row_weight. Blocks up to 2^40 apart, and a few rows of what is special."""
    generator = torch.Generator().manual_seed(seed)

    def spread(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator)
        power = torch.randint(-6 if dtype == torch.float16 else -30, 4, (*shape[:-1], -(-shape[-1] // 32)))
        return x * torch.exp2(power).repeat_interleave(32, -1)[..., : shape[-1]]

    d_h, gate, up = spread(rows, F), torch.randn(rows, F, generator=generator) * 6, spread(rows, F)
    row_weight = torch.rand(rows, generator=generator)
    special = torch.tensor([0.0, -0.0, 1.0, -87.0, 100.0, -INF, INF, 6e4, -6e4, 1e-7])
    if rows > 5:
        gate[1] = special.repeat(F)[:F]
        up[2], row_weight[3] = -0.0, 0.0
        d_h[3, F // 2] = NAN
        gate[4, F - 1], up[5, 0] = NAN, -INF
    return d_h.to(dtype), torch.cat([gate, up], dim=1).to(dtype), row_weight


def same(got: Tensor, want: Tensor) -> None:
    """Bit for bit; of a NaN of 16 or 32 bits any will do."""
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
    got = got.cpu()
    if got.dtype.itemsize > 1:
        assert torch.equal(got.isnan(), want.isnan())
        got, want = got.nan_to_num(0.0, INF, -INF), want.nan_to_num(0.0, INF, -INF)
    assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


def check(
    problem: tuple[Tensor, Tensor, Tensor | None],
    *quantized: Any,
    ends: Tensor | None = None,
    direction: str = WITH_H,
    activation: SwiGLU = PLAIN,
    gate_up_scale: Tensor | None = None,
    first: int | None = None,
    **tuning: int,
) -> None:
    """A kernel's results on DEVICE against the op's on the CPU; rows past the groups are neither read nor written.

    gate_up_scale: (R, 1) bytes, where the problem's gate_up is qdata. first: rows of gate_up from it on lie apart.
    """
    d_h, gate_up, row_weight = problem
    valid = gate_up.shape[0] if ends is None else int(ends[-1])
    backward = direction != FORWARD
    name = "swiglu_backward" if backward else "swiglu"
    inputs = ((d_h,) if backward else ()) + (gate_up, row_weight)
    dtype, *scaled = quantized or (gate_up.dtype, None, 0, False)
    out: list[Tensor] = [torch.empty(gate_up.shape, dtype=dtype)] if backward else []
    how = scaled if backward else (dtype, *scaled)
    if backward:  # h in E4M3, whatever the gradient is in
        how = (*scaled, None if direction != WITH_H else E4M3 if quantized else gate_up.dtype)
    of_rows = {"gate_up_scale": gate_up_scale, "rest": None, "rest_scale": None} if backward else {"rest": None}
    want = list(getattr(torch.ops.mxep, name)(*inputs, ends, *out, *how, activation=activation.packed, **of_rows))
    if direction == WITH_H and gate_up_scale is None:
        of_h = how[-1], scaled[0], min(scaled[1], d_h.shape[1]), scaled[2]
        for a, b in zip(want[2:], torch.ops.mxep.swiglu(gate_up, row_weight, ends, *of_h, activation.packed, None)):
            same(a, b)
    moved = [part if part is None else part.to(DEVICE, copy=True) for part in (*inputs, ends)]
    for part in moved[:-1]:
        if part is not None:
            part[valid:] = NAN
    if gate_up_scale is not None:
        of_rows["gate_up_scale"] = gate_up_scale.to(DEVICE, copy=True)
        of_rows["gate_up_scale"][valid:] = 255
    if first is not None:
        for both, what in ((moved[backward], "rest"), (of_rows.get("gate_up_scale"), "rest_scale")):
            if both is not None:
                of_rows[what] = both[first:].clone()
                both.resize_(first, both.shape[1])
    moved_out = [torch.empty(x.shape, dtype=x.dtype, device=DEVICE) for x in out]
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, tuning)
        got = getattr(kernels, name)(*moved, *moved_out, *how, activation=activation.packed, **of_rows)
    for a, b in zip((*moved_out, *got), (*out, *want), strict=True):
        assert a.shape == b.shape
        if b.numel():
            same(a[:valid], b[:valid])
            assert (a[valid:].view(torch.uint8) == POISON).all()


def set_constants(patch: pytest.MonkeyPatch, tuning: dict[str, int]) -> None:
    for name, value in tuning.items():
        patch.setattr(kernels, name, value)


@pytest.mark.parametrize(("F", "tuning"), WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_results(dtype: torch.dtype, F: int, tuning: dict[str, int]) -> None:
    """Any two of dtype, width and direction meet."""
    direction = DIRECTIONS[(WIDTHS.index((F, tuning)) + DTYPES.index(dtype)) % 3]
    check(problem(8, F, dtype), direction=direction, **tuning)


@pytest.mark.parametrize("F", [1056, 1280])
def test_rows_that_fewer_warps_divide_better(F: int) -> None:
    for folded in (False, True):
        check(problem(8, F), E4M3, "rceil", 32, folded)


@pytest.mark.parametrize("direction", [FORWARD, WITH_H])
@pytest.mark.parametrize(
    ("F", "tuning", "of_rows"), [*((*case, False) for case in WIDTHS), *((*case, True) for case in MORE_WIDTHS)]
)
def test_quantized_results(F: int, tuning: dict[str, int], of_rows: bool, direction: str) -> None:
    """of_rows: one scale a row. Any two of width, direction, dtype and folded meet. Every third backward has no h."""
    width, turn = MORE_WIDTHS.index((F, tuning)), DIRECTIONS.index(direction)
    direction = BACKWARD if direction == WITH_H and width % 3 == of_rows else direction
    block = 32 if not of_rows else F if direction == FORWARD else 2 * F
    dtype = DTYPES[(width + turn) % 2]
    check(problem(8, F, dtype), E4M3, "rceil", block, in_turn(width // 2, turn), direction=direction, **tuning)


@pytest.mark.parametrize(("F", "tuning"), [*WIDTHS, (14336 if DEVICE == "cuda" else 2080, {})])
@pytest.mark.parametrize("folded", [False, True])
def test_codes_written_over_the_gradient(
    folded: bool, F: int, tuning: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 40 if DEVICE == "cuda" else 12  # what is interpreted takes its time
    set_constants(monkeypatch, tuning | {"PROGRAMS_PER_SM": 3})
    d_h, gate_up, row_weight = problem(rows, F)
    how = "rceil", 32 if folded else 2 * F, folded
    qdata, ends = torch.empty(gate_up.shape, dtype=E4M3), ends_of(7, rows - 10)
    want = torch.ops.mxep.swiglu_backward(d_h, gate_up, row_weight, ends, qdata, *how, E4M3, *[None] * 4)
    moved = [part.to(DEVICE, copy=True) for part in (d_h, gate_up, row_weight, ends)]
    got = kernels.swiglu_backward(*moved, moved[0].view(E4M3), *how, E4M3)
    for a, b in zip((moved[0].view(E4M3), *got), (qdata, *want), strict=True):
        same(a[: rows - 3], b[: rows - 3])
    assert torch.equal(moved[0][rows - 3 :].cpu().view(torch.int16), d_h[rows - 3 :].view(torch.int16))


ACTIVATIONS = [
    SwiGLU(1.702, 7.0, 1.0, interleaved=True),
    SwiGLU(1.702, 7.0, 1.0),
    SwiGLU(limit=0.75),
    SwiGLU(interleaved=True),
]
"""gpt-oss, MiniMax-M3, DeepSeek-V4, and plain of other columns."""


QUANTIZED = {
    "rounded": (),
    "blocks": (E4M3, "rceil", 32, False),
    "folded": (E5M2, "floor", 32, True),
    "row": (E4M3, "rceil", None, False),
}


@pytest.mark.parametrize("how", QUANTIZED)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_other_activations(activation: SwiGLU, how: str) -> None:
    """Each activation and each format meets every direction and width."""
    turn = ACTIVATIONS.index(activation) + list(QUANTIZED).index(how)
    (F, tuning), direction = WIDTHS[1 + turn % 4], DIRECTIONS[turn % 3]
    of_row = tuple((F if direction == FORWARD else 2 * F) if part is None else part for part in QUANTIZED[how])
    given = problem(8, F, torch.float32 if F == 96 else torch.bfloat16)
    given[1][6, ::7], given[1][7, 1::5] = 0.75, -7.0  # limits themselves are not clamped
    check(given, *of_row, ends=ends_of(3, 5), direction=direction, activation=activation, **tuning)


@pytest.mark.parametrize("direction", [BACKWARD, WITH_H])
@pytest.mark.parametrize("block", [32, None])
@pytest.mark.parametrize("activation", [PLAIN, ACTIVATIONS[0]], ids=str)
def test_gate_up_in_fp8_with_one_scale_a_row(activation: SwiGLU, block: int | None, direction: str) -> None:
    for F, tuning in WIDTHS[direction == WITH_H :: 2]:
        d_h, gate_up, row_weight = problem(8, F)
        mx = quantize(gate_up, fmt="E5M2" if F == 96 else "E4M3", block_size=None)
        how: dict[str, Any] = {"direction": direction, "activation": activation, "ends": ends_of(3, 4), **tuning}
        given = d_h, mx.qdata, row_weight
        scale = mx.scale.view(torch.uint8)
        check(given, E4M3, "rceil", block or 2 * F, block is not None, gate_up_scale=scale, **how)


@pytest.mark.parametrize("F", [1, 2, 5, 8, 9, 100])
def test_widths_that_fill_nothing(F: int) -> None:
    check(problem(6, F))
    check(problem(6, F), direction=FORWARD)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
@pytest.mark.parametrize("mode", ScaleMode)
@pytest.mark.parametrize("folded", [False, True])
def test_every_format_and_mode(fmt: MXFormat, mode: ScaleMode, folded: bool) -> None:
    """And any two of these and of block sizes meet."""
    block = (32, 64, 256)[(FORMATS.index(fmt) + list(ScaleMode).index(mode) + folded) % 3]
    check(problem(8, 128, seed=block), fmt.dtype, mode.value, block, folded)


@pytest.mark.parametrize("block_size", [1, 16, 128, 256])
def test_other_blocks_and_chunks_of_at_least_a_block(block_size: int) -> None:
    for folded, direction in ((block_size != 16, FORWARD), (block_size == 16, WITH_H)):
        check(problem(3, 768), E4M3, "rceil", block_size, folded, direction=direction, THREAD_ELEMENTS=1)


def test_one_scale_for_gate_and_one_for_up() -> None:
    check(problem(6, 32), E4M3, "rceil", 32, False)


@pytest.mark.parametrize("block", [32, 48])
def test_blocks_that_gate_and_up_would_share_are_refused_on_cuda(block: int) -> None:
    with pytest.raises(ValueError, match=f"block_size: got {block}, want the whole row, 96, or a power of two"):
        check(problem(6, 48), E4M3, "rceil", block, False, direction=BACKWARD)


@pytest.mark.parametrize("sizes", [(0, 0), (10, 0, 5), (20,)], ids=str)
@pytest.mark.parametrize("quantized", [(), (E4M3, "rceil", 32, True), (E4M3, "rceil", 32, False)], ids=str)
def test_rows_past_the_last_group_are_neither_read_nor_written(sizes: tuple[int, ...], quantized: Any) -> None:
    for direction in DIRECTIONS:
        check(problem(20, 64), *quantized, ends=ends_of(*sizes), direction=direction, PROGRAMS_PER_SM=3)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("first", [1, 4, 6])
@pytest.mark.parametrize("quantized", [(), (E5M2, "floor", 32, True), (E4M3, "rceil", 192, False)], ids=str)
def test_rows_of_gate_up_that_lie_apart(quantized: Any, first: int, in_fp8: bool) -> None:
    d_h, gate_up, row_weight = problem(7, 96)
    scale, ends = None, ends_of(2, 3) if first < 6 else None
    if in_fp8:
        mx = quantize(gate_up, block_size=None)
        gate_up, scale = mx.qdata, mx.scale.view(torch.uint8)
        quantized = quantized or (torch.bfloat16, None, 0, False)
    for direction in (BACKWARD, WITH_H, *([] if in_fp8 or quantized[2:3] == (192,) else [FORWARD])):
        check((d_h, gate_up, row_weight), *quantized, ends=ends, direction=direction, gate_up_scale=scale, first=first)


@pytest.mark.parametrize("quantized", [(), (E5M2, "floor", 32, True)], ids=str)
def test_without_row_weights(quantized: Any) -> None:
    d_h, gate_up, _ = problem(7, 64)
    for direction in DIRECTIONS:
        check((d_h, gate_up, None), *quantized, direction=direction)


def test_gradients_may_have_another_dtype() -> None:
    d_h, gate_up, row_weight = problem(7, 64, torch.float32)
    check((d_h, gate_up.bfloat16(), row_weight))
    check((d_h.bfloat16(), gate_up, row_weight), E4M3, "rceil", 32, True)


def test_no_rows() -> None:
    for quantized in ((), (E4M3, "rceil", 32, True)):
        check(problem(0, 32), *quantized)
        check(problem(0, 32), *quantized, direction=FORWARD)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_inputs_with_strides_or_at_odd_addresses(in_fp8: bool) -> None:
    d_h, gate_up, row_weight = problem(6, 64)
    out, scale = torch.empty(gate_up.shape, dtype=E4M3 if in_fp8 else gate_up.dtype), None
    how: tuple[Any, ...] = ("rceil", 128, False, None, None) if in_fp8 else (None, 0, False, None, None)
    if in_fp8:
        mx = quantize(gate_up, block_size=None)
        gate_up, scale = mx.qdata, mx.scale.view(torch.uint8)
    want = torch.ops.mxep.swiglu_backward(d_h, gate_up, row_weight, None, out, *how, scale, None, None)

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x.to(DEVICE)] * 2, dim=-1)[..., 1] if x.ndim > 1 else x.to(DEVICE)  # not vectors

    def odd(x: Tensor) -> Tensor:
        buffer = torch.zeros(x.numel() + 1, dtype=x.dtype, device=DEVICE)
        buffer[1:] = x.flatten()
        return buffer[1:].view(x.shape)

    for change in (strided, odd):
        moved_out = torch.empty(out.shape, dtype=out.dtype, device=DEVICE)
        given = change(d_h), change(gate_up), change(row_weight), None, moved_out, *how
        got = kernels.swiglu_backward(*given, None if scale is None else change(scale))
        for a, b in zip((moved_out, *got), (out, *want)):
            same(a, b)


def test_the_sigmoid_at_every_gate_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all bf16, and of fp32 numbers where their integers carry: h with up = 1 is gate * sigmoid(gate)."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    gate = every.float().view(32, 2048)
    rest = torch.randint(-(2**31), 2**31 - 1, (32, 2048), generator=torch.Generator().manual_seed(0)).int()
    gate = torch.cat([gate, rest.view(torch.float32)])
    s, _ = sigmoid_pair(gate)
    set_constants(monkeypatch, {"THREAD_ELEMENTS": 32})
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1).to(DEVICE)
    got, _ = kernels.swiglu(gate_up, None, None, gate_up.dtype, None, 0, False)
    same(got, gate.clamp(min=-86.0) * s)


def test_a_program_has_the_registers_that_it_is_limited_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any width: an SM has 65536."""
    monkeypatch.setattr(kernels, "on_hopper", lambda **options: options)
    for num_warps in (1, 2, 4, 8, 16, 32):
        for elements in (8, 24, 40, 48, 64):
            assert 32 * num_warps * (kernels._max_registers(elements, num_warps) or 255) <= 65536
