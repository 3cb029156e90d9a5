"""Plan the memory of a record: one slab per graph for temporaries, and cuts that keep the peak low.

Two temporaries share bytes of a slab only if every user of one precedes every user of the other by edges of the graph.
Results are allocated before the first graph that uses them, and so is memory that several graphs use. A pass in one
graph would hold temporaries and gradients at once. The function frees temporaries before it allocates a gradient. So
the graph is cut at such points until its peak is close to the function's.
"""

import math
from collections.abc import Collection, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .record import Call, Launch, Record, Step, View

ALIGNMENT = 512
"""Alignment in bytes of memory in a slab, equal to that of torch's allocator."""


def pieces_of(steps: Sequence[Step]) -> list[list[int]]:
    """Indices of steps by piece. A torch op is a piece of its own; other consecutive steps form one."""
    pieces: list[list[int]] = []
    for i, step in enumerate(steps):
        is_call = isinstance(step.what, Call)
        if not pieces or is_call or isinstance(steps[pieces[-1][-1]].what, Call):
            pieces.append([])
        pieces[-1].append(i)
    return pieces


class Layout(NamedTuple):
    """Memory of each piece.

    Attributes:
        slabs: offset of each source in the piece's slab, and the slab's bytes. makes: sources allocated before it.
        drops, donated: sources and arguments that are free after it. peak: most bytes alive at once, over all pieces.
    """

    slabs: list[tuple[dict[int, int], int]]
    makes: list[list[int]]
    drops: list[list[int]]
    donated: list[list[int]]
    peak: int


class Sizes:
    """Computes the memory that a record takes for a given cut into pieces."""

    def __init__(self, record: Record, donated: Collection[int]) -> None:
        self.record = record
        self._kept = {x.source if isinstance(x, View) else x for x in record.results if x is not None}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._bytes = {record.given + k: _aligned(made.nbytes) for k, made in enumerate(record.made)}
        """Bytes of each source. An argument counts the bytes that the steps use."""
        self._users: dict[int, list[int]] = {}
        """Steps that use each source."""
        self._packed: dict[tuple[int, ...], tuple[dict[int, int], int]] = {}
        """Results of `packed`, by piece: most pieces of one cut are those of the next."""
        for i, step in enumerate(record.steps):
            for view in _views(step):
                self._users.setdefault(view.source, []).append(i)
                self._first.setdefault(view.source, i)
                self._last[view.source] = i
                if view.source < record.given:
                    nbytes = view.offset + nbytes_of(view)
                    self._bytes[view.source] = max(nbytes, self._bytes.get(view.source, 0))
        for source in self._kept:
            self._first.setdefault(source, 0)
            self._last.setdefault(source, 0)
        given = [i for i in self._last if i in donated and i < record.given]
        self._donated = [i for i in given if i not in self._kept and i not in record.written]
        large = {source for source, nbytes in self._bytes.items() if nbytes >= SMALL and source in self._last}
        self.changes = {self._first[source] for source in large & self._kept}
        """Candidate cuts: steps before which a large result is allocated, or large memory has become free."""
        self.changes |= {self._last[x] + 1 for x in large if x >= record.given or x in self._donated}

    def of(self, pieces: Sequence[list[int]]) -> Layout:
        record, given = self.record, self.record.given
        piece_of = {i: p for p, steps in enumerate(pieces) for i in steps} or {0: 0}
        ours, begins, ends = ([list[int]() for _ in pieces or [[]]] for _ in range(3))
        for k, made in enumerate(record.made):
            source = given + k
            if source not in self._first:
                continue
            first, last = piece_of[self._first[source]], piece_of[self._last[source]]
            if first == last and source not in self._kept and made.by < 0:
                ours[first].append(k)
                continue
            begins[first].append(k)
            if source not in self._kept:
                ends[last].append(k)
        slabs, makes, donated = [], [], []
        held = sum(self._bytes[i] for i in self._donated)
        peak = 0
        for p, steps in enumerate(pieces):
            key = steps[0], steps[-1], *ours[p]
            if key not in self._packed:
                self._packed[key] = packed(record, steps, ours[p], self._users)
            slabs.append(self._packed[key])
            makes.append([k for k in begins[p] if record.made[k].by < 0])
            donated.append([i for i in self._donated if piece_of[self._last[i]] == p])
            held += sum(self._bytes[given + k] for k in begins[p])
            peak = max(peak, held + slabs[-1][1])
            held -= sum(self._bytes[given + k] for k in ends[p]) + sum(self._bytes[i] for i in donated[-1])
        return Layout(slabs, makes, ends, donated, peak)

    def called(self) -> int:
        """Peak of the function itself, which frees memory after each step."""
        return self.of([[i] for i in range(len(self.record.steps))]).peak


