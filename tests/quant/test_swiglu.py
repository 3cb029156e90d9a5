"""SwiGLU and its derivative, against float64; and the laws of the portable sigmoid below them."""

import functools
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxep.quant import (
    E4M3,
    E5M2,
    MXTensor,
    ScaleMode,
    SwiGLU,
    fold,
    quantize,
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from mxep.quant.activation import reciprocal, sigmoid_pair
from mxep.quant.swiglu import tree_sum
from quant.exact import FORMATS, assert_bytes, raw
from quant.inputs import ends_of, gaussian
from quant.opchecks import WITHOUT_SCHEMA, check_op

INF, NAN = math.inf, math.nan


def swiglu_in_float64(gate_up: Tensor, row_weight: Tensor | None) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * up
    return h if row_weight is None else h * row_weight.double()[:, None]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(bits(a), bits(b))


def relative_errors(got: Tensor, want: Tensor) -> Tensor:
    """|got / want - 1| in 2^-23; want in float64."""
    return (got.double() / want - 1).abs() * 2**23


def fp32_numbers_between(low: float, high: float, step: int) -> Tensor:
    """Every step-th fp32 number between two positive ones, through all binades."""
    first, last = (struct.unpack("i", struct.pack("f", value))[0] for value in (low, high))
    return torch.arange(first, last + 1, step, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("low", "high", "bound"), [(2.0**-30, 1.0, 6), (1.0, 8.0, 10), (8.0, 20.0, 14), (20.0, 86.0, 38)]
)
def test_the_sigmoid_is_as_accurate_as_it_says(low: float, high: float, bound: int) -> None:
    x = fp32_numbers_between(low, high, 1021 if low < 1 else 127)
    s, one_minus_s = sigmoid_pair(x)
    assert relative_errors(s, torch.sigmoid(x.double())).max() <= bound
    assert relative_errors(one_minus_s, torch.sigmoid(-x.double())).max() <= bound


def test_the_reciprocal_is_within_its_bound_for_every_mantissa() -> None:
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for exponent in (-126, 0, 124):
        d = (mantissas + (127 + exponent << 23)).view(torch.float32)
        assert relative_errors(reciprocal(d), 1 / d.double()).max() <= 1.4


def test_the_sigmoid_of_minus_x_is_the_other_one_of_the_pair() -> None:
    x = torch.cat([gaussian(1000) * 20, torch.tensor([0.0, 1e-40, 86.0, 88.0, 1e30, INF])])
    s, one_minus_s = sigmoid_pair(x)
    transposed, one_minus_turned = sigmoid_pair(-x)
    assert_same_bits(s, one_minus_turned)
    assert_same_bits(one_minus_s, transposed)


def test_the_sigmoid_saturates_at_finite_limits_and_keeps_nan() -> None:
    s, one_minus_s = sigmoid_pair(torch.tensor([0.0, -0.0, 88.0, 1e38, INF, -88.0, -1e38, -INF, NAN]))
    least = float(sigmoid_pair(torch.tensor([-86.0]))[0])
    assert least == pytest.approx(math.exp(-86), rel=1e-5)
    assert s[:-1].tolist() == [0.5, 0.5, 1, 1, 1, least, least, least]
    assert one_minus_s[:-1].tolist() == [0.5, 0.5, least, least, least, 1, 1, 1]
    assert s[-1].isnan()
    assert one_minus_s[-1].isnan()


@settings(deadline=None, max_examples=60)
@given(value=st.floats(width=32), length=st.integers(1, 70), data=st.data())
def test_the_sigmoid_has_the_same_bits_at_any_position_of_any_tensor(value: float, length: int, data: Any) -> None:
    at = data.draw(st.integers(0, length - 1))
    x = gaussian(length)
    x[at] = value
    alone = sigmoid_pair(torch.tensor([value]))
    strided = torch.stack([gaussian(length, seed=1), x], dim=1)[:, 1]
    for among in (sigmoid_pair(x), sigmoid_pair(strided)):
        for one, many in zip(alone, among):
            if not math.isnan(value):
                assert_same_bits(one, many[at : at + 1])


@pytest.mark.parametrize("weighted", [False, True])
def test_forward_is_within_fp32_rounding_of_float64(weighted: bool) -> None:
    """silu: the sigmoid's 6 * 2^-23 for gates below 1, and a product; two more products, each half of 2^-23."""
    gate_up = gaussian(40, 2 * 50) * torch.logspace(-3, 1.3, 100)
    w = gaussian(40, seed=1) if weighted else None
    want = swiglu_in_float64(gate_up, w)
    assert ((swiglu(gate_up, w).double() - want).abs() <= 7.5 * 2.0**-23 * want.abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    gate_up, w, d_h = gaussian(9, 64, dtype=dtype), gaussian(9, seed=1), gaussian(9, 32, seed=2, dtype=dtype)
    assert_same_bits(swiglu(gate_up, w), swiglu(gate_up.float(), w).to(dtype))
    d_gate_up, d_w, _ = swiglu_backward(d_h, gate_up, w)
    wide, wide_w, _ = swiglu_backward(d_h.float(), gate_up.float(), w)
    assert_same_bits(d_gate_up, wide.to(dtype))
    assert_same_bits(d_w, wide_w)


@pytest.mark.parametrize("weighted", [False, True])
def test_backward_is_the_derivative_of_a_float64_swiglu(weighted: bool) -> None:
    """Relative to the largest terms of each element: slope sums 1 and gate * (1 - s); d_row_weight sums F terms.

    Gates are below 8, so a sigmoid is off by 10 * 2^-23 at most; slope has two and four roundings.
    """
    gate_up = (gaussian(30, 2 * 48) * torch.logspace(-2, 1.3, 96)).requires_grad_()
    d_h = gaussian(30, 48, seed=1)
    w = (gaussian(30, seed=2) if weighted else torch.ones(30)).requires_grad_()
    want_d, want_w = torch.autograd.grad(swiglu_in_float64(gate_up, w), (gate_up, w), d_h.double())
    d_gate_up, d_w, _ = swiglu_backward(d_h, gate_up.detach(), w.detach() if weighted else None)
    gate, up = gate_up.detach().double().chunk(2, 1)
    d = d_h.double() * w.detach().double()[:, None]
    s = torch.sigmoid(gate)
    terms = torch.cat([(d * up).abs() * s * (1 + (gate * (1 - s)).abs()), (d * gate * s).abs()], 1)
    assert ((d_gate_up.double() - want_d).abs() <= 16 * 2.0**-23 * terms).all()
    row_terms = (d_h.double() * swiglu_in_float64(gate_up.detach(), None)).abs().sum(1)
    assert ((d_w.double() - want_w).abs() <= 8 * 2.0**-23 * row_terms).all()
    assert (d_gate_up.dtype, d_w.dtype, d_w.shape) == (torch.float32, torch.float32, (30,))


ACTIVATIONS = [SwiGLU(1.702, 1.5, 1.0, interleaved=True), SwiGLU(limit=0.7), SwiGLU(1.3, None, 0.25), SwiGLU()]


def activation_in_float64(gate_up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    """As models write it, but where it clamps: at the limit torch's derivative is 1 before 2.15, and 0 since."""
    gate_up = gate_up.double()
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if activation.interleaved else gate_up.chunk(2, 1)
    if activation.limit is not None:
        gate = torch.where(gate > activation.limit, activation.limit, gate)
        up = torch.where(up.abs() > activation.limit, activation.limit * up.sign(), up)
    return (up + activation.shift) * (gate * torch.sigmoid(activation.alpha * gate))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_another_activation_is_its_formula_and_that_formulas_derivative(activation: SwiGLU) -> None:
    """Of gates up to 8, as plain SwiGLU's; alpha * gate and up + shift add a rounding each, which slopes amplify."""
    gate_up = (gaussian(30, 96) * 2).requires_grad_()
    with torch.no_grad():
        gate_up[3, 5], gate_up[3, 6], gate_up[4, 70] = -INF, NAN, NAN
        if activation.limit is not None:
            gate_up[5], gate_up[6, ::3] = activation.limit, -activation.limit
    d_h, w = gaussian(30, 48, seed=1), gaussian(30, seed=2).requires_grad_()
    want = activation_in_float64(gate_up, activation) * w.double()[:, None]
    given, weight = gate_up.detach(), w.detach()
    clean = torch.ones(30, dtype=torch.bool)
    clean[3:5] = False
    assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-5, check_dtype=False)
    assert_close(swiglu(given, weight, activation=activation)[clean], want.detach()[clean])
    d_gate_up, d_w, again = swiglu_backward(d_h, given, weight, activation=activation, with_h=True)
    assert_same_bits(again.nan_to_num(), swiglu(given, weight, activation=activation).nan_to_num())
    want_d, want_w = torch.autograd.grad(want[clean], (gate_up, w), d_h[clean].double())
    assert_close(d_gate_up[clean], want_d[clean])
    assert_close(d_w[clean], want_w[clean])
    h, (gate, up) = swiglu(given, activation=activation), activation.split(given)
    assert torch.equal(h.isnan(), gate.isnan() | up.isnan())
    assert torch.equal(activation.join(gate, up).nan_to_num(), given.nan_to_num())
    d_gate, _ = activation.split(d_gate_up)
    assert d_gate[gate.isnan()].isnan().all()
    assert not d_gate[~(gate.isnan() | up.isnan())].isnan().any()


def test_an_activation_that_is_none_says_so() -> None:
    for name, options in (("alpha 0", {"alpha": 0.0}), ("limit -1", {"limit": -1.0}), ("limit inf", {"limit": INF})):
        with pytest.raises(ValueError, match=f"SwiGLU: got {name}"):
            SwiGLU(**options)


def test_the_sum_over_a_row_is_the_tree_of_the_docstring() -> None:
    a, b, c, d, e = (gaussian(1000, seed=seed) * 10.0**seed for seed in range(5))
    assert_same_bits(tree_sum(torch.stack([a, b, c, d, e], 1)), ((a + b) + (c + d)) + e)
    eighths = [sum_of_eight(gaussian(1000, 8, seed=seed)) for seed in range(4)]
    want = (eighths[0] + eighths[2]) + (eighths[1] + eighths[3])
    assert_same_bits(tree_sum(torch.cat([gaussian(1000, 8, seed=seed) for seed in range(4)], 1)), want)
    assert_same_bits(tree_sum(a[:, None]), a)


def sum_of_eight(x: Tensor) -> Tensor:
    a, b, c, d, e, f, g, h = x.unbind(1)
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(0, 9), width=st.integers(1, 40), at=st.integers(0, 8), weighted=st.booleans())
def test_a_row_has_the_same_bits_among_any_others(rows: int, width: int, at: int, weighted: bool) -> None:
    gate_up, d_h = gaussian(rows + 1, 2 * width), gaussian(rows + 1, width, seed=1)
    w = gaussian(rows + 1, seed=2) if weighted else None
    r = min(at, rows)
    alone = slice(r, r + 1)
    w_alone = None if w is None else w[alone].clone()
    assert_same_bits(swiglu(gate_up, w)[alone], swiglu(gate_up[alone].clone(), w_alone))
    for among, one in zip(
        swiglu_backward(d_h, gate_up, w, with_h=True),
        swiglu_backward(d_h[alone].clone(), gate_up[alone].clone(), w_alone, with_h=True),
    ):
        assert_same_bits(among[alone], one)


def test_infinite_and_huge_gates_give_the_limits() -> None:
    gate = torch.tensor([-INF, -1e38, -100.0, 100.0, 1e38, INF])
    up = torch.full_like(gate, 2.0)
    gate_up = torch.cat([gate, up]).view(1, -1)
    h = swiglu(gate_up)[0]
    assert h[:3].abs().max() < 1e-35
    assert h[3:].tolist() == [200.0, pytest.approx(2e38), INF]
    d_gate_up, *_ = swiglu_backward(torch.ones(1, 6), gate_up)
    d_gate, d_up = d_gate_up[0].chunk(2)
    assert d_gate[:3].abs().max() < 1e-35
    assert d_gate[3:].tolist() == [2.0, 2.0, 2.0]
    assert d_up[:3].abs().max() < 1e-35


def test_a_nan_stays_in_its_element_or_its_block() -> None:
    gate_up, d_h = gaussian(4, 128), gaussian(4, 64, seed=1)
    clean, (clean_d, clean_w, _) = swiglu(gate_up), swiglu_backward(d_h, gate_up)
    gate_up[2, 40] = NAN  # gate of element 40
    bad = torch.zeros(4, 64, dtype=torch.bool)
    bad[2, 40] = True
    h = swiglu(gate_up)
    assert torch.equal(h.isnan(), bad)
    assert_same_bits(h[~bad], clean[~bad])
    d_gate_up, d_w, _ = swiglu_backward(d_h, gate_up)
    both = torch.cat([bad, bad], 1)
    assert torch.equal(d_gate_up.isnan(), both)
    assert_same_bits(d_gate_up[~both], clean_d[~both])
    assert d_w.isnan().tolist() == [False, False, True, False]
    assert_same_bits(d_w[[0, 1, 3]], clean_w[[0, 1, 3]])
    scale = raw(swiglu_quantize(gate_up).scale)
    assert (scale == 255).tolist() == [[False, False], [False, False], [False, True], [False, False]]


@pytest.mark.parametrize("mode", ScaleMode)
@pytest.mark.parametrize("block_size", [32, None])
def test_quantized_results_are_the_fp32_results_quantized(mode: ScaleMode, block_size: int | None) -> None:
    fmt = FORMATS[([*ScaleMode].index(mode) + (block_size is None)) % 2]
    gate_up, w = gaussian(6, 128, dtype=torch.bfloat16), gaussian(6, seed=1)
    d_h = gaussian(6, 64, seed=2, dtype=torch.bfloat16)
    wide = gate_up.float()
    h = swiglu_quantize(gate_up, w, fmt=fmt, mode=mode, block_size=block_size)
    d_gate_up, d_w, _ = swiglu_backward_quantize(d_h, gate_up, w, fmt=fmt, mode=mode, block_size=block_size)
    wide_d, wide_w, _ = swiglu_backward(d_h, wide, w)
    for got, values in ((h, swiglu(wide, w)), (d_gate_up, wide_d)):
        want = quantize(values, fmt=fmt, mode=mode, block_size=block_size)
        assert_bytes(got.qdata, raw(want.qdata))
        assert_bytes(got.scale, raw(want.scale))
        assert (got.dtype, got.axis, got.block_size) == (torch.bfloat16, -1, want.block_size)
    assert_same_bits(d_w, wide_w)


@pytest.mark.parametrize("mode", ScaleMode)
@pytest.mark.parametrize("block_size", [32, 64, None])
def test_folded_results_are_the_quantized_ones_folded(mode: ScaleMode, block_size: int | None) -> None:
    fmt = FORMATS[([*ScaleMode].index(mode) + (block_size == 64)) % 2]
    gate_up, w, d_h = gaussian(6, 256), gaussian(6, seed=1), gaussian(6, 128, seed=2)
    gate_up[:, 128:] *= torch.exp2(torch.arange(4) * -5.0 - 100.0).repeat_interleave(32)
    gate_up[1, 160:] = 0.0
    gate_up[2, 170] = NAN
    how: dict[str, Any] = {"fmt": fmt, "mode": mode, "block_size": block_size}
    d_gate_up, d_w, _ = swiglu_backward_quantize(d_h, gate_up, w, **how)
    folded_d, folded_w, _ = swiglu_backward_quantize(d_h, gate_up, w, folded=True, **how)
    assert_same_bits(folded_w.nan_to_num(), d_w.nan_to_num())
    for got, mx in (
        (swiglu_quantize(gate_up, w, folded=True, **how), swiglu_quantize(gate_up, w, **how)),
        (folded_d, d_gate_up),
    ):
        want = fold(mx)
        assert_bytes(got.qdata, raw(want.qdata))
        assert_bytes(got.scale, raw(want.scale))
        assert (got.dtype, got.axis, got.block_size) == (torch.float32, -1, want.shape[1])


@pytest.mark.parametrize("activation", [SwiGLU(), ACTIVATIONS[0]], ids=str)
@pytest.mark.parametrize("how", [{}, {"folded": True}, {"block_size": None, "fmt": E5M2}], ids=str)
def test_backward_of_gate_up_with_one_scale_a_row_is_that_of_its_values(
    how: dict[str, Any], activation: SwiGLU
) -> None:
    gate_up, w, d_h = gaussian(6, 256), gaussian(6, seed=1), gaussian(6, 128, seed=2, dtype=torch.bfloat16)
    gate_up[1] *= 1e4
    gate_up[5] = NAN
    mx, ends = quantize(gate_up.bfloat16(), block_size=None), ends_of(2, 3)
    how = how | {"offs": ends, "activation": activation, "h_fmt": E4M3}
    got = swiglu_backward_quantize(d_h, mx, w, **how)
    want = swiglu_backward_quantize(d_h, mx.dequantize(torch.float32), w, **how)
    for a, b in ((got[0], want[0]), (got[2], want[2])):
        assert a.dtype == torch.bfloat16
        assert_same_bits(a.qdata[:5], b.qdata[:5])
        assert_same_bits(a.scale[:5], b.scale[:5])
    assert_same_bits(got[1][:5], want[1][:5])
    assert not got[1][:5].isnan().any(), "the NaN of row 5 stays there"


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_gate_up_may_lie_in_two_tensors(in_fp8: bool, first: int) -> None:
    gate_up, w, d_h = gaussian(6, 256, dtype=torch.bfloat16), gaussian(6, seed=1), gaussian(6, 128, seed=2)
    kept, rest = gate_up[:first].clone(), gate_up[first:].clone()
    if in_fp8:
        gate_up, kept, rest = (quantize(x, block_size=None) for x in (gate_up, kept, rest))
    else:
        ends = ends_of(2, 3)
        assert_same_bits(swiglu(kept, w, offs=ends, rest=rest), swiglu(gate_up, w, offs=ends))
        assert_bytes(
            swiglu_quantize(kept, w, offs=ends, rest=rest).qdata, raw(swiglu_quantize(gate_up, w, offs=ends).qdata)
        )
        want, got = (
            swiglu_backward(d_h, x, w, offs=ends_of(2, 3), with_h=True, rest=y)
            for x, y in ((gate_up, None), (kept, rest))
        )
        assert all(map(torch.equal, want, got))
    how: dict[str, Any] = {"folded": True, "h_fmt": E4M3, "offs": ends_of(2, 3)}
    want = swiglu_backward_quantize(d_h, gate_up, w, **how)
    got = swiglu_backward_quantize(d_h, kept, w, rest=rest, **how)
    for a, b in ((got[0], want[0]), (got[2], want[2])):
        assert_bytes(a.qdata, raw(b.qdata))
        assert_bytes(a.scale, raw(b.scale))
    assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("how", [{"folded": True}, {"block_size": None, "fmt": E5M2}], ids=str)
def test_codes_with_one_scale_a_row_may_take_the_gradients_memory(how: dict[str, Any]) -> None:
    gate_up, w, d_h = gaussian(6, 256), gaussian(6, seed=1), gaussian(6, 128, seed=2, dtype=torch.bfloat16)
    want, want_w, _ = swiglu_backward_quantize(d_h, gate_up, w, **how)
    got, got_w, _ = swiglu_backward_quantize(d_h, gate_up, w, overwrite=True, **how)
    assert got.qdata.data_ptr() == d_h.data_ptr()
    assert_bytes(got.qdata, raw(want.qdata))
    assert_bytes(got.scale, raw(want.scale))
    assert_same_bits(got_w, want_w)


def test_codes_take_no_memory_that_does_not_suit_them() -> None:
    gate_up, d_h = gaussian(6, 256), gaussian(6, 128, dtype=torch.bfloat16)
    cases: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (d_h, {}),
        (d_h.float(), {"folded": True}),
        (d_h.repeat(1, 2)[:, :128], {"folded": True}),
        (d_h.clone().requires_grad_(), {"folded": True}),
    ]
    for grad, how in cases:
        before = grad.clone()
        got, *_ = swiglu_backward_quantize(grad, gate_up, overwrite=True, **how)
        assert got.qdata.data_ptr() != grad.data_ptr()
        assert torch.equal(grad, before)
        assert_bytes(got.qdata, raw(swiglu_backward_quantize(d_h, gate_up, **how)[0].qdata))


