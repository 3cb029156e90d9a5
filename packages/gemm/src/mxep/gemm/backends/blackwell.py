"""The blackwell backend: torch's scaled grouped mm (CUTLASS) with MX scales in the layout of Blackwell's tensor cores.

    a       qdata (M, K), gathered if indexed     scales swizzled group by group, each group's rows padded to 128
    w       qdata (G, N, K)                       scales swizzled matrix by matrix                -> out (M, N), and da
    dy, a   qdata (N, M), (K, M), requantized     scales swizzled group by group, each group's blocks of tokens padded
            along tokens                          to 4: `swizzle_along_tokens`                    -> dw (G, N, K)

A swizzled tile is 128 x 4 scales (`mxep.quant.swizzle`). Groups need only MX's own multiple of 32 rows, because the
scales are padded and the rows are not. NOT RUN ON HARDWARE: layouts are tested bit for bit against the published
formula, operands against torch's own checks of shapes and strides. No GEMM has been computed.

torch sets the limits: compute capability 10.x, E4M3 for both operands, bf16 results. So results are rounded to bf16
once more if out_dtype is fp32, and before a bias or main_grad is added. E5M2 gradients are refused.
Weights' scales (1/32 of their qdata) are swizzled at each call. Tiles (32x32) are kept as two copies of the qdata.
"""

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend, ends
from mxep.gemm.backends.dequant import Dequant, group_of_row, in_dtype
from mxep.gemm.backends.triton import check_mx
from mxep.gemm.recipe import Recipe
from mxep.quant import BLOCK, E4M3, MXTensor, gather_swizzled, pad_groups, swizzle_scales

ROWS, COLS = 128, 4
"""Rows and columns of scales in a swizzled tile."""
Operand = tuple[Tensor, Tensor]
"""qdata and their swizzled scales."""


