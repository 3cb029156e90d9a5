"""Batches of similar length share a record: memory is sized for a few more tokens, and each replay sets the length.

    tokens                          room       extra rows or share, at most
    1 .. 511                        steps of   16
    512 .. 1023                     steps of   64
    2^n .. 2^(n+1) - 1, from 1024   steps of   2^n / 16        6.25 %

Tensors that a call allocates for its tokens have the room's size. Rows past the tokens are unspecified and not read.
"""

from collections.abc import Callable

from torch import Tensor


class Length(int):
    """A kernel argument that each replay sets: the call's number of tokens, or a number that `rule` computes from it.

    No kernel may be specialized for a Length. Only kernel arguments and `record.fill` may depend on one, no shape and
    no grid.
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
    """Rows that memory is sized for in a call with this number of tokens."""
    step = 16 if tokens < 512 else 64 if tokens < 1024 else 1 << (tokens.bit_length() - 5)
    return -(-tokens // step) * step


def first_rows(x: Tensor, rows: int) -> Tensor:
    """The first rows of x, in its memory. For autograd they are no view of x."""
    if len(x) == rows:
        return x
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), (rows, *x.shape[1:]), x.stride())