@pytest.mark.parametrize(
    "how", [{}, {"folded": True, "overwrite": True}, {"block_size": None}, {"block_size": 64}], ids=str
)
def test_backward_writes_h_again_as_forward_did_in_its_own_format(how: dict[str, Any]) -> None:
    gate_up, w, d_h = gaussian(9, 128), gaussian(9, seed=1), gaussian(9, 64, seed=2, dtype=torch.bfloat16)
    gate_up[1, 3], ends = NAN, ends_of(2, 5)
    assert_same_bits(swiglu_backward(d_h, gate_up, w, offs=ends, with_h=True)[2], swiglu(gate_up, w, offs=ends))
    assert swiglu_backward(d_h, gate_up, w)[2] is swiglu_backward_quantize(d_h, gate_up, w)[2] is None
    plain = swiglu_backward_quantize(d_h.clone(), gate_up, w, offs=ends, fmt=E5M2, **how)
    got = swiglu_backward_quantize(d_h.clone(), gate_up, w, offs=ends, fmt=E5M2, h_fmt=E4M3, **how)
    of_forward = {name: value for name, value in how.items() if name != "overwrite"}
    want = swiglu_quantize(gate_up, w, offs=ends, fmt=E4M3, **of_forward)
    for a, b in ((got[0], plain[0]), (got[2], want)):
        assert_bytes(a.qdata, raw(b.qdata))
        assert_bytes(a.scale, raw(b.scale))
        assert (a.dtype, a.axis, a.block_size, a.shape) == (b.dtype, b.axis, b.block_size, b.shape)


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0, 2), (8,)])
def test_rows_past_the_last_group_do_not_matter(sizes: tuple[int, ...]) -> None:
    valid, ends = sum(sizes), ends_of(*sizes)
    gate_up, w, d_h = gaussian(8, 128), gaussian(8, seed=1), gaussian(8, 64, seed=2)
    args = gate_up[:valid].clone(), w[:valid].clone()
    wanted = [swiglu(*args), swiglu_quantize(*args)]
    wanted += [*swiglu_backward(d_h[:valid].clone(), *args, with_h=True)]
    wanted += [*swiglu_backward_quantize(d_h[:valid].clone(), *args, h_fmt=E5M2)]
    for part in (gate_up, w, d_h):
        part[valid:] = NAN
    got = [swiglu(gate_up, w, offs=ends), swiglu_quantize(gate_up, w, offs=ends)]
    got += [*swiglu_backward(d_h, gate_up, w, offs=ends, with_h=True)]
    got += [*swiglu_backward_quantize(d_h, gate_up, w, offs=ends, h_fmt=E5M2)]
    for a, b in zip(got, wanted):
        assert a.shape == (8, *b.shape[1:])
        if isinstance(a, MXTensor) and isinstance(b, MXTensor):
            assert_bytes(a.qdata[:valid], raw(b.qdata))
            assert_bytes(a.scale[:valid], raw(b.scale))
        else:
            assert_same_bits(a[:valid], b)


