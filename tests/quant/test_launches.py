"""What every kernel of mxep.quant compiles to, for Hopper and Blackwell, without either."""

from pathlib import Path

from ahead_of_time import report, table


def test_no_kernel_spills():
    rows = report(Path(__file__).with_name("launches.py"))
    spilled = [row for row in rows if row["spills"]]
    assert not spilled, "\n" + table(spilled)
