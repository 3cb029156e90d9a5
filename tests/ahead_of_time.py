"""Compile Triton kernels for GPUs that are not here, as launches would, and read what came out.

    python tests/ahead_of_time.py FILE [NAME ...] [--target 90] [--read [NAME ...]] [--sass KERNEL]
                                  [--ptx KERNEL] [--json]

FILE (tests/quant/launches.py, say) defines LAUNCHES: {name: function}. Each function calls launchers as usual, with
empty tensors: they are made on the meta device unless it says otherwise, so that any size costs nothing (they count as
aligned). No kernel runs; each is compiled with the specialization, constants and options of that call, for
sm_90 and sm_100, and makes a line:

    launch  kernel  sm  regs  spills  shared  warps  ctas/SM  instr  memory
      regs     registers a thread
      spills   bytes a thread keeps in local memory
      shared   bytes of shared memory a program; warps: of a program
      ctas/SM  programs that fit on an SM by these three (of sm_90)
      instr    instructions in the code (what a loop holds counts once)
      memory   those that move data, by width in bits: LDG STG global, LDS STS shared, LDL STL local (spills), ATOM RED
               atomic; LDSM STSM shared by matrices, SHFL between threads, BAR barriers

`report` also has `order`, what the PTX says of memory's, from top to bottom: "st" plain stores, "bar" barriers of the
program, "ld volatile", and atomics, "atom exch release sys".

NAME: only launches whose name contains it, =NAME: that one, NAME@90: for sm_90 alone.
--read NAME: `instr` and `memory` of launches whose name contains it alone: to disassemble takes 0.4 s a kernel.
--sass, --ptx: print kernels whose name contains KERNEL.
In tests: `report(file)` gives the lines as dicts, from a process of its own, as the test's may have TRITON_INTERPRET.
"""

import argparse
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

TARGETS = (90, 100)
MEMORY = re.compile(r"(LDG|STG|LDS|STS|LDL|STL|LDSM|STSM|LDGSTS|ATOMS|ATOMG|ATOM|RED|REDG|SHFL|BAR|UTMA\w*|UBLK\w*)\b")
ORDER = re.compile(
    r"^\s*(?:@!?%p\d+ )?(st\.global|bar|barrier|atom|red|fence|membar|ld(?=\S*\.(?:volatile|acquire|relaxed)))\b(\S*)",
    re.M,
)
ORDERS = ("add", "cas", "exch", "relaxed", "acquire", "release", "acq_rel", "volatile", "cta", "gpu", "sys")
WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")


