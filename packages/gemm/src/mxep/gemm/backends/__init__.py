"""Backends: the implementations of the GEMMs. `select` picks one by name or, for "auto", by device.

reference   the definition of results: a host loop over groups, sums in fp32. Runs on any device, fast on CPUs.
dequant     dequantizes to bf16 and calls torch's grouped mm. Runs on any device, without a host sync.
hopper      folds MX to one scale per row and multiplies on Hopper's FP8 tensor cores. "auto" picks it on Hopper.
triton      exact MX GEMMs by `tl.dot_scaled`: on Blackwell's tensor cores, in bf16 on other GPUs, interpreted on CPUs.
blackwell   torch's scaled grouped mm on Blackwell. E4M3 operands and bf16 results only. Never ran on hardware.
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
"""All backends, by name."""

AUTO: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("reference",), "cuda": ("hopper", "dequant", "reference")}
"""Backends that "auto" tries on a device type, in this order. "auto" takes the first that can run; the last always can.
"""


def select(backend: str | Backend, device: torch.device) -> Backend:
    """Return the backend of this name, or for "auto" the best one for `device`. A Backend is returned as it is.

    "auto" logs its choice once per process, with the reasons why better backends cannot run.
    Raises ValueError for an unknown name. Raises RuntimeError, with the reason, if the backend cannot run on `device`.
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
