"""What folding costs a model: a report on its products, for some steps. Slow, on any device, with any backend.

    with fold_report(model) as report:
        model(x).sum().backward()
    print(report)

The hopper backend folds MX rows to one scale a row: elements far below the largest of their row lose bits. That does
harm only where the other operand is large just there, so the report has the lowest SNR of a row of results, too. With
other backends it tells what folding would do. Recorded are products of `grouped_mm`, converted modules and MoE layers.
While it is open nothing is quantized to one scale a row at once, and compiled code runs eagerly. Replayed CUDA graphs
and weights that `quantize_weights_once` has held since before are not seen.
"""

import contextlib
import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mxep.gemm.backends import Backend
from mxep.gemm.backends.base import ends
from mxep.gemm.backends.hopper import fp8_grouped_wgrad
from mxep.gemm.backends.reference import grouped_mm_reference, grouped_wgrad_reference, parts_of
from mxep.quant import MXTensor, fold_for_wgrad, fold_with_stats
from mxep.quant.replay import no_replays

HARMFUL_DB = 40.0
"""SNR of folding below which other backends are advised; MX itself stands near 28 dB."""
_WATCHED = ("forward", "dgrad", "prepare_wgrad", "quantize_weight_rowwise", "quantize_weight_colwise")


@dataclass
class FoldedProduct:
    """A product of a module (its name, or class) with a weight (G, N, K). elements: of both operands, in all calls;
    rounded: those that folding changes, flushed: to zero; spread: most binades between scales that become one;
    snr_db: the lowest of a row of results, folded against exact."""

    module: str
    weight: tuple[int, ...]
    product: str
    calls: int = 0
    elements: int = 0
    rounded: int = 0
    flushed: int = 0
    spread: int = 0
    snr_db: float = math.inf


class FoldReport(dict[tuple[str, tuple[int, ...], str], FoldedProduct]):
    """What `fold_report` gives: products by (module, weight, product). str() is a table, with advice."""

    def __str__(self) -> str:
        lines = [f"{'product':<44}  calls   rounded   flushed  spread  SNR dB  advice"]
        for p in self.values():
            rounded, flushed = (f"{count / max(p.elements, 1):.5%}" for count in (p.rounded, p.flushed))
            advice = "hopper is fine" if p.snr_db >= HARMFUL_DB else "exact: dequant or triton; on sm_100 blackwell"
            name = f"{p.module} {'x'.join(map(str, p.weight))} {p.product}"
            lines.append(f"{name:<44} {p.calls:>6} {rounded:>9} {flushed:>9} {p.spread:>7} {p.snr_db:>7.1f}  {advice}")
        return "\n".join(lines)


