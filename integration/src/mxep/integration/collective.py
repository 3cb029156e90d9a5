"""What ranks exchange through the host."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def all_gather(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective over the default group."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
