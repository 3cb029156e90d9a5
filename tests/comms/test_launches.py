"""What the kernels of mxep.comms compile to for Hopper, without one. `ahead_of_time.py` takes Blackwell, too."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ahead_of_time import report, table

LAUNCHES = Path(__file__).with_name("launches.py")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return report(LAUNCHES, targets=[90])


def test_no_kernel_spills(rows):
    assert rows
    spilled = [row for row in rows if row["spills"]]
    assert not spilled, "\n" + table(spilled)


def test_a_plan_of_another_size_compiles_nothing(rows):
    made = Counter((row["launch"], row["kernel"]) for row in rows if "plan" in row["launch"])
    assert len(made) == 2 * 2
    assert set(made.values()) == {1}, made
