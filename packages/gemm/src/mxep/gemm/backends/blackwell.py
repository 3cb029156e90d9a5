"""The two backends for Blackwell: triton, by `tl.dot_scaled`, and blackwell, by torch's scaled grouped mm (CUTLASS).

NEITHER RAN ON BLACKWELL. Both multiply MX operands without folding them, and never sync with the host. Both refuse
recipe "fp8". GEMMs of unquantized operands (recipe "bf16", wgrad "bf16") run torch's grouped mm, as in dequant.

triton runs one persistent kernel per GEMM (`kernels.dot_scaled`). For wgrad, dy and a are requantized along tokens. On
Blackwell (sm_100) the tensor cores apply the scales. Other GPUs convert to bf16 first, which is slow. On a CPU triton
runs under Triton's interpreter, for tests.

blackwell passes scales in the layout that Blackwell's tensor cores need ("swizzled"):

    a       qdata (M, K), gathered if indexed     scales swizzled group by group, each group's rows padded to 128
    w       qdata (G, N, K)                       scales swizzled matrix by matrix                -> out (M, N), and da
    dy, a   qdata (N, M), (K, M), requantized     scales swizzled group by group, each group's blocks of tokens padded
            along tokens                          to 4: `swizzle_along_tokens`                    -> dw (G, N, K)

A swizzled tile is 128 x 4 scales (`mxep.quant.groups`). Only the scales are padded to tiles, so each group needs just
MX's own multiple of 32 rows. Tests compare the layouts with the published formula. No GEMM was ever computed.

torch limits blackwell to compute capability 10.x, E4M3 for both operands, and bf16 results. So fp32 results are rounded
to bf16 once more, and a bias or main_grad is added after this rounding. E5M2 gradients are refused. The scales of a
weight, 1/32 of its bytes, are swizzled at each call. With weight_block "32x32" the weight's qdata are kept twice.

M rows, N out features, K in features, G groups.
"""

import os
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend, ends
from mxep.gemm.backends.reference import Dequant, group_of_row, in_dtype
from mxep.gemm.recipe import Recipe
from mxep.quant import BLOCK, E4M3, BlockFP8, MXTensor, gather_swizzled, pad_groups, quantize, swizzle_scales
from mxep.runtime.op import op

OLDEST = (8, 9)
"""First compute capability for which Triton converts E4M3."""


