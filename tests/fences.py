"""For tests of kernels: what torch allocates lies between fences of bytes 0xff: a kernel that writes there shows.

What is read there is NaN in any float format, and -1. With the fixture, `torch.empty`, `zeros`, `empty_like` and
`new_empty` fence what they give, and so `fenced` operands do; `fences()` tells the shapes of what was written outside.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

FENCE = 1 << 16
BYTE = 0xFF


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, ...]]]:
    """Shapes of the tensors around which a byte has changed."""
    raw = torch.empty
    fenced_bytes: list[tuple[Tensor, tuple[int, ...]]] = []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        like = raw(*args, **kwargs)
        size = like.numel() * like.element_size()
        buffer = torch.full((size + 2 * FENCE,), BYTE, dtype=torch.uint8, device=like.device)
        fenced_bytes.append((buffer, tuple(like.shape)))
        return buffer[FENCE : FENCE + size].view(like.dtype).view(like.shape)

    def broken() -> list[tuple[int, ...]]:
        return [
            shape for buffer, shape in fenced_bytes
            if (buffer[:FENCE] != BYTE).any() or (buffer[-FENCE:] != BYTE).any()
        ]  # fmt: skip

    def new_empty(x: Tensor, *shape: Any, **how: Any) -> Tensor:
        return empty(*shape, **{"dtype": x.dtype, "device": x.device} | how)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: empty(*args, **kwargs).zero_())
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x.shape, dtype=x.dtype, device=x.device))
    return broken


def fenced(x: Tensor) -> Tensor:
    """A copy of x between fences."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
