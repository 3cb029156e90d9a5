"""Exchanges over NVSHMEM, by puts to processes instead of stores to addresses. Only the package itself imports it."""

from .transport import NvshmemTransport, StagedBuffer

__all__ = ["NvshmemTransport", "StagedBuffer"]
