"""run_ranks: what comes back, what a failure looks like, and that no process outlives the call."""

import contextlib
import inspect
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mxep.integration.launch import Rank, RanksFailed, run_ranks
from ranks import Context, distributed

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Running, not a zombie that its parent has yet to reap."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def gone(pids: list[int], *, within: float = 5.0) -> bool:
    limit = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def read_pids(folder: Path, count: int) -> list[int]:
    limit = time.monotonic() + 150
    while len(files := list(folder.glob("pid-*"))) < count or not all(file.read_text() for file in files):
        assert time.monotonic() < limit, "the ranks did not start"
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def note_pid(rank: Rank, folder: Path) -> None:
    (folder / f"pid-{rank.rank}").write_text(str(os.getpid()))


def sum_over_ranks(rank: Rank, offset: int) -> torch.Tensor:
    total = torch.tensor([rank.rank + offset])
    dist.all_reduce(total)
    return torch.cat([total, torch.tensor([rank.rank])])


def test_results_come_back_in_rank_order():
    results = run_ranks(sum_over_ranks, (10,), world_size=3, timeout=60, device="cpu")
    assert [value.tolist() for value in results] == [[33, 0], [33, 1], [33, 2]]


def environment_of(rank: Rank) -> tuple[str, str, int, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads(), os.environ["MXEP_TEST"]


def test_ranks_see_the_callers_environment_of_this_call(monkeypatch: pytest.MonkeyPatch):
    for value in ("first", "second"):
        monkeypatch.setenv("MXEP_TEST", value)
        seen = run_ranks(environment_of, world_size=2, timeout=60, device="cpu")
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert seen == [("0", "2", threads, value), ("1", "2", threads, value)]


def raise_on_rank_one(rank: Rank, folder: Path) -> None:
    note_pid(rank, folder)
    dist.barrier()
    if rank.rank == 1:
        raise KeyError("the token got lost")
    time.sleep(60)


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    with pytest.raises(
        RanksFailed, match=r"rank 1 raised:(.|\n)*in raise_on_rank_one(.|\n)*the token got lost"
    ) as info:
        run_ranks(raise_on_rank_one, (tmp_path,), world_size=3, timeout=60, device="cpu")
    assert info.value.ranks == (1,)
    assert "rank 0, 2 had not finished" in str(info.value)
    assert info.value.first == "rank 1 raised: KeyError: 'the token got lost'"
    assert gone(read_pids(tmp_path, 3), within=0.5)


def raise_everywhere(rank: Rank) -> None:
    time.sleep(0.1 * (1 - rank.rank))
    raise ValueError(f"no good on {rank.rank}")


def test_the_tracebacks_of_all_ranks_arrive():
    with pytest.raises(RanksFailed) as info:
        run_ranks(raise_everywhere, world_size=2, timeout=60, device="cpu")
    assert info.value.ranks == (1, 0), "in the order in which they raised"
    assert info.value.first == "rank 1 raised: ValueError: no good on 1"
    assert "no good on 0" in str(info.value)
    assert "no good on 1" in str(info.value)


def fill_the_disk(rank: Rank) -> None:
    whole = Path.write_bytes

    def write_bytes(file: Path, data: bytes) -> int:
        if not file.name.startswith("value"):
            return whole(file, data)
        whole(file, data[:1])
        raise OSError(28, "No space left on device")

    Path.write_bytes = write_bytes  # type: ignore[method-assign, assignment]


def test_a_result_that_does_not_fit_on_the_disk_is_a_failure():
    with pytest.raises(RanksFailed) as info:
        run_ranks(fill_the_disk, world_size=1, timeout=60, device="cpu")
    assert info.value.first == "rank 0 raised: OSError: [Errno 28] No space left on device"


def be_killed(rank: Rank) -> None:
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def test_a_rank_that_dies_is_named_with_its_signal():
    with pytest.raises(RanksFailed, match=r"rank 0 was killed by SIGSEGV before it returned") as info:
        run_ranks(be_killed, world_size=2, timeout=60, device="cpu")
    assert info.value.first == "rank 0 was killed by SIGSEGV before it returned"
    assert "rank 0 was at:" in str(info.value)
    assert "memory" not in str(info.value)
    assert "in be_killed" in str(info.value)


def fork_and_be_killed(rank: Rank, folder: Path) -> None:
    """Rank 0 dies, its child keeps what it inherited: the pipe to the caller among them."""
    if rank.rank == 0 and (child := os.fork()):
        (folder / "pid-0").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(250)


def test_a_rank_that_dies_is_noticed_though_a_child_that_it_forked_lives_on(tmp_path):
    killed = r"rank 0 was killed by SIGKILL before it returned\n\(most likely out of memory: "
    with pytest.raises(RanksFailed, match=killed):
        run_ranks(fork_and_be_killed, (tmp_path,), world_size=2, timeout=100, device="cpu")
    assert time.time() - (tmp_path / "pid-0").stat().st_mtime < 10
    assert gone(read_pids(tmp_path, 1))


def start_a_child_and_hang(rank: Rank, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    (folder / f"pid-{rank.rank}").write_text(str(child.pid))
    time.sleep(60)


def test_a_job_over_its_limit_ends_with_the_ranks_stacks_and_takes_their_children_along(tmp_path):
    run_ranks(process_group_of, world_size=2, timeout=60, device="cpu")  # the fork server is up
    with pytest.raises(RanksFailed, match=r"rank 0, 1 did not finish within 2.5 s(.|\n)*in start_a_child_and_hang"):
        run_ranks(start_a_child_and_hang, (tmp_path,), world_size=2, timeout=2.5, device="cpu")
    assert gone(read_pids(tmp_path, 2))


@pytest.mark.parametrize(
    ("world_size", "device", "message"),
    [
        (0, "cpu", "got 0, wanted at least 1"),
        (1, "tpu", "got 'tpu', wanted"),
        (99, "cuda", "wanted one for each of 99"),
    ],
)
def test_a_bad_world_or_device_is_refused(world_size, device, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(sum_over_ranks, world_size=world_size, device=device)


def test_a_function_that_ranks_cannot_find_is_refused():
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        run_ranks(lambda rank: None, world_size=1, device="cpu")


def count_steps(rank: Rank, folder: Path) -> int:
    note_pid(rank, folder)
    steps = 0
    while not rank.stop.agreed():
        steps += 1
        time.sleep(0.01 * (1 + rank.rank))
    return steps


def process_group_of(rank: Rank) -> int:
    return os.getpgrp()


def hang_deaf(rank: Rank, folder: Path) -> None:
    note_pid(rank, folder)
    while True:
        time.sleep(1)


@contextlib.contextmanager
def signals_to_the_caller(*numbers: int, folder: Path):
    """Signals this process, the caller, once its two ranks run; yields a list that gets the ranks' pids."""
    pids: list[int] = []

    def send() -> None:
        pids.extend(read_pids(folder, 2))
        for number in numbers:
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield pids
    finally:
        sender.join()


def test_ctrl_c_stops_all_ranks_after_the_same_step(tmp_path):
    with signals_to_the_caller(signal.SIGINT, folder=tmp_path) as pids:
        first, second = run_ranks(count_steps, (tmp_path,), world_size=2, timeout=60, device="cpu")
    assert first == second > 0
    assert gone(pids, within=0.5)


def test_a_second_signal_kills_ranks_that_do_not_listen(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    numbers = (signal.SIGTERM, signal.SIGTERM)
    with signals_to_the_caller(*numbers, folder=tmp_path) as pids, pytest.raises(KeyboardInterrupt):
        run_ranks(hang_deaf, (tmp_path,), world_size=2, timeout=60, device="cpu")
    assert gone(pids, within=0.5)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_first_signal_ends_a_job_without_steps(tmp_path):
    with signals_to_the_caller(signal.SIGINT, folder=tmp_path) as pids, pytest.raises(KeyboardInterrupt):
        run_ranks(hang_deaf, (tmp_path,), world_size=2, timeout=60, device="cpu", steps=False)
    assert gone(pids, within=0.5)


def test_a_terminals_ctrl_c_reaches_only_the_caller(tmp_path):
    assert os.getpgrp() not in run_ranks(process_group_of, world_size=2, timeout=60, device="cpu")


CALLER = """
import sys
from pathlib import Path
from mxep.integration.launch import run_ranks
import callee
folder = Path(sys.argv[1])
if __name__ == "__main__":
    run_ranks(callee.hang_deaf, (folder,), world_size=2, timeout=60, device="cpu")
"""


@pytest.mark.slow
def test_ranks_end_when_the_caller_is_killed(tmp_path):
    """Ranks import what they run, and a module of a few lines takes them no time."""
    sources = "from __future__ import annotations\nimport os, time", *map(inspect.getsource, (note_pid, hang_deaf))
    (tmp_path / "callee.py").write_text("\n\n".join(sources))
    (tmp_path / "caller.py").write_text(CALLER)
    with subprocess.Popen([sys.executable, tmp_path / "caller.py", tmp_path]) as caller:
        try:
            pids = read_pids(tmp_path, 2)
        finally:
            caller.kill()
    assert gone(pids)


@distributed(1, 2)
def test_distributed_bodies_get_parameters_and_fixtures(ctx: Context, word, tmp_path):
    words = [None] * ctx.world_size
    dist.all_gather_object(words, (ctx.rank, word), group=ctx.group)
    assert words == [(rank, "given") for rank in range(ctx.world_size)]
    assert tmp_path.exists()


@pytest.fixture
def word():
    return "given"


@distributed(2)
def test_a_skip_inside_a_body_is_a_skip(ctx: Context):
    pytest.skip("not here")


def run_pytest(rank: Rank) -> tuple[int, str]:
    """As torchrun does: with its environment, in a process of its own."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(
            ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:warnings", __file__, "-k", "bodies_get"]
        )
    return int(code), said.getvalue()


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="starts ranks as torchrun does")
def test_distributed_bodies_run_in_place_under_torchrun():
    for code, said in run_ranks(run_pytest, world_size=2, timeout=120, device="cpu"):
        assert code == 0, said
        assert "2 passed" in said


@pytest.mark.slow
def test_a_module_that_cannot_be_preloaded_is_left_to_the_ranks(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
    (tmp_path / "callee.py").write_text("def rank_of(rank):\n    return rank.rank\n")
    script = "import callee\nfrom mxep.integration import launch\nlaunch.PRELOADED = ('torch',)\n"
    script += "if __name__ == '__main__':\n    launch.start_fork_server('broken')\n"
    script += "    print(launch.run_ranks(callee.rank_of, world_size=2, timeout=60, device='cpu'))\n"
    (tmp_path / "caller.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    out = subprocess.run([sys.executable, tmp_path / "caller.py"], env=env, capture_output=True, text=True)
    assert out.stdout == "[0, 1]\n"
    assert "RuntimeError: no" in out.stderr