@dataclass(frozen=True)
class Compiled:
    """A kernel of a launch. spills: bytes a thread keeps in local memory; shared: bytes a program."""

    kernel: str
    target: int
    registers: int
    spills: int
    shared: int
    warps: int
    ptx: str
    cubin: bytes

    @cached_property
    def sass(self) -> str:
        return _cuobjdump("-sass", self.cubin)

    @property
    def instructions(self) -> list[str]:
        """The SASS without predicates and without the NOPs behind its end: 'LDG.E.128 R4, desc[UR4][R2.64]'."""
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([^;]+?)\s*;", self.sass)
        while found and found[-1] == "NOP":
            found.pop()
        return found

    @property
    def memory(self) -> dict[str, int]:
        """How many instructions of a kind and width move data: {'LDG.128': 4, 'STG.64': 2, 'SHFL': 10}."""
        count: Counter[str] = Counter()
        for instruction in self.instructions:
            opcode = instruction.split(" ")[0]
            if kind := MEMORY.match(opcode):
                width = WIDTH.search(opcode)
                plain = kind[0] in ("SHFL", "BAR", "LDSM", "STSM") or kind[0].startswith("U")
                count[kind[0] if plain else f"{kind[0]}.{width[1] if width else 32}"] += 1
        return dict(sorted(count.items()))

    @property
    def order(self) -> list[str]:
        """Instructions that order memory, and stores, as they stand in the PTX; the same next to each other once."""
        found = []
        for name, rest in ORDER.findall(self.ptx):
            said = [word for word in ORDERS if word in rest.split(".")]
            text = {"st.global": "st", "bar": "bar", "barrier": "bar"}.get(name) or " ".join([name, *said])
            of_a_warp = ".warp" in rest and self.warps > 1
            if found[-1:] != [text] and not of_a_warp:
                found.append(text)
        return found

    @property
    def programs_per_sm(self) -> int:
        """What 64 Ki registers (given out by 8 a thread), 227 KiB of shared memory and 64 warps allow."""
        registers = -(-max(self.registers, 1) // 8) * 8 * 32 * self.warps
        return min(65536 // registers, 227 * 1024 // (self.shared + 1024), 64 // self.warps, 32)

    def row(self, *, read: bool) -> dict[str, Any]:
        """read: with what the SASS says."""
        names = ("kernel", "target", "registers", "spills", "shared", "warps", "programs_per_sm", "order")
        of_sass = {"memory": self.memory, "instructions": len(self.instructions)} if read else {}
        return {name: getattr(self, name) for name in names} | of_sass


def compile_launches(fn: Callable[[], object], target: int = 90) -> list[Compiled]:
    """Call `fn` and compile every kernel it launches for sm_`target`, once each, in order; nothing is launched.

    Tuned kernels are compiled with all their configs. RuntimeError where TRITON_INTERPRET is set. AssertionError where
    `mxep.runtime.graph` would lay out a kernel's parameters in another way than this version of Triton.
    """
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from mxep.runtime.graph import parameters_of

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: its kernels cannot be compiled; use `report`")

    class NoDevice:
        """As much of a driver as compiling asks for. Kernels are cached by device, so the target is the device."""

        get_current_device = staticmethod(lambda: target)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", target, 32))

    kernels: dict[str, Any] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[kernel.hash] = kernel
        ours, theirs = [size for size, *_ in parameters_of(kernel, args)], sizes_in_ptx(kernel.asm["ptx"])
        assert ours == theirs, f"{kernel.metadata.name}: a graph's node has parameters of {ours} bytes, want {theirs}"
        return kernel

    def all_configs(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    run, tune, active, hook = JITFunction.run, Autotuner.run, driver._active, knobs.runtime.launch_enter_hook
    JITFunction.run, Autotuner.run = compile_only, all_configs
    knobs.runtime.launch_enter_hook = lambda *_: None  # `launch` leaves kernels that are profiled to Triton
    driver.set_active(NoDevice())
    try:
        with torch.device("meta"):
            fn()
    finally:
        JITFunction.run, Autotuner.run = run, tune
        driver._active = active
        knobs.runtime.launch_enter_hook = hook
    return [_read(kernel, target) for kernel in kernels.values()]


def sizes_in_ptx(ptx: str) -> list[int]:
    """Bytes of each parameter of the only entry."""
    (entry,) = re.findall(r"\.entry\s+\w+\((.*?)\)", ptx, re.S)
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s[^,\[]*(?:\[(\d+)\])?", entry)
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def _cuobjdump(option: str, cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _read(kernel: Any, target: int) -> Compiled:
    cubin, metadata = kernel.asm["cubin"], kernel.metadata
    said = _cuobjdump("-res-usage", cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert usage is not None, said
    registers, stack, local = map(int, usage.groups())
    size = metadata.shared, metadata.num_warps
    return Compiled(metadata.name, target, registers, stack + local, *size, kernel.asm["ptx"], cubin)


def report(
    file: str | Path, names: Sequence[str] = (), targets: Sequence[int] = TARGETS, *, read: Sequence[str] = ("",)
) -> list[dict[str, Any]]:
    """The lines of this command as dicts: launch, kernel, target, registers, spills, shared, warps, memory ..."""
    command = [sys.executable, __file__, str(file), *names, "--json", "--target", *map(str, targets), "--read", *read]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The lines of `report` as text."""
    lines = [("launch", "kernel", "sm", "regs", "spills", "shared", "warps", "ctas/SM", "instr", "memory")]
    for row in rows:
        numbers = (row[name] for name in ("target", "registers", "spills", "shared", "warps", "programs_per_sm"))
        memory = " ".join(f"{kind}x{count}" for kind, count in row.get("memory", {}).items())
        lines.append((row["launch"], row["kernel"], *map(str, numbers), str(row.get("instructions", "-")), memory))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]) for line in lines)


_launches: dict[str, Callable[[], object]] = {}


def _compile(job: tuple[str, int, bool]) -> list[tuple[dict[str, Any], Compiled]]:
    name, target, read = job
    try:
        kernels = compile_launches(_launches[name], target)
        return [({"launch": name, **kernel.row(read=read)}, kernel) for kernel in kernels]
    except Exception as error:
        raise RuntimeError(f"launch {name!r} for sm_{target}: {type(error).__name__}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--target", type=int, nargs="+", default=TARGETS)
    parser.add_argument("--read", metavar="NAME", nargs="*", default=[""])
    parser.add_argument("--sass", metavar="KERNEL")
    parser.add_argument("--ptx", metavar="KERNEL")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # not unset: `triton_interpreter`, which FILE may import, would set it
    launches = runpy.run_path(arguments.file)["LAUNCHES"]
    jobs = list(
        dict.fromkeys(
            (name, target, any(each in name for each in arguments.read))
            for part, _, at in (said.partition("@") for said in arguments.names or [""])
            for name in launches
            if f"={name}" == part or part in name
            for target in ([int(at)] if at else arguments.target)
        )
    )
    _launches.update({name: launches[name] for name, *_ in jobs})
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        compiled = [each for result in pool.map(_compile, jobs, chunksize=1) for each in result]
    rows = [row for row, _ in compiled]
    if arguments.json:
        print(json.dumps(rows))
    elif arguments.sass is None and arguments.ptx is None:
        print(table(rows))
    for row, kernel in compiled:
        if arguments.sass is not None and arguments.sass in kernel.kernel:
            print(f"// {row['launch']}\n{kernel.sass}")
        if arguments.ptx is not None and arguments.ptx in kernel.kernel:
            print(kernel.ptx)


if __name__ == "__main__":
    main()
