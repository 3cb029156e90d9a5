"""For tests of kernels: what a launcher allocates holds garbage, so a byte that no kernel writes shows.

Import the fixture into a test module, and it holds for all tests there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

POISON = 0xA5


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_allocations(monkeypatch, POISON)


def fill_allocations(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = empty(*args, **kwargs)
        if result.numel() and not result.is_meta:
            result.view(torch.uint8).fill_(byte)
        return result

    def new_empty(x: Tensor, *shape: Any, **how: Any) -> Tensor:
        return poisoned(*shape, **{"dtype": x.dtype, "device": x.device} | how)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
