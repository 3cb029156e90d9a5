"""A layer over several nodes of one machine, with TCP between them: its numbers, and what is said when a node dies."""

import dataclasses
import itertools
import os
import platform
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep.problem import make_ranks
from mxep.ep import MoE, make_dispatcher
from mxep.gemm import Recipe
from mxep.integration.metrics import snr
from mxep.integration.verify import BF16, MARGIN, quantizers
from nodes import Node, make_nodes, run_nodes, sent_bytes

pytestmark = pytest.mark.slow  # nodes are torchruns, and some wait until a collective gives up

BETWEEN_NODES = ("all_to_all", "hierarchical")
"""Dispatchers whose ranks may be on several nodes."""
TIMEOUT = 4.0
"""Seconds that a collective waits."""
TOKENS, DIM, EXPERTS, TOP_K, REPEATS = 256, 1024, 8, 4, 6
"""Of exchanges whose bytes are counted."""


def run_layer(group: dist.ProcessGroup) -> str:
    """Forward and backward are as good as the recipe allows. Returns the node's host name."""
    ctx = SimpleNamespace(rank=group.rank(), world_size=group.size(), group=group, device=torch.device("cpu"))
    problem = make_ranks([5 + 3 * rank for rank in range(ctx.world_size)])
    for dispatcher, recipe in itertools.product(BETWEEN_NODES, ("bf16", "mxfp8")):
        got = problem.run(ctx, dispatcher=dispatcher, recipe=recipe)
        exact, bound = problem.answer(ctx), problem.answer(ctx, quantizers(Recipe.named(recipe)))
        for field in dataclasses.fields(got):
            wanted, best, value = (getattr(results, field.name) for results in (exact, bound, got))
            floor = min(snr(wanted, best) - MARGIN, BF16)
            what = f"{dispatcher} {recipe} {field.name}"
            assert snr(wanted, value) > floor, f"{what}: {snr(wanted, value):.2f} dB, want {floor:.2f}"
    return platform.node()


def layer_and_bytes(group: dist.ProcessGroup, counted: bool) -> tuple[str, list[list[float]]]:
    return run_layer(group), bytes_of_exchanges(group) if counted else []


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Node], list[list[tuple[str, list[list[float]]]]]]:
    """Two nodes of two ranks, and what `layer_and_bytes` returned on each rank."""
    folder = tmp_path_factory.mktemp("nodes")
    with make_nodes(2) as nodes:
        args = (bool(nodes[0].namespace),)
        ended = run_nodes(layer_and_bytes, args, folder, nodes=nodes, ranks=2, timeout=100)
    assert all(node.results for node in ended), "\n".join(file.read_text() for file in folder.glob("log-*"))
    return nodes, [node.results for node in ended]


def test_experts_of_several_nodes_compute_what_a_dense_layer_computes(two_nodes) -> None:
    """Three nodes: tests/ep/test_dispatchers_hierarchical.py."""
    nodes, ended = two_nodes
    names = [f"node-{i}" if node.namespace else platform.node() for i, node in enumerate(nodes)]
    assert [[name for name, _ in results] for results in ended] == [[name] * 2 for name in names]


def bytes_of_exchanges(group: dist.ProcessGroup) -> list[list[float]]:
    """That this node's interface has sent for its two ranks: of a dispatch and a combine of each dispatcher."""
    return [bytes_of_a_dispatch_and_of_a_combine(group, name) for name in BETWEEN_NODES]


def bytes_of_a_dispatch_and_of_a_combine(group: dist.ProcessGroup, name: str) -> list[float]:
    """Each token's four experts are on the other node."""
    dispatcher = make_dispatcher(name, EXPERTS, dim=DIM, group=group, max_tokens=TOKENS)
    x = torch.randint(256, (TOKENS, 2 * DIM), dtype=torch.uint8)
    ids, weights = torch.rand(TOKENS, TOP_K).argsort(1).int(), torch.ones(TOKENS, TOP_K)
    ids += EXPERTS // 2 * (group.rank() < 2)
    _, routing = dispatcher.dispatch((x,), ids, weights, alignment=1).wait()
    rows = torch.ones(routing.plan.max_rows, DIM, dtype=torch.bfloat16)
    found = []
    for exchange in (
        lambda: dispatcher.dispatch((x,), ids, weights, alignment=1),
        lambda: dispatcher.combine(rows, routing),
    ):
        exchange().wait()
        dist.barrier(group)
        before = sent_bytes()
        dist.barrier(group)
        for _ in range(REPEATS):
            exchange().wait()
        dist.barrier(group)
        found.append((sent_bytes() - before) / REPEATS)
    dispatcher.check()
    assert routing.stats()["sent"] == {"hierarchical": TOKENS, "all_to_all": TOP_K * TOKENS}[name]
    return found


def test_a_token_crosses_the_wire_once_where_a_flat_exchange_sends_a_row_for_each_expert(two_nodes) -> None:
    """By the interface's own counter: rows, ids and weights as the plan has them, and what TCP adds, or sends again."""
    nodes, ended = two_nodes
    if not nodes[0].namespace:
        pytest.skip("loopback's counter is the whole machine's")
    tables = 8 * TOP_K * TOKENS  # of a token or of its rows, an id and a weight for each expert
    for _, found in itertools.chain(*ended):
        for (dispatched, combined), crossings in zip(found, (TOP_K, 1), strict=True):
            assert 1 <= dispatched / (2 * (crossings * TOKENS * 2 * DIM + tables)) < 1.25
            assert 1 <= combined / (2 * crossings * TOKENS * 2 * DIM) < 1.25


def train_until_the_last_node_is_lost(group: dist.ProcessGroup, dispatcher: str, folder: Path, how: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    limits = {} if dispatcher == "all_to_all" else {"timeout": TIMEOUT}  # it has its group's
    layer = MoE(32, 32, 2 * group.size(), 2, group=group, dispatcher=dispatcher, recipe="bf16", **limits)
    for step in range(1000):
        if step == 2 and group.rank() == group.size() - 1:
            time.sleep(0.5)  # until the others wait for it
            (folder / "lost").touch()
            if how == "silently":
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            os.kill(os.getppid(), signal.SIGKILL)  # its launcher
            os.kill(os.getpid(), signal.SIGKILL)
        layer(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize(
    ("dispatcher", "how", "said"),
    [("all_to_all", "killed", r"\[{address}\]"), ("hierarchical", "silently", "Timed out|timeout")],
)
def test_the_others_end_when_a_node_is_lost(dispatcher: str, how: str, said: str, tmp_path: Path) -> None:
    """A killed peer's kernel closes its connections, so it is named by its address; without power it is silent."""
    with make_nodes(3) as nodes:
        if how == "silently" and not nodes[0].namespace:
            pytest.skip("loopback can not be cut")
        args = (dispatcher, tmp_path, how)
        *others, lost = run_nodes(train_until_the_last_node_is_lost, args, tmp_path, nodes=nodes, ranks=1, timeout=60)
    assert lost.at is None
    since = (tmp_path / "lost").stat().st_mtime
    for node in others:
        assert node.error
        # Over loopback gloo's sockets have its first address. The first that waits in vain closes the others' pairs.
        address = nodes[-1].address if nodes[-1].namespace else "127.0.0.1"
        assert re.search(said.format(address=re.escape(address)), node.error)
        assert node.at - since < TIMEOUT + 5
