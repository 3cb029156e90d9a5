"""Weights as products want them, quantized in both orientations.

    w (G, N, K)  -->  rowwise: blocked along K, what the forward contracts
                      colwise: blocked along N, what dgrad contracts

`per_row` gives one scale to each row (rowwise) or column (colwise), whatever the recipe's blocks.
How long quantized weights live is the caller's business: see `mxep.gemm.quantize_once`.

G groups, N out features, K in features.
"""

from dataclasses import dataclass

from torch import Tensor

from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize, quantize_both, quantize_columns_of_amax, quantize_with_amax


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (G, N, K) as the products want it: MXTensors, or the weight itself where the recipe quantizes nothing.

    rowwise: blocked along K, for the forward. colwise: blocked along N, for dgrad; None if nobody asked for it.
    With 32x32 blocks both are the same tensor.
    """

    rowwise: Tensor
    colwise: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of qdata and scales."""
        found = {id(mx): mx for mx in (self.rowwise, self.colwise) if isinstance(mx, MXTensor)}
        return sum(mx.qdata.nbytes + mx.scale.nbytes for mx in found.values())


def quantize_weight(w: Tensor, recipe: Recipe, *, colwise: bool = True) -> QuantizedWeight:
    """Quantize w (G, N, K) bf16 or fp32 by the recipe, along K and, with `colwise`, along N in the same read.

    No gradient.
    """
    if colwise and recipe.scaling != "none" and not is_2d(recipe):
        both = quantize_both(w.detach(), fmt=recipe.fmt, mode=recipe.mode, block_size=recipe.block_size)
        return QuantizedWeight(*both)
    rowwise, _ = quantize_weight_rowwise(w, recipe)
    return QuantizedWeight(rowwise, rowwise if colwise or recipe.scaling == "none" or is_2d(recipe) else None)


def quantize_weight_rowwise(
    w: Tensor, recipe: Recipe, *, with_amax: bool = False, per_row: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(w blocked along K, amax). No gradient.

    amax: (G, K) fp32, largest magnitudes of the columns, with which `quantize_weight_colwise` reads w once instead of
    twice. None unless asked for, and where it saves nothing: only one scale a column needs it.
    """
    if recipe.scaling == "none":
        return w, None
    w, fmt, mode = w.detach(), recipe.fmt, recipe.mode
    if is_2d(recipe, per_row):
        return quantize(w, fmt=fmt, mode=mode, axis=(-2, -1)), None
    if recipe.block_size is not None and not per_row:
        return quantize(w, fmt=fmt, mode=mode), None
    if with_amax:
        return quantize_with_amax(w, fmt=fmt, mode=mode)
    return quantize(w, fmt=fmt, mode=mode, block_size=None), None


def quantize_weight_colwise(w: Tensor, recipe: Recipe, amax: Tensor | None = None, *, per_row: bool = False) -> Tensor:
    """w blocked along N; with 2-D blocks as rowwise. amax: of `quantize_weight_rowwise`. No gradient."""
    if recipe.scaling == "none" or is_2d(recipe, per_row):
        return quantize_weight_rowwise(w, recipe)[0]
    w, fmt, mode = w.detach(), recipe.fmt, recipe.mode
    if recipe.block_size is not None and not per_row:
        return quantize(w, fmt=fmt, mode=mode, axis=-2)
    if amax is not None:
        return quantize_columns_of_amax(w, amax, fmt=fmt, mode=mode)
    return quantize(w, fmt=fmt, mode=mode, axis=-2, block_size=None)


def is_2d(recipe: Recipe, per_row: bool = False) -> bool:
    """Whether weights get 32x32 blocks, one quantization for both orientations."""
    return recipe.weight_block == "32x32" and not per_row
