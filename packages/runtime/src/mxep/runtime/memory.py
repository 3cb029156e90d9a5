"""Where what a record makes lies when it is played: in slabs of graphs, which are cut where that lets memory go.

A graph's temporaries share a slab. Two have the same bytes only where all that uses one comes before all that uses the
other *by edges of the graph*. Results, and what several pieces use, are allocated before the first of these. One graph
of a pass would take more memory at once than the function, which drops what it has used before it makes a gradient. So
the graph is cut there.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .record import Call, Launch, Record, Step, View

ALIGNMENT = 512
"""Of memory in a slab, as torch's allocator has it."""


def pieces_of(steps: Sequence[Step]) -> list[list[int]]:
    """Places of steps: what follows each other and is no call, or one call."""
    pieces: list[list[int]] = []
    for i, step in enumerate(steps):
        is_call = isinstance(step.what, Call)
        if not pieces or is_call or isinstance(steps[pieces[-1][-1]].what, Call):
            pieces.append([])
        pieces[-1].append(i)
    return pieces


class Layout(NamedTuple):
    """Of pieces.

    slabs: by piece: where sources begin in its slab, and its bytes. makes: sources that are allocated before it. drops,
    donated: sources and arguments that nobody uses behind it. peak: the most bytes of all these at once.
    """

    slabs: list[tuple[dict[int, int], int]]
    makes: list[list[int]]
    drops: list[list[int]]
    donated: list[list[int]]
    peak: int


class Sizes:
    """What memory a record takes, by how it is cut into pieces."""

    def __init__(self, record: Record, donated: Collection[int]) -> None:
        self.record = record
        self._kept = {x.source if isinstance(x, View) else x for x in record.results if x is not None}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._bytes = {record.given + k: -(-made.nbytes // ALIGNMENT) * ALIGNMENT for k, made in enumerate(record.made)}
        """Of sources; of arguments as far as they are used."""
        for i, step in enumerate(record.steps):
            for view in _views(step):
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
        """Steps before which a large result is allocated, or behind the last that uses other large memory."""
        self.changes |= {self._last[x] + 1 for x in large if x >= record.given or x in self._donated}

    def of(self, pieces: Sequence[list[int]]) -> Layout:
        record, given = self.record, self.record.given
        piece_of = {i: p for p, steps in enumerate(pieces) for i in steps} or {0: 0}
        slabs, makes, drops, donated = [], [], [], []
        held = sum(self._bytes[i] for i in self._donated)
        peak = 0
        for p, steps in enumerate(pieces):
            ours, begins, ends = [], [], []
            for k, made in enumerate(record.made):
                source = given + k
                if source not in self._first:
                    continue
                first, last = piece_of[self._first[source]], piece_of[self._last[source]]
                if first == last == p and source not in self._kept and made.by < 0:
                    ours.append(k)
                    continue
                if first == p:
                    held += self._bytes[source]
                    begins += [k] * (made.by < 0)
                if last == p and source not in self._kept:
                    ends.append(k)
            slabs.append(packed(record, steps, ours))
            makes.append(begins)
            drops.append(ends)
            donated.append([i for i in self._donated if piece_of[self._last[i]] == p])
            peak = max(peak, held + slabs[-1][1])
            held -= sum(self._bytes[given + k] for k in ends) + sum(self._bytes[i] for i in donated[-1])
        return Layout(slabs, makes, drops, donated, peak)

    def called(self) -> int:
        """The peak of the function, which drops memory after each step."""
        return self.of([[i] for i in range(len(self.record.steps))]).peak


MOST_CUTS = 4
"""Of a graph, each of which costs a launch."""
CLOSE = 1.02
"""A peak of memory within this factor of the function's is not cut for."""
SMALL = 8 << 20
"""Bytes above the function's peak that are not, either."""


def cut(sizes: Sizes, pieces: list[list[int]]) -> list[list[int]]:
    """Cut where what is dropped before makes room for what is made behind, if the peak is far above the function's."""
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


def packed(record: Record, steps: Sequence[int], sources: Sequence[int]) -> tuple[dict[int, int], int]:
    """Where in a slab each source of a piece begins, and the slab's bytes.

    Two share bytes only where each step that uses one is before each that uses the other, by edges of the graph.
    """
    before: dict[int, int] = {}  # of each step, those before it, as bits
    users: dict[int, int] = dict.fromkeys(sources, 0)
    for n, i in enumerate(steps):
        before[n] = 0
        for j in record.steps[i].after:
            if j >= steps[0]:
                before[n] |= before[j - steps[0]] | 1 << (j - steps[0])
        for view in _views(record.steps[i]):
            if (k := view.source - record.given) in users:
                users[k] |= 1 << n
    # What is before all users of a source.
    earlier = {}
    for k, bits in users.items():
        common = -1
        for n in range(len(steps)):
            if bits >> n & 1:
                common &= before[n]
        earlier[k] = common
    starts: dict[int, int] = {}
    size = {k: -(-record.made[k].nbytes // ALIGNMENT) * ALIGNMENT for k in sources}
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
    """Of each source that is made and in a result: dtype, shape and strides of the tensor that is made there."""
    forms: dict[int, tuple[Any, ...]] = {}
    for step in record.steps:
        if isinstance(step.what, Call):
            forms |= {view.source - record.given: view[2:] for _, view in step.what.made}
    kept = {x.source - record.given for x in record.results if isinstance(x, View)}
    forms = {k: form for k, form in forms.items() if k in kept}
    for x in record.results:
        if isinstance(x, View) and (k := x.source - record.given) >= 0 and k not in forms:
            nbytes = record.made[k].nbytes
            whole = x.strides == _packed_strides(x.shape) and _numel(x.shape) * x.dtype.itemsize == nbytes
            forms[k] = x[2:] if whole else (torch.uint8, (nbytes,), (1,))
    return forms


def _views(step: Step) -> list[View]:
    """Of a step."""
    found: list[View] = []

    def add(x: Any) -> None:
        if isinstance(x, View):
            found.append(x)
        elif hasattr(x, "for_triton"):
            found.append(x.base)

    match step.what:
        case Launch(args=args):
            for x in args:
                add(x)
        case Call(args=args, kwargs=kwargs, made=made):
            for x in tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, View)):
                add(x)
            found += [view for _, view in made]
        case what:
            found += [x for x in what if isinstance(x, View)]
    return found


def nbytes_of(view: View) -> int:
    return _numel(view.shape) * view.dtype.itemsize


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """As torch gives a new tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
