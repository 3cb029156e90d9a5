"""`@distributed(...)`: a test body that runs on several ranks.

    @distributed(1, 2, 4)
    def test_something(ctx, dim): ...       # ctx: Context; the rest are ordinary pytest parameters and fixtures

    @distributed(2, recipe=["bf16", "mxfp8"])
    def test_something(ctx, recipe): ...    # with one after the other, in the same processes

By itself the test starts its ranks as processes (CPU, or CUDA where there are enough devices). On a CPU they stay for
the next tests of the file with as many ranks: each has a new default group, the environment of its test and nothing
compiled. After a failure the next test starts others. `fresh=True` is for bodies that change more than that.

Under torchrun the same body runs in place on a subgroup of the first n ranks, and is skipped where n is larger than the
world. With `device="cuda"` it is skipped, too, where there are fewer GPUs than ranks; "cpu" leaves them alone.
"""

import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_interpreter
from mxep.integration.launch import (
    Rank,
    StopFlag,
    init_process_group,
    resolve_device,
    run_ranks,
    start_fork_server,
)

triton_interpreter.on_import()  # a rank has no conftest
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for the fork server, which imports triton before any test


PRELOAD_OF_ALL = ["pytest", "triton.experimental.gluon.nvidia.hopper"]
"""What any rank would import, the latter when it first interprets a kernel, for 0.2 s."""
PRELOAD = [*PRELOAD_OF_ALL]
"""What ranks in tests of ep would import, for up to 3 s each."""
PRELOAD_OF_INTEGRATION: list[str] = []
"""And those of integration. The first to ask starts the fork server of a whole run, so all ask for all."""
if not torch.cuda.is_available():  # importing these starts CUDA, and what is forked then cannot use it
    PRELOAD += ["torch._dynamo.testing", "torch._inductor.compile_fx"]
    PRELOAD_OF_INTEGRATION += ["mxep.integration.transformers", "datasets"]  # torchtitan imports datasets


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
    *world_sizes: int,
    slow: Sequence[int] = (),
    timeout: float = 180.0,
    device: str = "auto",
    fresh: bool = False,
    **values: Sequence[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated body once for each world size, on that many ranks, within `timeout` seconds each.

    slow: sizes that only CI runs. fresh: in processes of its own. values: of arguments of the body, which runs with
    every combination of them.
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
            args = (body.__module__, body.__qualname__, each)
            skipped = run_again(_run_body, args, world_size=world_size, timeout=timeout, device=device, fresh=fresh)
            if skipped[0] is not None:
                pytest.skip(skipped[0])

        given = {"ctx", *values}
        parameters = [p for p in inspect.signature(body).parameters.values() if p.name not in given]
        by_size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([by_size, *parameters])  # type: ignore[attr-defined]
        sizes = [pytest.param(size, marks=[pytest.mark.slow] * (size in slow)) for size in world_sizes]
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


def run_again(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    world_size: int,
    timeout: float = 180.0,
    device: str = "auto",
    fresh: bool = False,
) -> list[Any]:
    """As `run_ranks`; on a CPU in processes that stay for the next call from this file with as many ranks."""
    start_fork_server(*PRELOAD_OF_ALL)
    if fresh or resolve_device(device, world_size) != "cpu":
        return run_ranks(fn, args, world_size=world_size, timeout=timeout, device=device)
    if world_size not in _staying:
        _staying[world_size] = _Staying(world_size)
    try:
        return _staying[world_size].call((fn, tuple(args), dict(os.environ), timeout))
    except BaseException:  # an interrupt, too: who knows where they are
        _staying.pop(world_size).close()
        raise


class _Staying:
    """A job of `run_ranks` whose ranks wait for calls."""

    def __init__(self, world_size: int) -> None:
        self._failure: BaseException | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="mxep-calls-")
        self._ended, ended = Pipe(duplex=False)
        listener = Listener(f"{self._folder.name}/calls", "AF_UNIX", backlog=world_size)

        def job() -> None:
            try:
                run_ranks(_serve, (self._folder.name,), world_size=world_size, device="cpu", steps=False)
            except BaseException as error:
                self._failure = error
            finally:
                ended.close()

        self._job = threading.Thread(target=job, daemon=True)
        self._job.start()
        self._calls: dict[int, Connection] = {}
        with listener:
            while len(self._calls) < world_size:
                if self._ended in wait([listener._listener._socket, self._ended]):  # type: ignore[attr-defined]
                    self._raise()
                call = listener.accept()
                self._calls[call.recv()] = call

    def call(self, request: tuple[Any, ...]) -> list[Any]:
        answers: dict[int, Any] = {}
        ranks = {call: rank for rank, call in self._calls.items()}
        try:
            payload = pickle.dumps(request)  # by value, as run_ranks does, also tensors
            for call in ranks:
                call.send_bytes(payload)
            while ranks:
                for ready in wait([*ranks, self._ended]):
                    answers[ranks.pop(ready)] = pickle.loads(ready.recv_bytes())  # type: ignore[call-overload, union-attr]
        except (KeyError, EOFError, OSError):  # it ended, or a rank did
            self._raise()
        return [answers[rank] for rank in sorted(answers)]

    def _raise(self) -> None:
        self._job.join()
        assert self._failure is not None
        for late in sorted(Path(self._folder.name).glob("late-*")):
            self._failure.add_note(late.read_text())
        raise self._failure

    def close(self) -> None:
        for call in self._calls.values():
            call.close()
        self._job.join()
        self._folder.cleanup()


_staying: dict[int, _Staying] = {}
"""By number of ranks."""


def close_ranks() -> None:
    """After a file: its last test that starts ranks cannot know."""
    while _staying:
        _staying.popitem()[1].close()


def _serve(rank: Rank, folder: str) -> None:
    """Answer calls until the caller hangs up."""
    gc.set_threshold(50_000, 20, 50)  # as conftest.py sets it
    own = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    barrier, here = os.environ["TORCH_DIST_INIT_BARRIER"], os.getcwd()
    with Client(f"{folder}/calls", "AF_UNIX") as calls, Path(folder, f"late-{rank.rank}").open("w") as late:
        calls.send(rank.rank)
        for number in itertools.count():
            try:
                request = calls.recv_bytes()
            except EOFError:
                return
            fn, args, environment, timeout = pickle.loads(request)
            faulthandler.dump_traceback_later(timeout, exit=True, file=late)
            os.environ.clear()
            os.environ.update({"TORCH_DIST_INIT_BARRIER": barrier} | environment | own)
            os.chdir(here)
            if number:
                _forget(rank, f"file://{folder}/store-{number}")
            calls.send_bytes(pickle.dumps(fn(replace(rank, stop=StopFlag()), *args)))
            faulthandler.cancel_dump_traceback_later()


def _forget(rank: Rank, store: str) -> None:
    """What a call before left: its groups, what it compiled, defaults of torch."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if "torch.distributed.tensor" in sys.modules:  # it keeps meshes, whose groups are gone
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        for kept in vars(_redistribute).values():
            if isinstance(kept, functools._lru_cache_wrapper):
                kept.cache_clear()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    init_process_group("cpu", rank.rank, rank.world_size, init_method=store)


def _run_body(rank: Rank, module: str, name: str, each: list[dict[str, Any]]) -> str | None:
    gc.set_threshold(50_000, 20, 50)  # as conftest.py sets it
    body = getattr(importlib.import_module(module), name).__wrapped__
    context = Context(rank.rank, rank.world_size, dist.group.WORLD, rank.device)
    try:
        context.run_each(body, each)
    except pytest.skip.Exception as reason:
        return str(reason)
    return None


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