@contextlib.contextmanager
def fold_report(model: nn.Module | None = None) -> Iterator[FoldReport]:
    """Report on all products of MX operands of the process while it is open. model: whose names modules get."""
    report, modules, inside = FoldReport(), list[str](), threading.local()
    names = {module: name or "model" for name, module in model.named_modules()} if model else {}
    owner: dict[Any, str] = {}  # the module of what was multiplied in forward, by address

    def record(product: str, x: MXTensor, y: MXTensor, offs: Tensor | None) -> None:
        rows = list(itertools.pairwise([0, *ends(offs, x).tolist()]))
        shape = (len(rows), x.shape[1], y.shape[1]) if product == "wgrad" else tuple(y.shape)
        if product == "forward":
            owner[_address(x), shape] = owner[_address(y)] = modules[-1] if modules else ""
        module = owner.get((_address(y), shape) if product == "wgrad" else _address(y), "")
        p = report.setdefault((module, shape, product), FoldedProduct(module, shape, product))
        p.calls += 1
        for g, (start, end) in enumerate(rows):  # one by one: it takes much memory an element
            if product == "wgrad":
                _add_wgrad(p, cast(MXTensor, x[start:end]), cast(MXTensor, y[start:end]))
            else:
                w = cast(MXTensor, y[g])
                _add_product(p, cast(MXTensor, x[start:end]), cast(MXTensor, w.mT) if product == "dgrad" else w)

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(backend: Any, x: Tensor, y: Any, *args: Any, **options: Any) -> Any:
            outer, inside.name = getattr(inside, "name", None), name  # one method may call another
            try:
                if outer is None and isinstance(x, MXTensor) and isinstance(y, MXTensor):
                    with torch.no_grad():
                        record(name.removeprefix("prepare_"), x, y, args[0])
                out = method(backend, x, y, *args, **options)
            finally:
                inside.name = outer
            if name == "quantize_weight_rowwise":
                owner[_address(x)] = modules[-1] if modules else ""
            elif name == "quantize_weight_colwise":
                owner[_address(out)] = owner.get(_address(x), "")
            return out

        return run

    def left(*_: Any) -> None:
        modules.pop()

    with contextlib.ExitStack() as stack:
        stack.enter_context(no_replays())  # a graph would multiply past what is watched
        for cls in _subclasses(Backend):
            for name in vars(cls).keys() & {*_WATCHED, "wants_rowwise"}:
                found = vars(cls)[name]
                stack.callback(setattr, cls, name, found)
                setattr(cls, name, watched(name, found) if name in _WATCHED else False)
        enter = register_module_forward_pre_hook(lambda m, _: modules.append(names.get(m, type(m).__name__)))
        stack.callback(enter.remove)
        stack.callback(register_module_forward_hook(left, always_call=True).remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield report


def _address(x: Tensor) -> int:
    return (x.qdata if isinstance(x, MXTensor) else x).data_ptr()


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def _add_product(p: FoldedProduct, a: MXTensor, w: MXTensor) -> None:
    """a (M, K) x w (N, K), contracted along K."""
    w = w if w.axis == -1 else w.along(-1)
    (a_folded, of_a), (w_folded, of_w) = fold_with_stats(a), fold_with_stats(w)
    p.elements += a.numel() + w.numel()
    p.rounded += int(of_a.changed + of_w.changed)
    p.flushed += int(of_a.flushed + of_w.flushed)
    p.spread = max([p.spread, *of_a.spread.tolist(), *of_w.spread.tolist()])
    _add_snr(p, _product(a, w), _product(a_folded, w_folded))


def _add_wgrad(p: FoldedProduct, dy: MXTensor, a: MXTensor) -> None:
    """dy (M, N) and a (M, K), contracted along their rows."""
    offs = ends(None, a)
    folded = fold_for_wgrad(a, dy, offs)
    y, x = (v.dequantize(torch.float32) for v in (dy, a))
    (y_rows, of_y), (x_rows, of_x) = (fold_with_stats(v) for v in (dy, a))
    y_scale, x_scale = (rows.scale.view(torch.uint8)[:, 0].int() - 127 for rows in (y_rows, x_rows))
    behind = folded.exponent - y_scale - x_scale
    x_exponent, y_exponent = x_scale + behind // 2, y_scale + behind - behind // 2
    for values, qdata, exponent in ((x, folded.x_t, x_exponent), (y, folded.y_t, y_exponent)):
        after = torch.ldexp(qdata.T.double(), exponent.unsqueeze(1))
        p.elements += values.numel()
        p.rounded += int(((after != values) & after.isfinite()).sum())
        p.flushed += int(((after == 0) & (values != 0)).sum())
    spreads = behind[x.any(1) & y.any(1)], of_y.spread, of_x.spread
    p.spread = max([p.spread, *torch.cat(spreads).tolist()])
    exact = grouped_wgrad_reference(y, None, None, x, None, None, offs, torch.float32)
    product = torch.empty_like(exact)
    fp8_grouped_wgrad.reference(product, folded.y_t, folded.x_t, folded.exponent, folded.offs, 1.0, False)
    _add_snr(p, exact, product)
    _add_snr(p, exact.mT, product.mT)


def _product(a: MXTensor, w: MXTensor) -> Tensor:
    """(M, N) fp32."""
    out: Tensor = grouped_mm_reference(*parts_of(a), w.qdata[None], w.scale[None], None, None, torch.float32)
    return out


def _add_snr(p: FoldedProduct, exact: Tensor, folded: Tensor) -> None:
    signal, noise = (x.double().square().sum(-1).nan_to_num() for x in (exact, folded - exact))
    p.snr_db = min([p.snr_db, *(10 * torch.log10(signal / noise)[noise > 0]).tolist()])
