"""Plan the memory of a record: one slab per graph for temporaries, and cuts that keep the peak low.

A piece is a run of steps that become one CUDA graph, or a single torch op. A slab is one allocation that holds all
temporaries of a piece. Two temporaries share bytes of it only if every step that uses one precedes every step that uses
the other, by edges of the graph.

Results, and memory that several pieces use, are allocated before the first piece that uses them. So with a single graph
the temporaries and all gradients would be in memory at the same time, while the function frees temporaries before it
allocates a gradient. At such points the record is cut into more graphs, until its peak is close to the function's.
"""

import bisect
import math
from collections.abc import Collection, Hashable, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .record import Call, Launch, Record, Step, View

ALIGNMENT = 512
"""Alignment of memory in a slab, in bytes, as in torch's allocator."""


def pieces_of(steps: Sequence[Step]) -> list[list[int]]:
    """Split steps into pieces: each torch op alone, and runs of other steps. Returns the step indices of each piece."""
    pieces: list[list[int]] = []
    for i, step in enumerate(steps):
        is_call = isinstance(step.what, Call)
        if not pieces or is_call or isinstance(steps[pieces[-1][-1]].what, Call):
            pieces.append([])
        pieces[-1].append(i)
    return pieces


class Layout(NamedTuple):
    """Memory plan; lists have one entry per piece. Sources here are indices of `Record.made`.

    slabs: (offset of each source in the piece's slab, bytes of the slab).
    makes: sources that are allocated by themselves before the piece.
    drops: sources that are freed after the piece.
    donated: arguments that are freed after the piece.
    peak: maximum bytes in memory at the same time.
    """

    slabs: list[tuple[dict[int, int], int]]
    makes: list[list[int]]
    drops: list[list[int]]
    donated: list[list[int]]
    peak: int


