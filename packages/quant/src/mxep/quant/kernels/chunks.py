"""A row in chunks, and its sum in a fixed order: device code of kernels that take one row at a time.

A chunk has the same number of elements for each thread of a program. A row's last chunk may not be full.
"""

import triton
import triton.language as tl


@triton.jit
def _neighbours(x):
    a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    return a + b


@triton.jit
def sums_of_eight(x):
    """The first part of `mxep.quant.swiglu.tree_sum`. x: a power of two elements, 8 or more."""
    return _neighbours(_neighbours(_neighbours(x)))


@triton.jit
def amax(x, N: tl.constexpr):
    """Largest magnitude of every N neighbours of x, NaN if one is NaN. It takes one instruction per two elements;
    integers take three. N: a power of two, best the elements of a thread, as `tl.max` across threads loses NaNs."""
    if N == 1:
        return tl.abs(x)
    else:
        a, b = tl.split(tl.reshape(amax(x, 1), (x.shape[0] // 2, 2)))
        return amax(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), N // 2)


@triton.jit
def _halves(x):
    """The second part of it. A sum of two numbers has only one order, so each level is a tl.sum."""
    if x.shape[0] <= 2:
        return tl.sum(x, axis=0)
    else:
        return _halves(tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0))


@triton.jit
def tree_sum(chunks):
    """`mxep.quant.swiglu.tree_sum` of a row, given as chunks (a tuple) of a power of two sums of eight. The upper
    levels are between chunks."""
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
    """Join chunks (a tuple) to one tensor, padded to a power of two of them with anything. One store serves all."""
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
    """Chunk c, of N elements, of a row of COUNT; zeros after its end."""
    element = c * N + tl.arange(0, N)
    if (c + 1) * N <= COUNT:
        return tl.load(ptr + element)
    else:
        return tl.load(ptr + element, mask=element < COUNT, other=0.0)


@triton.jit
def store_chunk(ptr, values, c: tl.constexpr, COUNT: tl.constexpr):
    """Store `values` as chunk c of a row of COUNT."""
    N: tl.constexpr = values.shape[0]
    element = c * N + tl.arange(0, N)
    values = values.to(ptr.dtype.element_ty)
    if (c + 1) * N <= COUNT:
        tl.store(ptr + element, values)
    else:
        tl.store(ptr + element, values, mask=element < COUNT)
