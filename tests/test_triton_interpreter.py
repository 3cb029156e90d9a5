"""The numbers of Triton kernels: on a GPU this states what it does, elsewhere that the interpreter does the same."""

import itertools
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ranks import Context, distributed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
HALF = [torch.float16, torch.bfloat16]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ADD, SUBTRACT, MULTIPLY, DIVIDE, LARGER, LARGER_OR_NAN, SMALLER, SMALLER_OR_NAN, LESS, DIFFERS = range(10)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty), mask=i < size)


@triton.jit
def _combine(a, b, OPERATION: tl.constexpr):
    if OPERATION == 0:
        out = a + b
    elif OPERATION == 1:
        out = a - b
    elif OPERATION == 2:
        out = a * b
    elif OPERATION == 3:
        out = tl.div_rn(a, b)
    elif OPERATION == 4:
        out = tl.maximum(a, b)
    elif OPERATION == 5:
        out = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == 6:
        out = tl.minimum(a, b)
    elif OPERATION == 7:
        out = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == 8:
        out = (a < b).to(a.dtype)
    else:
        out = (a != b).to(a.dtype)
    return out


@triton.jit
def _combine_kernel(a_ptr, b_ptr, out_ptr, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, _combine(tl.load(a_ptr + i), tl.load(b_ptr + i), OPERATION))


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def _constants_kernel(x_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    half = tl.full((BLOCK,), 0.5, x.dtype)
    for _ in range(rows):
        x = tl.where(x < 100.0, x * 2.0 + half, x)
    tl.store(out_ptr + i, tl.clamp(x, -3.0, 3.0))


@triton.jit
def _same_numbers_kernel(x_ptr, n_ptr, out_ptr, SIZE: tl.constexpr):
    """out: (4, SIZE, SIZE) fp32."""
    i = tl.arange(0, SIZE)
    at = out_ptr + i[:, None] * SIZE + i[None, :]
    x, n = tl.load(x_ptr + i).to(tl.float32), tl.load(n_ptr + i)
    tl.store(at, x[:, None] - n[None, :])
    tl.store(at + SIZE * SIZE, n[None, :] - x[:, None])
    tl.store(at + 2 * SIZE * SIZE, (2 - x)[:, None] + (x - 2)[None, :])
    tl.store(at + 3 * SIZE * SIZE, (n * 2 // 4)[:, None] + (n * 2.0 / 4)[None, :])


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr):
    m, k = tl.arange(0, 16), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * 16 + m[None, :])
    tl.store(out_ptr + m[:, None] * 16 + m[None, :], tl.dot(a, b))


@triton.jit
def _dot_scaled_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, K: tl.constexpr):
    m, n, k, s = tl.arange(0, 128), tl.arange(0, 16), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + s[None, :])
    b = tl.load(b_ptr + k[:, None] * 16 + n[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + s[None, :])
    out = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e5m2")
    tl.store(out_ptr + m[:, None] * 16 + n[None, :], out)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["size"])
@triton.jit
def _tuned_kernel(x_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, i, mask=i < size)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    _cast_kernel[(triton.cdiv(x.numel(), 8192),)](x.to(DEVICE), out, x.numel(), 8192)
    return out.cpu()


def combine(a: Tensor, b: Tensor, operation: int) -> Tensor:
    out = torch.empty(a.shape, dtype=a.dtype, device=DEVICE)
    _combine_kernel[(a.numel() // 4096,)](a.to(DEVICE), b.to(DEVICE), out, operation, 4096, enable_fp_fusion=False)
    return out.cpu()


def bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.element_size()])


def assert_same(got: Tensor, want: Tensor) -> None:
    """The same bits, but any NaN for a NaN."""
    differs = (bits(got) != bits(want)) & ~(got.float().isnan() & want.float().isnan())
    assert not differs.any(), (differs.nonzero()[:4].tolist(), got[differs][:4].float(), want[differs][:4].float())


def every(dtype: torch.dtype) -> Tensor:
    """All 256 or 65536 numbers of a format."""
    size = 8 * dtype.itemsize
    return torch.arange(2**size).to(BITS[dtype.itemsize]).view(dtype)


