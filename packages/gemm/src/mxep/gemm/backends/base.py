"""What a backend is: three products over ragged groups of rows, and how it wants their operands quantized."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mxep.gemm.recipe import Recipe
from mxep.quant import (
    Axis,
    MXFormat,
    quantize,
    quantize_columns_of_amax,
    quantize_joined,
    quantize_with_amax,
)


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
    recordable: whether all that it starts are ops of torch and kernels that `mxep.runtime.launch` starts, so that a
        record shows it (`mxep.runtime.record`). Else calls with it are never played. Each class says so itself: what
        is derived from one that is recordable may start kernels of its own.
    """

    name: str
    wants_rowwise: bool = False
    bf16_is_torchs: bool = True
    recordable: bool = False

    def unsupported_reason(self, device: torch.device) -> str | None:
        """None if it runs on `device`, else the reason why not, as the end of a sentence."""
        ...

    def block_size(self, recipe: Recipe) -> int | None:
        """Elements that a scale of this recipe covers here; None for the whole row, or column."""
        return None if self.wants_rowwise else recipe.block_size

    def quantize_rows(self, x: Tensor, fmt: MXFormat, recipe: Recipe) -> Tensor:
        """A plain activation or gradient (M, D) as this backend wants it, in elements of `fmt`."""
        if recipe.scaling == "none":
            return x
        return quantize(x, fmt=fmt, mode=recipe.mode, block_size=self.block_size(recipe))

    def quantize_parts(self, parts: Sequence[Tensor], fmt: MXFormat, recipe: Recipe) -> Tensor:
        """Plain gradients (M, D of each) as `quantize_rows` makes what they are side by side."""
        if self.wants_rowwise and recipe.scaling != "none":
            return quantize_joined(parts, fmt=fmt, mode=recipe.mode)
        return self.quantize_rows(torch.cat([*parts], 1), fmt, recipe)

    def quantize_weight_rowwise(
        self, w: Tensor, recipe: Recipe, *, with_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(w (G, N, K) as forward wants it, blocked along K or in 2-D blocks, amax of its columns). No gradient.

        amax: (G, K) fp32, what saves `quantize_weight_colwise` a read; None unless asked for, and where it saves
            nothing: only one scale a column needs it.
        """
        if recipe.scaling == "none":
            return w, None
        w, fmt, mode = w.detach(), recipe.fmt, recipe.mode
        if (block_size := self.block_size(recipe)) is not None:
            return quantize(w, fmt=fmt, mode=mode, axis=_axis(recipe, -1), block_size=block_size), None
        if with_amax:
            return quantize_with_amax(w, fmt=fmt, mode=mode)
        return quantize(w, fmt=fmt, mode=mode, block_size=None), None

    def quantize_weight_colwise(self, w: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Tensor:
        """w (G, N, K) as dgrad wants it, blocked along N. No gradient. amax: what `quantize_weight_rowwise` gave."""
        if recipe.scaling == "none":
            return w
        w, fmt, mode = w.detach(), recipe.fmt, recipe.mode
        if (block_size := self.block_size(recipe)) is not None:
            return quantize(w, fmt=fmt, mode=mode, axis=_axis(recipe, -2), block_size=block_size)
        if amax is not None:
            return quantize_columns_of_amax(w, amax, fmt=fmt, mode=mode)
        return quantize(w, fmt=fmt, mode=mode, axis=-2, block_size=None)

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


def _axis(recipe: Recipe, axis: int) -> Axis:
    """Of a weight's blocks; 2-D ones serve both orientations."""
    return (-2, -1) if recipe.weight_block == "32x32" else axis


def ends(offs: Tensor | None, rows: Tensor) -> Tensor:
    """offs, or those of one group of all rows: for kernels that want some."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device) if offs is None else offs
