"""`@distributed(...)`: a test body that runs on several ranks.

    @distributed(1, 2, 4)
    def test_something(ctx, dim): ...       # ctx: Context; the rest are ordinary pytest parameters and fixtures

    @distributed(2, recipe=["bf16", "mxfp8"])
    def test_something(ctx, recipe): ...    # with one after the other, in the same processes

By itself the test starts its ranks (CPU, or CUDA where there are enough devices). On CPUs they stay for the other
bodies of the file, each with a new default group, until one fails; on GPUs each test has fresh processes. Under
torchrun the same body runs in place on a subgroup of the first n ranks, and is skipped where n is larger than the
world. With `device="cuda"` it is skipped, too, where there are fewer GPUs than ranks; "cpu" leaves them alone.
"""

import atexit
import functools
import gc
import inspect
import itertools
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_interpreter
from mxep.integration.launch import FunctionName, Rank, init_process_group, resolve_device, run_ranks, start_fork_server

triton_interpreter.on_import()  # a rank has no conftest
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for the fork server, which imports triton before any test


PRELOAD = ["pytest"]
"""What ranks in tests of ep and integration would import, for up to 3 s each. The first to ask starts the fork server
of a whole run, so all ask for all."""
if not torch.cuda.is_available():  # importing these starts CUDA, and what is forked then cannot use it
    PRELOAD += ["torch._dynamo.testing", "torch._inductor.compile_fx", "mxep.integration.transformers"]
    PRELOAD += ["datasets"]  # which torchtitan imports


@dataclass(frozen=True)
class Context:
    """Who runs a body: its rank in `group`, the group's size, its device. Collectives take `group=ctx.group`."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    device: torch.device
    _opened: list[Any] = field(default_factory=list)

    def transport(self, kind: type | None = None, **options: Any) -> Any:
        """A new transport over the group (collective), closed after the body: shared memory on CPU, NVLink on CUDA."""
        from mxep.comms import SharedMemoryTransport, SymmetricMemoryTransport

        kind = kind or (SymmetricMemoryTransport if self.device.type == "cuda" else SharedMemoryTransport)
        self._opened.append(kind(self.group, **options))
        return self._opened[-1]

    def run(self, body: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        torch.manual_seed(0)
        try:
            body(self, **kwargs)
        finally:
            while self._opened:
                self._opened.pop().close()

    def run_each(self, body: Callable[..., Any], each: Sequence[dict[str, Any]]) -> None:
        for kwargs in each:
            try:
                self.run(body, kwargs)
            except Exception as error:
                if kwargs:
                    error.add_note(f"with {kwargs}")
                raise


def distributed(
    *world_sizes: int, slow: Sequence[int] = (), timeout: float = 180.0, device: str = "auto", **values: Sequence[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated body once for each world size, on that many ranks, within `timeout` seconds each.

    slow: sizes that only CI runs. values: of arguments of the body, which runs with every combination of them.
    """
    combinations = [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            each = [kwargs | chosen for chosen in combinations]
            if "TORCHELASTIC_RUN_ID" in os.environ:
                _run_in_place(body, world_size, each, device)
                return
            if device == "cuda" and torch.cuda.device_count() < world_size:
                pytest.skip(f"fewer than {world_size} GPUs")
            name = FunctionName.of(body)
            start_fork_server("pytest")
            if resolve_device(device, world_size) == "cpu":
                skipped = _pool(name.file, world_size).run(name, each, timeout)
            else:
                args = name, each
                skipped = run_ranks(_run_body, args, world_size=world_size, timeout=timeout, device=device)[0]
            if skipped is not None:
                pytest.skip(skipped)

        given = {"ctx", *values}
        parameters = [p for p in inspect.signature(body).parameters.values() if p.name not in given]
        by_size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([by_size, *parameters])  # type: ignore[attr-defined]
        sizes = [pytest.param(size, marks=[pytest.mark.slow] * (size in slow)) for size in world_sizes]
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


def _run_body(rank: Rank, name: FunctionName, each: list[dict[str, Any]]) -> str | None:
    gc.set_threshold(50_000, 20, 50)  # as conftest.py sets it
    body = name.load().__wrapped__  # type: ignore[attr-defined]
    context = Context(rank.rank, rank.world_size, dist.group.WORLD, rank.device)
    try:
        context.run_each(body, each)
    except pytest.skip.Exception as reason:
        return str(reason)
    return None


class Pool:
    """Ranks that run the bodies of one file: a start takes 0.3 s, and as long the first call of what they compute."""

    def __init__(self, file: str, world_size: int) -> None:
        self.file, self.failed, self._bodies = file, False, itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="mxep-pool-")
        self._error: BaseException | None = None
        with Listener(f"{self._folder.name}/socket", backlog=world_size) as listener:
            self._thread = threading.Thread(target=self._start, args=(world_size, listener.address), daemon=True)
            self._thread.start()
            self._ranks: list[Connection] = []
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            while len(self._ranks) < world_size and self._thread.is_alive():
                try:
                    self._ranks.append(listener.accept())
                except TimeoutError:
                    continue
        self._pids = [rank.recv() for rank in self._ranks]

    def _start(self, world_size: int, address: str) -> None:
        try:
            run_ranks(_serve, (address,), world_size=world_size, device="cpu", steps=False)
        except BaseException as error:
            self._error = error

    def run(self, name: FunctionName, each: list[dict[str, Any]], timeout: float) -> str | None:
        """Run a body. Returns why rank 0 skipped it, or None; raises what `run_ranks` does."""
        self.failed, environment = True, {key: value for key, value in os.environ.items() if key not in OWN}
        store = f"{self._folder.name}/store-{next(self._bodies)}"
        for rank in self._ranks:
            rank.send((name, each, environment, store))
        limit, running = time.monotonic() + timeout, list(self._ranks)
        skipped: dict[Connection, str | None] = {}
        try:
            while running:
                ready = wait(running, max(limit - time.monotonic(), 0))
                if not ready:
                    self._show_stacks()
                    break
                for rank in [rank for rank in running if rank in ready]:
                    skipped[rank] = rank.recv()
                    running.remove(rank)
        except EOFError:  # it raised, or died
            pass
        if running:
            self._thread.join(30)
            raise self._error or TimeoutError(f"{name.qualname} did not finish within {timeout} s")
        self.failed = False
        return skipped[self._ranks[0]]

    def _show_stacks(self) -> None:
        """Have `run_ranks` report where each rank is, and end them."""
        for number in (signal.SIGUSR2, signal.SIGKILL):
            for pid in self._pids:
                os.kill(pid, number)
            time.sleep(0.3)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._thread.join(30)
        self._folder.cleanup()


OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_DIST_INIT_BARRIER")
"""Of a rank's environment: what it has for itself."""
_pools: dict[int, Pool] = {}


def _pool(file: str, world_size: int) -> Pool:
    for size, pool in list(_pools.items()):
        if pool.file != file or pool.failed:
            _pools.pop(size).close()
    if world_size not in _pools:
        _pools[world_size] = Pool(file, world_size)
    return _pools[world_size]


@atexit.register
def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _serve(rank: Rank, address: str) -> None:
    """Run bodies until the caller hangs up. An error ends the rank, and so all."""
    with Client(address) as caller:
        caller.send(os.getpid())
        for bodies in itertools.count():
            try:
                name, each, environment, store = caller.recv()
            except EOFError:
                return
            os.environ.update(environment)
            for key in os.environ.keys() - environment.keys() - set(OWN):
                del os.environ[key]
            if bodies:  # all ranks have ended the one before
                gc.collect()
                torch.compiler.reset()
                dist.destroy_process_group()
                init_process_group("cpu", rank.rank, rank.world_size, init_method=f"file://{store}")
            caller.send(_run_body(rank, name, each))


def _run_in_place(body: Callable[..., None], world_size: int, each: list[dict[str, Any]], device: str) -> None:
    """Under torchrun: the first `world_size` ranks run the body, all ranks share the outcome."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > world:
        pytest.skip(f"{world_size} ranks wanted, torchrun started {world}")
    if not dist.is_initialized():
        # Kept for all tests of the session; the interpreter's end takes it down.
        init_process_group(resolve_device("auto", world), rank, world)
    on_cuda = device != "cpu" and "nccl" in dist.get_backend_config()
    if device == "cuda" and not on_cuda:
        pytest.skip(f"fewer than {world} GPUs")
    if on_cuda and world_size < world:
        # torch 2.11 numbers the rendezvous of symmetric memory by process, not by group: after one that some ranks sat
        # out, the next one of all ranks hangs. Without torchrun every size has fresh processes.
        pytest.skip(f"on CUDA only all {world} ranks of torchrun can meet")
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=60))
    here = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    error = None
    if rank < world_size:
        try:
            Context(rank, world_size, group, here).run_each(body, each)
        except pytest.skip.Exception:
            error = "skip"
        except Exception:
            error = traceback.format_exc()
    errors: list[str | None] = [None] * world
    dist.all_gather_object(errors, error)
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)
    if "skip" in errors:
        pytest.skip("the body skipped")
    failed = [f"rank {rank} raised:\n{text}" for rank, text in enumerate(errors) if text]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
