"""The hopper backend folds MX operands to one scale per row, and multiplies them on Hopper's FP8 tensor cores.

    forward  a MX (slots, index) --fold, gather--> one scale per row   x   w quantized to one scale per row      -> out
    dgrad    dy like a                                                 x   w quantized to one scale per column   -> da
    wgrad    dy, a --fold for wgrad: transposed, tokens contiguous-->  * 2^e                                     -> dw

A frozen weight of block FP8 is not folded: each sum over 128 elements is multiplied by its scale. A row-scaled one is
not folded either: its fp32 scales multiply the columns of out. For dgrad both are transposed. The scales of rows then
lie along the contraction, so dy is multiplied by them, and rounded a second time (`mxep.quant.scale_columns`).

Folding moves the scales' exponents into qdata (`mxep.quant.fold`). It is exact, except for elements 2^-14 or more below
the largest of their row. `mxep.gemm.fold_report` tells if that matters. Unquantized activations, gradients and weights
are quantized to one scale per row directly, also where the recipe has blocks of 32. Compared with folding, only those
small elements differ: they are rounded once instead of twice.

GEMMs of unquantized operands (recipe "bf16", wgrad "bf16") run the same kernel in bf16. A linear, which has no groups,
runs torch's GEMM instead. FP8 tensor cores add with 13 fraction bits, so sums leave them every 256 products. No GEMM
syncs with the host. GEMMs and folds take no time for rows past the last group, but quantizing plain operands covers all
rows.
"""

from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend, ends
from mxep.gemm.backends.reference import ALIGNMENT, Dequant, as_bf16, check_alignment, grouped_mm_reference
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.gemm.recipe import Recipe
from mxep.quant import BlockFP8, MXTensor, WgradOperands, fold, fold_for_dgrad, fold_for_wgrad, scale_columns
from mxep.runtime.op import op


