"""Contract of a backend: three GEMMs over ragged groups of rows, and the quantization of their operands."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.recipe import Recipe
from mxep.quant import (
    Axis,
    MXFormat,
    MXTensor,
    WgradOperands,
    quantize,
    quantize_columns_with_amax,
    quantize_joined,
    quantize_with_amax,
    to_mxfp8,
)


class AlongTokens(NamedTuple):
    """Operands of a weight gradient: dy (M, N) and a (M, K), plain, or MXTensors with blocks along M."""

    dy: Tensor
    a: Tensor


class Backend(Protocol):
    """Three GEMMs over ragged groups of rows. Derive from this class to inherit its methods.

    offs (G,) int32, on the device, are inclusive cumulative group sizes: rows offs[g-1] to offs[g] - 1 belong to group
    g. Rows from offs[-1] on are not read, and are unspecified in results. If offs is None, as in a linear, there is one
    group of any number of rows. Only backend "reference", and torch's grouped mm on older GPUs, read offs on the host.

    Operands are MXTensors if the recipe quantizes, else plain bf16 or fp32. Activations and gradients have blocks along
    their rows, and may have a row index, which points into receive slots. Weights are as this backend quantized them.
    A frozen weight may also be BlockFP8 in blocks of 128 x 128, or with one scale per row.

    M rows, N out features, K in features, G groups.

    Attributes:
        name: the name by which users pick the backend.
        wants_rowwise: True if the GEMMs fold MX rows to one scale per row. Producers of rows may then fold them.
            Plain operands get one scale per row, and dgrad's weights one per column.
        bf16_is_torchs: True if a linear in plain bf16 calls torch's GEMM instead of this backend.
        recordable: True if the backend starts only torch ops and kernels of `mxep.runtime.launch`, which
            `mxep.runtime.record` can record. If False, its calls are never replayed. Every class must set it, because a
            derived class may start other kernels.
    """

    name: str
    wants_rowwise: bool = False
    bf16_is_torchs: bool = True
    recordable: bool = False

    def unsupported_reason(self, device: torch.device) -> str | None:
        """None if the backend runs on `device`; else the reason why not, as the end of a sentence."""
        ...

    def block_size(self, recipe: Recipe) -> int | None:
        """Elements per scale with this recipe. None: one scale per row or column."""
        return None if self.wants_rowwise else recipe.block_size

    def quantize_rows(self, x: Tensor, fmt: MXFormat, recipe: Recipe) -> Tensor:
        """Quantize a plain activation or gradient (M, D) along D, to elements of `fmt`."""
        if recipe.scaling == "none":
            return x
        return quantize(x, fmt=fmt, mode=recipe.mode, block_size=self.block_size(recipe))

    def quantize_parts(self, parts: Sequence[Tensor], fmt: MXFormat, recipe: Recipe) -> Tensor:
        """Concatenate plain gradients, (M, D1), (M, D2) and so on, along D. Quantize as `quantize_rows` does."""
        if self.wants_rowwise and recipe.scaling != "none":
            return quantize_joined(parts, fmt=fmt, mode=recipe.mode)
        return self.quantize_rows(torch.cat([*parts], 1), fmt, recipe)

    def quantize_weight_rowwise(
        self, w: Tensor, recipe: Recipe, *, with_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Quantize w (G, N, K) for forward, with blocks along K, or 2-D blocks. No gradients.

        Also returns the amax of w's columns, (G, K) fp32, which saves `quantize_weight_colwise` a read of w, or None if
        not `with_amax`, or if the weight gets several scales per column.
        """
        if recipe.scaling == "none":
            return w, None
        w, fmt, mode = recipe.rounded_weight(w.detach()), recipe.fmt, recipe.mode
        if (block_size := self.block_size(recipe)) is not None:
            return quantize(w, fmt=fmt, mode=mode, axis=_axis(recipe, -1), block_size=block_size), None
        if with_amax:
            return quantize_with_amax(w, fmt=fmt, mode=mode)
        return quantize(w, fmt=fmt, mode=mode, block_size=None), None

    def quantize_weight_colwise(self, w: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Tensor:
        """Quantize w (G, N, K) for dgrad, with blocks along N. No gradient. amax: from `quantize_weight_rowwise`."""
        if recipe.scaling == "none":
            return w
        w, fmt, mode = recipe.rounded_weight(w.detach()), recipe.fmt, recipe.mode
        if (block_size := self.block_size(recipe)) is not None:
            return quantize(w, fmt=fmt, mode=mode, axis=_axis(recipe, -2), block_size=block_size)
        if amax is not None:
            return quantize_columns_with_amax(w, amax, fmt=fmt, mode=mode)
        return quantize(w, fmt=fmt, mode=mode, axis=-2, block_size=None)

    def expand_rowwise(self, w: FrozenWeight) -> Any:
        """The values of a frozen weight, as `forward` takes them."""
        x = w.along_k()
        return to_mxfp8(x) if isinstance(x, MXTensor) else x

    def expand_colwise(self, w: FrozenWeight) -> Any:
        """The values of a frozen weight, as `dgrad` takes them. They equal forward's if the backend folds exactly."""
        return Backend.expand_rowwise(self, w)

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Compute a[rows of g] @ w[g].T + bias[g] for each group g. Returns (M, N) in out_dtype.

        a: (M, K). w: (G, N, K), from `quantize_weight_rowwise`. bias: (G, N) or None.
        """
        ...

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """Compute dy[rows of g] @ w[g] for each group g. Returns (M, K), which the caller may overwrite.

        dy: (M, N). w: (G, N, K), from `quantize_weight_colwise`.
        """
        return self.forward(dy, w.mT, offs, bias=None, out_dtype=out_dtype)

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> Any:
        """Prepare dy (M, N) and a (M, K), both with blocks along their rows, for `wgrad`, which contracts over rows.

        A backend may return any type that holds all tensors that `wgrad` needs, so that dy and a may be freed.
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
        transposed: bool = False,
    ) -> Tensor | None:
        """Compute scale * dy[rows of g].T @ a[rows of g] for each group g, zero if g is empty.

        Args:
            operands: dy and a, from `prepare_wgrad`.
            accumulate_into: (G, N, K) or None. If given, the result is added to it in its dtype.
            halves: (2, G, N / 2, K) in out_dtype, contiguous, or None: the gradients of two weights, such as gate and
                up, that are multiplied as one. If given, the result is written to it.
            transposed: True to store the result (G, K, N) in memory, like a weight that `is_transposed`. torch is slow
                at adding a gradient to one with another layout. Ignored if operands have a custom backend's own type.

        Returns (G, N, K) in out_dtype; None if accumulate_into or halves is given.
        """
        if accumulate_into is not None:
            transposed = is_transposed(accumulate_into)
        if transposed and halves is None and (exchanged := _exchanged(operands)) is not None:
            into = None if accumulate_into is None else accumulate_into.mT
            dw = self.wgrad(exchanged, offs, out_dtype=out_dtype, scale=scale, accumulate_into=into)
            return None if dw is None else dw.mT
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
        """Let the GEMM's kernel write the result to out, or add it if `add`. Returns False if no kernel can.

        out: contiguous, (G, N, K), or (2, G, N / 2, K) as `halves` of `wgrad`.
        """
        return False

    def wgrad_product(self, operands: Any, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        """The result of `wgrad` as a new tensor, (G, N, K) in out_dtype."""
        raise NotImplementedError


def is_transposed(w: Tensor) -> bool:
    """True if w (..., N, K) lies (..., K, N) in memory, as gpt-oss stores its experts' weights."""
    return not w.is_contiguous() and w.mT.is_contiguous()


def empty_gradient(w: Tensor) -> Tensor:
    """Memory of w's gradient, which lies as w does: in the layout that `Backend.wgrad` returns."""
    return w.new_empty(w.mT.shape).mT if is_transposed(w) else w.new_empty(w.shape)


def _exchanged(operands: Any) -> Any:
    """Swap dy and a: `wgrad` then computes the transposed gradient, with the same sums in the same order."""
    if isinstance(operands, AlongTokens):
        return AlongTokens(operands.a, operands.dy)
    if isinstance(operands, WgradOperands):
        return replace(operands, x_t=operands.y_t, y_t=operands.x_t)
    return None


def _axis(recipe: Recipe, axis: int) -> Axis:
    """The axis of a weight's blocks: both of the last two if the recipe has 2-D blocks, else `axis`."""
    return (-2, -1) if recipe.weight_block == "32x32" else axis


def ends(offs: Tensor | None, rows: Tensor) -> Tensor:
    """Ends of the groups, (G,) int32: offs, or [number of rows] if offs is None."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device) if offs is None else offs
