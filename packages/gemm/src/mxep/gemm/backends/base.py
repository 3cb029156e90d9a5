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
    """Operands of a weight gradient: dy (M, N) and a (M, K), plain, or MXTensors blocked along M."""

    dy: Tensor
    a: Tensor


class Backend(Protocol):
    """Three GEMMs over ragged groups of rows: rows offs[g-1] .. offs[g] - 1 belong to group g.

    Operands are quantized by the recipe: MXTensor, or plain bf16 / fp32. Activations and gradients are blocked along
    their rows, and a row index may point into receive slots. Weights are as this backend quantized them, or BlockFP8
    (of a frozen weight) in blocks of 128 x 128. Rows past offs[-1] (int32, on the device) are not read, and unspecified
    in results. offs None means one group of any number of rows, as in a linear. Only reference syncs with the device.
    Derive from this class to inherit its methods.

    Attributes:
        name: name that users pick it by.
        wants_rowwise: True if its GEMMs fold MX rows to one scale per row. Producers of rows may then fold them, and
            plain operands get one scale per row, dgrad's weights one per column.
        bf16_is_torchs: True if a linear's plain bf16 GEMM is torch's, without asking the backend.
        recordable: True if it starts only torch ops and kernels of `mxep.runtime.launch`, so that a record shows them
            (`mxep.runtime.record`). Otherwise its calls are never replayed. Each class states it itself, because a
            derived class may start other kernels.
    """

    name: str
    wants_rowwise: bool = False
    bf16_is_torchs: bool = True
    recordable: bool = False

    def unsupported_reason(self, device: torch.device) -> str | None:
        """Why it does not run on `device`, as the end of a sentence; None: it does."""
        ...

    def block_size(self, recipe: Recipe) -> int | None:
        """Elements per scale with this recipe; None for a whole row or column."""
        return None if self.wants_rowwise else recipe.block_size

    def quantize_rows(self, x: Tensor, fmt: MXFormat, recipe: Recipe) -> Tensor:
        """Quantize a plain activation or gradient (M, D) to elements of `fmt`."""
        if recipe.scaling == "none":
            return x
        return quantize(x, fmt=fmt, mode=recipe.mode, block_size=self.block_size(recipe))

    def quantize_parts(self, parts: Sequence[Tensor], fmt: MXFormat, recipe: Recipe) -> Tensor:
        """Quantize the concatenation along D of plain gradients (M, D of each), as `quantize_rows` does."""
        if self.wants_rowwise and recipe.scaling != "none":
            return quantize_joined(parts, fmt=fmt, mode=recipe.mode)
        return self.quantize_rows(torch.cat([*parts], 1), fmt, recipe)

    def quantize_weight_rowwise(
        self, w: Tensor, recipe: Recipe, *, with_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(w (G, N, K) quantized for forward, along K or in 2-D blocks; the amax of its columns or None), without
        gradients.

        amax: (G, K) fp32, which saves `quantize_weight_colwise` a read. None without `with_amax`, and for weights with
        several scales per column.
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
        """Quantize w (G, N, K) for dgrad, blocked along N, without a gradient. amax: from `quantize_weight_rowwise`."""
        if recipe.scaling == "none":
            return w
        w, fmt, mode = recipe.rounded_weight(w.detach()), recipe.fmt, recipe.mode
        if (block_size := self.block_size(recipe)) is not None:
            return quantize(w, fmt=fmt, mode=mode, axis=_axis(recipe, -2), block_size=block_size)
        if amax is not None:
            return quantize_columns_with_amax(w, amax, fmt=fmt, mode=mode)
        return quantize(w, fmt=fmt, mode=mode, axis=-2, block_size=None)

    def expand_rowwise(self, w: FrozenWeight) -> Any:
        """A frozen weight, prepared for `forward`."""
        x = w.along_k()
        return to_mxfp8(x) if isinstance(x, MXTensor) else x

    def expand_colwise(self, w: FrozenWeight) -> Any:
        """A frozen weight, prepared for `dgrad`: the same values as in forward, if the backend's fold is exact."""
        return Backend.expand_rowwise(self, w)

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """a (M, K), w (G, N, K) quantized rowwise -> (M, N): a[rows of g] @ w[g].T + bias[g].

        bias: (G, N) or None.
        """
        ...

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """dy (M, N), w (G, N, K) quantized colwise -> (M, K) that the caller may overwrite: dy[rows of g] @ w[g]."""
        return self.forward(dy, w.mT, offs, bias=None, out_dtype=out_dtype)

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> Any:
        """Prepare dy (M, N) and a (M, K), both blocked along their rows, for the contraction of `wgrad` over rows.

        The result holds all tensors that `wgrad` needs, so dy and a may be freed before the gradient is allocated. Its
        form is the backend's own choice; this one is the definition.
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
        """scale * dy[rows of g].T @ a[rows of g], zero for empty groups: (G, N, K) in out_dtype.

        Args:
            accumulate_into: (G, N, K). The result is added to it, in its dtype, and None is returned.
            halves: (2, G, N / 2, K) in out_dtype, contiguous, the dense gradients of two weights with consecutive rows.
                The result is written to it, and None is returned.
            transposed: the result shall lie (G, K, N) in memory, as a weight `is_transposed`. Sums into gradients with
                another layout than theirs are slow. Without effect on operands of a custom form.
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
        """Write the result to out, or add it if `add`, in the GEMM's kernel. False if there is no such kernel. out:
        contiguous, (G, N, K) or halves (2, G, N / 2, K)."""
        return False

    def wgrad_product(self, operands: Any, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        """The result of `wgrad`, (G, N, K) in out_dtype."""
        raise NotImplementedError


def is_transposed(w: Tensor) -> bool:
    """True if w (.., N, K) lies (.., K, N) in memory, as gpt-oss stores its experts' weights."""
    return not w.is_contiguous() and w.mT.is_contiguous()


def _exchanged(operands: Any) -> Any:
    """Operands of the transposed weight gradient. The same products are summed in the same order."""
    if isinstance(operands, AlongTokens):
        return AlongTokens(operands.a, operands.dy)
    if isinstance(operands, WgradOperands):
        return replace(operands, x_t=operands.y_t, y_t=operands.x_t)
    return None


def _axis(recipe: Recipe, axis: int) -> Axis:
    """Axis of a weight's blocks. 2-D blocks serve both orientations."""
    return (-2, -1) if recipe.weight_block == "32x32" else axis


def ends(offs: Tensor | None, rows: Tensor) -> Tensor:
    """offs, or the number of rows as the only end if offs is None."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device) if offs is None else offs
