"""`fold_report` shows how much accuracy folding costs a model's GEMMs.

The hopper backend folds MX rows to one scale per row, so elements far below the largest of their row lose bits. The
lost bits matter only if such elements meet large elements of the other operand. Therefore the report contains the
lowest SNR of any row of the result. fold_report is slow, and works on any device, with any backend. While a report is
open, compiled code runs eagerly. CUDA graphs that were captured earlier are not reported. Neither are quantizations
that `quantize_weights_once` held already.

M rows, N out features, K in features, G groups.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mxep.gemm.backends import Backend
from mxep.gemm.backends.base import ends
from mxep.gemm.backends.hopper import fp8_grouped_wgrad
from mxep.gemm.backends.reference import grouped_mm_reference, grouped_wgrad_reference, parts_of
from mxep.quant import MXTensor, fold_for_wgrad, fold_with_stats
from mxep.runtime.replay import no_replays

HARMFUL_DB = 40.0  # below this SNR the report advises other backends; quantization to MX itself has about 28 dB
_WATCHED = ("forward", "dgrad", "prepare_wgrad", "quantize_weight_rowwise", "quantize_weight_colwise")


@dataclass
class FoldedProduct:
    """Statistics of one GEMM: forward, dgrad or wgrad of a module (name or class) with a weight of shape (G, N, K).

    elements, rounded, flushed: elements of both operands over all calls; those that folding changes, and makes zero.
    spread: log2 of the largest ratio of two scales that folding merges into one.
    snr_db: lowest SNR of any row of the result, folded compared with exact.
    """

    module: str
    weight: tuple[int, ...]
    product: str
    calls: int = 0
    elements: int = 0
    rounded: int = 0
    flushed: int = 0
    spread: int = 0
    snr_db: float = float("inf")


class FoldReport(dict[tuple[str, tuple[int, ...], str], FoldedProduct]):
    """Result of `fold_report`: a FoldedProduct by (module, weight, product). str() gives a table with advice."""

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
    """Context manager that reports on all GEMMs of MX operands in the process while it is open.

    model: the report uses its modules' names. Without it, the report uses class names.
    """
    report, modules, inside = FoldReport(), [""], threading.local()
    names = {module: name or "model" for name, module in model.named_modules()} if model else {}
    owner: dict[Any, str] = {}  # name of the module that used an operand in forward, by the operand's address

    @torch.no_grad()
    def record(product: str, x: Any, y: Any, offs: Tensor | None) -> None:
        stops = ends(offs, x).tolist()
        shape = (len(stops), x.shape[1], y.shape[1]) if product == "wgrad" else tuple(y.shape)
        if product == "forward":
            owner[_address(x), shape] = owner[_address(y)] = modules[-1]
        module = owner.get((_address(y), shape) if product == "wgrad" else _address(y), "")
        p = report.setdefault((module, shape, product), FoldedProduct(module, shape, product))
        p.calls += 1
        for g, (start, end) in enumerate(zip([0, *stops], stops)):  # one by one: each element needs much memory
            other = y[start:end] if product == "wgrad" else y[g].mT if product == "dgrad" else y[g]
            operands, results = (_wgrad if product == "wgrad" else _product)(x[start:end], other)
            for elements, changed, flushed, spread in operands:
                p.elements += elements
                p.rounded, p.flushed = p.rounded + int(changed), p.flushed + int(flushed)
                p.spread = max([p.spread, *spread.tolist()])
            for exact, folded in results:
                signal, noise = (x.double().square().sum(-1).nan_to_num() for x in (exact, folded - exact))
                p.snr_db = min([p.snr_db, *(10 * torch.log10(signal / noise)[noise > 0]).tolist()])
            del operands, results, changed, flushed, exact, folded, signal, noise

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(backend: Any, x: Tensor, y: Any, *args: Any, **options: Any) -> Any:
            outer, inside.name = getattr(inside, "name", None), name  # one method may call another
            try:
                if outer is None and isinstance(x, MXTensor) and isinstance(y, MXTensor):
                    record(name.removeprefix("prepare_"), x, y, args[0])
                out = method(backend, x, y, *args, **options)
            finally:
                inside.name = outer
            if name == "quantize_weight_rowwise":
                owner[_address(x)] = modules[-1]
            elif name == "quantize_weight_colwise":
                owner[_address(out)] = owner.get(_address(x), "")
            return out

        return run

    with no_replays(), contextlib.ExitStack() as stack:  # a replayed graph would bypass the watched methods
        for cls in _subclasses(Backend):
            for name in vars(cls).keys() & {*_WATCHED, "wants_rowwise"}:
                stack.callback(setattr, cls, name, vars(cls)[name])
                setattr(cls, name, watched(name, vars(cls)[name]) if name in _WATCHED else False)
        stack.enter_context(register_module_forward_pre_hook(lambda m, _: modules.append(names.get(m, m._get_name()))))
        stack.enter_context(register_module_forward_hook(lambda *_: modules.__delitem__(-1), always_call=True))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield report


def _address(x: Tensor) -> int:
    return (x.qdata if isinstance(x, MXTensor) else x).data_ptr()


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def _product(a: Any, w: Any) -> Any:
    """Multiply a (M, K) by w (N, K), contracted over K, exactly and folded.

    Returns [(elements, changed, flushed, spreads) of a and of w], [(exact result, folded result)].
    """
    exact = a, w if w.axis == -1 else w.along(-1)
    folded, stats = zip(*map(fold_with_stats, exact))
    how = None, None, torch.float32
    products = (grouped_mm_reference(*parts_of(x), y.qdata[None], y.scale[None], *how) for x, y in (exact, folded))
    return [(x.numel(), of.changed, of.flushed, of.spread) for x, of in zip(exact, stats)], [tuple(products)]


def _wgrad(dy: Any, a: Any) -> Any:
    """Multiply dy (M, N) by a (M, K), contracted over M. Returns as `_product`, plus the results' transposes."""
    folded = fold_for_wgrad(a, dy, offs := ends(None, a))
    y, x = (v.dequantize(torch.float32) for v in (dy, a))
    (y_rows, of_y), (x_rows, of_x) = map(fold_with_stats, (dy, a))
    y_scale, x_scale = (rows.scale.view(torch.uint8)[:, 0].int() - 127 for rows in (y_rows, x_rows))
    behind = folded.exponent - y_scale - x_scale
    spread = torch.cat((behind[x.any(1) & y.any(1)], of_y.spread, of_x.spread))
    halves, operands = (x_scale + behind // 2, y_scale + behind - behind // 2), []
    for values, qdata, exponent in zip((x, y), (folded.x_t, folded.y_t), halves):
        after = torch.ldexp(qdata.T.double(), exponent.unsqueeze(1))
        changed, flushed = (after != values) & after.isfinite(), (after == 0) & (values != 0)
        operands.append((values.numel(), changed.sum(), flushed.sum(), spread))
    exact = grouped_wgrad_reference(y, None, None, x, None, None, offs, torch.float32, 1.0)
    product = torch.empty_like(exact)
    fp8_grouped_wgrad.reference(product, folded.y_t, folded.x_t, folded.exponent, folded.offs, 1.0, False)
    return operands, [(exact, product), (exact.mT, product.mT)]
