"""What a backend is: three products over ragged groups of rows, and how it wants their operands quantized."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mxep.gemm.recipe import Recipe
from mxep.gemm.weights import QuantizedWeight, quantize_weight, quantize_weight_cols, quantize_weight_rows
from mxep.quant import MXFormat

__all__ = ["Backend"]


class Backend(Protocol):
    """Three products over ragged groups of rows: rows offs[g-1] .. offs[g] - 1 are of group g.

    Operands are quantized as the recipe says: MXTensor, or plain bf16 / fp32. Activations and gradients are blocked
    along their rows (maybe indexed: bytes still in receive slots); weights as `quantize_weight` made them.
    Rows past offs[-1] (int32, on the device) are not read; in results they are unspecified.
    Only reference waits for the host. Derive from this class to inherit what is defined here.
    """

    @property
    def name(self) -> str:
        """What users pick it by."""
        ...

    @property
    def folds(self) -> bool:
        """Whether its products fold MX rows to one scale a row: who makes a row may as well fold it at once."""
        return False

    def why_not(self, device: torch.device) -> str | None:
        """None if it runs on `device`, else the reason why not, as the end of a sentence."""
        ...

    def quantize_rows(self, x: Tensor, fmt: MXFormat, recipe: Recipe) -> Tensor:
        """A plain activation or gradient (M, D) as this backend wants it, in elements of `fmt`."""
        return recipe.quantize_rows(x, fmt)

    def quantize_weight(self, w: Tensor, recipe: Recipe, *, cols: bool) -> QuantizedWeight:
        """w (G, N, K) as this backend wants it in forward (rows) and, with `cols`, in dgrad (cols). No gradient.

        For `quantized_weight`, and forward alone; who overrides it overrides the two below as well.
        """
        return quantize_weight(w, recipe, cols=cols)

    def quantize_weight_rows(self, w: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
        """Its rows alone, and columns' magnitudes or None, to be kept until `quantize_weight_cols`."""
        return quantize_weight_rows(w, recipe)

    def quantize_weight_cols(self, w: Tensor, recipe: Recipe, amax: Tensor | None) -> Tensor:
        """Its cols alone: in backward, where they are needed, so that nobody keeps them until then."""
        return quantize_weight_cols(w, recipe, amax)

    def forward(self, a: Tensor, w: Tensor, offs: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """a (M, K), w (G, N, K) the rows of its quantization -> (M, N): a[rows of g] @ w[g].T + bias[g].

        bias: (G, N) or None.
        """
        ...

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """dy (M, N), w (G, N, K) the cols of its quantization -> (M, K): dy[rows of g] @ w[g].

        The result has memory of its own, which the caller may write over and the next call must not.
        """
        ...

    def wgrad(
        self,
        dy: Tensor,
        a: Tensor,
        offs: Tensor,
        *,
        recipe: Recipe,
        out_dtype: torch.dtype,
        scale: float = 1.0,
    ) -> Tensor:
        """dy (M, N), a (M, K), both blocked along their rows -> (G, N, K): scale * dy[rows of g].T @ a[rows of g], 0 if
        empty.

        How row-blocked qdata become operands that contract over rows is the backend's business; `recipe.along_tokens`
        is the definition.
        """
        ...

    def start_wgrad(
        self,
        dy: Tensor,
        a: Tensor,
        offs: Tensor,
        *,
        recipe: Recipe,
        out_dtype: torch.dtype,
        to: Tensor | None = None,
        scale: float = 1.0,
    ) -> Callable[[], Tensor | None]:
        """`wgrad`, or with `to` `add_wgrad`, in two steps: what is returned multiplies.

        Where operands are transposed first, they are now, and dy and a may go before the gradient takes its memory.
        """
        if to is None:
            return lambda: self.wgrad(dy, a, offs, recipe=recipe, out_dtype=out_dtype, scale=scale)
        return lambda: self.add_wgrad(dy, a, offs, recipe=recipe, to=to, scale=scale)

    def add_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor, *, recipe: Recipe, to: Tensor, scale: float = 1.0) -> None:
        """`wgrad` added into `to`, (G, N, K) fp32."""
        to.add_(self.wgrad(dy, a, offs, recipe=recipe, out_dtype=to.dtype), alpha=scale)
