"""What the kernels of mxep.quant compile to, for Hopper and Blackwell, without either."""

import runpy
from pathlib import Path

from ahead_of_time import report, table

LAUNCHES = Path(__file__).with_name("launches.py")
BETWEEN = {"fold 2048", "fold 4096", "fold 5120", "swiglu_backward_quantize 768 folded"}
"""Widths that take no more registers than a wider one in LAUNCHES: `ahead_of_time.py LAUNCHES` compiles them too."""


def test_no_kernel_spills():
    names = set(runpy.run_path(str(LAUNCHES))["LAUNCHES"])
    assert names >= BETWEEN
    rows = report(LAUNCHES, sorted(names - BETWEEN))
    assert {row["launch"] for row in rows} == names - BETWEEN
    spilled = [row for row in rows if row["spills"]]
    assert not spilled, "\n" + table(spilled)
