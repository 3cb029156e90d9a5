"""SwiGLU forward and backward. Results are rounded, quantized per block or per row, or quantized per block and folded.

    gate_up (R, 2F), row_weight                       read once        bytes per element of h, bf16: 4 in, 1 or 2 out
    d_h (R, F)                                        backward                                        6 in, 2 or 4 out
      | a row at a time, in chunks of 8 or 16 elements per thread: of gate, of up, of d_h; fp32 from here
      v
    h (R, F) | d_gate_up (R, 2F), d_row_weight        written once; backward also writes h, if needed: 1 or 2 out

The fp32 operations are those of `mxep.quant.activation`, in the same order. A row is summed in the order of `tree_sum`
of `mxep.quant.swiglu`. Programs stride over rows. A warp takes 1024 or 2048 elements of a row, so that few warps wait
at a barrier. The loop over the chunks of a row is unrolled, and a chunk is loaded before the previous one is computed.
If a result has one scale per row, its elements stay in registers until the scale is known: as fp32 if quantized per
row, as qdata if folded. F is a constexpr, so that rows of 768 or 14336 elements need no padding.

While an H200 moves these bytes at 4.25 TB/s, an SM can issue 34 instructions per element forward, and 54 backward. The
kernels that fold need 36 forward, and 53 to 55 backward. To save instructions, the sigmoid has no division, and threads
combine their sums only at the end of a row.
"""

import triton
import triton.language as tl

from mxep.quant import activation
from mxep.quant.activation import SwiGLU
from mxep.quant.device import (
    NAN_SCALE,
    abs_bits,
    num_sms,
    on_hopper,
    power_of_two,
    reciprocal,
    scale_of_amax,
    shifted,
    valid_rows,
)
from mxep.quant.shapes import empty_swiglu, empty_swiglu_backward
from mxep.runtime.launch import cdiv, launch, next_power_of_2

_LIMIT = tl.constexpr(activation.LIMIT)
_SCALE = tl.constexpr(activation.SCALE)
_ROUND = tl.constexpr(activation.ROUND)
_C0, _C1 = tl.constexpr(activation.C0), tl.constexpr(activation.C1)
_MAGIC = tl.constexpr(activation.MAGIC)
_ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _sigmoid_pair(x):
    """`mxep.quant.activation.sigmoid_pair`. x: fp32, already clamped to +-_LIMIT."""
    t = x * _SCALE
    u = t + _ROUND
    f = t - (u - _ROUND)
    even = f * f + _C0
    odd = f * _C1
    p = (even + odd).to(tl.int32, bitcast=True) + (u.to(tl.int32, bitcast=True) << 23)
    p = p.to(tl.float32, bitcast=True)
    q = even - odd
    d = p + q
    r = (-d.to(tl.int32, bitcast=True) + _MAGIC).to(tl.float32, bitcast=True)
    t = d * r
    r = r * (3.0 - t * (3.0 - t))
    r = r * (2.0 - d * r)
    return q * r, p * r


@triton.jit
def _clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum(x, LOW, propagate_nan=_ALL_NAN), HIGH, propagate_nan=_ALL_NAN)


@triton.jit
def glu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """`SwiGLU.glu`. LIMIT None: no clamp.

    Returns glu, up', the argument x of the sigmoid clamped to +-_LIMIT, sigmoid(x) and sigmoid(-x).
    """
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=_ALL_NAN)
        up = _clamp(up, -LIMIT, LIMIT)
    if SHIFT != 0.0:
        up = up + SHIFT
    above = tl.maximum(gate, -_LIMIT / ALPHA, propagate_nan=_ALL_NAN)
    x = _clamp(gate * ALPHA if ALPHA != 1.0 else gate, -_LIMIT, _LIMIT)
    s, one_minus_s = _sigmoid_pair(x)
    return above * s, up, x, s, one_minus_s


@triton.jit
def unclamped(d_gate, d_up, gate, up, LIMIT: tl.constexpr):
    if LIMIT is not None:
        d_gate = tl.where(gate > LIMIT, 0.0, d_gate)
        d_up = tl.where(tl.abs(up) > LIMIT, 0.0, d_up)
    return d_gate, d_up


