"""Split the nested arguments and results of replayed functions into tensors and a hashable form, and rebuild them.

    take_apart(x)          returns the plain tensors of x, in order, and its form: a hashable description of the rest
    build(form, tensors)   rebuilds x with other tensors

An "object of tensors" is a tensor, None, or a tuple, named tuple, list or `Bundle` of such objects. Any other value in
it is part of the form.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

Form = Any
"""`Tensor` for a tensor, None, (class, forms of its fields), or (class, value) for any other value."""


class Bundle:
    """Base class of frozen dataclasses whose fields are objects of tensors."""

    field_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.field_names = *cls.field_names, *cls.__annotations__


class Operands(Bundle):
    """A bundle that is owned by the replayed function it is passed to. The function may release its fields early.

    After a replay all fields are None.
    """

    def release(self, *names: str) -> None:
        """Set fields to None, so that later allocations can use their memory."""
        if not torch.compiler.is_compiling():  # compiled code frees memory by itself
            for name in names:
                self.__dict__[name] = None  # plain assignment would raise, because the dataclass is frozen


_parts_of: dict[type, Any] = {}
"""Registered class -> its parts class."""
_parts_classes: set[type] = set()


def register_parts(parts: type, whole: type) -> None:
    """Let replayed functions take and return objects of class `whole`. Their callers pass and receive `parts` instead.

    parts: a named tuple class. `parts.of(x)` takes an object x of class `whole` apart. `join()` of the result rebuilds
        x.
    """
    _parts_of[whole] = parts
    _parts_classes.add(parts)


def as_parts(x: Any) -> Any:
    """x with its registered objects replaced by their parts."""
    return _mapped(x, lambda x: _parts_of[type(x)].of(x) if type(x) in _parts_of else x)


def as_whole(x: Any) -> Any:
    """The inverse of `as_parts`. Bundles that contain parts are changed in place."""
    return _mapped(x, lambda x: x.join() if type(x) in _parts_classes else x)


def _mapped(x: Any, convert: Callable[[Any], Any]) -> Any:
    found = convert(x)
    if found is not x:
        return found
    if isinstance(x, tuple | list):
        values = [_mapped(each, convert) for each in x]
        return x if all(map(operator.is_, values, x)) else _made(type(x), values)
    if isinstance(x, Bundle):
        fields = [getattr(x, name) for name in x.field_names]
        values = [_mapped(each, convert) for each in fields]
        if all(map(operator.is_, values, fields)):
            return x
        if torch.compiler.is_compiling():
            return type(x)(**dict(zip(x.field_names, values)))
        x.__dict__.update(zip(x.field_names, values))
    return x


def take_apart(x: Any) -> tuple[list[Tensor], Form]:
    """The tensors of x, and its form."""
    tensors: list[Tensor] = []
    return tensors, take(x, tensors)


def take(x: Any, tensors: list[Tensor], classes: list[type] | None = None) -> Form:
    """Returns the form of x. Appends its tensors to `tensors`, and the types of its other values to `classes`."""
    kind: Any = type(x)
    if kind is Tensor or kind is Parameter:
        tensors.append(x)
        return Tensor
    if x is None:
        return None
    if issubclass(kind, Bundle):
        if (known := x.__dict__.get(_TAKEN)) is not None:
            tensors += known[0]
            return known[1]
        return (kind, *[take(getattr(x, name), tensors, classes) for name in kind.field_names])
    if isinstance(x, Tensor):
        tensors.append(x)
        return Tensor
    if isinstance(x, tuple | list):
        return (kind, *[take(each, tensors, classes) for each in x])
    if classes is not None:
        classes.append(kind)
    # The class is part of the form because 1 == True == 1.0, and floats are in hex because 0.0 == -0.0.
    return kind, x.hex() if kind is float else x


_TAKEN = "_taken"
"""Key in a bundle's `__dict__`: what `remember_form` keeps."""


def remember_form(x: Bundle) -> None:
    """Keep x's tensors and form in it, so that `take` is faster.

    x must not change. Its other values must be numbers and dtypes, because `take` no longer reports their classes.
    """
    x.__dict__[_TAKEN] = take_apart(x)


def build(form: Form, tensors: Iterator[Tensor]) -> Any:
    """Build the object of this form, with its tensors taken from the iterator."""
    if form is Tensor:
        return next(tensors)
    if form is None:
        return None
    kind, *parts = form
    if issubclass(kind, Bundle):
        fields = dict(zip(kind.field_names, [build(part, tensors) for part in parts]))
        if torch.compiler.is_compiling():
            return kind(**fields)
        made = object.__new__(kind)  # faster than __init__
        made.__dict__.update(fields)
        return made
    if issubclass(kind, tuple | list):
        return _made(kind, [build(part, tensors) for part in parts])
    return float.fromhex(parts[0]) if kind is float else parts[0]


def _made(kind: Any, values: list[Any]) -> Any:
    return kind(values) if kind is tuple or kind is list else kind(*values)


def count(form: Form) -> int:
    """Number of tensors in an object of this form."""
    if form is Tensor:
        return 1
    if form is None:
        return 0
    kind, *parts = form
    return sum(map(count, parts)) if issubclass(kind, Bundle | tuple | list) else 0


def tensors_in(x: Any) -> list[Tensor]:
    """The plain tensors of x, including those in parts and in registered objects."""
    return take_apart(as_parts(x))[0]