def hostile(dtype: torch.dtype) -> Tensor:
    """fp32 numbers around all roundings to `dtype` (its numbers, the middles, their neighbours), and any bits."""
    numbers = every(dtype).double()
    numbers = numbers[numbers.isfinite()].sort().values
    largest = numbers[-1:]
    beyond = 2 * largest - numbers[-2]  # would be the next number if there were one
    centres = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, (largest + beyond) / 2, beyond]).float()
    centres = torch.cat([centres, -centres])
    up, down = (torch.nextafter(centres, torch.tensor(limit)) for limit in (torch.inf, -torch.inf))
    anything = torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    return torch.cat([centres, up, down, anything, special])


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The rule: round to nearest even; 8 bits saturate; any NaN is 0x7f.., its sign lost."""
    info = torch.finfo(dtype)
    saturated = x.float().clamp(info.min, info.max) if dtype in FP8 else x.float()
    return torch.where(x.isnan(), torch.tensor(0x7F if dtype in FP8 else 0x7FFF).to(BITS[dtype.itemsize]),
                       bits(saturated.to(dtype))).view(dtype)  # fmt: skip


@pytest.mark.parametrize("to", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_8_bit_number_has_the_value_torch_gives_it(dtype, to):
    want = every(dtype).float().to(to)
    if dtype == torch.float8_e5m2 and to == torch.bfloat16:
        # Triton shifts the bits and multiplies: 0x7c .. 0x7f, Inf and NaN, become 2**16 * 1 .. 1.75.
        numbers = torch.tensor([1.0, 1.25, 1.5, 1.75]) * 2.0**16
        want[0x7C:0x80], want[0xFC:] = numbers, -numbers
    assert_same(cast(every(dtype), to), want)


@pytest.mark.skipif(DEVICE == "cuda", reason="there the compiler aborts")
def test_no_cast_from_8_bits_to_other_8_bits():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="only through another format"):
        cast(every(FP8[0]), FP8[1])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_16_bit_number_has_the_value_torch_gives_it(dtype):
    assert_same(cast(every(dtype), torch.float32), every(dtype).float())


@pytest.mark.parametrize("dtype", [*FP8, *HALF], ids=str)
def test_fp32_rounds_to_nearest_even_and_8_bits_saturate(dtype):
    x = hostile(dtype)
    assert torch.equal(bits(cast(x, dtype)), bits(nearest(x, dtype)))


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("source", HALF, ids=str)
def test_every_16_bit_number_rounds_to_8_bits(source, dtype):
    assert torch.equal(bits(cast(every(source), dtype)), bits(nearest(every(source), dtype)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_small_integers_become_numbers(dtype):
    x = torch.arange(-256, 257, dtype=torch.int32)
    assert torch.equal(cast(x, dtype), x.to(dtype))
    assert torch.equal(cast(x.to(dtype), torch.int32), x)


def test_large_integers_round_once():
    x = torch.tensor([2**30 + 2**22, 2**30 + 2**22 + 1, 2**30 + 3 * 2**22 - 1, -(2**31) + 1], dtype=torch.int32)
    assert cast(x, torch.bfloat16).tolist() == [2**30, 2**30 + 2**23, 2**30 + 2**23, -(2**31)]


@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (ADD, torch.add),
        (SUBTRACT, torch.sub),
        (MULTIPLY, torch.mul),
        (LARGER, lambda a, b: torch.where(a.isnan(), b, torch.where(b.isnan(), a, torch.maximum(a, b)))),
        (LARGER_OR_NAN, torch.maximum),
        (SMALLER, lambda a, b: torch.where(a.isnan(), b, torch.where(b.isnan(), a, torch.minimum(a, b)))),
        (SMALLER_OR_NAN, torch.minimum),
        (LESS, lambda a, b: (a < b).to(a.dtype)),
        (DIFFERS, lambda a, b: (a != b).to(a.dtype)),
    ],
)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_arithmetic_rounds_as_torch_does(dtype, operation, reference):
    if dtype == torch.float32:
        a, b = torch.randint(-(2**31), 2**31, (2, 2**15), dtype=torch.int32).view(dtype)
    else:
        a, b = every(dtype), every(dtype)[torch.randperm(2**16)]
    want = reference(a, b)
    if operation in (LARGER, LARGER_OR_NAN, SMALLER, SMALLER_OR_NAN):
        a, b, want = (torch.where((a == 0) & (b == 0), 1, x) for x in (a, b, want))
    assert_same(combine(a, b, operation), want)


def test_division_rounds_to_nearest():
    a, b = torch.randint(-(2**31), 2**31, (2, 2**15), dtype=torch.int32).view(torch.float32)
    assert_same(combine(a, b, DIVIDE), a / b)


@pytest.mark.parametrize(("operation", "mixed"), [(LARGER, 0.0), (SMALLER, -0.0)])
def test_minus_zero_is_less_than_zero(operation, mixed):
    a, b = torch.tensor([0.0, 0.0, -0.0, -0.0]).repeat(1024), torch.tensor([0.0, -0.0, 0.0, -0.0]).repeat(1024)
    want = torch.tensor([0.0, mixed, mixed, -0.0]).repeat(1024)
    assert torch.equal(bits(combine(a, b, operation)), bits(want))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_fma_rounds_once(dtype):
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    x, y = (1 + torch.randint(0, round(1 / eps), (2, 1024)) * eps).to(dtype)
    z = (-x * y + torch.randint(-8, 9, (1024,)) * 2.0 ** torch.randint(-14, 2, (1024,))).to(dtype)
    out = torch.empty(1024, dtype=dtype, device=DEVICE)
    _fma_kernel[(1,)](x.to(DEVICE), y.to(DEVICE), z.to(DEVICE), out, 1024)
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x.tolist(), y.tolist(), z.tolist())]
    for got, want in zip(out.cpu(), exact):
        others = [torch.nextafter(got, torch.tensor(limit, dtype=dtype)).item() for limit in (torch.inf, -torch.inf)]
        assert all(abs(Fraction(got.item()) - want) <= abs(Fraction(other) - want) for other in others)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_constants_take_the_format_of_what_they_meet(dtype):
    x = torch.linspace(-3, 3, 64).to(dtype)
    out = torch.empty(64, dtype=dtype, device=DEVICE)
    _constants_kernel[(1,)](x.to(DEVICE), out, 2, 64, enable_fp_fusion=False)
    want = x
    for _ in range(2):
        want = want * 2 + 0.5
    assert torch.equal(out.cpu(), want.clamp(-3, 3))


def test_the_same_number_and_the_same_shapes_meet_again_on_either_side_and_in_other_types():
    """Of which the interpreter remembers what they become: no second launch, size or dtype is taken for the first."""
    for size, dtype, of in itertools.product((16, 32), (torch.float32, torch.bfloat16), (torch.int32, torch.int64)):
        x, n = torch.linspace(-4, 4, size).to(dtype), torch.arange(size, dtype=of)
        for _ in range(2):
            out = torch.empty(4, size, size, device=DEVICE)
            _same_numbers_kernel[(1,)](x.to(DEVICE), n.to(DEVICE), out, size)
            wide = x.float()
            difference = wide[:, None] - n[None, :]
            sides = (2 - wide)[:, None] + (wide - 2)[None, :]
            types = (n * 2 // 4)[:, None] + (n / 2).float()[None, :]
            assert torch.equal(out.cpu(), torch.stack([difference, -difference, sides, types]))


@pytest.mark.parametrize("dtype", [*HALF, *FP8], ids=str)
def test_dot_sums_exact_products(dtype):
    a, b = (torch.randint(-4, 5, shape).float().to(dtype) for shape in ((16, 32), (32, 16)))
    out = torch.empty(16, 16, device=DEVICE)
    _dot_kernel[(1,)](a.to(DEVICE), b.to(DEVICE), out, 32)
    assert torch.equal(out.cpu(), a.float() @ b.float())


def test_dot_scaled_multiplies_blocks_of_32_by_their_powers_of_two():
    a, b = torch.randint(-4, 5, (128, 64)).float(), torch.randint(-4, 5, (64, 16)).float()
    a_scale, b_scale = (torch.randint(124, 131, (rows, 2), dtype=torch.uint8) for rows in (128, 16))
    out = torch.empty(128, 16, device=DEVICE)
    qdata = a.to(FP8[0]).to(DEVICE), a_scale.to(DEVICE), b.to(FP8[1]).to(DEVICE), b_scale.to(DEVICE)
    _dot_scaled_kernel[(1,)](*qdata, out, 64)
    a, b = (x * torch.exp2(s - 127.0).repeat_interleave(32, 1) for x, s in ((a, a_scale), (b.T, b_scale)))
    assert torch.equal(out.cpu(), a @ b.T)


def test_a_tuned_kernel_runs_without_a_driver():
    x = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    _tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
    assert torch.equal(x.cpu(), torch.arange(100, dtype=torch.int32))


@pytest.mark.skipif(DEVICE == "cuda", reason="a rank takes the GPU, if there is one")
@distributed(2, device="cpu")
def test_kernels_of_a_rank_round_the_same(ctx: Context) -> None:
    x = hostile(FP8[0])
    assert torch.equal(bits(cast(x, FP8[0])), bits(nearest(x, FP8[0])))
