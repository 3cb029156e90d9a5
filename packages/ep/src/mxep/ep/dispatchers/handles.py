"""Handles of exchanges, in flight or over."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Handle(Protocol[_T_co]):
    """An exchange in flight."""

    def wait(self) -> _T_co:
        """Return its result, for the current stream. The host does not wait. Call it once."""


class Done(NamedTuple, Generic[_T]):
    """A handle of an exchange that is over."""

    result: _T

    def wait(self) -> _T:
        return self.result


class Later(Generic[_T]):
    """A handle that runs the last steps of its exchange in ``wait``, then frees their tensors. Call it once."""

    def __init__(self, finish: Callable[[], _T]) -> None:
        self._steps = [finish]

    def wait(self) -> _T:
        return self._steps.pop()()