def test_swiglu_ops_pass_opcheck() -> None:
    gate_up, w, d_h = gaussian(6, 128, dtype=torch.bfloat16), gaussian(6), gaussian(6, 64, dtype=torch.bfloat16)
    ops, clamped, e4m3 = torch.ops.mxep, SwiGLU(1.5, 2.0, 1.0).packed, torch.float8_e4m3fn
    rounded = None, 0, False
    check_op(ops.swiglu, gate_up, None, None, torch.bfloat16, *rounded, None, None)
    check_op(ops.swiglu, gate_up, w, None, torch.bfloat16, *rounded, clamped, gate_up[:0])
    check_op(ops.swiglu, gate_up[:4].clone(), w, None, torch.bfloat16, *rounded, clamped, gate_up[4:].clone())
    for folded in (False, True):
        check_op(ops.swiglu, gate_up, w, ends_of(2, 3), e4m3, "rceil", 32, folded, None, None)
    for dtype, how in ((torch.bfloat16, rounded), (e4m3, ("rceil", 32, False)), (e4m3, ("rceil", 32, True))):
        for h_dtype, activation in ((None, None), (dtype, clamped)):
            out = torch.empty(6, 128, dtype=dtype)
            args = d_h, gate_up, w, ends_of(2, 3), out, *how, h_dtype, activation, None, None, None
            torch.library.opcheck(ops.swiglu_backward, args, test_utils=WITHOUT_SCHEMA)
    mx = quantize(gate_up.bfloat16(), block_size=None)
    how = torch.empty(6, 128, dtype=e4m3), "rceil", 32, True, e4m3, None, mx.scale.view(torch.uint8)
    whole = d_h, mx.qdata, w, ends_of(2, 3), *how, None, None
    torch.library.opcheck(ops.swiglu_backward, whole, test_utils=WITHOUT_SCHEMA)
    apart = (*how[:-1], how[-1][:4].clone(), mx.qdata[4:].clone(), how[-1][4:].clone())
    given = d_h, mx.qdata[:4].clone(), w, ends_of(2, 3), *apart
    torch.library.opcheck(ops.swiglu_backward, given, test_utils=WITHOUT_SCHEMA)


