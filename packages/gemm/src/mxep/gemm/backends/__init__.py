"""Backends: who multiplies. Each is a file; `select` picks by name or, for "auto", by device.

reference   fp32 accumulation group by group, a loop on the host: the definition, for any device, fast on CPUs
dequant     dequantize to bf16, then torch's grouped mm: any device, no host sync
"""

import functools
import logging
from collections.abc import Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from mxep.gemm.backends.dequant import Dequant
from mxep.gemm.backends.reference import Reference
from mxep.gemm.recipe import Recipe

__all__ = ["AUTO", "BACKENDS", "Backend", "select"]


class Backend(Protocol):
    """Three products over ragged groups of rows: rows group_ends[g-1] .. group_ends[g] - 1 are of group g.

    Operands are quantized as the recipe says: MXTensor, or plain bf16 / fp32. Activations and gradients are blocked
    along their rows (maybe indexed: bytes still in receive slots); weights along the contraction, or in tiles.
    Rows past group_ends[-1] (int32, on the device) are not read; in results they are unspecified.
    Only reference waits for the host.
    """

    @property
    def name(self) -> str:
        """What users pick it by."""
        ...

    def why_not(self, device: torch.device) -> str | None:
        """None if it runs on `device`, else the reason why not, as the end of a sentence."""
        ...

    def forward(
        self, a: Tensor, w: Tensor, group_ends: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """a (M, K), w (G, N, K) blocked along K -> (M, N): a[rows of g] @ w[g].T + bias[g]. bias: (G, N) or None."""
        ...

    def dgrad(self, dy: Tensor, w: Tensor, group_ends: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """dy (M, N), w (G, N, K) blocked along N -> (M, K): dy[rows of g] @ w[g]."""
        ...

    def wgrad(self, dy: Tensor, a: Tensor, group_ends: Tensor, *, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """dy (M, N), a (M, K), both blocked along their rows -> (G, N, K): dy[rows of g].T @ a[rows of g], 0 if empty.

        How row-blocked codes become operands that contract over rows is the backend's business; `recipe.along_tokens`
        is the definition.
        """
        ...


BACKENDS: Final[Mapping[str, Backend]] = {backend.name: backend for backend in (Reference(), Dequant())}
"""All backends by name."""

AUTO: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("reference",), "cuda": ("dequant",)}
"""What "auto" tries on a device type, best first; the first that can run is taken."""


def select(backend: str | Backend, device: torch.device) -> Backend:
    """The backend called so, or the best for `device` if "auto" (logged once per process); a Backend passes through.

    ValueError for a name that is none; RuntimeError, with the reason, if it cannot run on `device`.
    """
    if backend == "auto":
        candidates = AUTO.get(device.type, ("reference",))
        backend = next((name for name in candidates if BACKENDS[name].why_not(device) is None), candidates[0])
        _log_choice(backend, device.type)
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise ValueError(f"backend: got {backend!r}, want auto, {', '.join(BACKENDS)} or a Backend")
        backend = BACKENDS[backend]
    if (reason := backend.why_not(device)) is not None:
        raise RuntimeError(f"backend {backend.name!r} cannot run on {device}: {reason}")
    return backend


@functools.cache
def _log_choice(name: str, device_type: str) -> None:
    logging.getLogger("mxep.gemm").info("backend auto: %s on %s", name, device_type)
