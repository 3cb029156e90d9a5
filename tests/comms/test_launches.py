"""What the kernels of mxep.comms compile to for Hopper, without one. `ahead_of_time.py` takes Blackwell, too."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ahead_of_time import report, table

pytestmark = pytest.mark.slow
LAUNCHES = Path(__file__).with_name("launches.py")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return report(LAUNCHES, targets=[90], read=())


def test_no_kernel_spills(rows):
    assert rows
    spilled = [row for row in rows if row["spills"]]
    assert not spilled, "\n" + table(spilled)


def test_a_plan_of_another_size_compiles_nothing(rows):
    launches = "make_plan", "all_to_all's plan", "headers", "join", "nodes' "
    made = Counter((row["launch"], row["kernel"]) for row in rows if row["launch"].startswith(launches))
    assert len(made) == 14
    assert set(made.values()) == {1}, made


@pytest.mark.parametrize("launch", ["barrier", "dispatch", "redispatch", "tables", "combine"])
def test_ranks_meet_by_release_and_acquire_at_system_scope(rows, launch):
    """What `test_schedules.py` shows to be enough, and each of it to be needed, reaches the code of the GPU."""
    (order,) = [row["order"] for row in rows if row["launch"] == launch]
    announced, heard = "atom exch release sys", "atom add acquire sys"
    arrived, told, drawn = "atom add acq_rel sys", "atom cas acq_rel sys", "atom add relaxed gpu"
    assert {step for step in order if step not in ("st", "bar")} == (
        {announced, "ld volatile", heard, arrived, told} | ({drawn} if launch == "combine" else set())
    )
    for i, step in enumerate(order):
        if step == arrived:  # all threads' stores before the one thread's atomic that vouches for them
            assert [other for other in order[:i] if other in ("st", "bar")][-1] == "bar", order[: i + 1]
        if step == heard:  # all threads' loads after the atomic of one
            assert order[i + 1] == "bar", order[: i + 2]