class Hopper(Backend):
    """See the module's docstring; `Backend` has the contract."""

    name = "hopper"
    recordable = True
    wants_rowwise = True

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"got a {device.type} device, want a Hopper GPU; use backend 'reference'"
        if torch.version.hip is not None:
            return "got an AMD GPU, want a Hopper GPU; use backend 'auto'"
        if (have := torch.cuda.get_device_capability(device)) != (9, 0):
            return f"got compute capability {have}, want (9, 0), as wgmma is Hopper's alone; use backend 'auto'"
        return None

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        out: Tensor
        if isinstance(a, MXTensor):
            a, w = _folded(a, offs), w if isinstance(w, BlockFP8) else _folded(w)
            out = fp8_grouped_mm(a.qdata, a.scale, w.qdata, w.scale, offs, bias, out_dtype)
        elif offs is None:
            out = Dequant().forward(a, w, offs, bias=bias, out_dtype=out_dtype)
        else:
            check_alignment(*w.shape[1:])
            out = bf16_grouped_mm(as_bf16(a), as_bf16(w), offs, bias, out_dtype)
        return out

    def dgrad(self, dy: Tensor, w: Any, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        if isinstance(dy, MXTensor) and isinstance(w, BlockFP8) and w.block_size == (1, w.shape[-1]):
            dy = scale_columns(dy, w.scale.squeeze(-1), offs=offs)
            one = w.qdata.new_full((len(w.qdata), 1, w.shape[-1]), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            w = MXTensor(w.qdata, one, None, -2, w.shape[-2], dy.dtype, trusted=True)
        return self.forward(dy, _transposed(w), offs, bias=None, out_dtype=out_dtype)

    def expand_rowwise(self, w: FrozenWeight) -> Any:
        x = w.along_k()
        return fold(x) if isinstance(x, MXTensor) and w.row_scale is None else x

    def expand_colwise(self, w: FrozenWeight) -> Any:
        return fold_for_dgrad(
            w.along_k(), None if w.column_scale is None else w.column_scale.view(torch.float8_e8m0fnu)
        )

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> Any:
        if isinstance(dy, MXTensor) and isinstance(a, MXTensor):
            return fold_for_wgrad(a, dy, ends(offs, a), alignment=HOPPER_BLOCK_K)
        return super().prepare_wgrad(dy, a, offs, recipe)

    def wgrad_into(
        self, out: Tensor, operands: WgradOperands | AlongTokens, offs: Tensor | None, scale: float, *, add: bool
    ) -> bool:
        if not isinstance(operands, AlongTokens):
            fp8_grouped_wgrad(out, operands.y_t, operands.x_t, operands.exponent, operands.offs, scale, add)
            return True
        if offs is None:
            return False
        y, x = as_bf16(operands.dy), as_bf16(operands.a)
        check_alignment(y.shape[1], x.shape[1])
        if out.shape[-2] % ALIGNMENT:  # of halves
            return False
        bf16_grouped_wgrad(out, y, x, offs, scale, add)
        return True

    def wgrad_product(
        self, operands: WgradOperands | AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float
    ) -> Tensor:
        if not isinstance(operands, AlongTokens):
            y, x, groups = operands.y_t, operands.x_t, operands.offs.shape[0]
        elif offs is not None:
            y, x, groups = operands.dy.mT, operands.a.mT, offs.shape[0]
        else:
            return Dequant().wgrad_product(operands, offs, out_dtype, scale)
        dw = torch.empty((groups, y.shape[0], x.shape[0]), dtype=out_dtype, device=y.device)
        self.wgrad_into(dw, operands, offs, scale, add=False)
        return dw


def _transposed(w: Tensor) -> Tensor:
    """w.mT without torch's dispatcher, which takes 50 us to transpose an MXTensor."""
    if not isinstance(w, MXTensor) or w.axis != -2:
        return w.mT
    return MXTensor(w.qdata.mT, w.scale.mT, None, -1, w.block_size, w.dtype, trusted=True)


def _folded(x: Tensor, offs: Tensor | None = None) -> MXTensor:
    """Fold x, an MXTensor, to one scale per row. The result has dense rows, multiples of 16 bytes apart."""
    assert isinstance(x, MXTensor)
    if x.axis != -1:
        x = x.along(-1)
    aligned = x.qdata.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.qdata.stride()[:-1])
    if x.block_size == x.shape[-1] and x.row_index is None and aligned:
        return x
    return fold(x, offs=offs)


@op(
    "mxep::fp8_grouped_mm",
    fake=lambda a, a_scale, w, w_scale, offs, bias, out_dtype: a.new_empty((a.shape[0], w.shape[1]), dtype=out_dtype),
    launcher="mxep.gemm.kernels.hopper:grouped_mm",
)
def fp8_grouped_mm(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, offs: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`Backend.forward` of a (M, K) fp8 with scales (M, 1) e8m0, and w (G, N, K) fp8.

    w_scale: (G, N, 1) e8m0 or fp32, or for blocks of 128 x 128 (G, ceil(N/128), ceil(K/128)) fp32.
    """
    out: Tensor = grouped_mm_reference.reference(a, a_scale, None, w, w_scale, offs, bias, out_dtype)
    return out


@op(
    "mxep::fp8_grouped_wgrad",
    fake=lambda *_: None,
    launcher="mxep.gemm.kernels.hopper:grouped_wgrad",
    mutates_args=("out",),
)
def fp8_grouped_wgrad(
    out: Tensor, y_t: Tensor, x_t: Tensor, exponent: Tensor, offs: Tensor, scale: float, add: bool
) -> None:
    """Contract y_t (N, C) and x_t (K, C) fp8 over the C columns of each group. Writes the result, or adds it if `add`.

    The result of group g is scale * 2^exponent[g] * y_t[:, columns of g] @ x_t[:, columns of g].T, rounded to out's
    dtype. 2^exponent is applied in two steps, because it may lie outside fp32.

    out: contiguous, (G, N, K), or (2, G, N / 2, K), whose two parts take the first and second half of the N rows.
    exponent, offs: (G,) int32, as in WgradOperands.
    """
    dw = torch.zeros_like(out, dtype=torch.float32)
    starts = [0, *offs.tolist()]
    for g, (start, end, e) in enumerate(zip(starts, starts[1:], exponent.tolist())):
        product = y_t[:, start:end].float() @ x_t[:, start:end].float().T
        of_group = dw[..., g, :, :]
        of_group.copy_((product * (2.0 ** (e // 2) * scale) * 2.0 ** (e - e // 2)).view(of_group.shape))
    if add:
        out.add_(dw.to(out.dtype))
    else:
        out.copy_(dw)


@op(
    "mxep::bf16_grouped_mm",
    fake=lambda a, w, offs, bias, out_dtype: a.new_empty((a.shape[0], w.shape[1]), dtype=out_dtype),
    launcher="mxep.gemm.kernels.hopper:bf16_grouped_mm",
)
def bf16_grouped_mm(a: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`Backend.forward` of a (M, K) bf16 and w (G, N, K) bf16, with fp32 sums."""
    return Dequant().forward(a, w, offs, bias=bias, out_dtype=out_dtype)


@op(
    "mxep::bf16_grouped_wgrad",
    fake=lambda *_: None,
    launcher="mxep.gemm.kernels.hopper:bf16_grouped_wgrad",
    mutates_args=("out",),
)
def bf16_grouped_wgrad(out: Tensor, y: Tensor, x: Tensor, offs: Tensor, scale: float, add: bool) -> None:
    """`Backend.wgrad_into` of y (M, N) bf16 and x (M, K) bf16. out, add: see `fp8_grouped_wgrad`."""
    dw = Dequant().wgrad_product(AlongTokens(y, x), offs, out.dtype, scale)
    dw = dw if out.dim() == 3 else dw.unflatten(1, (2, -1)).transpose(0, 1)
    if add:
        out.add_(dw)
    else:
        out.copy_(dw)
