"""What the kernels of mxep.gemm compile to, for Hopper and Blackwell, without either."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

import ahead_of_time
from mxep.gemm.backends.blackwell import OLDEST

pytestmark = pytest.mark.slow

LAUNCHES = Path(__file__).with_name("launches.py")
NEWER_SPILL = {(3, 9): {"fp32_linear_kernel": 56, "fp32_dgrad_kernel": 24}}
"""Bytes that a thread keeps in local memory by these versions of Triton, not measured. Older ones spill nothing."""
OF_ROUTERS = "fp32 of bf16", "fp32 60 experts", "top_k steered"


@pytest.fixture(scope="module")
def compiled() -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table and PTX of the kernels with the most registers; the others: `ahead_of_time.py LAUNCHES`."""
    names = ("forward of slots, bias", "wgrad add", "=forward@89", *(f"={name}@90" for name in OF_ROUTERS))
    command = [sys.executable, ahead_of_time.__file__, str(LAUNCHES), *names, "--read", "--json", "--ptx", "kernel"]
    rows, _, ptx = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.partition("\n")
    return json.loads(rows), ptx.split(".version ")[1:]


def test_no_kernel_spills(compiled: tuple[list[dict[str, Any]], list[str]]) -> None:
    rows = [row for row in compiled[0] if row["target"] in ahead_of_time.TARGETS]
    assert {row["launch"] for row in rows} >= {"forward of slots, bias", "wgrad add"}
    known = NEWER_SPILL.get(tuple(map(int, triton.__version__.split(".")[:2])), {})
    spilled = [row for row in rows if row["spills"] > known.get(row["kernel"], 0)]
    assert not spilled, "\n" + ahead_of_time.table(spilled)


def test_dot_scaled_multiplies_with_its_scales_in_blackwells_tensor_cores(
    compiled: tuple[list[dict[str, Any]], list[str]],
) -> None:
    qdata = [code for code in compiled[1] if re.search(r"\.entry grouped", code)]
    blackwell, hopper = ([code for code in qdata if f".target sm_{sm}a" in code] for sm in (100, 90))
    assert (len(blackwell), len(hopper)) == (2, 2)
    assert all(re.search(r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale", code) for code in blackwell)
    assert all("wgmma.mma_async" in code for code in hopper)


def test_fp32_kernels_multiply_terms_from_registers_two_programs_an_sm(
    compiled: tuple[list[dict[str, Any]], list[str]],
) -> None:
    """Of fp32 weights; a bf16 one is no sum of terms, and read from shared memory."""
    rows = [row for row in compiled[0] if row["launch"].startswith("fp32")]
    assert len(rows) == 2 * 3
    assert all(row["programs_per_sm"] >= 2 for row in rows), "\n" + ahead_of_time.table(rows)
    code = [code for code in compiled[1] if re.search(r"\.entry fp32", code)]
    assert len(code) == len(rows)
    in_registers = r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \{[^}]*\}, \{"
    assert sum(bool(re.search(in_registers, text)) for text in code) == len(rows) - 1


QDATA = {"forward": "E4M3.E4M3", "wgrad E5M2 halves add": "E5M2.E4M3"}


@pytest.fixture(scope="module")
def on_hopper() -> dict[str, str]:
    """SASS of the Gluon kernels, by launch, from one process, which imports torch and Triton once."""
    file, names = LAUNCHES.with_name("hopper_launches.py"), (f"={launch}@90" for launch in QDATA)
    command = [sys.executable, ahead_of_time.__file__, str(file), *names, "--read", "--json", "--sass", "grouped"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(re.findall(r"^// ([^\n]+)\n(.*?)(?=^// |\Z)", printed, re.M | re.S))


@pytest.mark.parametrize("launch", QDATA)
def test_hopper_kernels_keep_their_sums_in_registers_where_they_multiply(
    launch: str, on_hopper: dict[str, str]
) -> None:
    """Some scalars of a tile are spilled; nothing is within the loop over the contraction."""
    assert set(on_hopper) == set(QDATA)
    sass, qdata = on_hopper[launch], QDATA[launch]
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([^;]+?)\s*;", sass)
    places = {int(address, 16): i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (_, instruction) in enumerate(code):
        if jump := re.match(r"BRA 0x([0-9a-f]+)", instruction):
            body = [line for _, line in code[places[int(jump[1], 16)] : i]]
            if any("QGMMA" in line for line in body):
                loops.append(body)
    inner = sorted(loops, key=len)[:2]  # of both warpgroups
    assert [sum(f"QGMMA.64x128x32.F32.{qdata}" in line for line in body) for body in inner] == [16, 16]
    assert not [line for body in inner for line in body if re.match(r"LDL|STL", line)]


def test_dot_scaled_compiles_from_ada_on(compiled: tuple[list[dict[str, Any]], list[str]]) -> None:
    """Before that Triton has no E4M3: `quant/test_launches.py`."""
    (row,) = [row for row in compiled[0] if row["target"] == 89]
    assert row["shared"] <= 99 * 1024
    assert OLDEST == (8, 9)