@triton.jit
def split_pairs(x):
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))


@triton.jit
def joined_pairs(a, b):
    return tl.reshape(tl.join(a, b), (a.shape[0] * 2,))


@triton.jit
def _neighbours(x):
    a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    return a + b


@triton.jit
def sums_of_eight(x):
    """The sums of 8 neighbours with which `mxep.quant.swiglu.tree_sum` begins. x: 2**n elements, 8 or more."""
    return _neighbours(_neighbours(_neighbours(x)))


@triton.jit
def amax(x, N: tl.constexpr):
    """Largest magnitude of each N neighbours of x; NaN if one of them is NaN. Returns x.shape[0] / N elements.

    N: a power of two, best the number of consecutive elements that a thread holds. On fp32 values two elements take one
    instruction; a maximum of integer bits would take three.
    """
    if N == 1:
        return tl.abs(x)
    else:
        a, b = tl.split(tl.reshape(amax(x, 1), (x.shape[0] // 2, 2)))
        return amax(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), N // 2)


@triton.jit
def _halves(x):
    """Sum x by adding its second half to its first until one number is left, as `tree_sum` ends.

    Each tl.sum adds only two numbers, so the order is fixed.
    """
    if x.shape[0] <= 2:
        return tl.sum(x, axis=0)
    else:
        return _halves(tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0))


@triton.jit
def tree_sum(chunks):
    """`mxep.quant.swiglu.tree_sum` of a row. chunks: a tuple with the result of `sums_of_eight` for each chunk."""
    if len(chunks) > 1:
        half: tl.constexpr = triton.next_power_of_2(len(chunks)) // 2
        sums = ()
        for i in tl.static_range(half):
            if i + half < len(chunks):
                sums += (chunks[i] + chunks[i + half],)
            else:
                sums += (chunks[i] + 0.0,)
        return tree_sum(sums)
    else:
        return _halves(chunks[0])


@triton.jit
def joined(chunks):
    """Concatenate a tuple of chunks, so that one store writes them. The tuple is padded to a power of two by repeating
    chunks; the padding must be masked."""
    if len(chunks) > 1:
        pairs = ()
        for i in tl.static_range(0, len(chunks), 2):
            pair = tl.join(chunks[i], chunks[i + 1 if i + 1 < len(chunks) else i])
            pairs += (tl.reshape(tl.trans(pair), (pair.numel,)),)
        return joined(pairs)
    else:
        return chunks[0]


@triton.jit
def load_chunk(ptr, c: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """Load elements c * N to c * N + N - 1 of a row of COUNT elements. Elements past the row's end are zero."""
    element = c * N + tl.arange(0, N)
    if (c + 1) * N <= COUNT:
        return tl.load(ptr + element)
    else:
        return tl.load(ptr + element, mask=element < COUNT, other=0.0)


@triton.jit
def store_chunk(ptr, values, c: tl.constexpr, COUNT: tl.constexpr):
    N: tl.constexpr = values.shape[0]
    element = c * N + tl.arange(0, N)
    values = values.to(ptr.dtype.element_ty)
    if (c + 1) * N <= COUNT:
        tl.store(ptr + element, values)
    else:
        tl.store(ptr + element, values, mask=element < COUNT)


WARP_ELEMENTS = 2048
"""Maximum elements of a row per warp. Rows are padded to a power of two here."""
THREAD_ELEMENTS = 8
"""Elements of a chunk per thread. It is doubled if chunks of that size divide F, and halved if padding the last chunk
would add more than 10% to F."""
AHEAD = 1
"""Number of chunks that are loaded before the current chunk is computed."""
PROGRAMS_PER_SM = 256
"""Maximum programs per SM. If there are more rows, programs take several."""


@triton.jit
def _emit(values, out, c: tl.constexpr, F: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, FOLDED: tl.constexpr):
    """Store chunk c of a row at `out`, unless its qdata depend on a scale of the whole row.

    Returns, for `_finish`, a tuple of the values or qdata that were not stored, and a tuple of block scales.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    if MODE is None:
        store_chunk(out, values, c, F)
        return (), ()
    elif BLOCK == 0:
        return (values,), ()
    else:
        blocks = tl.reshape(values, (values.shape[0] // BLOCK, BLOCK))
        if FOLDED:
            EIGHT: tl.constexpr = 8 if BLOCK > 8 else BLOCK
            bits = tl.reshape(amax(values, EIGHT).to(tl.int32, bitcast=True), (blocks.shape[0], BLOCK // EIGHT))
            scale = scale_of_amax(tl.max(bits, axis=1), MODE, dtype)
            # A scale of 255 (NaN) is not handled here, because `_finish` makes the whole row NaN.
            factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
            return ((blocks * factor[:, None]).to(dtype),), (scale,)
        else:
            scale = scale_of_amax(tl.max(abs_bits(blocks), axis=1), MODE, dtype)
            qdata = (blocks * reciprocal(scale)[:, None]).to(dtype)
            store_chunk(out, tl.reshape(qdata, (values.shape[0],)), c, F)
            return (), (scale,)


@triton.jit
def _finish(
    out, scale_ptr, row, saved, scales,
    PARTS: tl.constexpr, F: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Store what `_emit` did not store of a row of PARTS * F values at `out`. saved, scales: its results, joined."""
    if FOLDED:
        # A block of zeros never has the largest scale, because `_emit` gave it scale 0.
        max_scale = scales[0]
        for k in tl.static_range(1, len(saved)):
            max_scale = tl.maximum(max_scale, scales[k])
        max_scale = tl.max(max_scale, axis=0)
        for k in tl.static_range(len(saved)):
            qdata = shifted(saved[k], (max_scale - scales[k])[:, None], max_scale == NAN_SCALE)
            store_chunk(out + k % PARTS * F, tl.reshape(qdata, (qdata.numel,)), k // PARTS, F)
        tl.store(scale_ptr + row, max_scale.to(tl.uint8))
    elif len(saved) > 0:
        bits = abs_bits(saved[0])
        for k in tl.static_range(1, len(saved)):
            bits = tl.maximum(bits, abs_bits(saved[k]))
        scale = scale_of_amax(tl.max(bits, axis=0), MODE, out.dtype.element_ty)
        factor = reciprocal(scale)
        for k in tl.static_range(len(saved)):
            store_chunk(out + k % PARTS * F, saved[k] * factor, k // PARTS, F)
        tl.store(scale_ptr + row, scale.to(tl.uint8))
    else:
        for i in tl.static_range(PARTS if len(scales) > 0 else 0):
            part_scales = ()
            for c in tl.static_range(len(scales) // PARTS):
                part_scales += (scales[c * PARTS + i],)
            first = scale_ptr + tl.cast(row, tl.int64) * (PARTS * F // BLOCK) + i * (F // BLOCK)
            store_chunk(first, joined(part_scales), 0, F // BLOCK)


@triton.jit(do_not_specialize=["rows", "num_groups", "first"])
def swiglu_kernel(
    gate_up_ptr, gate_up_scale_ptr, weight_ptr, offs_ptr, h_ptr, h_scale_ptr, d_h_ptr, out_ptr, scale_ptr, d_weight_ptr,
    rest_ptr, rest_scale_ptr, rows, num_groups, first,
    F: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, FOLDED: tl.constexpr,
    AHEAD: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Compute h if h_ptr is given, and the gradients if d_h_ptr is given. weight_ptr and offs_ptr may be None.

    gate_up_scale_ptr: one scale per row if gate_up is qdata, else None.
    rest_ptr, rest_scale_ptr: the rows of gate_up from row `first` on, and their scales; None if gate_up has all rows.
    MODE: scale mode. None: round results to their dtype instead of quantizing.
    BLOCK: elements per scale, a divisor of CHUNK. 0: one scale per row.
    FOLDED: fold block scales to one scale per row.
    ALPHA, LIMIT, SHIFT, INTERLEAVED: fields of `mxep.quant.SwiGLU`.
    """
    CHUNKS: tl.constexpr = (F + CHUNK - 1) // CHUNK
    PARTS: tl.constexpr = 1 if INTERLEAVED else 2  # contiguous column ranges of d_gate_up that a chunk writes
    WIDTH: tl.constexpr = 2 * F // PARTS
    valid = valid_rows(offs_ptr, num_groups, rows)
    for row in range(tl.program_id(0), valid, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        gate_up, gate_up_scale = gate_up_ptr + row64 * (2 * F), gate_up_scale_ptr
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + row)
        if rest_ptr is not None:
            gate_up = tl.where(row < first, gate_up, rest_ptr + (row64 - first) * (2 * F))
        if gate_up_scale_ptr is not None:
            gate_up_scale = gate_up_scale_ptr + row
            if rest_ptr is not None:
                gate_up_scale = tl.where(row < first, gate_up_scale, rest_scale_ptr + row - first)
            factor = power_of_two(tl.load(gate_up_scale).to(tl.int32))
        gates, ups, d_hs, sums = (), (), (), ()
        saved, scales, h_saved, h_scales = (), (), (), ()
        for step in tl.static_range(CHUNKS + AHEAD):
            if step < CHUNKS:
                if INTERLEAVED:
                    gate, up = split_pairs(load_chunk(gate_up, step, 2 * CHUNK, 2 * F))
                else:
                    gate, up = load_chunk(gate_up, step, CHUNK, F), load_chunk(gate_up + F, step, CHUNK, F)
                gates += (gate,)
                ups += (up,)
                if d_h_ptr is not None:
                    d_hs += (load_chunk(d_h_ptr + row64 * F, step, CHUNK, F),)
            if step >= AHEAD:
                if FOLDED and d_h_ptr is not None and step < CHUNKS:
                    tl.debug_barrier()  # without it ptxas moves this step's loads after the previous computation
                gate, raw_up = gates[step - AHEAD].to(tl.float32), ups[step - AHEAD].to(tl.float32)
                if gate_up_scale_ptr is not None:
                    gate, raw_up = gate * factor, raw_up * factor
                silu, up, z, s, one_minus_s = glu(gate, raw_up, ALPHA, LIMIT, SHIFT)
                h = silu * up
                if d_h_ptr is not None:
                    d = d_hs[step - AHEAD].to(tl.float32)
                    sums += (sums_of_eight(d * h),)
                    if weight_ptr is not None:
                        d *= weight
                    d_gate, d_up = d * up * ((z * one_minus_s + 1.0) * s), silu * d
                    d_gate, d_up = unclamped(d_gate, d_up, gate, raw_up, LIMIT)
                    parts = (joined_pairs(d_gate, d_up),) if INTERLEAVED else (d_gate, d_up)
                    for i in tl.static_range(PARTS):
                        out = out_ptr + row64 * (2 * F) + i * WIDTH
                        x = _emit(parts[i], out, step - AHEAD, WIDTH, MODE, BLOCK, FOLDED)
                        saved += x[0]
                        scales += x[1]
                if h_ptr is not None:
                    if weight_ptr is not None:
                        h *= weight
                    x = _emit(h, h_ptr + row64 * F, step - AHEAD, F, MODE, BLOCK, FOLDED)
                    h_saved += x[0]
                    h_scales += x[1]
        if d_h_ptr is not None:
            _finish(out_ptr + row64 * (2 * F), scale_ptr, row, saved, scales, PARTS, WIDTH, MODE, BLOCK, FOLDED)
            tl.store(d_weight_ptr + row, tree_sum(sums))
        if h_ptr is not None:
            _finish(h_ptr + row64 * F, h_scale_ptr, row, h_saved, h_scales, 1, F, MODE, BLOCK, FOLDED)


def swiglu(gate_up, row_weight, offs, dtype, mode, block_size, folded, activation=None, rest=None):
    """Launcher of mxep::swiglu. `_launch` says which block sizes it accepts."""
    h, scale = empty_swiglu(gate_up, dtype, mode, block_size, folded, rest)
    _launch(gate_up, None, row_weight, offs, h, scale, rest, None, None, mode, block_size, folded, activation)
    return h, scale


def swiglu_backward(
    d_h, gate_up, row_weight, offs, out, mode, block_size, folded, h_dtype, activation=None, gate_up_scale=None,
    rest=None, rest_scale=None,
):  # fmt: skip
    """Launcher of mxep::swiglu_backward. `_launch` says which block sizes it accepts.

    If d_gate_up has one scale per row, out may share d_h's memory: computing the scale needs the whole row, so all
    loads of a row come before its first store.
    """
    results = scale, d_row_weight, h, h_scale = empty_swiglu_backward(d_h, mode, block_size, folded, h_dtype)
    of_gate_up = gate_up, gate_up_scale, row_weight, offs, None if h_dtype is None else h, h_scale, rest, rest_scale
    _launch(*of_gate_up, (d_h, out, scale, d_row_weight), mode, block_size, folded, activation)
    return results


def _launch(
    gate_up, gate_up_scale, row_weight, offs, h, h_scale, rest, rest_scale, backward, mode, block_size, folded,
    activation,
) -> None:  # fmt: skip
    """Launch the kernel. It writes h and h_scale if h is given, and out, scale and d_row_weight if backward is given.

    backward: (d_h, out, scale, d_row_weight) or None.
    Raises ValueError if block_size is neither the whole row nor a power of two that divides F.
    """
    d_h, out, scale, d_row_weight = backward or (None,) * 4
    rows, F, how = (h if d_h is None else d_h).shape[0], gate_up.shape[1] // 2, SwiGLU.unpacked(activation)
    width = F if backward is None else 2 * F
    by_row = block_size == width or mode is None
    if not by_row and (block_size & (block_size - 1) or F % block_size):
        raise ValueError(
            f"block_size: got {block_size}, want the whole row, {width}, or a power of two that divides {F}, on CUDA"
        )
    if rows == 0:
        return

    padded = max(8, next_power_of_2(F))
    three = backward is not None and h is not None and mode is not None  # d_gate, d_up and h take more registers
    warp_elements = WARP_ELEMENTS if padded > WARP_ELEMENTS and not three else WARP_ELEMENTS // 2
    if backward is not None and mode is not None and by_row:
        warp_elements //= 2  # results stay in registers as fp32
    num_warps = min(16 if three else 32, max(1, padded // warp_elements))
    chunk = 32 * num_warps * 2 * THREAD_ELEMENTS
    if F % chunk:
        chunk //= 2
        if cdiv(F, chunk) * chunk > 1.1 * F:
            chunk //= 2
            if three and not by_row and num_warps > 1:
                num_warps //= 2  # with 4 elements per thread there would be a quarter more instructions
    chunk = min(chunk, padded)
    max_registers = None
    plain = activation is None and gate_up.itemsize == 2  # with fewer registers other kernels would spill
    if backward is not None and h is None and folded and not by_row and plain:
        max_registers = _max_registers(cdiv(F, chunk) * chunk // (32 * num_warps), num_warps)
    if mode is None:
        scale = None
    launch(swiglu_kernel, (min(rows, PROGRAMS_PER_SM * num_sms(gate_up.device)),),
        gate_up.contiguous(), None if gate_up_scale is None else gate_up_scale.contiguous(), row_weight, offs,
        h, None if h is None or mode is None else h_scale, None if d_h is None else d_h.contiguous(), out, scale,
        d_row_weight, rest, rest_scale, rows, 0 if offs is None else offs.shape[0], gate_up.shape[0],
        F=F, CHUNK=chunk if by_row else max(chunk, block_size), MODE=mode, BLOCK=0 if by_row else block_size,
        FOLDED=folded and not by_row, AHEAD=AHEAD, ALPHA=how.alpha, LIMIT=how.limit, SHIFT=how.shift,
        INTERLEAVED=how.interleaved, num_warps=num_warps, maxnreg=max_registers, enable_fp_fusion=False,
    )  # fmt: skip


def _max_registers(elements: int, num_warps: int) -> int | None:
    """Limit of registers per thread on Hopper, where ptxas would use too many. elements: elements of a row per thread.

    None: no limit.
    """
    if elements > 40:
        registers = 128
    elif num_warps == 1:
        return None
    elif num_warps == 2:
        registers = 72 if elements <= 24 else 80
    else:
        registers = 96
    registers = min(registers, 65536 // (32 * num_warps))  # an SM has 65536 registers
    return on_hopper(maxnreg=registers).get("maxnreg")
