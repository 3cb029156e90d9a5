"""Launchers of the grouped GEMM on Hopper, for FP8 and bf16. `hopper_device` has the kernel and its letters."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.gemm.kernels.hopper_device import BLOCK_M as _BLOCK_M
from mxep.gemm.kernels.hopper_device import BLOCK_N as _BLOCK_N
from mxep.gemm.kernels.hopper_device import ROWS_END, grouped_mm_kernel
from mxep.gemm.quantize_once import in_graph_tree
from mxep.quant.device import num_sms as num_sms_of
from mxep.runtime.launch import cdiv, launch
from mxep.runtime.record import fixed, set_up

BLOCK_M, BLOCK_N, BLOCK_K = _BLOCK_M.value, _BLOCK_N.value, HOPPER_BLOCK_K
BLOCK_K_BF16 = BLOCK_K // 2
HALF_ROWS = BLOCK_M // 2
"""Rows of a tile that each of the two multiplying warpgroups computes."""
STAGES = 4
INTERVAL = 2
"""Stages (of 128 products) that are summed on the tensor core before the sum is added in fp32.

With fewer stages there are more additions. With more, all 4 stages would be in use, and no load could run ahead.
"""
GROUP_M = 16
"""Row tiles that are computed for one column of tiles before the next column begins, so that programs share L2."""
LONG_K = 4096
"""If K is larger, bf16 halves GROUP_M. Example: with DeepSeek-V3's K = 7168, the rows of 16 tiles are 29 MB, too much.
"""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
PART_TOKENS, MOST_PARTS = 1024, 8
"""Limits of `parts_of_wgrad`: minimum tokens per part, maximum number of parts."""
_QDATA = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_BF16, _BF16_3D, _BF16_4D = (gl.NVMMASharedLayout(128, element_bitwidth=16, rank=rank) for rank in (2, 3, 4))


def grouped_mm(a, a_scale, w, w_scale, offs, bias, out_dtype):
    """Launcher of mxep::fp8_grouped_mm, which has the types. Row strides of a and w must be multiples of 16 bytes."""
    (M, K), (G, N, _) = a.shape, w.shape
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    a, w = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (a, w))
    if M:
        w = w if w.is_contiguous() else w.reshape(G * N, K)
        scales = a_scale.contiguous(), w_scale.contiguous()
        blocks = w_scale.dtype == torch.float32 and w_scale.shape[1:] != (N, 1)
        bias = None if bias is None else bias.contiguous()
        _launch(out, a, w, *scales, bias, offs, M, N, K, ragged="rows", blocks=blocks)
    return out


def grouped_wgrad(out, y_t, x_t, exponent, offs, factor=1.0, add=False):
    """Launcher of mxep::fp8_grouped_wgrad, which has the types. Groups begin at multiples of BLOCK_K columns.

    If out is 4-D and N / 2 no multiple of HALF_ROWS, a warpgroup's rows could belong to both matrices of out, so each
    gets its own launch.
    """
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
    """Number of parts to cut a single group's tokens (`columns`) into, so that an (n, k) gradient occupies the SMs.

    Each part is computed as a group, and the parts are added up. With several groups the result is 1, no cut.
    Example: a 512 x 2048 gradient has 32 tiles. On 132 SMs its 8192 tokens are cut into 4 parts.
    """
    if groups > 1:
        return 1
    tiles = cdiv(n, BLOCK_M) * cdiv(k, BLOCK_N)
    return max(1, min(num_sms // tiles, columns // PART_TOKENS, MOST_PARTS))


def cuts_of_parts(offs: Tensor, columns: int, parts: int) -> Tensor:
    """Ends of the parts of a single group, (parts,) int32. offs: (1,) int32, the number of valid columns.

    Example: 3 parts of 700 columns, 600 of them valid, end at 256, 512 and 600.
    """
    part = cdiv(cdiv(columns, parts), BLOCK_K) * BLOCK_K
    cuts = torch.arange(part, parts * part + 1, part, dtype=torch.int32, device=offs.device)
    return torch.minimum(cuts, offs)


class Descriptor(NamedTuple):
    """A TMA tensor descriptor. Only the first launch per signature runs Triton's checks on it."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: tuple[int, ...]
    layout: gl.NVMMASharedLayout
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def for_triton(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout)


_counters: dict[tuple[int, int], Tensor] = {}
"""Tile counters, by (device index, stream)."""


def _tile_counter(device: torch.device) -> Tensor:
    """The current stream's tile counter, (1,) int32. It is zero before and after each kernel."""
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
    how = {"RAGGED": ragged, "INTERVAL": 1 if blocks else INTERVAL, "GROUP_M": GROUP_M, "BLOCKS": blocks}
    _start(out, a_desc, b_desc, a_scale, b_scale, bias, offs, M, N, K, factor, ADD=add, HALVES=halves, **how)