class Sizes:
    """Computes the memory that a record needs for given pieces."""

    def __init__(self, record: Record, donated: Collection[int]) -> None:
        self.record = record
        self._kept = {x.source if isinstance(x, View) else x for x in record.results if x is not None}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._made = {k: -(-made.nbytes // ALIGNMENT) * ALIGNMENT for k, made in enumerate(record.made)}
        self._bytes = {record.given + k: nbytes for k, nbytes in self._made.items()}
        """Bytes of each source. For an argument, the bytes up to the last one that the steps use."""
        users: dict[int, list[int]] = {}
        self._packed: dict[tuple[int, ...], tuple[dict[int, int], int]] = {}
        """Cache of `packed`: sources -> result. When `cut` tries another cut, most pieces stay the same."""
        for i, step in enumerate(record.steps):
            for view in _views(step):
                users.setdefault(view.source, []).append(i)
                self._first.setdefault(view.source, i)
                self._last[view.source] = i
                if view.source < record.given:
                    nbytes = view.offset + nbytes_of(view)
                    self._bytes[view.source] = max(nbytes, self._bytes.get(view.source, 0))
        self._orders = order_of(record, users)
        for source in self._kept:
            self._first.setdefault(source, 0)
            self._last.setdefault(source, 0)
        given = [i for i in self._last if i in donated and i < record.given]
        self._donated = [i for i in given if i not in self._kept and i not in record.written]
        large = {source for source, nbytes in self._bytes.items() if nbytes >= SMALL and source in self._last}
        self.changes = {self._first[source] for source in large & self._kept}
        """Steps before which a cut may help, because a large result is allocated or large memory is freed there."""
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
        for p in range(len(pieces)):
            key = tuple(ours[p])
            if key not in self._packed:
                self._packed[key] = packed(key, self._made, self._orders)
            slabs.append(self._packed[key])
            makes.append([k for k in begins[p] if record.made[k].by < 0])
            donated.append([i for i in self._donated if piece_of[self._last[i]] == p])
            held += sum(self._bytes[given + k] for k in begins[p])
            peak = max(peak, held + slabs[-1][1])
            held -= sum(self._bytes[given + k] for k in ends[p]) + sum(self._bytes[i] for i in donated[-1])
        return Layout(slabs, makes, ends, donated, peak)

    def called(self) -> int:
        """Peak bytes of the function itself, which frees memory after each step."""
        return self.of([[i] for i in range(len(self.record.steps))]).peak


MOST_CUTS = 4
"""Maximum cuts of a record. Each cut costs one more graph launch."""
CLOSE = 1.02
"""A record is not cut if its peak is at most the function's peak times this."""
SMALL = 8 << 20
"""Bytes. A record is not cut if its peak exceeds the function's peak by at most this. No cut is tried at the allocation
of less memory than this."""


_cuts: dict[Hashable, tuple[list[list[int]], float]] = {}
"""Kernels of a record -> (pieces of the last cut, ratio of its peak to the wanted peak). Records with the same kernels
but other sizes try this cut first, because a search takes as long as recording."""
MOST_CUTS_KEPT = 1024


def cut(sizes: Sizes, pieces: list[list[int]]) -> list[list[int]]:
    """Cut pieces one by one, the best cut first, until the peak is close to the function's or no cut lowers it."""
    wanted = sizes.called()
    wanted = max(int(CLOSE * wanted), wanted + SMALL)
    steps = sizes.record.steps
    key = tuple(id(step.what.kernel) if isinstance(step.what, Launch) else type(step.what) for step in steps)
    before, ratio = _cuts.get(key, (pieces, 1.0))
    if sizes.of(before).peak <= max(1.0, ratio) * wanted:
        return before
    pieces = _cut(sizes, pieces, wanted)
    if len(_cuts) >= MOST_CUTS_KEPT:
        _cuts.clear()
    _cuts[key] = pieces, sizes.of(pieces).peak / wanted
    return pieces


def _cut(sizes: Sizes, pieces: list[list[int]], wanted: int) -> list[list[int]]:
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


class Order(NamedTuple):
    """Order of a source among the steps. Both fields are bit masks of steps.

    users: steps that use the source. earlier: steps that precede all its users.
    """

    users: int
    earlier: int


def order_of(record: Record, users_of: dict[int, list[int]]) -> dict[int, Order]:
    """Index in `Record.made` -> Order. users_of: source -> indices of the steps that use it."""
    before: list[int] = []  # for each step, a bit mask of the steps that precede it
    for step in record.steps:
        before.append(reduce(or_, [before[j] | 1 << j for j in step.after], 0))
    return {
        k: Order(reduce(or_, [1 << i for i in users]), reduce(and_, [before[i] for i in users]))
        for k in range(len(record.made))
        if (users := users_of.get(record.given + k))
    }


def packed(sources: Sequence[int], nbytes: dict[int, int], orders: dict[int, Order]) -> tuple[dict[int, int], int]:
    """Place the sources of a piece in its slab. nbytes: bytes of each source, a multiple of ALIGNMENT.

    Returns a dict with the offset of each source, and the bytes of the slab.
    """
    placed: list[tuple[int, int, Order]] = []
    starts: dict[int, int] = {}
    for k in sorted(sources, key=lambda k: -nbytes[k]):
        (users, earlier), start, size = orders[k], 0, nbytes[k]
        for begin, end, other in placed:  # sorted by begin
            if users & ~other.earlier and other.users & ~earlier:
                if start + size <= begin:
                    break
                start = max(start, end)
        starts[k] = start
        bisect.insort(placed, (start, start + size, orders[k]))
    return starts, max((end for _, end, _ in placed), default=0)


def forms_of(record: Record) -> dict[int, tuple[Any, ...]]:
    """Index in `Record.made` -> (dtype, shape, strides) to allocate, for each source that holds a result."""
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
    match step.what:
        case Launch(args=args):
            used = [x.base if hasattr(x, "for_triton") else x for x in args]
        case Call(args=args, kwargs=kwargs, made=made):
            leaves = tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, View))
            used = [*leaves, *[view for _, view in made]]
        case what:
            used = list(what)
    return [x for x in used if isinstance(x, View)]


def nbytes_of(view: View) -> int:
    return math.prod(view.shape) * view.dtype.itemsize


def _is_contiguous(view: View) -> bool:
    return view.strides == tuple(math.prod(max(n, 1) for n in view.shape[i + 1 :]) for i in range(len(view.shape)))
