"""Notes on raised errors, kept in the process group's store for peers that time out.

rank 1   raises MemoryError in its layer, before an exchange      tell_failure: writes the note
rank 0   times out                                                told_failures: "rank 1 raised MemoryError: ..."
"""

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

GRACE = 5.0
"""Seconds that the store has to answer. Its host may be gone."""


def tell_failure(group: dist.ProcessGroup | None, error: BaseException) -> None:
    """Leave a note of the error that this rank raised. It replaces an earlier note."""
    text = f"{type(error).__name__}: {error}"[:1000]
    _ask(lambda: _store(group).set(_key(dist.get_rank(group)), f"{time.time()} {text}"))


def told_failures(group: dist.ProcessGroup | None, ranks: Iterable[int]) -> str:
    """Notes of these ranks, worded as the end of a message; "" without notes or if the store does not answer."""
    notes: list[str] = []

    def read() -> None:
        store = _store(group)
        for rank in ranks:
            if store.check([_key(rank)]):
                when, _, text = store.get(_key(rank)).decode().partition(" ")
                notes.append(f"; rank {rank} raised {text} ({time.time() - float(when):.0f} s ago)")

    _ask(read)
    return "".join(notes)


def _ask(question: Any) -> None:
    def ask() -> None:
        with contextlib.suppress(RuntimeError, KeyError):  # the store, or the group, is gone
            question()

    thread = threading.Thread(target=ask, daemon=True)  # daemon: a store on a silent host blocks it forever
    thread.start()
    thread.join(GRACE)


def _store(group: dist.ProcessGroup | None) -> Any:
    found = group or dist.group.WORLD
    assert found is not None
    return dist.distributed_c10d._world.pg_map[found][1]


def _key(rank: int) -> str:
    return f"mxep/raised/{rank}"
