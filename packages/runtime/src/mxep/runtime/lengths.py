"""Batches of similar length share a record: memory is sized for a few more tokens, and each replay sets the length.

The number of tokens is rounded up to "room", the number of rows that are allocated:

    tokens                          room is a multiple of
    1 .. 511                        16
    512 .. 1023                     64
    2^n .. 2^(n+1) - 1, from 1024   2^n / 16, so at most 6.25 % more rows

Rows past the number of tokens are unspecified and not read.
"""

from collections.abc import Callable

from torch import Tensor


class Length(int):
    """An int that each replay computes anew: the call's number of tokens, or `rule` of that number.

    Only arguments of kernels and `record.fill` may be a Length. No shape and no grid may depend on one. Kernels must
    not be specialized for it (`do_not_specialize`).
    """

    rule: Callable[[int], int] | None

    def __new__(cls, tokens: int, rule: Callable[[int], int] | None = None) -> "Length":
        made = super().__new__(cls, tokens if rule is None else rule(tokens))
        made.rule = rule
        return made

    def of(self, tokens: int) -> int:
        """The number for a call with this number of tokens."""
        return tokens if self.rule is None else self.rule(tokens)


def room_for(tokens: int) -> int:
    """Number of rows to allocate in a call with this number of tokens."""
    step = 16 if tokens < 512 else 64 if tokens < 1024 else 1 << (tokens.bit_length() - 5)
    return -(-tokens // step) * step


def first_rows(x: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of x, sharing its memory. Autograd does not treat the result as a view of x."""
    if len(x) == rows:
        return x
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), (rows, *x.shape[1:]), x.stride())
