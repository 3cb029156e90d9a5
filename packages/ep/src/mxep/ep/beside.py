"""Work beside a move: on the device's side stream, from when the move has begun, forward and backward.

    layer        quantize, start_send ┬ weights, wait | experts | rows home ┬ +
    side stream                       └ fn(x) ──────────────────────────────┘

    layer        quantize, start_resend, weights ┬ wait | experts' | dx home ┬ +
    side stream                                  └ fn'(d_out) ───────────────┘

Begun before the move, fn would take the multiprocessors that the move needs, and the layer would wait for both.

Autograd runs a node on the stream of its forward, and of the nodes that can run the one that was made last: fn's nodes
are made before the layer's, so that the host gives the layer's backward out first, and they wait for its move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Beside:
    """``fn(x)`` beside the moves of a layer that is called before :meth:`join`, on CUDA.

    The layer calls :meth:`send_begun` in forward, before it makes autograd nodes, and records ``resent`` in backward.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._fn, self._x = fn, x
        self._out: Tensor | None = None
        self.resent = torch.cuda.Event()
        self._grad = torch.is_grad_enabled()  # a checkpoint of the layer alone may turn it off there

    def send_begun(self) -> None:
        with torch.set_grad_enabled(self._grad):
            side = _side_stream(self._x.device)
            x = _Fork.apply(self._x, side)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                self._out = _WaitInBackward.apply(self._fn(x), self.resent)  # type: ignore[no-untyped-call]

    def join(self) -> Tensor:
        """fn's result, which the current stream waits for."""
        out, self._out = self._out, None  # whose graph would keep it, and be kept
        assert out is not None, "the layer has begun no move"
        here = torch.cuda.current_stream(out.device)
        here.wait_stream(_side_stream(out.device))
        out.record_stream(here)
        return out


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Fork(torch.autograd.Function):
    """x for the side stream. Its backward comes after all of fn's: who waits for dx, as FSDP does before it reduces
    the gradients of fn's weights, waits for those too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: torch.cuda.Stream) -> Tensor:
        ctx.side = side
        side.wait_stream(torch.cuda.current_stream(x.device))
        x.record_stream(side)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        torch.cuda.current_stream(dx.device).wait_stream(ctx.side)
        return dx, None


class _WaitInBackward(torch.autograd.Function):
    """Nothing in forward; in backward an event, if it has been recorded."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, event: torch.cuda.Event) -> Tensor:
        ctx.event = event
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        torch.cuda.current_stream(d_out.device).wait_event(ctx.event)
        return d_out, None
