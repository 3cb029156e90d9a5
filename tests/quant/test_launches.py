"""What the kernels of mxep.quant compile to, for Hopper, Blackwell and Ada, without any of them."""

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from ahead_of_time import report, table

pytestmark = pytest.mark.slow

LAUNCHES = Path(__file__).with_name("launches.py")
TESTED = (
    "quantize_rows",
    "quantize_joined_rows 14336",
    "quantize_2d",
    "quantize_e2m1",
    "quantize_e2m1 14336",
    "quantize_columns",
    "quantize_columns fp32",
    "quantize_per_row 7168",
    "quantize_per_row fp32 14336",
    "quantize_per_row 2048 of parts",
    "quantize_per_column of parts",
    "requantize gathered",
    "fold 16384",
    "fold rows of one scale",
    "dequantize E2M1",
    "fold_columns",
    "fold_e2m1 2880",
    "fold_e2m1 16384",
    "materialize",
    "gather_swizzled",
    "fold_for_wgrad",
    "swiglu_quantize 14336 folded",
    "swiglu_backward and h 14336",
    "swiglu_backward_quantize 8192 folded",
    "swiglu_backward_quantize 2560 folded",
    *(f"swiglu_backward_quantize and h {F} folded" for F in (2560, 8192)),
    *(f"swiglu_backward_quantize and h 14336 {how} of FP8" for how in ("folded", "per row")),
    "swiglu_backward_quantize and h 2048 folded E5M2",
    "swiglu_backward_quantize and h 2880 folded gpt-oss",
    "pad_index 1024 groups",
    *(f"fold_for_wgrad {groups} groups" for groups in (256, 1024)),
)
"""Of each kernel the launches that take most registers, or all that it may. The others: `ahead_of_time.py LAUNCHES`."""
ON_BLACKWELL = ("requantize gathered", "fold 16384", "fold_for_wgrad")
ON_ADA = ("requantize gathered", "fold 7168", "swiglu_backward_quantize and h 2048")

SPILL = {"quantize_per_row 7168": 40}
"""Bytes that a thread keeps in local memory where that was measured to be faster than what spills nothing."""
NEWER_SPILL = {
    (3, 8): {"fold_for_wgrad": 8},
    (3, 9): {
        "requantize gathered": 16,
        "swiglu_backward_quantize 2560 folded": 16,
        "swiglu_backward_quantize 8192 folded": 48,
    },
}
"""The same by these versions of Triton, not measured. Older ones spill nothing of these."""

TARGETS = {90: TESTED, 100: ON_BLACKWELL, 89: ON_ADA}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """From one process, as each imports torch and Triton."""
    wanted = [f"={name}@{target}" for target, names in TARGETS.items() for name in names]
    return report(LAUNCHES, wanted, read=["quantize 2560", "h 2560", "fold_e2m1 2880"])


def test_no_kernel_spills(rows):
    assert {(row["launch"], row["target"]) for row in rows} == {
        (name, target) for target, names in TARGETS.items() for name in names
    }
    known = SPILL | NEWER_SPILL.get(tuple(map(int, triton.__version__.split(".")[:2])), {})
    spilled = [row for row in rows if row["spills"] > known.get(row["launch"], 0)]
    assert not spilled, "\n" + table(spilled)


def test_swiglu_loads_sixteen_bytes_a_thread_whatever_the_width(rows):
    read = [row for row in rows if "memory" in row and "swiglu" in row["launch"]]
    assert len(read) == 2
    assert {row["memory"].get("LDG.128") for row in read} == {3 * 2560 // (8 * 32 * 2)}, "\n" + table(read)


def test_expanding_mxfp4_stores_what_a_thread_loads_without_shared_memory(rows):
    """2880 columns: 180 pairs of words a row, six a thread of one warp, and six scales. One more of each in the loop
    for rows with small blocks."""
    (memory,) = [row["memory"] for row in rows if row["launch"] == "fold_e2m1 2880"]
    assert memory == {"LDG.64": 7, "LDG.8": 7, "STG.128": 7, "STG.8": 1}


def test_before_ada_triton_has_no_e4m3():
    """Why `mxep.runtime.op.E4M3_CAPABILITY` is 8.9."""
    has = {sm: CUDABackend(GPUTarget("cuda", sm, 32)).parse_options({}).supported_fp8_dtypes for sm in (80, 86, 89)}
    assert ["fp8e4nv" in formats for formats in has.values()] == [False, False, True]
