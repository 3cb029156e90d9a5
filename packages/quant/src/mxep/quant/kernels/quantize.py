"""Quantization kernels: along rows, in square blocks, along columns (with a transpose), per row, and per column.

    rows         x is a list of blocks; a program takes NUM_BLOCKS of them, padded to a power of two elements. Blocks
                 of more than LONGEST elements are read twice
    2-D          a program takes BLOCK_SIZE rows x BLOCK_N columns
    joined rows  one scale per row of [x | y | z], without the concatenation
    columns      x (N, K) -> qdata (K, N), scale (N/BLOCK_SIZE, K); a program takes a tile of BLOCK_M rows x BLOCK_N
                 columns. A block longer than a tile takes two kernels, one for the amax and one for the qdata
    per row      qdata (N, K), scale (N, 1), and the amax of each column by atomic max
    per column   that amax -> qdata (K, N), scale (1, K), by the second kernel of columns

Leading axes are a batch. A thread holds PACK = 8 consecutive rows of a tile, as a tuple of 8 tensors
(BLOCK_M / 8, BLOCK_N). So it can pack 8 qdata of a column into two 32-bit words in registers, and the tile is
transposed through shared memory word by word. Byte by byte it would take four times the accesses and instructions.

    tile[i][j] is row 8 * j + i         word 2 * j      q0 | q1 << 8 | q2 << 16 | q3 << 24   (q0 lies first in memory)
                                        word 2 * j + 1  q4 | q5 << 8 | q6 << 16 | q7 << 24
    stored (columns, BLOCK_M / 4) words  =  (columns, BLOCK_M) qdata

If the number of rows is no multiple of 8, the tuple has one tensor (BLOCK_M, BLOCK_N), stored byte by byte.

On an H200 "columns" runs at 0.96 of copy speed (65536 x 7168). Its limit is the number of requests to L2, half of which
cross the fabric between the two L2 partitions. To need few requests, a row of a tile has at least 128 bytes, and the
scales of a block row are neighbours in memory.
"""

import functools
import operator
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import abs_bits, num_sms, reciprocal, scale_of_amax
from mxep.quant.kernels.e2m1 import quantize_e2m1
from mxep.quant.shapes import empty_2d, empty_columns, empty_rows, joined, joined_shape
from mxep.runtime.launch import cdiv, launch, next_power_of_2
from mxep.runtime.lengths import Length


@triton.jit
def load_tile(ptr, row, column, stride, rows_left, columns_left, PACK: tl.constexpr):
    """Load a tile as a tuple of PACK tensors (BLOCK_M / PACK, BLOCK_N): tensor i has rows `row` + i of the matrix.

    ptr: first element of the tile. stride: elements per row of the matrix.
    row: (BLOCK_M / PACK, 1) int32, first row of each pack of PACK rows. column: (1, BLOCK_N) int32.
    rows_left, columns_left: elements from there on are zero. rows_left is a multiple of PACK.
    """
    mask = (row < rows_left) & (column < columns_left)
    ptr += row.to(tl.int64) * stride + column
    tile = ()
    for _ in tl.static_range(PACK):
        tile = tile + (tl.load(ptr, mask=mask, other=0.0),)
        ptr += stride
    return tile


