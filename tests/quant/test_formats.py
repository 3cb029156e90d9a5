"""The two element formats and the four ways to a scale byte."""

import numpy as np
import pytest
import torch

from mxep.quant import BLOCK, E4M3, E5M2, MXFormat, ScaleMode, format_of
from mxep.quant.formats import power_of_two, reciprocal, scale_of_amax
from quant import exact
from quant.exact import FORMATS, MODES

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_a_format_describes_its_dtype(fmt: MXFormat) -> None:
    assert fmt.max == torch.finfo(fmt.dtype).max
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert format_of(fmt.dtype) is fmt
    assert repr(fmt) == fmt.name


def test_blocks_have_32_elements_and_rceil_is_a_mode() -> None:
    assert BLOCK == 32
    assert [mode.value for mode in ScaleMode] == ["floor", "rceil"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz, torch.uint8])
def test_format_of_another_dtype_names_got_and_wanted(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"{dtype}.*want.*{E4M3.dtype}"):
        format_of(dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_torch_reads_all_256_codes_as_the_definition_does(fmt: MXFormat) -> None:
    np.testing.assert_array_equal(ALL_BYTES.view(fmt.dtype).double().numpy(), exact.code_values(fmt))


def test_scale_bytes_are_powers_of_two_both_ways() -> None:
    exponent = torch.arange(255, dtype=torch.float64) - 127
    assert torch.equal(power_of_two(ALL_BYTES[:255]).double(), 2.0**exponent)
    assert torch.equal(reciprocal(ALL_BYTES[:255]).double(), 2.0**-exponent)
    assert power_of_two(ALL_BYTES[255:]).isnan().all()
    assert reciprocal(ALL_BYTES[255:]).isnan().all()


KNOWN = [  # amax, format, mode, byte
    (480.0, E4M3, ScaleMode.FLOOR, 127),
    (480.0, E4M3, ScaleMode.RCEIL, 128),
    (exact.FP32_MAX, E4M3, ScaleMode.FLOOR, 246),
    (exact.FP32_MAX, E4M3, ScaleMode.RCEIL, 247),
    (449.0, E4M3, ScaleMode.RCEIL, 128),
    (448.0, E4M3, ScaleMode.RCEIL, 127),
    (57344.0, E5M2, ScaleMode.RCEIL, 127),
    (57345.0, E5M2, ScaleMode.RCEIL, 128),
]


@pytest.mark.parametrize(("amax", "fmt", "mode", "byte"), KNOWN)
def test_known_scale_bytes(amax: float, fmt: MXFormat, mode: ScaleMode, byte: int) -> None:
    assert scale_of_amax(torch.tensor([amax]), fmt, mode).tolist() == [byte]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_scale_bytes_match_float64_for_every_exponent_and_the_mantissas_around_every_threshold(
    fmt: MXFormat, mode: ScaleMode
) -> None:
    exponent = torch.arange(256, dtype=torch.int32) << 23
    eighths = torch.arange(32, dtype=torch.int32) << 18
    mantissa = (eighths[:, None] + torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int32)).flatten() & 0x7FFFFF
    amax = (exponent[:, None] | mantissa).flatten().view(torch.float32)
    exact.assert_bytes(scale_of_amax(amax, fmt, mode), exact.scale_of_amax(fmt, mode, amax.double().numpy()))