def test_bad_arguments_say_what_they_got_and_what_is_wanted() -> None:
    gate_up, w = gaussian(4, 64), gaussian(4)
    with pytest.raises(ValueError, match=r"gate_up: got torch\.float32 of shape \(4, 63\), want \(R, 2F\)"):
        swiglu(gate_up[:, 1:])
    with pytest.raises(ValueError, match=r"gate_up: got torch\.int64"):
        swiglu(gate_up.long())
    with pytest.raises(ValueError, match=r"row_weight: got torch\.float32 of shape \(3,\), want .* \(4,\)"):
        swiglu(gate_up, w[:3])
    with pytest.raises(ValueError, match=r"row_weight: got torch\.bfloat16"):
        swiglu(gate_up, w.bfloat16())
    with pytest.raises(ValueError, match=r"d_h: got torch\.float32 of shape \(4, 64\), want \(4, 32\)"):
        swiglu_backward(gate_up, gate_up)
    for rest in (gate_up.half(), gate_up[:, :32], gaussian(4, 128)[:, ::2], quantize(gate_up), gate_up.to("meta")):
        with pytest.raises(
            ValueError, match=r"rest: got torch.* of shape .*, want dense rows like those of dense gate_up, torch"
        ):
            swiglu_backward(gaussian(8, 32), gate_up, rest=rest)
    with pytest.raises(ValueError, match=r"d_h: got torch\.float32 of shape \(4, 32\), want \(6, 32\)"):
        swiglu_backward(gaussian(4, 32), gate_up, rest=gate_up[:2])
    with pytest.raises(ValueError, match=r"row_weight: got device meta, want cpu"):
        swiglu(gate_up, w.to("meta"))
    with pytest.raises(ValueError, match="want axis -1 a multiple of the block, 32"):
        swiglu_quantize(gaussian(4, 80), fmt=E4M3)
    with pytest.raises(ValueError, match="want axis -1 a multiple of the block, 48"):
        swiglu_backward_quantize(gaussian(4, 32), gate_up, fmt=E5M2, block_size=48)
    with pytest.raises(ValueError, match="want axis -1 a multiple of the block, 64"):
        swiglu_backward_quantize(gaussian(4, 32), gate_up, block_size=64, h_fmt=E4M3)
    with pytest.raises(ValueError, match="got 5, want 0 to 4"):
        swiglu(gate_up, offs=ends_of(5))
    for blocks in ({}, {"axis": -2, "block_size": None}):
        with pytest.raises(
            ValueError, match=r"gate_up: got MXTensor.*, want one scale a row, as block_size=None gives"
        ):
            swiglu_backward_quantize(gaussian(32, 32), quantize(gaussian(32, 64), **blocks))
