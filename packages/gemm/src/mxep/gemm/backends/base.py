"""What a backend is: three products over ragged groups of rows, and how it wants their operands quantized."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mxep.gemm.recipe import Recipe
from mxep.gemm.weights import QuantizedWeight, quantize_weight_colwise, quantize_weight_rowwise
from mxep.quant import MXFormat, MXTensor, quantize, quantize_joined


class AlongTokens(NamedTuple):
    """Operands of a weight gradient: dy (M, N) and a (M, K), plain, or MXTensors blocked along M."""

    dy: Tensor
    a: Tensor


class Backend(Protocol):
    """Three products over ragged groups of rows: rows offs[g-1] .. offs[g] - 1 are of group g.

    Operands are quantized as the recipe says: MXTensor, or plain bf16 / fp32. Activations and gradients are blocked
    along their rows (maybe indexed: bytes still in receive slots); weights as the backend quantized them.
    Rows past offs[-1] (int32, on the device) are not read; in results they are unspecified. offs may be None: one group
    of all rows, which a linear is, and however many there are.
    Only reference waits for the host. Derive from this class to inherit what is defined here.

    name: what users pick it by.
    wants_rowwise: whether its products fold MX rows to one scale a row: who makes a row may as well fold it at once,
        and what is plain is quantized to one scale a row, weights to one a column, too.
    bf16_is_torchs: whether a linear's plain product in bf16 is torch's, and the backend is not asked.
    """

    name: str
    wants_rowwise: bool = False
    bf16_is_torchs: bool = True

    def unsupported_reason(self, device: torch.device) -> str | None:
        """None if it runs on `device`, else the reason why not, as the end of a sentence."""
        ...

    def quantize_rows(self, x: Tensor, fmt: MXFormat, recipe: Recipe) -> Tensor:
        """A plain activation or gradient (M, D) as this backend wants it, in elements of `fmt`."""
        if self.wants_rowwise and recipe.scaling != "none":
            return quantize(x, fmt=fmt, mode=recipe.mode, block_size=None)
        return recipe.quantize_rows(x, fmt)

    def quantize_parts(self, parts: Sequence[Tensor], fmt: MXFormat, recipe: Recipe) -> Tensor:
        """Plain gradients (M, D of each) as `quantize_rows` makes what they are side by side."""
        if self.wants_rowwise and recipe.scaling != "none":
            return quantize_joined(parts, fmt=fmt, mode=recipe.mode)
        return self.quantize_rows(torch.cat([*parts], 1), fmt, recipe)

    def quantize_weight_rowwise(
        self, w: Tensor, recipe: Recipe, *, with_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(w (G, N, K) as forward wants it, amax of its columns). No gradient.

        amax: what saves `quantize_weight_colwise` a read; None unless asked for, and where it saves nothing.
        """
        return quantize_weight_rowwise(w, recipe, with_amax=with_amax, per_row=self.wants_rowwise)

    def quantize_weight_colwise(self, w: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Tensor:
        """w (G, N, K) as dgrad wants it. No gradient. amax: what `quantize_weight_rowwise` gave."""
        return quantize_weight_colwise(w, recipe, amax, per_row=self.wants_rowwise)

    def quantize_weight(self, w: Tensor, recipe: Recipe, *, colwise: bool = True) -> QuantizedWeight:
        """w (G, N, K) as forward and, with `colwise`, dgrad want it: for `quantized_weight` of `grouped_mm`."""
        rowwise, amax = self.quantize_weight_rowwise(w, recipe, with_amax=colwise)
        if isinstance(rowwise, MXTensor) and rowwise.axis == (-2, -1):  # serves both ways
            return QuantizedWeight(rowwise, rowwise)
        return QuantizedWeight(rowwise, self.quantize_weight_colwise(w, recipe, amax) if colwise else None)

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """a (M, K), w (G, N, K) quantized rowwise -> (M, N): a[rows of g] @ w[g].T + bias[g].

        bias: (G, N) or None.
        """
        ...

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """dy (M, N), w (G, N, K) quantized colwise -> (M, K): dy[rows of g] @ w[g].

        The result has memory of its own, which the caller may write over and the next call must not.
        """
        return self.forward(dy, w.mT, offs, bias=None, out_dtype=out_dtype)

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> Any:
        """dy (M, N) and a (M, K), both blocked along their rows -> the operands that `wgrad` contracts over rows.

        What it returns are tensors, and all that `wgrad` needs: dy and a may go before the gradient takes its memory.
        How row-blocked qdata become operands is the backend's business; this here is the definition.
        """
        return AlongTokens(recipe.along_tokens(dy, offs), recipe.along_tokens(a, offs))

    def wgrad(
        self,
        operands: Any,
        offs: Tensor | None,
        *,
        out_dtype: torch.dtype,
        scale: float = 1.0,
        accumulate_into: Tensor | None = None,
        halves: Tensor | None = None,
    ) -> Tensor | None:
        """scale * dy[rows of g].T @ a[rows of g], 0 if empty: (G, N, K) in out_dtype.

        accumulate_into: (G, N, K) fp32, takes the sum of itself and the product; then nothing is returned.
        halves: (2, G, N / 2, K) in out_dtype, contiguous, takes the product, as the gradients of two weights whose rows
            follow each other, each dense; then nothing is returned.
        """
        if halves is not None:
            if not self.wgrad_into(halves, operands, offs, scale, add=False):
                dw = self.wgrad_product(operands, offs, out_dtype, scale)
                halves.copy_(dw.unflatten(1, (2, -1)).transpose(0, 1))
            return None
        if accumulate_into is None:
            return self.wgrad_product(operands, offs, out_dtype, scale)
        if not (accumulate_into.is_contiguous() and self.wgrad_into(accumulate_into, operands, offs, scale, add=True)):
            accumulate_into.add_(self.wgrad_product(operands, offs, accumulate_into.dtype, 1.0), alpha=scale)
        return None

    def wgrad_into(self, out: Tensor, operands: Any, offs: Tensor | None, scale: float, *, add: bool) -> bool:
        """The product's kernel writes to out, contiguous, (G, N, K) or halves (2, G, N / 2, K), or adds to it, fp32, if
        `add`; False if there is none that does."""
        return False

    def wgrad_product(self, operands: Any, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        """What `wgrad` returns."""
        raise NotImplementedError


def ends(offs: Tensor | None, rows: Tensor) -> Tensor:
    """offs, or those of one group of all rows: for kernels that want some."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device) if offs is None else offs
