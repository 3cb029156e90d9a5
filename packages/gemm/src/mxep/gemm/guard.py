"""The guard: does a product of folded operands still stand for the exact MX product? Found out on the device.

Folding (`mxep.quant.fold`) loses bits of elements far below their row's largest. That does harm only where the other
operand is large just there: where magnitudes are anti-aligned along the contraction by 12 binades or more. So, a call:

    trigger    the spread of exponents of any row of a or w is above SPREAD_LIMIT; if not, nothing else is computed
    moments    of each column k of w[g], over its N rows: mean b[k] and variance vb[k] of the elements,
               e[k] and ve[k] of the errors of their fold, w_folded - w
    check      of each row of a, with da = a_folded - a (sums over k):
               signal = (sum a b)^2  + sum a^2 vb
               noise  = (sum da b + a_folded e)^2 + sum da^2 vb + sum a_folded^2 ve
               predicted SNR = 10 log10(signal / noise) dB, of the row's N results against the exact MX product

which is what they are if w's columns are independent but for their means (same-sign data has large ones).
Example: a block of a is 2^20 above the rest, w there 2^-20 of the rest: all that made the result is flushed,
noise = signal, 0 dB.
An operand that was quantized to one scale a row at once has no exact MX twin. It is taken as exact, and its error as
step^2 / 12 for each subnormal code (and zero); without a spread of it every call is checked.
Rows and weights that are NaN as a whole are left out: the exact product is NaN there, too.

Only forward and dgrad: wgrad contracts tokens. M rows (capacity), N out features, K the contraction, G groups.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mxep.gemm.guard_ops import check_op, moments_op, trigger_op
from mxep.quant import MXTensor

SPREAD_LIMIT = 8
"""Binades of spread that are harmless: the worst product seen there stood at 56.7 dB."""

Action = Literal["count", "warn", "exact"]


@dataclass(frozen=True)
class GuardReport:
    """What a guard has counted. calls: inspected products; triggered: those with a spread to look into (or none given);
    failed: those with rows predicted under min_snr_db; failed_rows: such rows; worst_db: the lowest prediction."""

    calls: int
    triggered: int
    failed: int
    failed_rows: int
    worst_db: float


class Guard:
    """Counts on the device where folding does harm.

    action: "count"; "warn": also a warning naming the product, at the next call or `read` after the device has found
        it; "exact": the backend computes the failed calls again, exactly, on the device's decision.
    min_snr_db: rows predicted below are failures, against the exact MX product. MX itself stands near 28 dB.

    Counters live on the device from a product's first call on: call once before capturing a CUDA graph (no warnings
    come out of one). Copies and pickles start counting anew. Not for several threads at once.
    """

    def __init__(self, action: Action = "count", *, min_snr_db: float = 40.0) -> None:
        if action not in ("count", "warn", "exact"):
            raise ValueError(f"action: got {action!r}, want count, warn or exact")
        if not math.isfinite(min_snr_db):
            raise ValueError(f"min_snr_db: got {min_snr_db}, want a finite number of dB")
        self.action: Action = action
        self.min_snr_db = min_snr_db
        self._counters: dict[tuple[str, torch.device], Tensor] = {}
        self._copies: dict[tuple[str, torch.device], tuple[Tensor, torch.cuda.Event | None]] = {}
        self._warned: dict[tuple[str, torch.device], int] = {}

    def inspect(
        self,
        a: MXTensor,
        a_folded: MXTensor,
        spread_a: Tensor | None,
        w: MXTensor,
        w_folded: MXTensor,
        spread_w: Tensor | None,
        offs: Tensor,
        *,
        product: str = "forward",
        moments: Tensor | None = None,
    ) -> Tensor:
        """() int32 on the device: 1 if a row of the product is predicted below min_snr_db, else 0. No host sync.

        a: (M, K) blocked along -1, a row index or not; a_folded: what `fold` makes of it, (M, K), one scale a row.
        w: (G, N, K) blocked along K, or tiles; w_folded the same folded. Blocked along -2 both are transposed: dgrad's
            w (G, N, K), contracted along N.
        spread_a (M,), spread_w (G, N): int32, as `fold_with_stats` gives them; None: unknown, so look at any rate.
        offs: (G,) int32, multiples of 16. product: whom to name. moments: what `weight_moments` gave for w.
        ValueError: operands that do not fit each other.
        """
        a, a_folded, w, w_folded = (_along_rows(x) for x in (a, a_folded, w, w_folded))
        _check(a, a_folded, spread_a, w, w_folded, spread_w, offs, moments)
        place = product, offs.device
        if self.action == "warn":
            self._poll(place)
        if place not in self._counters:
            self._counters[place] = torch.zeros(5, dtype=torch.int64, device=offs.device)
        counters = self._counters[place]
        fired = trigger_op(spread_a, spread_w, offs, counters, SPREAD_LIMIT)
        if moments is None:
            moments = moments_op(w.qdata, w.scale, w_folded.scale, fired)
        flag: Tensor
        flag, _ = check_op(
            *(a.qdata, a.scale, a.row_index, a_folded.scale, moments, offs, fired, counters),
            10 ** (-self.min_snr_db / 10),
        )
        if self.action == "warn":
            self._copy(place)
        return flag

    def read(self, product: str | None = None) -> GuardReport:
        """The counts, of one product or of all together; with action "warn" also warns. Here the host waits."""
        counts = {place: counters.tolist() for place, counters in self._counters.items() if product in (None, place[0])}
        if self.action == "warn":
            for place, (_, _, failed, *_) in counts.items():
                self._warn(place, failed)
        calls, triggered, failed, failed_rows = (sum(row[i] for row in counts.values()) for i in range(4))
        worst = torch.tensor(max((row[4] for row in counts.values()), default=0), dtype=torch.int32)
        return GuardReport(calls, triggered, failed, failed_rows, float(_db(worst.view(torch.float32))))

    def reset(self) -> None:
        """All counts to zero. No host sync."""
        for counters in self._counters.values():
            counters.zero_()
        self._copies.clear()
        self._warned.clear()

    def _copy(self, place: tuple[str, torch.device]) -> None:
        """Start a copy of the number of failed calls, unless one is on its way."""
        counters = self._counters[place]
        if place in self._copies or torch.compiler.is_compiling():
            return
        if counters.device.type != "cuda":
            self._copies[place] = counters[2].clone(), None
        elif not torch.cuda.is_current_stream_capturing():
            copy = torch.empty((), dtype=torch.int64, pin_memory=True)
            copy.copy_(counters[2], non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(counters.device))
            self._copies[place] = copy, event

    def _poll(self, place: tuple[str, torch.device]) -> None:
        """Warn of what the last copy says, if it has arrived; does not wait."""
        if place not in self._copies or torch.compiler.is_compiling():
            return
        copy, event = self._copies[place]
        if event is None or (not torch.cuda.is_current_stream_capturing() and event.query()):
            del self._copies[place]
            self._warn(place, int(copy))

    def _warn(self, place: tuple[str, torch.device], failed: int) -> None:
        if failed > self._warned.get(place, 0):
            self._warned[place] = failed
            warnings.warn(
                f"mxep.gemm guard: folding is predicted to leave {place[0]} under {self.min_snr_db} dB of the exact MX "
                f"product in {failed} calls so far: action='exact', or backend 'dequant' or 'triton', avoid it",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.action, self.min_snr_db)


def _rebuild(cls: type[Guard], action: Action, min_snr_db: float) -> Guard:
    return cls(action, min_snr_db=min_snr_db)


def weight_moments(w: MXTensor, w_folded: MXTensor) -> Tensor:
    """(4, G, K) fp32: what `Guard.inspect` makes of a weight at each call, to be kept while the weight is the same."""
    w, w_folded = _along_rows(w), _along_rows(w_folded)
    moments: Tensor = moments_op(w.qdata, w.scale, w_folded.scale, None)
    return moments


def predicted_snr(a: MXTensor, a_folded: MXTensor, w: MXTensor, w_folded: MXTensor, offs: Tensor) -> Tensor:
    """(M,) fp32, dB: the SNR predicted for each row; Inf where nothing is lost; unspecified past the last group.

    Arguments as for `Guard.inspect`, whatever the spreads.
    """
    a, a_folded = _along_rows(a), _along_rows(a_folded)
    _check(a, a_folded, None, _along_rows(w), _along_rows(w_folded), None, offs, None)
    fired, counters = offs.new_ones(()), offs.new_zeros(5, dtype=torch.int64)
    moments = weight_moments(w, w_folded)
    _, (noise, signal) = check_op(a.qdata, a.scale, a.row_index, a_folded.scale, moments, offs, fired, counters, 1.0)
    return _db(torch.where(signal > 0, noise / signal, 0.0))


def _db(ratio: Tensor) -> Tensor:
    """The SNR of noise / signal."""
    return -10 * torch.log10(ratio)


def _along_rows(x: MXTensor) -> MXTensor:
    """x blocked along its last axis: tiles expanded, columns transposed. Detached."""
    if not isinstance(x, MXTensor):
        raise ValueError(
            f"guard: got a {type(x).__name__}, want MXTensors, as folded and before: there is nothing to guard"
        )
    along: Any = x.detach()
    if not isinstance(x.axis, int):
        along = along.along(-1)
    transposed: MXTensor = along if along.axis == -1 else along.mT
    return transposed


def _check(
    a: MXTensor,
    a_folded: MXTensor,
    spread_a: Tensor | None,
    w: MXTensor,
    w_folded: MXTensor,
    spread_w: Tensor | None,
    offs: Tensor,
    moments: Tensor | None,
) -> None:
    if a.ndim != 2 or w.ndim != 3 or a.shape[1] != w.shape[2] or offs.shape != w.shape[:1]:
        raise ValueError(
            f"guard: got a {tuple(a.shape)}, w {tuple(w.shape)}, offs {tuple(offs.shape)}, "
            "want (M, K), (G, N, K) and (G,), K contracted: for dgrad give w as it is, blocked along N"
        )
    k = a.shape[1]
    for name, x, folded in (("a", a, a_folded), ("w", w, w_folded)):
        if folded.shape != x.shape or folded.block_size != k:
            raise ValueError(f"{name}_folded: got {folded}, want shape {tuple(x.shape)} and one scale a row: fold(...)")
        if x.block_size not in (32, k):
            raise ValueError(f"{name}: got {x}, want blocks of 32, or one scale a row")
    wanted = (
        ("spread_a", spread_a, a.shape[:1]),
        ("spread_w", spread_w, w.shape[:2]),
        ("moments", moments, (4, *w.shape[::2])),
    )
    for name, given, shape in wanted:
        dtype = torch.float32 if name == "moments" else torch.int32
        if given is not None and (given.shape != shape or given.dtype != dtype):
            raise ValueError(f"{name}: got {given.dtype} {tuple(given.shape)}, want {dtype} {tuple(shape)} or None")
    for name, other in (("w", w), ("offs", offs), ("spread_a", spread_a), ("spread_w", spread_w)):
        if other is not None and other.device != a.device:
            raise ValueError(f"{name}: got device {other.device}, want {a.device}, where a is")
