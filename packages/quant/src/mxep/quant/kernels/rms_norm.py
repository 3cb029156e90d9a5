"""RMSNorm with its result quantized, and its backward: a row at a time, in chunks of 8 elements a thread.

    forward    x (R, D)      read once, kept in registers until its sum is there     bytes an element, bf16: 2 in, 1 out
    backward   dy, x (R, D)  likewise; a program adds up d_weight over its rows                              4 in, 2 out

Programs stride over rows; those of backward are RMS_NORM_PARTS, so that a part has the same rows on every device. The
weight comes from L2 with every row. Its bits were tested on an H200, its time was not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import abs_bits, as_bytes, num_sms, reciprocal, scale_of_amax
from mxep.quant.kernels.chunks import joined, load_chunk, store_chunk, sums_of_eight, tree_sum
from mxep.quant.shapes import RMS_NORM_PARTS, empty_rows
from mxep.runtime.launch import launch, next_power_of_2

WARP_ELEMENTS, BACKWARD_WARP_ELEMENTS = 1024, 512
THREAD_ELEMENTS = 8
"""Of a chunk for each thread."""
PROGRAMS_PER_SM = 16


@triton.jit(do_not_specialize=["rows", "eps", "of_length"])
def rms_norm_quantize_kernel(
    x_ptr, weight_ptr, qdata_ptr, scale_ptr, rstd_ptr, rows, eps, of_length,
    D: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """BLOCK_SIZE: elements of a scale, which divide CHUNK; 0 for the row."""
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        xs, sums = (), ()
        for c in tl.static_range(CHUNKS):
            x = load_chunk(x_ptr + row64 * D, c, CHUNK, D).to(tl.float32)
            xs += (x,)
            sums += (sums_of_eight(x * x),)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tree_sum(sums) * of_length + eps))
        tl.store(rstd_ptr + row, rstd)
        hs, scales = (), ()
        for c in tl.static_range(CHUNKS):
            h = (xs[c] * rstd) * load_chunk(weight_ptr, c, CHUNK, D).to(tl.float32)
            if BLOCK_SIZE == 0:
                hs += (h,)
            else:
                blocks = tl.reshape(h, (CHUNK // BLOCK_SIZE, BLOCK_SIZE))
                scale = scale_of_amax(tl.max(abs_bits(blocks), axis=1), MODE, dtype)
                qdata = (blocks * reciprocal(scale)[:, None]).to(dtype)
                store_chunk(qdata_ptr + row64 * D, tl.reshape(qdata, (CHUNK,)), c, D)
                scales += (scale,)
        if BLOCK_SIZE == 0:
            bits = abs_bits(hs[0])
            for c in tl.static_range(1, CHUNKS):
                bits = tl.maximum(bits, abs_bits(hs[c]))
            scale = scale_of_amax(tl.max(bits, axis=0), MODE, dtype)
            factor = reciprocal(scale)
            for c in tl.static_range(CHUNKS):
                store_chunk(qdata_ptr + row64 * D, hs[c] * factor, c, D)
            tl.store(scale_ptr + row, scale.to(tl.uint8))
        else:
            store_chunk(scale_ptr + row64 * (D // BLOCK_SIZE), joined(scales), 0, D // BLOCK_SIZE)


@triton.jit(do_not_specialize=["rows", "of_length"])
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, parts_ptr, rows, of_length, D: tl.constexpr, CHUNK: tl.constexpr
):
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    totals = ()
    for _ in tl.static_range(CHUNKS):
        totals += (tl.zeros((CHUNK,), tl.float32),)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        gs, ns, sums, added = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            dy = load_chunk(dy_ptr + row64 * D, c, CHUNK, D).to(tl.float32)
            n = load_chunk(x_ptr + row64 * D, c, CHUNK, D).to(tl.float32) * rstd
            g = dy * load_chunk(weight_ptr, c, CHUNK, D).to(tl.float32)
            gs += (g,)
            ns += (n,)
            sums += (sums_of_eight(g * n),)
            added += (totals[c] + dy * n,)
        totals = added
        mean = tree_sum(sums) * of_length
        for c in tl.static_range(CHUNKS):
            store_chunk(dx_ptr + row64 * D, (gs[c] - ns[c] * mean) * rstd, c, D)
    for c in tl.static_range(CHUNKS):
        store_chunk(parts_ptr + tl.program_id(0).to(tl.int64) * D, totals[c], c, D)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, mode: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """mxep::rms_norm_quantize. ValueError for blocks that are neither the row nor a power of two."""
    rows, D = x.shape
    by_row = block_size == D
    if not by_row and block_size & (block_size - 1):
        raise ValueError(f"block_size: got {block_size}, want the whole row, {D}, or a power of two, on CUDA")
    qdata, scale = empty_rows(x, dtype, block_size)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        chunk, warps = _shape(D, WARP_ELEMENTS)
        launch(rms_norm_quantize_kernel, (min(rows, PROGRAMS_PER_SM * num_sms(x.device)),),
            x.contiguous(), weight, qdata, as_bytes(scale), rstd, rows, eps, 1.0 / D,
            D=D, CHUNK=chunk if by_row else max(chunk, block_size), MODE=mode, BLOCK_SIZE=0 if by_row else block_size,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return qdata, scale, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """mxep::rms_norm_backward."""
    rows, D = x.shape
    dx, parts = x.new_empty(x.shape), torch.empty((RMS_NORM_PARTS, D), dtype=torch.float32, device=x.device)
    chunk, warps = _shape(D, BACKWARD_WARP_ELEMENTS)
    launch(rms_norm_backward_kernel, (RMS_NORM_PARTS,),
        dy.contiguous(), x.contiguous(), weight, rstd, dx, parts, rows, 1.0 / D,
        D=D, CHUNK=chunk, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return dx, parts


def _shape(D: int, warp_elements: int) -> tuple[int, int]:
    """(elements of a chunk, warps). warp_elements: of a row, padded to a power of two, for each warp of its program."""
    padded = max(8, next_power_of_2(D))
    warps = min(16, max(1, padded // warp_elements))
    return min(32 * warps * THREAD_ELEMENTS, padded), warps
