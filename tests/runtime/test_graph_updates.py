"""Which nodes a launch updates, with a driver that only reads nodes' parameters: needs no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxep.runtime import graph
from mxep.runtime.graph import CopyParams
from mxep.runtime.record import Copy, Step, View

A, B, C, D = (1 << 20) * 1, (1 << 20) * 2, (1 << 20) * 3, (1 << 20) * 4
"""Addresses."""


class Driver:
    """copies: (from, to) of each node, as CUDA's driver knows them. problem: the next call raises or returns it."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[int, int]] = {}
        self.updates: list[int] = []
        self.problem: Any = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0

    @staticmethod
    def _addresses(params: Any) -> tuple[int, int]:
        copy: CopyParams = params._obj
        return copy.srcDevice, copy.dstDevice

    def cuGraphAddMemcpyNode(self, node: Any, graph: Any, after: Any, count: Any, params: Any, context: Any) -> int:
        if self.problem:
            return self._fail()
        node._obj.value = len(self.copies) + 1
        self.copies[node._obj.value] = self._addresses(params)
        return 0

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        made._obj.value = 1
        return 0

    def cuGraphExecMemcpyNodeSetParams(self, made: Any, node: Any, params: Any, context: Any) -> int:
        if self.problem:
            return self._fail()
        self.updates.append(node.value)
        self.copies[node.value] = self._addresses(params)
        return 0

    def _fail(self) -> int:
        problem, self.problem = self.problem, 0
        if isinstance(problem, BaseException):
            raise problem
        return int(problem)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(graph, "driver", lambda: made)
    monkeypatch.setattr(graph, "patient_driver", lambda: made)
    return made


def copies() -> Any:
    """A graph of two copies: from base 0 to base 1, from base 2 to base 3."""
    views = [View(source, 8 * source, torch.uint8, (64,), (1,)) for source in range(4)]
    steps = [Step(Copy(views[1], views[0]), frozenset()), Step(Copy(views[3], views[2]), frozenset([0]))]
    return graph._Graph(steps, [0, 1], SimpleNamespace(fixed=[]), {})


def places(*bases: int) -> list[int]:
    return [*bases, 7]  # the last is the number of tokens


def test_only_nodes_whose_memory_moved_are_updated(driver: Driver) -> None:
    work = copies()
    work._build(places(A, B, C, D))
    assert driver.copies == {1: (A, B + 8), 2: (C + 16, D + 24)}
    for bases, updated in (((A, B, C, D), []), ((A, B, C, A), [2]), ((A, B, C, A), []), ((D, B, B, A), [1, 2])):
        assert work._move(places(*bases)) == 0
        assert sorted(driver.updates) == updated
        assert driver.copies == {1: (bases[0], bases[1] + 8), 2: (bases[2] + 16, bases[3] + 24)}
        driver.updates.clear()


@pytest.mark.parametrize("problem", [700, KeyboardInterrupt()], ids=["an error", "an interrupt"])
@pytest.mark.parametrize("then", [(A, B, C, D), (D, C, B, A)], ids=["as before", "as then"])
def test_an_update_that_did_not_end_is_followed_by_one_of_all_nodes(
    driver: Driver, problem: Any, then: tuple[int, ...]
) -> None:
    work = copies()
    work._build(places(A, B, C, D))
    driver.problem = problem
    try:
        assert work._move(places(D, C, B, A)) == problem
    except KeyboardInterrupt:
        assert isinstance(problem, KeyboardInterrupt)
    assert work._move(places(*then)) == 0
    assert driver.copies == {1: (then[0], then[1] + 8), 2: (then[2] + 16, then[3] + 24)}


def test_a_build_that_did_not_end_leaves_no_nodes_to_the_next(driver: Driver) -> None:
    work = copies()
    driver.problem = 2
    with pytest.raises(RuntimeError, match="cuGraphAddMemcpyNode: got error 2"):
        work._build(places(A, B, C, D))
    work._build(places(A, B, C, D))
    assert (len(work._nodes), sorted(work._updates)) == (2, [0, 1])
    assert all(len(uses.words) == 1 for uses in work._uses.values())
    assert work._move(places(B, B, D, D)) == 0
    assert driver.copies == {1: (B, B + 8), 2: (D + 16, D + 24)}
