"""What the kernels of mxep.gemm compile to, for Hopper and Blackwell, without either."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ahead_of_time

LAUNCHES = Path(__file__).with_name("launches.py")


def test_dot_scaled_multiplies_with_its_scales_in_blackwells_tensor_cores_and_nowhere_spills() -> None:
    # Those with the most registers; all others: python tests/ahead_of_time.py tests/gemm/launches.py
    names = ("forward of slots, bias", "wgrad add")
    command = [sys.executable, ahead_of_time.__file__, str(LAUNCHES), *names, "--json", "--ptx", "grouped"]
    rows, _, ptx = subprocess.run(command, check=True, capture_output=True, text=True).stdout.partition("\n")
    spilled = [row for row in json.loads(rows) if row["spills"]]
    assert not spilled, "\n" + ahead_of_time.table(spilled)
    codes = ptx.split(".version ")[1:]
    blackwell, hopper = ([code for code in codes if f".target sm_{sm}a" in code] for sm in (100, 90))
    assert (len(blackwell), len(hopper)) == (2, 2)
    assert all(re.search(r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale", code) for code in blackwell)
    assert all("wgmma.mma_async" in code for code in hopper)
