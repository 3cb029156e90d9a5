"""Fold for wgrad: row-blocked X and dY become the operands of a wgrad, without a second quantization.

dW = sum over tokens m of dY[m]^T X[m]. Token m carries the scale 2^(s_x(m) + s_y(m)), where s is the largest exponent
of its row's blocks. A GEMM that contracts over tokens cannot apply it. So the largest scale of a group, 2^E, multiplies
the product, and the rest of a token, d, is shifted into its qdata: d // 2 into X's, the other half into dY's. Each
element is also shifted by the difference between its block and its row. It is rounded once, by the element rule of
`mxep.quant.fold` (exact until subnormal). On the way rows are picked by an index, and qdata are transposed: FP8 tensor
cores need contiguous tokens.

    product[g] = 2^E[g] * y_t[:, g] @ x_t[:, g].T         (N, K), over the columns of group g

Example: a group of four tokens, the third a padding row, K = N = 1.

    token           0      1      2      3
    s_x             0     -2      -     -1
    s_y             3      0      -      0
    s_x + s_y       3     -2      -     -1       E = 3
    d               0      5      -      4
    x   q         1.5    3.0      0    1.0
        shift       0      2      -      2
        becomes   1.5   0.75      0   0.25
    y   q         2.0    1.0      0    4.0
        shift       0      3      -      2
        becomes   2.0  0.125      0    1.0       2^3 * (3 + 0.09375 + 0 + 0.25) = 26.75, as 24 + 0.75 + 0 + 2

Only scales decide the shifts. A row of zeros from `quantize`, `fold` or a padding index has scale 0, 2^-127, so it does
not raise E. (Zeros with a larger scale, as in 2-D blocks, can raise it. Others then shift further than needed.)
A row with a NaN block (scale 255) does not count. Its qdata become 0x7f, so its whole group's product is NaN. The exact
product has NaN only in a row or a column. All other tokens keep their bits. A group without a counting row has E = 0.

A GEMM that walks over tokens in steps may need every group to begin at a step. With `alignment` a group's columns begin
at a multiple of it, and the columns up to the next group are zeros.

R rows (tokens), K and N columns of x and y, S stored rows (slots) of an indexed operand, G groups, C columns of the
results: R, or with alignment R + G * (alignment - 1), rounded up to alignment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.quant.checks import check_byte_elements
from mxep.quant.fold import shift_qdata
from mxep.quant.groups import check_offs, group_of_rows, valid_rows
from mxep.quant.ops import NAN_ELEMENT, pick_mx
from mxep.quant.scales import NAN_SCALE
from mxep.quant.shapes import num_rows, padded_rows
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


@dataclass(frozen=True)
class WgradOperands:
    """Operands of a grouped wgrad: product[g] = 2**exponent[g] * y_t[:, g] @ x_t[:, g].T.

    x_t:      (K, C) qdata in x's format, contiguous (tokens innermost); columns from offs[-1] on are unspecified.
    y_t:      (N, C) qdata in y's format, the same way.
    exponent: (G,) int32, -254 to 254. 2**exponent may lie outside fp32: multiply by 2**(e // 2) and 2**(e - e // 2).
    offs:     (G,) int32, inclusive ends of the groups' columns, zeros included; as given without an alignment.
    """

    x_t: Tensor
    y_t: Tensor
    exponent: Tensor
    offs: Tensor


def fold_for_wgrad(x: MXTensor, y: MXTensor, offs: Tensor, *, alignment: int = 1) -> WgradOperands:
    """Fold the scales of x (R, K) and y (R, N) into their qdata, per group, and transpose both; see the module.

    x, y: blocked along their rows (axis -1) in blocks of any length, or row-scaled; E4M3 or E5M2. Each may have a row
        index (-1: a row of zeros).
    offs: (G,) int32, inclusive ends of the groups. Rows from offs[-1] on are not read.
    alignment: groups begin at multiples of this many columns, 1 or more.
    No autograd. Raises ValueError for another axis, unequal rows, a wrong offs or alignment.
    """
    if alignment < 1:
        raise ValueError(f"alignment: got {alignment}, want 1 or more columns")
    for name, operand in (("x", x), ("y", y)):
        if not isinstance(operand, MXTensor):
            raise ValueError(f"{name}: got a {type(operand).__name__}, want an MXTensor: quantize it")
        check_byte_elements(name, operand)
        if operand.axis != -1:
            raise ValueError(f"{name}: got {operand!r}, want a tensor blocked along its rows, axis -1")
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"y: got {y.shape[0]} rows, want {x.shape[0]}, as x has")
    check_offs(offs, x, y)
    x_parts, y_parts = ((mx.qdata, mx.scale, mx.row_index) for mx in (x, y))
    return WgradOperands(*_fold_for_wgrad(*x_parts, *y_parts, offs, alignment))


@op(
    "mxep::fold_for_wgrad",
    fake=lambda x, x_scale, x_index, y, y_scale, y_index, offs, alignment: (
        *(
            operand.new_empty((operand.shape[1], padded_rows(num_rows(x, x_index), offs.shape[0], alignment)))
            for operand in (x, y)
        ),
        torch.empty_like(offs),
        torch.empty_like(offs),
    ),
    launcher="mxep.quant.kernels.fold_for_wgrad:fold_for_wgrad",
)
def _fold_for_wgrad(
    x: Tensor,
    x_scale: Tensor,
    x_index: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_index: Tensor | None,
    offs: Tensor,
    alignment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (S, K) fp8, x_scale (S, K/block_size) e8m0, x_index int32 (R,) or None (then R is S); y (S', N) likewise; offs
    int32 (G,) -> x_t (K, C), y_t (N, C), exponent and out_offs (G,) int32."""
    capacity = num_rows(x, x_index)
    valid = valid_rows(offs, capacity)
    x, x_scale, x_max = _picked(x, x_scale, x_index, valid)
    y, y_scale, y_max = _picked(y, y_scale, y_index, valid)
    counts = (x_max != NAN_SCALE) & (y_max != NAN_SCALE)
    carried = x_max + y_max
    group = group_of_rows(offs, valid)
    nothing = -1
    most = carried.new_full((offs.shape[0] + 1,), nothing)  # the last entry is for rows past the groups
    most = most.scatter_reduce(0, group, torch.where(counts, carried, nothing), "amax")
    d = torch.where(counts, most[group] - carried, 0)
    exponent = torch.where(most == nothing, 0, most - 2 * 127)[:-1]
    to_x = d // 2
    sizes = offs.diff(prepend=offs.new_zeros(1))
    out_offs = ((sizes + alignment - 1) // alignment * alignment).cumsum(0, dtype=torch.int32)
    column = (
        torch.arange(valid, device=x.device, dtype=torch.int64)
        + torch.nn.functional.pad(out_offs - offs, (1, 0))[group]
    )
    columns = padded_rows(capacity, len(offs), alignment)
    x_t = _shift_and_transpose(x, x_scale, x_max, to_x, column, columns)
    y_t = _shift_and_transpose(y, y_scale, y_max, d - to_x, column, columns)
    return x_t, y_t, exponent, out_offs


def _picked(qdata: Tensor, scale: Tensor, row_index: Tensor | None, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """The valid rows: qdata (valid, K) fp8, scale (valid, blocks) int32, largest scale of each row (valid,) int32."""
    qdata, scale = pick_mx(qdata, scale, row_index, valid)
    scale = scale.int()
    return qdata, scale, torch.nn.functional.pad(scale, (0, 1)).amax(1)  # a row without blocks has scale 0


def _shift_and_transpose(
    qdata: Tensor, scale: Tensor, max_scale: Tensor, half: Tensor, column: Tensor, columns: int
) -> Tensor:
    """Shift qdata (valid, K) by (max_scale - scale) + half, and put each row in its column of (K, C). Rows with
    max_scale NaN become all 0x7f."""
    blocks = scale.shape[1]
    shift = (max_scale + half).unsqueeze(1) - scale
    by_block = torch.unflatten(qdata, 1, (blocks, qdata.shape[1] // max(blocks, 1)))
    shifted = shift_qdata(by_block, shift.unsqueeze(2)).view(torch.uint8).flatten(1)
    shifted.masked_fill_((max_scale == NAN_SCALE).unsqueeze(1), NAN_ELEMENT)
    transposed = shifted.new_zeros((shifted.shape[1], columns))
    transposed[:, column] = shifted.T
    return transposed.view(qdata.dtype)