class Blackwell(Backend):
    """See the module's docstring; `Backend` has the contract."""

    name = "blackwell"
    recordable = True

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"want a CUDA device of compute capability 10.x, got {device.type}; use backend 'reference'"
        if (have := torch.cuda.get_device_capability(device))[0] != 10:
            return f"torch's MX grouped mm wants compute capability 10.x, got {have}; use backend 'auto'"
        return None

    def quantize_weight_rowwise(
        self, w: Tensor, recipe: Recipe, *, with_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        rowwise, amax = super().quantize_weight_rowwise(w, recipe, with_amax=with_amax)
        return rowwise.along(-1) if isinstance(rowwise, MXTensor) else rowwise, amax

    def quantize_weight_colwise(self, w: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Tensor:
        colwise = super().quantize_weight_colwise(w, recipe, amax)
        return colwise.along(-2).materialize() if isinstance(colwise, MXTensor) else colwise

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        if not isinstance(a, MXTensor):
            return Dequant().forward(a, w, offs, bias=bias, out_dtype=out_dtype)
        a, w = self._e4m3("a", a), self._e4m3("w", w)
        offs = ends(offs, a)
        if not len(a):
            return torch.empty((0, w.shape[1]), dtype=out_dtype, device=w.device)
        out = multiply(*rows_operand(a, offs), *weight_operand(w), offs)
        out = in_dtype(out, out_dtype)
        return out if bias is None else in_dtype(out + bias[group_of_row(offs, len(out))], out_dtype)

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> AlongTokens:
        if not isinstance(dy, MXTensor) and not isinstance(a, MXTensor):
            return AlongTokens(dy, a)
        dy, a = self._e4m3("dy", dy), self._e4m3("a", a)
        return (
            AlongTokens(recipe.along_tokens(dy, offs), recipe.along_tokens(a, offs)) if len(dy) else AlongTokens(dy, a)
        )

    def wgrad_product(self, operands: AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        y, x = operands
        if not isinstance(y, MXTensor) or not isinstance(x, MXTensor):
            return Dequant().wgrad_product(operands, offs, out_dtype, scale)
        offs = ends(offs, y)
        if not len(y):
            return torch.zeros((offs.shape[0], y.shape[1], x.shape[1]), dtype=out_dtype, device=y.device)
        (y_t, y_scale), (x_t, x_scale) = tokens_operand(y, offs), tokens_operand(x, offs)
        dw = multiply(y_t, y_scale, x_t.mT, x_scale, offs)
        if scale != 1:  # qdata cannot be scaled
            dw.mul_(scale)
        # It is not documented whether the kernel writes empty groups.
        empty = offs.diff(prepend=offs.new_zeros(1)) == 0
        return in_dtype(dw.masked_fill_(empty.view(-1, 1, 1), 0), out_dtype)

    def _e4m3(self, name: str, x: Tensor) -> MXTensor:
        mx = check_mx(self.name, name, x, -1)
        if mx.qdata.dtype != E4M3.dtype:
            raise ValueError(
                f"backend {self.name!r}: {name}: got {mx!r}, want E4M3, all that torch's MX grouped mm takes: "
                "use a recipe without E5M2, or backend 'triton'"
            )
        return mx


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor) -> Tensor:
    """torch's GEMM of qdata with swizzled e8m0 scales, in bf16: a (M, K) x b (G, K, N), or a (N, M) x b (M, K)."""
    out: Tensor = torch._scaled_grouped_mm(a, b, a_scale, b_scale, offs=offs, out_dtype=torch.bfloat16)
    return out


def rows_operand(a: MXTensor, offs: Tensor) -> Operand:
    """a (M, K) along K -> qdata (M, K) by rows, scales (round_up(M + G * 127, 128), round_up(K/32, 4))."""
    if a.row_index is not None or not a.qdata.is_contiguous():
        return gather_swizzled(a, offs=offs)
    return a.qdata, swizzle_scales(a.scale, offs=offs)


def weight_operand(w: MXTensor) -> Operand:
    """w (G, N, K) along K -> qdata (G, K, N), K contiguous, scales (G, round_up(N, 128) * round_up(K/32, 4))."""
    qdata = w.qdata if w.qdata.is_contiguous() else w.qdata.contiguous()
    return qdata.mT, swizzle_scales(w.scale).flatten(1)


def tokens_operand(x: MXTensor, offs: Tensor) -> Operand:
    """x (M, N) along M, as `requantize` stores it -> qdata (N, M) by rows, scales of `swizzle_along_tokens`."""
    return x.qdata.mT, swizzle_along_tokens(x.scale, offs)


def swizzle_along_tokens(scale: Tensor, offs: Tensor) -> Tensor:
    """Swizzle the scales of operands that contract over each group's tokens, group by group.

    scale: (M/32, N) e8m0, blocks of 32 tokens; those from offs[-1] / 32 on are not read.
    Returns (round_up(N, 128), round_up(M/32 + 3 G, 4)): the bytes of `swizzle_scales(scale[blocks of g].mT)` for all g,
    one after another. A group's blocks are padded to 4 with zeros. Bytes after the last group are unspecified.
    Example: N 128, groups of 32 and 160 tokens: a tile of block 0, then two tiles of blocks 1 to 4 and 5.
    """
    blocks = offs // BLOCK
    sizes = blocks.diff(prepend=blocks.new_zeros(1))
    padded = pad_groups(scale.view(torch.uint8), sizes, alignment=COLS)
    all_groups = swizzle_scales(padded.rows.mT)
    rows, columns = all_groups.shape[0] // ROWS, all_groups.shape[1] // COLS
    # Tile numbers: row tile * width + column tile within a group, row tile * columns + column tile over all groups.
    last = padded.offs.long() // COLS
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    tile = torch.arange(rows * columns, device=scale.device, dtype=torch.int64)
    group = torch.searchsorted(last * rows, tile, right=True).clamp_(max=len(last) - 1)
    width = (last - first).clamp(min=1)[group]
    within = tile - first[group] * rows
    source = (within // width).clamp_(max=rows - 1) * columns + first[group] + within % width
    tiles = all_groups.view(rows * columns, ROWS * COLS).index_select(0, source.clamp_(max=rows * columns - 1))
    return tiles.view(all_groups.shape).view(scale.dtype)