class Triton(Backend):
    """See the module's docstring; `Backend` has the contract."""

    name = "triton"
    recordable = True

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            if torch.version.hip is None and (have := torch.cuda.get_device_capability(device)) < OLDEST:
                return f"got compute capability {have}, want {OLDEST} or newer for E4M3; use backend 'auto'"
            return None
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return (
            "want a CUDA device, or TRITON_INTERPRET=1 set before Triton is imported (slow, for tests); "
            "use backend 'reference' or 'dequant'"
        )

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        if not isinstance(a, MXTensor):
            return Dequant().forward(a, w, offs, bias=bias, out_dtype=out_dtype)
        a, w = check_mx(self.name, "a", a, -1), check_mx(self.name, "w", _mx(w), -1, (-2, -1))
        parts = a.qdata, a.scale, a.row_index, w.qdata, w.scale
        out: Tensor = grouped_mm_dot_scaled(*parts, ends(offs, a), bias, out_dtype)
        return out

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> Any:
        if isinstance(dy, MXTensor) or isinstance(a, MXTensor):
            dy, a = check_mx(self.name, "dy", dy, -1), check_mx(self.name, "a", a, -1)
        return super().prepare_wgrad(dy, a, offs, recipe)

    def wgrad_into(self, out: Tensor, operands: AlongTokens, offs: Tensor | None, scale: float, *, add: bool) -> bool:
        y, x = operands
        if not isinstance(y, MXTensor) or not isinstance(x, MXTensor):
            return False
        grouped_wgrad_dot_scaled(out, *_in_bytes(y), *_in_bytes(x), ends(offs, y), scale, add)
        return True

    def wgrad_product(self, operands: AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        y, x = operands
        if not isinstance(y, MXTensor) or not isinstance(x, MXTensor):
            return Dequant().wgrad_product(operands, offs, out_dtype, scale)
        offs = ends(offs, y)
        dw = y.qdata.new_empty((offs.shape[0], y.shape[1], x.shape[1]), dtype=out_dtype)
        grouped_wgrad_dot_scaled(dw, *_in_bytes(y), *_in_bytes(x), offs, scale, False)
        return dw


def _in_bytes(x: MXTensor) -> tuple[Tensor, Tensor]:
    """(qdata, scales as uint8). Inductor cannot compile an op that writes to a tensor and has an e8m0 argument."""
    return x.qdata, x.scale.view(torch.uint8)


def _mx(w: Tensor | BlockFP8) -> Tensor:
    """Return a weight in MXFP8. Block FP8 is requantized at each call: MX units cannot apply its fp32 scales."""
    return quantize(w.dequantize()) if isinstance(w, BlockFP8) else w


def check_mx(backend: str, name: str, x: Tensor, *axes: int | tuple[int, int]) -> MXTensor:
    """Return x if it is an MXTensor with blocks of 32 along one of `axes`. Otherwise raise ValueError."""
    if isinstance(x, MXTensor) and x.axis in axes and x.block_size == BLOCK:
        return x
    got = repr(x) if isinstance(x, MXTensor) else f"a plain tensor of {x.dtype}"
    raise ValueError(
        f"backend {backend!r}: {name}: got {got}, want an MXTensor in blocks of {BLOCK}: "
        "use a recipe 'mxfp8...', or for recipe 'fp8' backend 'dequant' or 'reference'"
    )


# On a CPU these ops run the same kernels, interpreted. `reference` has the plain-torch GEMMs.


@op(
    "mxep::grouped_mm_dot_scaled",
    fake=lambda a, a_scale, a_index, w, w_scale, offs, bias, out_dtype: a.new_empty(
        ((a if a_index is None else a_index).shape[0], w.shape[1]), dtype=out_dtype
    ),
    launcher="mxep.gemm.kernels.dot_scaled:grouped_mm",
)
def grouped_mm_dot_scaled(
    a: Tensor, a_scale: Tensor, a_index: Tensor | None, w: Tensor, w_scale: Tensor, offs: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`Backend.forward` of a (R, K) with row index (M,), and w (G, N, K) in blocks of 32, or 32 x 32."""
    from mxep.gemm.kernels import dot_scaled

    out: Tensor = dot_scaled.grouped_mm(a, a_scale, a_index, w, w_scale, offs, bias, out_dtype)  # type: ignore[no-untyped-call]
    return out


@op(
    "mxep::grouped_wgrad_dot_scaled",
    fake=lambda *_: None,
    launcher="mxep.gemm.kernels.dot_scaled:grouped_wgrad",
    mutates_args=("out",),
)
def grouped_wgrad_dot_scaled(
    out: Tensor, y: Tensor, y_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, scale: float, add: bool
) -> None:
    """`Backend.wgrad_into` of y (M, N) and x (M, K), both with blocks along M."""
    from mxep.gemm.kernels import dot_scaled

    dot_scaled.grouped_wgrad(out, y, y_scale, x, x_scale, offs, scale, add)  # type: ignore[no-untyped-call]


ROWS, COLS = 128, 4
"""Rows and columns of scales in a swizzled tile."""
Operand = tuple[Tensor, Tensor]
"""(contiguous qdata, swizzled scales)."""


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
        a, w = self._e4m3("a", a), self._e4m3("w", _mx(w))
        offs = ends(offs, a)
        if not len(a):
            return torch.empty((0, w.shape[1]), dtype=out_dtype, device=w.device)
        out = multiply(*rows_operand(a, offs), *weight_operand(w), offs)
        out = in_dtype(out, out_dtype)
        return out if bias is None else in_dtype(out + bias[group_of_row(offs, len(out))], out_dtype)

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> Any:
        if not isinstance(dy, MXTensor) and not isinstance(a, MXTensor):
            return AlongTokens(dy, a)
        dy, a = self._e4m3("dy", dy), self._e4m3("a", a)
        return super().prepare_wgrad(dy, a, offs, recipe) if len(dy) else AlongTokens(dy, a)

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
    """torch's grouped GEMM, bf16: a (M, K), b (G, K, N) in forward and dgrad, a (N, M), b (M, K) in wgrad."""
    out: Tensor = torch._scaled_grouped_mm(a, b, a_scale, b_scale, offs=offs, out_dtype=torch.bfloat16)
    return out


def rows_operand(a: MXTensor, offs: Tensor) -> Operand:
    """a (M, K) with blocks along K -> qdata (M, K), scales (round_up(M + G * 127, 128), round_up(K/32, 4))."""
    if a.row_index is not None or not a.qdata.is_contiguous():
        return gather_swizzled(a, offs=offs)
    return a.qdata, swizzle_scales(a.scale, offs=offs)


def weight_operand(w: MXTensor) -> Operand:
    """w (G, N, K) with blocks along K -> qdata (G, K, N), scales (G, round_up(N, 128) * round_up(K/32, 4))."""
    return w.qdata.contiguous().mT, swizzle_scales(w.scale).flatten(1)


def tokens_operand(x: MXTensor, offs: Tensor) -> Operand:
    """x (M, N) with blocks along M, as `requantize` returns it -> qdata (N, M), scales of `swizzle_along_tokens`."""
    return x.qdata.mT, swizzle_along_tokens(x.scale, offs)


def swizzle_along_tokens(scale: Tensor, offs: Tensor) -> Tensor:
    """Swizzle the scales of operands that contract over each group's tokens, group by group.

    scale: (M/32, N) e8m0, a row for each block of 32 tokens. Rows from offs[-1] / 32 on are not read.

    Returns (round_up(N, 128), round_up(M/32 + 3 * G, 4)). It holds the bytes of `swizzle_scales(scale[blocks of g].mT)`
    for all g, one after another. Each group's blocks are padded to a multiple of 4 with zeros. Bytes after the last
    group are unspecified.

    Example: N = 128, groups of 32 and 160 tokens. Group 0 has block 0, in one tile. Group 1 has blocks 1 to 5, in two
    tiles: blocks 1 to 4, then block 5.
    """
    blocks = offs // BLOCK
    sizes = blocks.diff(prepend=blocks.new_zeros(1))
    padded = pad_groups(scale.view(torch.uint8), sizes, alignment=COLS)
    all_groups = swizzle_scales(padded.rows.mT)
    rows, columns = all_groups.shape[0] // ROWS, all_groups.shape[1] // COLS
    # A tile's number is row tile * width + column tile within its group, and row tile * columns + column tile overall.
    last = padded.offs.long() // COLS
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    tile = torch.arange(rows * columns, device=scale.device, dtype=torch.int64)
    group = torch.searchsorted(last * rows, tile, right=True).clamp_(max=len(last) - 1)
    width = (last - first).clamp(min=1)[group]
    within = tile - first[group] * rows
    source = (within // width).clamp_(max=rows - 1) * columns + first[group] + within % width
    tiles = all_groups.view(rows * columns, ROWS * COLS).index_select(0, source.clamp_(max=rows * columns - 1))
    return tiles.view(all_groups.shape).view(scale.dtype)
