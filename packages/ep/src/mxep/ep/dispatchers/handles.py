"""Handles of exchanges in flight, and of those that are over."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Handle(Protocol[_T_co]):
    """An exchange in flight."""

    def wait(self) -> _T_co:
        """Its result, for the current stream; the host does not wait. To be called once."""


class Done(NamedTuple, Generic[_T]):
    """A handle of an exchange that is over."""

    result: _T

    def wait(self) -> _T:
        return self.result


class Later(Generic[_T]):
    """A handle of an exchange whose last steps ``wait``, to be called once, makes. What they held goes then."""

    def __init__(self, finish: Callable[[], _T]) -> None:
        self._steps = [finish]

    def wait(self) -> _T:
        return self._steps.pop()()