def _start(
    out, a_desc, b_desc, a_scale, b_scale, bias, offs, M, N, K, factor=1.0, *,
    INTERVAL=1, ADD=False, HALVES=False, BLOCKS=False, TRANSPOSED=False, **how,
) -> None:  # fmt: skip
    out_desc = None
    if out.dtype == torch.bfloat16:
        out_desc = Descriptor(out, (out.numel() // N, N), (N, 1), (HALF_ROWS, BLOCK_N // 2), _BF16)
    tile_counter, groups = _tile_counter(out.device), 1 if offs is None else offs.shape[0]
    launch(
        grouped_mm_kernel, (num_sms_of(out.device),),
        a_desc, b_desc, out, out_desc, a_scale, b_scale, bias, offs, tile_counter, groups, M, N, K, factor,
        TRANSPOSED=TRANSPOSED, STAGES=STAGES, INTERVAL=INTERVAL, ADD=ADD, HALVES=HALVES, BLOCKS=BLOCKS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4, **how,
    )  # fmt: skip


def bf16_grouped_mm(a, w, offs, bias, out_dtype):
    """Launcher of mxep::bf16_grouped_mm. N and K must be multiples of 8. w may lie (G, K, N) in memory, as in dgrad."""
    (M, K), N = a.shape, w.shape[1]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if M:
        transposed = w.stride(-1) != 1 and w.stride(-2) == 1
        a, w = _loadable(a), _loadable(w.mT if transposed else w)
        a_desc = Descriptor(a, (M, K), a.stride(), (BLOCK_M, BLOCK_K_BF16), _BF16)
        block = (1, BLOCK_K_BF16, BLOCK_N) if transposed else (1, BLOCK_N, BLOCK_K_BF16)
        w_desc = Descriptor(w, w.shape, w.stride(), block, _BF16_3D)
        bias = None if bias is None else bias.contiguous()
        how = {"RAGGED": "rows", "GROUP_M": GROUP_M if K <= LONG_K else GROUP_M // 2, "TRANSPOSED": transposed}
        _start(out, a_desc, w_desc, None, None, bias, offs, M, N, K, **how)
    return out


def bf16_grouped_wgrad(out, y, x, offs, factor=1.0, add=False):
    """Launcher of mxep::bf16_grouped_wgrad. N and K must be multiples of 8. A 4-D out: as for `grouped_wgrad`."""
    (C, N), (_, K) = y.shape, x.shape
    if len(offs) == 1:
        out = out.view(1, N, K)  # with one group the halves follow each other anyway
    if (halves := out.dim() == 4) and N // 2 % HALF_ROWS:
        for half, part in zip(out, y.chunk(2, 1)):
            bf16_grouped_wgrad(half, part, x, offs, factor, add)
    elif C:
        operands = ragged(_loadable(y), BLOCK_M), ragged(_loadable(x), BLOCK_N)
        how = {"RAGGED": "contraction", "GROUP_M": GROUP_M, "ADD": add, "HALVES": halves}
        _start(out, *operands, None, None, None, offs, N, K, C, factor, **how)
    elif not add:
        out.zero_()


def _loadable(x: Tensor) -> Tensor:
    """x bf16 itself if TMA can load it, else a contiguous copy.

    TMA needs stride 1 in the last dimension, and multiples of 16 bytes as start address and as all other strides."""
    dense = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def ragged(x: Tensor, width: int) -> Descriptor:
    """A descriptor of x (C, D) that loads blocks of BLOCK_K_BF16 rows x `width` columns, with zeros past a group's end.

    A group's end differs from load to load, but a descriptor has a fixed end. So each load passes the group's `end` as
    a coordinate. If the group has n rows, its row i is x[end - n + i]. To load element j of it, a load passes the
    coordinates (ROWS_END, end, ROWS_END - n + i, j). Row `end` has ROWS_END as its third coordinate. The descriptor
    ends there, so TMA gives zeros from there on.

    With `row` = x.stride(0), the load's offset from x is, in elements,
    ROWS_END * (2^34 - row) + end * row + (ROWS_END - n + i) * row + j = ROWS_END * 2^34 + (end - n + i) * row + j.
    ROWS_END * 2^34 = 2^64, a multiple of the address space, has no effect.
    """
    row = x.stride(0)
    strides = 2**34 - row, row, row, 1
    return Descriptor(x, (2**31 - 2**16, 2**31 - 2**16, ROWS_END.value, x.shape[1]), strides,
                      (1, 1, BLOCK_K_BF16, width), _BF16_4D)  # fmt: skip
