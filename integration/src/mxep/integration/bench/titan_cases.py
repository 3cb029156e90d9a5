"""Every case of `bench.titan` for a model, each in processes of its own and within a limit, on the GPUs of one host.

    python -m mxep.integration.bench.titan_cases --ranks 2 --seconds 520 --model qwen3-30b --layers 12 --out titan.jsonl

Options that are not its own go to `bench.titan`. A case that fails, or is not over in time, costs its row: that holds
the end of its log. While a case runs, the next one imports, and waits for a file.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..rank import NO_MULTICAST
from .titan import parse, print_table

CASES = (
    *(("torchtitan", False), ("mxfp8", False), ("torchtitan", True), ("mxfp8", True)),
    *(("torchtitan-fp8", True), ("torchtitan-fp8", False), ("bf16", False), ("bf16", True)),
)
"""(case, whether compiled), the more telling ones first: what is last may find no time."""
STEPS = {False: 100, True: 60}
LEAST = 30.0
"""Seconds under which no case is begun."""


@dataclass
class Job:
    """The processes of one case, one a rank. They have imported what they need when the file `go` appears."""

    command: list[str]
    ranks: int
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        world = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | NO_MULTICAST
        for rank in range(self.ranks):
            env = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (self.folder / f"log-{rank}").open("wb") as log:
                command = [*self.command, "--after", str(self.folder / "go")]
                self.processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))

    def run(self, seconds: float) -> str | None:
        """Let it go on; what went wrong, None if all ranks ended well within so many seconds."""
        (self.folder / "go").touch()
        limit = time.monotonic() + seconds
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed or None not in codes or time.monotonic() > limit:
                break
            time.sleep(0.1)
        if not failed and None not in codes:
            return None
        time.sleep(1 if failed else 0)  # others may have something to say about it
        self.end()
        rank = failed[0] if failed else 0
        what = f"rank {rank} exited with {codes[rank]}" if failed else f"not over after {seconds:.0f} s"
        log = (self.folder / f"log-{rank}").read_text(errors="replace")
        return f"{what}\n{log[-6000:]}"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def run_cases(jobs: dict[tuple[str, bool], Job], seconds: float, limit: float) -> dict[tuple[str, bool], str]:
    """Each case -> what went wrong, for those with which something did.

    seconds: for all together. limit: for each, its imports aside.
    """
    stop = time.monotonic() + seconds
    wrong = {}
    waiting = list(jobs.items())
    try:
        waiting[0][1].start()
        for i, (case, job) in enumerate(waiting):
            left = stop - time.monotonic()
            if left < LEAST:
                wrong[case] = "no time was left"
                continue
            if i + 1 < len(waiting):
                waiting[i + 1][1].start()
            begun = time.monotonic()
            if error := job.run(min(left, limit)):
                wrong[case] = error
            print(f"{case}: {error or 'done'}, {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        for job in jobs.values():
            job.end()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="all cases of bench.titan", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=520, help="for all cases")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one case")
    args, others = parser.parse_known_args()
    of_all = parse(others)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for i, (case, compiled) in enumerate(CASES):
            command = [sys.executable, "-m", "mxep.integration.bench.titan", "--steps", str(STEPS[compiled]), *others]
            command += ["--case", case, *(["--compile"] if compiled else [])]
            jobs[case, compiled] = Job(command, args.ranks, Path(folder) / str(i))
        wrong = run_cases(jobs, args.seconds, args.limit)
    with of_all.out.open("a") as stream:
        for (case, compiled), error in wrong.items():
            row = {"model": of_all.model, "case": case, "compile": compiled, "error": error}
            stream.write(json.dumps(row) + "\n")
    print_table(of_all.out)


if __name__ == "__main__":
    main()
