"""The tool that compiles without a GPU: what it reads from the code, and that it reads this very call."""

import pytest

from ahead_of_time import report, sizes_in_ptx, table

SOURCE = '''
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


@triton.jit
def turn_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Holds a tile of SIZE x SIZE in registers."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + i * SIZE + j)
    tl.store(out_ptr + j * SIZE + i, x * tl.sum(x, axis=0)[None, :])


@triton.jit
def muladd_kernel(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x * x + 1.0)


tuned_kernel = triton.autotune([triton.Config({"BLOCK": b}) for b in (128, 256)], key=[])(muladd_kernel)


def copy(offset=0):
    x, out = torch.empty(1 << 40, dtype=torch.bfloat16), torch.empty(1 << 40, dtype=torch.bfloat16)
    assert x.is_meta
    copy_kernel[(1,)](x[offset:], out[offset:], 7, BLOCK=1024)


LAUNCHES = {
    "copy": lambda: [copy(), copy()],
    "copy misaligned": lambda: copy(offset=1),
    "copy on cpu": lambda: copy_kernel[(1,)](torch.empty(8, device="cpu"), torch.empty(8), 1, BLOCK=512),
    "turn": lambda: turn_kernel[(1,)](torch.empty(4096), torch.empty(4096), SIZE=64, num_warps=8),
    "turn with 24 registers": lambda: turn_kernel[(1,)](torch.empty(4096), torch.empty(4096), SIZE=64, maxnreg=24),
    "fused": lambda: muladd_kernel[(1,)](torch.empty(128), BLOCK=128),
    "not fused": lambda: muladd_kernel[(1,)](torch.empty(128), BLOCK=128, enable_fp_fusion=False),
    "tuned": lambda: tuned_kernel[(1,)](torch.empty(128)),
}
'''


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    file = tmp_path_factory.mktemp("launches") / "launches.py"
    file.write_text(SOURCE)
    names = [f"={name}@100" for name in ("turn", "turn with 24 registers")]
    return report(file, ["@90", *names], read=["copy", "turn", "fused"])


def of(rows: list[dict], launch: str, target: int = 90) -> list[dict]:
    return [row for row in rows if (row["launch"], row["target"]) == (launch, target)]


@pytest.mark.parametrize("target", [90, 100])
def test_spilled_registers_show(rows, target):
    (tight,), (roomy,) = of(rows, "turn with 24 registers", target), of(rows, "turn", target)
    assert tight["registers"] <= 24
    assert tight["spills"] > 0
    assert any(kind.startswith("STL") for kind in tight["memory"])
    assert roomy["spills"] == 0
    assert not any(kind.startswith("STL") for kind in roomy["memory"])
    assert (tight["warps"], roomy["warps"]) == (4, 8)


def test_alignment_of_the_arguments_decides_on_widths(rows):
    (aligned,), (misaligned,), (on_cpu,) = (of(rows, f"copy{which}") for which in ("", " misaligned", " on cpu"))
    assert aligned["memory"] == on_cpu["memory"] == {"LDG.128": 1, "STG.128": 1}
    assert misaligned["memory"] == {"LDG.16": 8, "STG.16": 8}


def test_a_kernel_is_listed_once_a_launch_and_a_tuned_one_with_all_its_configs(rows):
    assert len(of(rows, "copy")) == 1
    assert len(of(rows, "tuned")) == 2


def test_options_of_the_launch_reach_the_code(rows):
    (fused,), (separate,) = of(rows, "fused"), of(rows, "not fused")
    assert separate["instructions"] == fused["instructions"] + 1


def test_the_table_has_a_line_a_row(rows):
    lines = table(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[1].split() == ["copy", "copy_kernel", "90", *lines[1].split()[3:-2], "LDG.128x1", "STG.128x1"]


def test_sizes_of_a_kernels_parameters_are_read_from_its_entry() -> None:
    ptx = """
.visible .entry grouped(
\t.param .align 64 .b8 grouped_param_0[128],
\t.param .u32 grouped_param_1,
\t.param .u64 .ptr .global .align 16 grouped_param_2,
\t.param .f32 grouped_param_3,
\t.param .u8 grouped_param_4,
\t.param .u64 .ptr .global .align 1 grouped_param_5
)
.reqntid 128
"""
    assert sizes_in_ptx(ptx) == [128, 4, 8, 4, 1, 8]


def test_a_node_that_would_have_other_parameters_is_an_error_that_names_the_launch(tmp_path) -> None:
    """As where a version of Triton passes one more address of scratch memory."""
    file = tmp_path / "launches.py"
    patched = "import mxep.runtime.graph as graph\nreal = graph.parameters_of\n"
    patched += "graph.parameters_of = lambda *of: list(real(*of))[:-1]\n"
    file.write_text(patched + SOURCE)
    said = r"launch 'copy' for sm_90: AssertionError: .*a graph's node has parameters of"
    with pytest.raises(RuntimeError, match=said):
        report(file, ["=copy@90"], read=[])
