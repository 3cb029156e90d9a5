"""Launchers of the FP8 grouped GEMM on Hopper. `hopper_device` has the kernel and defines the result."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.gemm.kernels.hopper_device import grouped_mm_kernel
from mxep.gemm.quantize_once import in_graph_tree
from mxep.quant.device import num_sms as num_sms_of
from mxep.runtime.launch import cdiv, launch
from mxep.runtime.record import fixed, set_up

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, HOPPER_BLOCK_K
HALF_ROWS = BLOCK_M // 2
"""Rows of a tile that one warpgroup multiplies."""
STAGES = 4
INTERVAL = 2
"""Stages between promotions: 256 products. Fewer stages cost additions, more hold all 4 and leave loads no slack."""
GROUP_M = 16
"""Row tiles that consecutive tiles go down before the next column of tiles, so that programs share L2 contents."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
PART_TOKENS, MOST_PARTS = 1024, 8
"""For a weight gradient with few tiles: minimum tokens per part, maximum parts."""
_QDATA = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_BF16 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def grouped_mm(a, a_scale, w, w_scale, offs, bias, out_dtype):
    """mxep::fp8_grouped_mm. Its reference has the types. Rows of qdata must be multiples of 16 bytes apart."""
    (M, K), (G, N, _) = a.shape, w.shape
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    a, w = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (a, w))
    if M:
        w = w if w.is_contiguous() else w.reshape(G * N, K)
        scales, blocks = (a_scale.contiguous(), w_scale.contiguous()), w_scale.dtype == torch.float32
        bias = None if bias is None else bias.contiguous()
        _launch(out, a, w, *scales, bias, offs, M, N, K, ragged="rows", blocks=blocks)
    return out


def grouped_wgrad(out, y_t, x_t, exponent, offs, factor=1.0, add=False):
    """mxep::fp8_grouped_wgrad. Groups begin at multiples of BLOCK_K. Halves are separate GEMMs if a warpgroup's rows
    would belong to both."""
    (N, C), (K, _) = y_t.shape, x_t.shape
    if len(offs) == 1:
        out = out.view(1, N, K)  # with one group the halves follow each other anyway
    if (halves := out.dim() == 4) and N // 2 % HALF_ROWS:
        for half, y in zip(out, y_t.chunk(2)):
            grouped_wgrad(half, y, x_t, exponent, offs, factor, add)
        return
    if (parts := parts_of_wgrad(offs.shape[0], N, K, C, num_sms_of(y_t.device))) > 1:
        products = torch.empty((parts, N, K), dtype=torch.float32, device=y_t.device)
        exponents, cuts = exponent.expand(parts).contiguous(), cuts_of_parts(offs, C, parts)  # parts act as groups
        _launch(products, y_t, x_t, exponents, None, None, cuts, N, K, C, ragged="contraction", factor=factor)
        if add or out.dtype != torch.float32:
            (out.add_ if add else out.copy_)(products.sum(0, keepdim=True).to(out.dtype))
        else:
            torch.sum(products, 0, keepdim=True, out=out)
    elif C:
        product = out, y_t, x_t, exponent, None, None, offs, N, K, C
        _launch(*product, ragged="contraction", add=add, halves=halves, factor=factor)
    elif not add:
        out.zero_()


def parts_of_wgrad(groups: int, n: int, k: int, columns: int, num_sms: int) -> int:
    """Number of parts to cut a single group's tokens into, so that a small gradient's tiles occupy the SMs.

    Example: 512 x 2048 are 32 tiles; on 132 SMs 8192 tokens are cut into 4 parts.
    """
    if groups > 1:
        return 1
    tiles = cdiv(n, BLOCK_M) * cdiv(k, BLOCK_N)
    return max(1, min(num_sms // tiles, columns // PART_TOKENS, MOST_PARTS))


def cuts_of_parts(offs: Tensor, columns: int, parts: int) -> Tensor:
    """(parts,) int32: where each part of the single group ends. offs: (1,), number of valid columns.

    Example: 3 parts of 700 columns, 600 of them valid, end at 256, 512 and 600.
    """
    part = cdiv(cdiv(columns, parts), BLOCK_K) * BLOCK_K
    cuts = torch.arange(part, parts * part + 1, part, dtype=torch.int32, device=offs.device)
    return torch.minimum(cuts, offs)


class Descriptor(NamedTuple):
    """A tensor descriptor that launches without Triton's checks. The first launch per signature makes them."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: tuple[int, int]
    layout: gl.NVMMASharedLayout
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def for_triton(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout)


_counters: dict[tuple[int, int], Tensor] = {}
"""Tile counters by device and stream."""


def _tile_counter(device: torch.device) -> Tensor:
    """(1,) int32 counter of the current stream. It is zero, and a kernel leaves it zero."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or in_graph_tree(device):
        return torch.zeros(1, dtype=torch.int32, device=device)  # the graph's own: it may overlap with this stream
    index = torch._C._cuda_getDevice()
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _counters:
        with set_up():
            made = _counters.setdefault(key, torch.zeros(1, dtype=torch.int32, device=device))
            fixed(made)
    return _counters[key]


def _launch(
    out, a, b, a_scale, b_scale, bias, offs, M: int, N: int, K: int, *, ragged: str, add=False, halves=False,
    blocks=False, factor=1.0,
) -> None:  # fmt: skip
    a_desc = Descriptor(a, a.shape, a.stride(), (BLOCK_M, BLOCK_K), _QDATA)
    b_desc = Descriptor(b, (b.numel() // K, K), b.stride()[-2:], (BLOCK_N, BLOCK_K), _QDATA)
    out_desc = None
    if out.dtype == torch.bfloat16:
        out_desc = Descriptor(out, (out.numel() // N, N), (N, 1), (HALF_ROWS, BLOCK_N // 2), _BF16)
    tile_counter, groups = _tile_counter(out.device), 1 if offs is None else offs.shape[0]
    launch(
        grouped_mm_kernel, (num_sms_of(a.device),),
        a_desc, b_desc, out, out_desc, a_scale, b_scale, bias, offs, tile_counter, groups, M, N, K, factor,
        RAGGED=ragged, STAGES=STAGES, INTERVAL=1 if blocks else INTERVAL, GROUP_M=GROUP_M, ADD=add, HALVES=halves,
        BLOCKS=blocks, CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
