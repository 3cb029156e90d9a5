"""Exchanges over NVSHMEM, by puts to processes instead of stores to addresses. Only the package itself imports it.

It has run between the GPUs of one host. Between hosts it never ran: unproven.
"""

from .transport import NvshmemTransport, StagedBuffer

__all__ = ["NvshmemTransport", "StagedBuffer"]
