"""Nodes of one machine, on CPUs: torchrun's launcher once for each, over TCP, between network namespaces.

    node-0  10.77.0.1 ──┐
    node-1  10.77.0.2 ──┼── a bridge in a namespace of its own
    node-2  10.77.0.3 ──┘

Each node has a host name and an address, and no way to the machine's network. Where namespaces can not be made, which
root alone may, nodes are addresses of loopback, 127.0.0.2 and on, and what gloo sends goes over the same interface.

Launchers are forked from the tests' fork server and fork their ranks, so that nothing is imported again. They are
torchrun's own, started with its own arguments.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mxep.integration.launch import init_process_group, start_fork_server

NEW_UTS = 0x04000000


@dataclass(frozen=True)
class Node:
    """index: of the node. address, interface: how others reach it. port: of the first one, where all meet.

    namespace: the file by which a process enters it; None: it shares the machine's network and host name.
    """

    index: int
    address: str
    interface: str
    port: int
    namespace: str | None


@dataclass(frozen=True)
class Ended:
    """results: what its ranks returned, by local rank; None if it failed. error: what torchrun said then.

    at: time.time() when its launcher was over. All are None for a node that was killed.
    """

    results: list[Any] | None = None
    error: str | None = None
    at: float | None = None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def make_nodes(count: int) -> Iterator[list[Node]]:
    """Connected nodes, which are gone afterwards."""
    names = [f"mxep-{os.getpid()}-{i}" for i in range(count)]
    bridge, made = f"mxep-{os.getpid()}-b", []
    try:
        try:
            for name in (bridge, *names):
                _ip("netns", "add", name)
                made.append(name)
            _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", bridge, "link", "set", "bridge", "up")
            for i, name in enumerate(names):
                _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}", "netns", bridge)
                _ip("-n", bridge, "link", "set", f"port{i}", "master", "bridge", "up")
                _ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError):
            with socket.create_server(("127.0.0.2", 0)) as server:
                port = server.getsockname()[1]
            nodes = [Node(i, f"127.0.0.{i + 2}", "lo", port, None) for i in range(count)]
        else:
            nodes = [Node(i, f"10.77.0.{i + 1}", "eth0", 29500, f"/run/netns/{n}") for i, n in enumerate(names)]
        yield nodes
    finally:
        for name in made:
            _ip("netns", "del", name)


def sent_bytes() -> int:
    """That have left the calling process's node, whose namespace is its own, so far."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def run_nodes(
    fn: Callable[..., Any],
    args: Sequence[Any],
    folder: Path,
    *,
    nodes: Sequence[Node],
    ranks: int,
    timeout: float,
    connected: bool = True,
) -> list[Ended]:
    """Call `fn(group, *args)` in so many ranks of each node, and what became of the nodes.

    fn: a module-level function. group: gloo's, of all ranks; connected=False calls `fn(*args)`, which makes its own.
    Nodes that are not over after `timeout` seconds are killed. What they print is in `log-N` of the folder.
    """
    context = multiprocessing.get_context("forkserver")
    start_fork_server("pytest")
    payload = pickle.dumps((fn, tuple(args), connected))
    endings = [folder / f"node-{node.index}" for node in nodes]
    launchers = []
    try:
        for node, ending in zip(nodes, endings):
            launcher = context.Process(
                target=_launch, args=(node, nodes[0].address, len(nodes), ranks, payload, ending, dict(os.environ))
            )
            launcher.start()
            launchers.append(launcher)
        limit = time.monotonic() + timeout
        for launcher in launchers:
            launcher.join(max(0.0, limit - time.monotonic()))
    finally:
        for launcher in launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.join()
    return [pickle.loads(each.read_bytes()) if each.exists() else Ended() for each in endings]


def _launch(
    node: Node, head: str, count: int, ranks: int, payload: bytes, ending: Path, environment: dict[str, str]
) -> None:
    """The process of one node: torchrun with these arguments."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.setsid()
    with ending.with_name(f"log-{node.index}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server ignores it
    os.environ.clear()
    os.environ.update(environment, GLOO_SOCKET_IFNAME=node.interface, OMP_NUM_THREADS="1")
    if node.namespace:
        _enter(node.namespace, f"node-{node.index}")
    host = str(node.index == 0).lower()
    arguments = ["--nnodes", str(count), "--nproc-per-node", str(ranks), "--local-addr", node.address]
    arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{node.port}", "--rdzv-id", "nodes"]
    arguments += ["--rdzv-conf", f"is_host={host}", "no script"]
    config = config_from_args(parse_args(arguments))[0]
    config.start_method = "fork"
    try:
        results = elastic_launch(config, _rank)(payload)
        ended = Ended([results[rank] for rank in sorted(results)], None, time.time())
    except ChildFailedError as error:
        ended = Ended(None, "\n".join(str(failure.message) for failure in error.failures.values()), time.time())
    partial = ending.with_suffix(".part")
    partial.write_bytes(pickle.dumps(ended))
    partial.rename(ending)


def _enter(namespace: str, name: str) -> None:
    """Of this process: another network, and a host name by which it is told from others."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), 0) or libc.unshare(NEW_UTS):
            raise OSError(ctypes.get_errno(), namespace)
    socket.sethostname(name)
    platform._uname_cache = None  # type: ignore[attr-defined]  # the fork server's


def _rank(payload: bytes) -> Any:
    fn, args, connected = pickle.loads(payload)
    if not connected:
        return fn(*args)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    init_process_group("cpu", rank, world_size)
    result = fn(dist.group.WORLD, *args)
    dist.destroy_process_group()
    return result
