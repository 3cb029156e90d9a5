"""For tests on a GPU: no call within may wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_sync() -> Iterator[None]:
    """torch raises RuntimeError where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
