"""What the kernels of mxep.quant compile to, for Hopper and Blackwell, without either."""

import runpy
from pathlib import Path

from ahead_of_time import report, table

LAUNCHES = Path(__file__).with_name("launches.py")
TESTED = (
    "quantize_rows",
    "quantize_tiles",
    "quantize_columns",
    "quantize_both fp32",
    "quantize_rows_whole 7168",
    "quantize_rows_whole fp32 14336",
    "requantize gathered",
    "fold 16384",
    "fold whole rows",
    "fold_with_stats",
    "materialize",
    "pad_quantize",
    "gather_swizzled",
    "quantize_swizzled in groups",
    "split_fold",
    "swiglu_quantize 14336 folded",
    "swiglu_backward 14336",
    "swiglu_backward_quantize 8192 whole",
    "swiglu_backward_quantize 2048 folded E5M2",
    "swiglu_backward_quantize 8192 folded",
)
"""Of each kernel the launches that take most registers. All of them, in two minutes: `ahead_of_time.py LAUNCHES`."""
ON_BLACKWELL = ("requantize gathered", "fold 16384", "quantize_swizzled in groups", "split_fold")


def test_no_kernel_spills():
    names = set(runpy.run_path(str(LAUNCHES))["LAUNCHES"])
    rows = []
    for target, tested in ((90, TESTED), (100, ON_BLACKWELL)):
        assert names >= set(tested)
        compiled = report(LAUNCHES, [f"={name}" for name in tested], [target])
        assert {row["launch"] for row in compiled} == set(tested)
        rows += compiled
    spilled = [row for row in rows if row["spills"]]
    assert not spilled, "\n" + table(spilled)
