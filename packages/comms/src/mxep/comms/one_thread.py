"""OneThread: one thread makes all exchanges with peers, because ranks must make them in one order.

Two threads of a process take turns by chance, and differently on each rank. So the first thread that exchanges owns the
exchanges of its group until it ends. Autograd's threads act for it: code within a backward may always exchange.
"""

import threading

import torch


class OneThread:
    """Guard that lets one thread make the exchanges of a group, or of an arena."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ident = 0
        self._owner: threading.Thread | None = None

    def claim(self) -> None:
        """Call before an exchange. Raises RuntimeError on a second thread while the first one lives."""
        ident = threading.get_ident()
        if ident == self._ident or torch._C._current_graph_task_id() != -1:
            return
        with self._lock:
            mine, owner = threading.current_thread(), self._owner
            if owner is not None and owner is not mine and owner.is_alive():
                raise RuntimeError(
                    f"exchange: got thread {mine.name!r}, expected {owner.name!r}, which made the exchanges before: "
                    "call layers that share a group in one thread, or make a process group for each thread"
                )
            self._owner, self._ident = mine, ident