@triton.jit
def quantize_tile_columns(
    tile, qdata_ptr, scale_ptr, stride, scale_stride, rows_left, columns_left, MODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize a tile from `load_tile` in blocks of BLOCK_SIZE rows, which divides rows_left.

    qdata of column c are stored at qdata_ptr + c * stride, scales of block row b at scale_ptr + b * scale_stride.
    """
    PACKS: tl.constexpr = tile[0].shape[0]
    BLOCK_N: tl.constexpr = tile[0].shape[1]
    NUM_BLOCKS: tl.constexpr = PACKS * len(tile) // BLOCK_SIZE
    BY_BLOCK: tl.constexpr = (NUM_BLOCKS, PACKS // NUM_BLOCKS, BLOCK_N)
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    amax = tl.abs(tile[0].to(tl.float32))
    for i in tl.static_range(1, len(tile)):
        amax = tl.maximum(amax, tl.abs(tile[i].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of_amax(tl.max(tl.reshape(abs_bits(amax), BY_BLOCK), axis=1), MODE, dtype)
    factor = tl.reshape(tl.broadcast_to(reciprocal(scale)[:, None, :], BY_BLOCK), (PACKS, BLOCK_N))
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled = scaled + (tile[i].to(tl.float32) * factor,)
    blocks_left = rows_left // BLOCK_SIZE
    store_transposed(scaled, qdata_ptr, stride, blocks_left * BLOCK_SIZE, columns_left)
    block = tl.arange(0, NUM_BLOCKS)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    offsets = block.to(tl.int64) * scale_stride + column
    tl.store(scale_ptr + offsets, scale.to(tl.uint8), mask=(column < columns_left) & (block < blocks_left))


@triton.jit
def store_transposed(tile, out_ptr, stride, rows_left, columns_left):
    """Cast `tile` to the dtype of out_ptr and store it transposed: column c at out_ptr + c * stride.

    tile: tuple of 8 tensors (BLOCK_M / 8, BLOCK_N), or of one tensor (BLOCK_M, BLOCK_N). With 8 tensors, stride and
    rows_left must be multiples of 8. Code is best if Triton knows that rows_left is a multiple of 16.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, tile[0].shape[1])[:, None]
    if len(tile) == 1:
        qdata = tl.trans(tile[0].to(dtype))
        row = tl.arange(0, qdata.shape[1])[None, :]
        mask = (column < columns_left) & (row < rows_left)
        tl.store(out_ptr + column.to(tl.int64) * stride + row, qdata, mask=mask)
    else:
        first = _word(tile[0], tile[1], tile[2], tile[3], dtype)
        second = _word(tile[4], tile[5], tile[6], tile[7], dtype)
        words = tl.permute(tl.join(first, second), (1, 0, 2))
        words = tl.reshape(words, (words.shape[0], words.shape[1] * 2))
        word = tl.arange(0, words.shape[1])[None, :]
        mask = (column < columns_left) & (word < rows_left // 4)
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + column.to(tl.int64) * (stride // 4) + word, words, mask=mask)


@triton.jit
def _word(a, b, c, d, dtype: tl.constexpr):
    """Cast four values to `dtype` and pack them in a 32-bit word. The hardware's cast packs two at no cost."""
    return _half(a, b, dtype) | (_half(c, d, dtype) << 16)


@triton.jit
def _half(a, b, dtype: tl.constexpr):
    low, high = tl.split(tl.join(a, b).to(dtype).to(tl.uint8, bitcast=True).to(tl.int32))
    return low | (high << 8)


@triton.jit
def program_tile(row_tiles, column_tiles, ROWS_FIRST: tl.constexpr):
    """(batch, row tile, column tile) of this program. ROWS_FIRST: True: consecutive programs take the same columns."""
    program = tl.program_id(0)
    batch = program // (row_tiles * column_tiles)
    program = program % (row_tiles * column_tiles)
    if ROWS_FIRST:
        return batch.to(tl.int64), program % row_tiles, program // row_tiles
    else:
        return batch.to(tl.int64), program // column_tiles, program % column_tiles


TILE_ELEMENTS, LONG_ELEMENTS = 4096, 8192
LONGEST = 16384
"""Maximum elements of a block that a program holds in registers at once."""
BLOCK_N_2D = 256


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_blocks_kernel(
    x_ptr, qdata_ptr, scale_ptr, num_blocks, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Quantize NUM_BLOCKS consecutive blocks of BLOCK_SIZE elements per program, CHUNK elements of each at a time."""
    first = tl.program_id(0).to(tl.int64) * NUM_BLOCKS
    block = tl.arange(0, NUM_BLOCKS)
    mask = block < num_blocks - first
    element = tl.arange(0, CHUNK)[None, :]
    offsets = block[:, None] * BLOCK_SIZE + element
    x_ptr += first * BLOCK_SIZE
    qdata_ptr += first * BLOCK_SIZE
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    inside = mask[:, None] if CHUNK == BLOCK_SIZE else mask[:, None] & (element < BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(abs_bits(x), axis=1)
    for chunk in range(CHUNK, BLOCK_SIZE, CHUNK):
        more_inside = mask[:, None] & (chunk + element < BLOCK_SIZE)
        more = tl.load(x_ptr + chunk + offsets, mask=more_inside, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, tl.max(abs_bits(more), axis=1))
    scale = scale_of_amax(bits, MODE, dtype)
    factor = reciprocal(scale)[:, None]
    tl.store(qdata_ptr + offsets, (x * factor).to(dtype), mask=inside)
    for chunk in range(CHUNK, BLOCK_SIZE, CHUNK):
        more_inside = mask[:, None] & (chunk + element < BLOCK_SIZE)
        more = tl.load(x_ptr + chunk + offsets, mask=more_inside, other=0.0).to(tl.float32)
        tl.store(qdata_ptr + chunk + offsets, (more * factor).to(dtype), mask=more_inside)
    tl.store(scale_ptr + first + block, scale.to(tl.uint8), mask=mask)


@triton.jit
def quantize_2d_kernel(
    x_ptr, qdata_ptr, scale_ptr, K, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """x: (rows, K) with leading axes flattened into rows, a multiple of BLOCK_SIZE."""
    row_block = tl.program_id(0).to(tl.int64)
    column0 = tl.program_id(1) * BLOCK_N
    row = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_N)
    start = row_block * BLOCK_SIZE * K + column0
    offsets = row[:, None].to(tl.int64) * K + column[None, :]
    mask = (column < K - column0)[None, :]
    x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    x = tl.reshape(x, (BLOCK_SIZE, BLOCK_N // BLOCK_SIZE, BLOCK_SIZE))
    scale = scale_of_amax(tl.max(tl.max(abs_bits(x), axis=2), axis=0), MODE, dtype)
    qdata = tl.reshape((x * reciprocal(scale)[None, :, None]).to(dtype), (BLOCK_SIZE, BLOCK_N))
    tl.store(qdata_ptr + start + offsets, qdata, mask=mask)
    block = column0 // BLOCK_SIZE + tl.arange(0, BLOCK_N // BLOCK_SIZE)
    tl.store(scale_ptr + row_block * (K // BLOCK_SIZE) + block, scale.to(tl.uint8), mask=block < K // BLOCK_SIZE)


def quantize_rows(x, dtype, mode, block_size):
    if dtype == torch.float4_e2m1fn_x2:
        return quantize_e2m1(x, mode, block_size)
    return quantize_into_room(x, None, dtype, mode, block_size)


def quantize_into_room(x, room, dtype, mode, block_size):
    """Launcher of mxep::quantize_into_room; with room None, of mxep::quantize_rows."""
    qdata, scale = empty_rows(x, dtype, block_size, None if room is None else (room, x.shape[1]))
    if x.numel():
        chunk = min(next_power_of_2(block_size), LONGEST)
        tile = max(1, (TILE_ELEMENTS if chunk == block_size <= TILE_ELEMENTS else LONG_ELEMENTS) // chunk)
        blocks = scale.numel() if room is None else Length(len(x), functools.partial(operator.mul, scale.shape[1]))
        launch(quantize_blocks_kernel, (cdiv(scale.numel(), tile),),
            x.contiguous(), qdata, scale, blocks, MODE=mode, BLOCK_SIZE=block_size, NUM_BLOCKS=tile,
            CHUNK=chunk, num_warps=max(4, chunk // 2048),
        )  # fmt: skip
    return qdata, scale


def quantize_2d(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Launcher of mxep::quantize_2d. Raises ValueError unless block_size is a power of two up to 128."""
    if block_size & (block_size - 1) or block_size > 128:
        raise ValueError(f"block_size: got {block_size} x {block_size}, want a power of two up to 128 on CUDA")
    k = x.shape[-1]
    qdata, scale = empty_2d(x, dtype, block_size)
    if x.numel():
        launch(quantize_2d_kernel, (x.numel() // k // block_size, cdiv(k, BLOCK_N_2D)),
            x.contiguous(), qdata, scale, k, MODE=mode, BLOCK_SIZE=block_size, BLOCK_N=BLOCK_N_2D,
            num_warps=8,
        )  # fmt: skip
    return qdata, scale


TILE = (256, 64)
LONG_TILE = (64, 128)
NUM_WARPS = 8


@triton.jit
def quantize_tile_kernel(
    x_ptr, qdata_ptr, scale_ptr, N, K,
    MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x (batch, N, K) -> qdata (batch, K, N), scale (batch, N / BLOCK_SIZE, K)."""
    PACK: tl.constexpr = 8
    batch, row_tile, column_tile = program_tile(tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row0 = (row_tile * BLOCK_M).to(tl.int64)
    column0 = column_tile * BLOCK_N
    rows_left = N - row_tile * BLOCK_M
    columns_left = K - column0
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    first = batch * N * K
    tile = load_tile(x_ptr + first + row0 * K + column0, row, column, K, rows_left, columns_left, PACK)
    qdata_ptr += first + column0.to(tl.int64) * N + row0
    scale_ptr += (batch * N + row0) // BLOCK_SIZE * K + column0
    quantize_tile_columns(tile, qdata_ptr, scale_ptr, N, K, rows_left, columns_left, MODE, BLOCK_SIZE)


@triton.jit
def column_amax_kernel(x_ptr, bits_ptr, length, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """x (segments, length, K) -> bits (segments, K): `abs_bits` of the amax of each column. bits must be 0 before."""
    segment, row_tile, column_tile = program_tile(tl.cdiv(length, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < K
    offsets = (segment * length + row)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + offsets, mask=(row < length)[:, None] & mask[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr + segment * K + column, tl.max(abs_bits(x), axis=0), mask=mask, sem="relaxed")


@triton.jit
def quantize_long_columns_kernel(
    x_ptr, bits_ptr, qdata_ptr, scale_ptr, length, N, K, all_rows, MODE: tl.constexpr, PACK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x (segments, length, K), bits (segments, K) -> qdata (batch, K, N), scale (segments, K).

    bits: bits of the amax. A NaN or -0 may have set the sign bit.
    all_rows: length of a row of qdata if it also holds other parts of x, else None (it is N).
    """
    segment, row_tile, column_tile = program_tile(tl.cdiv(length, BLOCK_M), tl.cdiv(K, BLOCK_N), True)
    batch = segment // (N // length)
    within = segment % (N // length)
    row0 = row_tile * BLOCK_M
    column0 = column_tile * BLOCK_N
    column = tl.arange(0, BLOCK_N)[None, :]
    mask = column < K - column0
    bits = tl.load(bits_ptr + segment * K + column0 + column, mask=mask, other=0) & 0x7FFFFFFF
    scale = scale_of_amax(bits, MODE, qdata_ptr.dtype.element_ty)
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    x_ptr += (segment * length + row0) * K + column0
    tile = load_tile(x_ptr, row, column, K, length - row0, K - column0, PACK)
    scaled = ()
    for i in tl.static_range(PACK):
        scaled = scaled + (tile[i].to(tl.float32) * reciprocal(scale),)
    stride = N if all_rows is None else all_rows
    qdata_ptr += (batch * K + column0) * stride + within * length + row0
    store_transposed(scaled, qdata_ptr, stride, length - row0, K - column0)
    if row_tile == 0:
        tl.store(scale_ptr + segment * K + column0 + column, scale.to(tl.uint8), mask=mask)


def quantize_columns(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    qdata, scale = empty_columns(x, dtype, block_size)
    n, k = x.shape[-2:]
    if x.numel() and 16 <= block_size <= min(TILE) and block_size & (block_size - 1) == 0:  # blocks fill a tile
        block_m, block_n = TILE
        launch(quantize_tile_kernel, (x.numel() // (n * k) * cdiv(n, block_m) * cdiv(k, block_n),),
            x, qdata, scale, n, k, MODE=mode, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    elif x.numel():
        bits = torch.zeros((x.numel() // (block_size * k), k), dtype=torch.int32, device=x.device)
        column_amax(x, bits, block_size)
        quantize_long_columns(x, bits, qdata, scale, mode, block_size)
    return qdata, scale


def column_amax(x: Tensor, bits: Tensor, block_size: int) -> None:
    """Launch `column_amax_kernel` for x (..., N, K), contiguous, with segments of block_size rows."""
    k = x.shape[-1]
    block_m, block_n = TILE
    if bits.numel() and block_size:
        grid = (bits.numel() // k * cdiv(block_size, block_m) * cdiv(k, block_n),)
        launch(column_amax_kernel, grid, x, bits, block_size, k, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=NUM_WARPS)


def quantize_long_columns(x: Tensor, bits: Tensor, qdata: Tensor, scale: Tensor, mode: str, block_size: int) -> None:
    """Launch `quantize_long_columns_kernel` for x (..., N, K), contiguous. qdata and scale are written.

    qdata: (..., K, N). It may be a view of N columns of a wider tensor.
    """
    n, k = x.shape[-2:]
    block_m, block_n = LONG_TILE
    width = qdata.stride(-2)
    packed = block_size % 8 == width % 8 == qdata.storage_offset() % 8 == 0
    grid = (bits.shape[0] * cdiv(block_size, block_m) * cdiv(k, block_n),)
    launch(quantize_long_columns_kernel, grid,
        x, bits, qdata, scale, block_size, n, k, None if width == n else width, MODE=mode,
        PACK=8 if packed else 1, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _load(x_ptr, row, K: tl.constexpr):
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    return tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _store(x, factor, qdata_ptr, K: tl.constexpr):
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    tl.store(qdata_ptr + column, (x * factor).to(qdata_ptr.dtype.element_ty), mask=column < K)


@triton.jit
def quantize_joined_rows_kernel(
    x_ptr, y_ptr, z_ptr, qdata_ptr, scale_ptr, KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """Quantize one row of [x | y | z] per program. KX, KY, KZ: columns of x, y and z. KZ is 0 if there is no z."""
    row = tl.program_id(0).to(tl.int64)
    x = _load(x_ptr, row, KX)
    y = _load(y_ptr, row, KY)
    bits = tl.maximum(tl.max(abs_bits(x), axis=1), tl.max(abs_bits(y), axis=1))
    if KZ:
        z = _load(z_ptr, row, KZ)
        bits = tl.maximum(bits, tl.max(abs_bits(z), axis=1))
    scale = scale_of_amax(bits, MODE, qdata_ptr.dtype.element_ty)
    factor = reciprocal(scale)[:, None]
    qdata_ptr += row * (KX + KY + KZ)
    _store(x, factor, qdata_ptr, KX)
    _store(y, factor, qdata_ptr + KX, KY)
    if KZ:
        _store(z, factor, qdata_ptr + KX + KY, KZ)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale.to(tl.uint8))


def quantize_joined_rows(x, y, z, dtype, mode):
    """Launcher of mxep::quantize_joined_rows. If a row does not fit in registers, x, y and z are concatenated first."""
    parts = [part.contiguous() for part in (x, y, z) if part is not None]
    widths = [part.shape[1] for part in parts] + [0] * (3 - len(parts))
    padded = sum(map(next_power_of_2, filter(None, widths)))
    if padded > LONGEST or 0 in widths[: len(parts)]:
        x = joined(-1, *parts)
        return quantize_rows(x, dtype, mode, x.shape[1])
    qdata, scale = empty_rows(x, dtype, 0, joined_shape(-1, *parts))
    if x.shape[0]:
        launch(quantize_joined_rows_kernel, (x.shape[0],),
            parts[0], parts[1], parts[-1], qdata, scale, KX=widths[0], KY=widths[1], KZ=widths[2], MODE=mode,
            num_warps=max(4, next_power_of_2(padded // 2048)),
        )  # fmt: skip
    return qdata, scale


ROWS_PER_PROGRAM = 192
"""Approximate rows per program. Fewer rows mean more atomics (one per column and program), more rows fewer programs."""
LEAST_ROWS = 16
"""Minimum rows per program, even if the GPU is then not full."""


@triton.jit(do_not_specialize=["steps"])
def quantize_rows_with_amax_kernel(
    x_ptr, qdata_ptr, scale_ptr, bits_ptr, N, all_rows, steps, K: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """x (batch, N, K) -> qdata (batch, N, K), scale (batch, N). Also raises bits to the amax of each column.

    bits: (batch, K), `abs_bits` of the amax so far: 0, or the amax of parts of x handled by earlier launches.
    steps: a program takes `steps` times ROWS rows.
    all_rows: rows per matrix of the results if they also hold other parts of x, else None (it is N).
    """
    programs = tl.cdiv(N, ROWS * steps)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    row0 = tl.program_id(0) % programs * (ROWS * steps)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(K))
    column_mask = column < K
    if all_rows is not None:
        qdata_ptr += batch * (all_rows - N) * K
        scale_ptr += batch * (all_rows - N)
    amax = tl.zeros(column.shape, tl.int32)
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    first = batch * N + row0
    offsets = row[:, None] * K + column[None, :]
    left = N - row0
    mask = (row < left)[:, None] & column_mask[None, :]
    ahead = tl.load(x_ptr + first * K + offsets, mask=mask, other=0.0)
    for step in range(tl.minimum(steps, tl.cdiv(left, ROWS))):
        x = ahead.to(tl.float32)
        row_mask = row < left
        mask = row_mask[:, None] & column_mask[None, :]
        left -= ROWS
        next_mask = (row < tl.where(step + 1 < steps, left, 0))[:, None] & column_mask[None, :]
        ahead = tl.load(x_ptr + (first + ROWS) * K + offsets, mask=next_mask, other=0.0)
        bits = abs_bits(x)
        amax = tl.maximum(amax, tl.max(bits, axis=0))
        scale = scale_of_amax(tl.max(bits, axis=1), MODE, dtype)
        to = tl.max_contiguous(qdata_ptr + first * K + offsets, (1, 8))
        tl.store(to, (x * reciprocal(scale)[:, None]).to(dtype), mask=mask)
        tl.store(scale_ptr + first + row, scale.to(tl.uint8), mask=row_mask)
        first += ROWS
    tl.atomic_max(bits_ptr + batch * K + column, amax, mask=column_mask, sem="relaxed")


def quantize_per_row(x, y, z, dtype, mode):
    """Launcher of mxep::quantize_per_row. If a row does not fit in registers, parts are concatenated and read twice."""
    *rest, n, k = shape = joined_shape(-2, x, y, z)
    amax = torch.zeros((*rest, k), dtype=torch.float32, device=x.device)
    bits = amax.view(torch.int32)
    if k > LONGEST or not x.numel():
        x = joined(-2, x, y, z).contiguous()
        column_amax(x, bits, n)
        return *quantize_rows(x, dtype, mode, k), amax
    qdata, scale = empty_rows(x, dtype, k, shape)
    wide = next_power_of_2(k) > 2048
    rows = 8 // x.element_size() if k <= LONGEST // 2 else 1
    batch, all_rows = amax.numel() // k, None if y is None else n
    for part, (to, scale_to) in _places((qdata, scale), -2, x, y, z):
        n = part.shape[-2]
        steps = _steps(batch, n, rows, num_sms(x.device) * (1 if wide else 3))
        launch(quantize_rows_with_amax_kernel, (batch * cdiv(n, rows * steps),),
            part, to, scale_to, bits, n, all_rows, steps, K=k, MODE=mode, ROWS=rows, num_warps=16 if wide else 4,
        )  # fmt: skip
    return qdata, scale, amax


def _places(
    results: tuple[Tensor, ...], dim: int, *parts: Tensor | None
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield each nonempty part, made contiguous, and the views of `results` into which its results are written.

    parts: tensors to be concatenated along their axis -2. results: hold all parts one after another along `dim`.
    """
    start = 0
    for part in parts:
        if part is not None and (n := part.shape[-2]):
            whole = results[0].shape[dim] == n
            yield part.contiguous(), results if whole else tuple(to.narrow(dim, start, n) for to in results)
            start += n


def _steps(batch: int, n: int, rows: int, at_once: int) -> int:
    """Steps of `rows` rows per program, so that all programs together fill whole waves of `at_once` programs."""
    waves = max(1, round(batch * n / (at_once * ROWS_PER_PROGRAM)))
    return cdiv(max(LEAST_ROWS, cdiv(n, max(1, at_once * waves // batch))), rows)


def quantize_per_column(x, y, z, amax, dtype, mode):
    *_, n, k = shape = joined_shape(-2, x, y, z)
    qdata, scale = empty_columns(x, dtype, n, shape)
    if qdata.numel():
        bits = amax.contiguous().view(-1, k).view(torch.int32)
        for part, (to,) in _places((qdata,), -1, x, y, z):
            quantize_long_columns(part, bits, to, scale, mode, part.shape[-2])
    return qdata, scale
