"""What a rank raised, for peers that wait for it in vain: a note in the store of the process group.

rank 1   raises MemoryError in its layer, before an exchange      tell_failure: the note
rank 0   its time-out is over                                     told_failures: "rank 1 raised MemoryError: ..."
"""

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

GRACE = 5.0
"""Seconds that a store has to answer: its host may be the one that is gone."""


def tell_failure(group: dist.ProcessGroup | None, error: BaseException) -> None:
    """Leave a note of what this rank raised. A later one takes its place."""
    text = f"{type(error).__name__}: {error}"[:1000]
    _ask(lambda: _store(group).set(_key(dist.get_rank(group)), f"{time.time()} {text}"))


def told_failures(group: dist.ProcessGroup | None, ranks: Iterable[int]) -> str:
    """The notes of ranks of the group, as the end of a message; "" without any, or if the store does not answer."""
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

    thread = threading.Thread(target=ask, daemon=True)  # a store on a silent host keeps it for ever
    thread.start()
    thread.join(GRACE)


def _store(group: dist.ProcessGroup | None) -> Any:
    found = group or dist.group.WORLD
    assert found is not None
    return dist.distributed_c10d._world.pg_map[found][1]


def _key(rank: int) -> str:
    return f"mxep/raised/{rank}"
