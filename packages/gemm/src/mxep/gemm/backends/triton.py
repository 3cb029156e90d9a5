"""The triton backend: MXFP8 GEMMs by `tl.dot_scaled`, one persistent kernel each, no host sync.

    forward  a (qdata as they come, gathered by their index inside the kernel) x w along K       -> out
    dgrad    dy (likewise)                                                     x w along N       -> da
    wgrad    dy, a requantized along tokens, one pass each                     x, group by group -> dw, or added to fp32

The GEMM is exact MX: qdata and scales as the recipe defines them, no folding, sums in fp32. On Blackwell (sm_100) the
tensor cores apply the scales. Other GPUs upcast to bf16, which is slow. On a CPU it runs under Triton's interpreter,
for tests. Not run on Blackwell or CDNA4 hardware.

GEMMs of unquantized operands (recipe "bf16", wgrad "bf16") are torch's grouped mm, as in `dequant`. Not for "fp8".
"""

import os

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend, ends
from mxep.gemm.backends.dequant import Dequant
from mxep.gemm.recipe import Recipe
from mxep.quant import BLOCK, MXTensor
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
        a, w = check_mx(self.name, "a", a, -1), check_mx(self.name, "w", w, -1, (-2, -1))
        parts = a.qdata, a.scale, a.row_index, w.qdata, w.scale
        out: Tensor = grouped_mm_dot_scaled(*parts, ends(offs, a), bias, out_dtype)
        return out

    def prepare_wgrad(self, dy: Tensor, a: Tensor, offs: Tensor | None, recipe: Recipe) -> AlongTokens:
        if isinstance(dy, MXTensor) or isinstance(a, MXTensor):
            dy, a = check_mx(self.name, "dy", dy, -1), check_mx(self.name, "a", a, -1)
        return AlongTokens(recipe.along_tokens(dy, offs), recipe.along_tokens(a, offs))

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
    """qdata, and the scales as bytes: inductor compiles no op that writes if one of its tensors is e8m0."""
    return x.qdata, x.scale.view(torch.uint8)


def check_mx(backend: str, name: str, x: Tensor, *axes: int | tuple[int, int]) -> MXTensor:
    """`x` as an MXTensor in blocks of 32 along one of `axes`. Raises ValueError for anything else."""
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
    a: Tensor,
    a_scale: Tensor,
    a_index: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a (R, K), index (M,) or None, w (G, N, K), bias (G, N) or None -> (M, N) out_dtype."""
    from mxep.gemm.kernels import dot_scaled

    return dot_scaled.grouped_mm(a, a_scale, a_index, w, w_scale, offs, bias, out_dtype)


@op(
    "mxep::grouped_wgrad_dot_scaled",
    fake=lambda *_: None,
    launcher="mxep.gemm.kernels.dot_scaled:grouped_wgrad",
    mutates_args=("out",),
)
def grouped_wgrad_dot_scaled(
    out: Tensor, y: Tensor, y_scale: Tensor, x: Tensor, x_scale: Tensor, offs: Tensor, scale: float, add: bool
) -> None:
    """Contract y (M, N) and x (M, K), both blocked along M, over the rows of each group.

    scale * the result is written to out, or added to it in fp32 if `add`. out: contiguous, (G, N, K) or the halves of N
    (2, G, N / 2, K)."""
    from mxep.gemm.kernels import dot_scaled

    dot_scaled.grouped_wgrad(out, y, y_scale, x, x_scale, offs, scale, add)
