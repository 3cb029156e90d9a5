"""Backends: the implementations of the GEMMs. `select` picks one by name or, for "auto", by device.

reference   fp32 accumulation group by group, in a loop on the host: the definition, for any device, fast on CPUs
dequant     dequantize to bf16, then torch's grouped mm: any device, no host sync
hopper      MX folded to one scale per row, FP8 tensor cores of Hopper, promoted sums; the choice of "auto" there
triton      the exact MX GEMM by `tl.dot_scaled`: tensor cores of Blackwell, upcasts elsewhere; CPU: interpreted
blackwell   torch's scaled grouped mm on Blackwell, E4M3 only, bf16 results; not run on hardware yet
"""

import functools
import logging
from collections.abc import Mapping
from typing import Final

import torch

from mxep.gemm.backends.base import Backend
from mxep.gemm.backends.blackwell import Blackwell, Triton
from mxep.gemm.backends.hopper import Hopper
from mxep.gemm.backends.reference import Dequant, Reference

__all__ = ["AUTO", "BACKENDS", "Backend", "Hopper", "select"]


BACKENDS: Final[Mapping[str, Backend]] = {
    backend.name: backend for backend in (Reference(), Dequant(), Hopper(), Triton(), Blackwell())
}
"""All backends by name."""

AUTO: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("reference",), "cuda": ("hopper", "dequant", "reference")}
"""Backends that "auto" tries on a device type, best first. It takes the first that can run. The last always can."""


def select(backend: str | Backend, device: torch.device) -> Backend:
    """The backend of this name, or the best for `device` if "auto". A Backend is returned as it is.

    "auto" logs its choice once per process, with the reasons against better backends. Raises ValueError for an unknown
    name, and RuntimeError with the reason if the backend cannot run on `device`.
    """
    if backend == "auto":
        return _best.__wrapped__(device) if torch.compiler.is_compiling() else _best(device)
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise ValueError(f"backend: got {backend!r}, want auto, {', '.join(BACKENDS)} or a Backend")
        backend = BACKENDS[backend]
    if (reason := backend.unsupported_reason(device)) is not None:
        raise RuntimeError(f"backend {backend.name!r} cannot run on {device}: {reason}")
    return backend


@functools.cache
def _best(device: torch.device) -> Backend:
    against = ""
    for name in AUTO.get(device.type, ("reference",)):
        if (reason := BACKENDS[name].unsupported_reason(device)) is None:
            break
        against += f"; not {name}: {reason}"
    if not torch.compiler.is_compiling():
        _log_choice(name, device.type, against)
    return BACKENDS[name]


@functools.cache
def _log_choice(name: str, device_type: str, against: str) -> None:
    slow = name == "reference" and device_type != "cpu"
    level = logging.WARNING if slow else logging.INFO
    note = ", slow: it waits for the host" if slow else ""
    logging.getLogger("mxep.gemm").log(level, "backend auto: %s on %s%s%s", name, device_type, note, against)
