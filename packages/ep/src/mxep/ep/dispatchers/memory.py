"""Memory that outlives the call that makes it: counts and buffers, made at a layer's first call."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mxep.gemm.quantize_once import in_graph_tree
from mxep.runtime.record import set_up

_T = TypeVar("_T")


def made_to_stay(device: torch.device, make: Callable[[], _T]) -> _T:
    """Return make(). Its tensors on the device outlive the current call.

    No record shows it. While torch.compile's mode="reduce-overhead" warms up or records, a thread's allocations belong
    to graphs, which raise if anything but outputs stays there. So another thread makes them then.
    """

    def aside() -> _T:
        with torch.cuda.device(device):
            made = make()
            torch.cuda.current_stream().synchronize()  # nobody waits for this thread's stream
        return made

    with torch.inference_mode(False), set_up():
        if not in_graph_tree(device):
            return make()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(aside).result()