MOST_CUTS = 4
"""Most cuts of a record. Each costs one more graph launch."""
CLOSE = 1.02
"""A peak within this factor of the function's needs no cut."""
SMALL = 8 << 20
"""A peak this many bytes above the function's needs no cut. Smaller allocations are no candidates."""


def cut(sizes: Sizes, pieces: list[list[int]]) -> list[list[int]]:
    """Cut greedily until the peak is close to the function's, or no cut lowers it."""
    wanted = sizes.called()
    wanted = max(int(CLOSE * wanted), wanted + SMALL)
    peak = sizes.of(pieces).peak
    for _ in range(MOST_CUTS):
        if peak <= wanted:
            break
        tried = [
            [*pieces[:p], steps[:i], steps[i:], *pieces[p + 1 :]]
            for p, steps in enumerate(pieces)
            for i in range(1, len(steps))
            if steps[i] in sizes.changes
        ]
        best = min(tried, key=lambda each: sizes.of(each).peak, default=pieces)
        found = sizes.of(best).peak
        if found >= peak:
            break
        pieces, peak = best, found
    return pieces


def packed(
    record: Record, steps: Sequence[int], sources: Sequence[int], users_of: dict[int, list[int]]
) -> tuple[dict[int, int], int]:
    """Offset in a slab of each source of a piece, and the slab's bytes. users_of: steps of each argument and source.

    Two sources share bytes only if each user of one precedes each user of the other by edges of the graph.
    """
    first = steps[0] if steps else 0
    users = {k: sum({1 << (i - first) for i in users_of[record.given + k]}) for k in sources}  # sets of steps, as bits
    before: list[int] = []  # of each step, those before it
    for i in steps:
        after = [j - first for j in record.steps[i].after if j >= first]
        before.append(reduce(or_, [before[n] | 1 << n for n in after], 0))
    # Steps that precede every user of a source.
    earlier = {k: reduce(and_, [b for n, b in enumerate(before) if bits >> n & 1], -1) for k, bits in users.items()}
    starts: dict[int, int] = {}
    size = {k: _aligned(record.made[k].nbytes) for k in sources}
    for k in sorted(sources, key=lambda k: -size[k]):
        taken = sorted(
            (starts[other], starts[other] + size[other])
            for other in starts
            if users[other] & ~earlier[k] and users[k] & ~earlier[other]
        )
        start = 0
        for begin, end in taken:
            if start + size[k] <= begin:
                break
            start = max(start, end)
        starts[k] = start
    return starts, max((starts[k] + size[k] for k in sources), default=0)


def forms_of(record: Record) -> dict[int, tuple[Any, ...]]:
    """(dtype, shape, strides) of the allocation of each source that a result lies in."""
    forms: dict[int, tuple[Any, ...]] = {}
    for step in record.steps:
        if isinstance(step.what, Call):
            forms |= {view.source - record.given: view[2:] for _, view in step.what.made}
    kept = {x.source - record.given for x in record.results if isinstance(x, View)}
    forms = {k: form for k, form in forms.items() if k in kept}
    for x in record.results:
        if isinstance(x, View) and (k := x.source - record.given) >= 0 and k not in forms:
            nbytes = record.made[k].nbytes
            whole = _is_contiguous(x) and nbytes_of(x) == nbytes
            forms[k] = x[2:] if whole else (torch.uint8, (nbytes,), (1,))
    return forms


def _views(step: Step) -> list[View]:
    """The views that a step uses."""
    match step.what:
        case Launch(args=args):
            used = [x.base if hasattr(x, "for_triton") else x for x in args]
        case Call(args=args, kwargs=kwargs, made=made):
            leaves = tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, View))
            used = [*leaves, *[view for _, view in made]]
        case what:
            used = list(what)
    return [x for x in used if isinstance(x, View)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def nbytes_of(view: View) -> int:
    return math.prod(view.shape) * view.dtype.itemsize


def _is_contiguous(view: View) -> bool:
    return view.strides == tuple(math.prod(max(n, 1) for n in view.shape[i + 1 :]) for i in range(len(view.shape)))
