"""SwiGLU multiplied by the routing weight, forward and backward. Results are rounded or quantized.

    forward                                                    backward
    gate_up (R, 2F) = [gate | up], row_weight w (R,)           d_h (R, F), and gate_up and w of forward
      s = sigmoid(gate), silu = gate * s                         d_row_weight = sum over F of d_h * (silu * up)
      h = (silu * up) * w      fp32                              d = d_h * w
      h (R, F): rounded once to gate_up's dtype, or              d_up   = d * silu
      quantized from fp32 with no bf16 in between                d_gate = (d * up) * (s * (1 + gate * (1 - s)))
                                                                 [d_gate | d_up] (R, 2F): rounded or quantized likewise
                                                               h, if requested, so that forward need not save it

The down-projection is linear, so the routing weight can be multiplied in before it. Then combine is a plain sum, and
the gradient of a routing weight is a sum over one row.

All operations are fp32, in the order written above, each rounded separately. The sigmoid is portable
(`mxep.quant.activation`), and the sum over F is a fixed tree (`tree_sum`). So a kernel compiled without FMA contraction
has the same bits as the reference.

For gate = -inf, silu and its derivative are -3.9e-36, as for gate = -86. For gate = +inf, silu is inf and its
derivative is 1. A NaN element makes the d_row_weight of its row NaN, and all elements of its block if quantized.

R rows (capacity), F hidden width, G groups of rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.quant.activation import PLAIN, SwiGLU
from mxep.quant.fold import fold_op
from mxep.quant.formats import BLOCK, E4M3, SCALE_DTYPE, MXFormat, ScaleMode
from mxep.quant.groups import check_offs, fill_rows, valid_rows
from mxep.quant.ops import decode, quantize_rows
from mxep.quant.shapes import (
    VALUE_DTYPES,
    check_block,
    check_byte_elements,
    check_format,
    check_mode,
    empty_swiglu,
    empty_swiglu_backward,
)
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


def swiglu(
    gate_up: Tensor,
    row_weight: Tensor | None = None,
    *,
    offs: Tensor | None = None,
    rest: Tensor | None = None,
    activation: SwiGLU = PLAIN,
) -> Tensor:
    """silu(gate) * up * row_weight, or the given activation times row_weight. No autograd: see `swiglu_backward`.

    Args:
        gate_up: (R, 2F) bf16 | fp32 | fp16: the columns of gate, then those of up. If the activation is interleaved,
            gate and up alternate.
        row_weight: (R,) fp32. None: all weights are 1.
        offs: (G,) int32 inclusive ends of the row groups. Rows from offs[-1] on are not read, and unspecified in the
            result.
        rest: the last rows of gate_up, if they are a tensor of their own. R then is the sum of both row counts, and
            both tensors must be contiguous.
    Returns:
        (R, F) in gate_up's dtype.
    Raises ValueError for other shapes, dtypes or devices.
    """
    _check(gate_up, row_weight, offs, rest=rest)
    h: Tensor = _swiglu(gate_up, row_weight, offs, gate_up.dtype, None, 0, False, activation.packed, rest)[0]
    return h


def swiglu_quantize(
    gate_up: Tensor,
    row_weight: Tensor | None = None,
    *,
    offs: Tensor | None = None,
    fmt: MXFormat | str = E4M3,
    mode: ScaleMode | str = ScaleMode.RCEIL,
    block_size: int | None = BLOCK,
    folded: bool = False,
    rest: Tensor | None = None,
    activation: SwiGLU = PLAIN,
) -> MXTensor:
    """`swiglu` with its fp32 result quantized, not rounded to gate_up's dtype before.

    Args:
        fmt, mode, block_size: as for `quantize`.
        folded: fold the quantized result to one scale per row (`mxep.quant.fold`).
        Others: as for `swiglu`.
    Returns:
        MXTensor (R, F) with blocks along F and gate_up's dtype as outer dtype. It is bitwise
        `quantize(swiglu(gate_up.float(), ...), fmt=fmt, mode=mode, block_size=block_size)`, folded if `folded`.
    Raises ValueError as `swiglu` does, and if F is no multiple of `block_size`. On CUDA, also if `block_size` is
    neither a power of two nor the whole row.
    """
    _check(gate_up, row_weight, offs, rest=rest)
    width = gate_up.shape[1] // 2
    block_size = check_block(block_size, -1, gate_up[:, :width])
    how = check_format(fmt), check_mode(mode), block_size, folded, activation.packed, rest
    return _mx(_swiglu(gate_up, row_weight, offs, *how), gate_up.dtype, width if folded else block_size)


def swiglu_backward(
    d_h: Tensor,
    gate_up: Tensor,
    row_weight: Tensor | None = None,
    *,
    offs: Tensor | None = None,
    with_h: bool = False,
    rest: Tensor | None = None,
    activation: SwiGLU = PLAIN,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `swiglu`.

    Args:
        d_h: (R, F) bf16 | fp32 | fp16, gradient of the result h of `swiglu`.
        with_h: also compute h again.
        Others: as for `swiglu`.
    Returns:
        d_gate_up: (R, 2F) in gate_up's dtype.
        d_row_weight: (R,) fp32. Computed even without row_weight, as the gradient of weights that are all 1.
        h: (R, F), bitwise the result of `swiglu`, or None without `with_h`.
    Raises ValueError as `swiglu` does.
    """
    _check(gate_up, row_weight, offs, d_h, rest)
    d_gate_up = gate_up.new_empty(len(d_h), gate_up.shape[1])
    how = None, 0, False, gate_up.dtype if with_h else None, activation.packed, None, rest, None
    _, d_row_weight, h, _ = _swiglu_backward(d_h, gate_up, row_weight, offs, d_gate_up, *how)
    return d_gate_up, d_row_weight, h if with_h else None


def swiglu_backward_quantize(
    d_h: Tensor,
    gate_up: Tensor | MXTensor,
    row_weight: Tensor | None = None,
    *,
    offs: Tensor | None = None,
    fmt: MXFormat | str = E4M3,
    mode: ScaleMode | str = ScaleMode.RCEIL,
    block_size: int | None = BLOCK,
    folded: bool = False,
    overwrite: bool = False,
    h_fmt: MXFormat | str | None = None,
    rest: Tensor | MXTensor | None = None,
    activation: SwiGLU = PLAIN,
) -> tuple[MXTensor, Tensor, MXTensor | None]:
    """`swiglu_backward` with its fp32 d_gate_up quantized, not rounded to gate_up's dtype before.

    Args:
        gate_up, rest: plain tensors, or MXTensors with one scale per row. MXTensors are dequantized to fp32.
        fmt, mode, block_size, folded: as for `swiglu_quantize`. They apply to d_gate_up, and to h except for fmt.
        overwrite: allow to overwrite d_h with the qdata of d_gate_up. This is done if d_gate_up has one scale per row,
            and d_h is contiguous, has 16 bits per element and requires no grad.
        h_fmt: also compute h again, quantized to this format.
        Others: as for `swiglu_backward`.
    Returns:
        d_gate_up: MXTensor (R, 2F) with blocks along 2F and gate_up's dtype as outer dtype. If block_size is None or
            `folded`, gate and up share one scale per row.
        d_row_weight: (R,) fp32, as from `swiglu_backward`.
        h: MXTensor (R, F), bitwise the result of `swiglu_quantize` with fmt=h_fmt, or None without `h_fmt`.
    Raises ValueError as `swiglu_backward` does, and:
        - if `block_size` does not divide 2F, or with `h_fmt` does not divide F;
        - on CUDA, if `block_size` is neither the whole row nor a power of two that divides F;
        - if gate_up is an MXTensor with more than one scale per row.
    """
    _check(gate_up, row_weight, offs, d_h, rest)
    (values, gate_up_scale), outer = _bytes_of_rows(gate_up), gate_up.dtype
    rest, rest_scale = (None, None) if rest is None else _bytes_of_rows(rest)
    if h_fmt is not None:
        check_block(block_size, -1, d_h)
    block_size = check_block(block_size, -1, gate_up)
    dtype, h_dtype = check_format(fmt), None if h_fmt is None else check_format(h_fmt)
    # With one scale per row a kernel reads the whole row before it writes its qdata. Otherwise d_h is still needed.
    fits = d_h.itemsize == 2 and d_h.is_contiguous() and d_h.stride(-1) == 1 and not d_h.requires_grad
    if overwrite and fits and (folded or block_size == gate_up.shape[1]):
        qdata = d_h.view(dtype)
    else:
        qdata = values.new_empty((len(d_h), values.shape[1]), dtype=dtype)
    how = check_mode(mode), block_size, folded, h_dtype, activation.packed, gate_up_scale, rest, rest_scale
    scale, d_row_weight, *h = _swiglu_backward(d_h, values, row_weight, offs, qdata, *how)
    d_gate_up = _mx((qdata, scale), outer, gate_up.shape[1] if folded else block_size)
    if h_dtype is None:
        return d_gate_up, d_row_weight, None
    width = d_h.shape[1]
    return d_gate_up, d_row_weight, _mx(h, outer, width if folded else min(block_size, width))


def _bytes_of_rows(gate_up: Tensor | MXTensor) -> tuple[Tensor, Tensor | None]:
    """Split gate_up into (qdata, scale bytes) if it is an MXTensor with one scale per row; (gate_up, None) if plain."""
    if not isinstance(gate_up, MXTensor):
        return gate_up, None
    if gate_up.axis != -1 or gate_up.block_size != gate_up.shape[1] or gate_up.row_index is not None:
        raise ValueError(f"gate_up: got {gate_up}, want one scale a row, as block_size=None gives, and no row index")
    check_byte_elements("gate_up", gate_up)
    return gate_up.qdata, gate_up.scale.view(torch.uint8)


def _mx(parts: Sequence[Tensor], dtype: torch.dtype, block_size: int) -> MXTensor:
    """MXTensor of parts = (qdata (R, n), scale bytes).

    block_size is an argument and not computed from shapes, because shapes are symbols under torch.compile.
    """
    qdata, scale = parts
    return MXTensor(qdata, scale.view(SCALE_DTYPE), None, -1, block_size, dtype, trusted=True)


def _check(
    gate_up: Tensor, row_weight: Tensor | None, offs: Tensor | None, d_h: Tensor | None = None,
    rest: Tensor | None = None,
) -> None:  # fmt: skip
    if gate_up.ndim != 2 or gate_up.shape[1] == 0 or gate_up.shape[1] % 2 or gate_up.dtype not in VALUE_DTYPES:
        raise ValueError(
            f"gate_up: got {gate_up.dtype} of shape {tuple(gate_up.shape)}, want (R, 2F) of one of {VALUE_DTYPES}"
        )
    rows, width = gate_up.shape
    if rest is not None:
        given, wanted = (
            (*((x.qdata.dtype,) if isinstance(x, MXTensor) else ()), x.dtype, *x.shape[1:], x.device, x.is_contiguous())
            for x in (rest, gate_up)
        )
        if given != wanted or not gate_up.is_contiguous():
            raise ValueError(
                f"rest: got {rest.dtype} of shape {tuple(rest.shape)} on {rest.device}, want dense rows like those of "
                f"dense gate_up, {gate_up.dtype} of shape {tuple(gate_up.shape)} on {gate_up.device}"
            )
        rows += len(rest)
    if row_weight is not None and (row_weight.shape != (rows,) or row_weight.dtype != torch.float32):
        raise ValueError(
            f"row_weight: got {row_weight.dtype} of shape {tuple(row_weight.shape)}, want torch.float32 of ({rows},)"
        )
    if d_h is not None and (d_h.shape != (rows, width // 2) or d_h.dtype not in VALUE_DTYPES):
        raise ValueError(
            f"d_h: got {d_h.dtype} of shape {tuple(d_h.shape)}, want ({rows}, {width // 2}) of one of {VALUE_DTYPES}"
        )
    for name, other in (("row_weight", row_weight), ("d_h", d_h)):
        if other is not None and other.device != gate_up.device:
            raise ValueError(f"{name}: got device {other.device}, want {gate_up.device}, where gate_up is")
    check_offs(offs, gate_up)


def _forward(gate_up: Tensor, row_weight: Tensor | None, valid: int, packed: Sequence[float] | None) -> Tensor:
    """h (valid, F) fp32."""
    activation = SwiGLU.unpacked(packed)
    found = activation.glu(*activation.split(gate_up[:valid].float()))
    h = found.glu.mul_(found.up)
    return h if row_weight is None else h.mul_(row_weight[:valid, None])


def _backward(
    d_h: Tensor, gate_up: Tensor, row_weight: Tensor | None, valid: int, packed: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """d_gate_up (valid, 2F), d_row_weight (valid, 1), both fp32."""
    activation = SwiGLU.unpacked(packed)
    gate, up = activation.split(gate_up[:valid].float())
    found, d = activation.glu(gate, up), d_h[:valid].float()
    d_row_weight = tree_sum(d * (found.glu * found.up)).unsqueeze(-1)
    if row_weight is not None:
        d = d * row_weight[:valid, None]
    d_gate = activation.unclamped((d * found.up).mul_(found.slope()), gate, both=False)
    d_up = activation.unclamped(found.glu.mul_(d), up, both=True)
    return activation.join(d_gate, d_up), d_row_weight


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis of x (R, F) in a fixed order that suits a GPU: threads first add their own 8 elements.

    F is padded with zeros to a power of two, 8 or more. Neighbours are added three times: a b c d e f g h becomes
    ((a+b)+(c+d))+((e+f)+(g+h)), one sum per 8 elements. Then the second half of the sums is added to the first half,
    until one sum is left: A B C D -> A+C B+D -> (A+C)+(B+D).
    """
    width = x.shape[-1]
    padded = max(8, 1 << (width - 1).bit_length())
    x = torch.nn.functional.pad(x, (0, padded - width))
    for _ in range(3):
        x = x[..., 0::2] + x[..., 1::2]
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def _result(
    valid: Tensor, rows: int, dtype: torch.dtype, mode: str | None, block_size: int, folded: bool
) -> tuple[Tensor, Tensor]:
    """Round (mode None) or quantize `valid` (n, width) fp32, then append zero rows. Returns them, and scale bytes."""
    if mode is None:
        return fill_rows(valid.to(dtype), rows), valid.new_empty(0, dtype=torch.uint8)
    qdata, scale = quantize_rows.reference(valid, dtype, mode, block_size)
    if folded:
        qdata, scale = fold_op.reference(qdata, scale, None, None)
    return fill_rows(qdata, rows), fill_rows(scale.view(torch.uint8), rows)


# Both ops return scales as uint8, because inductor cannot compile an op that mutates an argument and has e8m0 tensors.


@op(
    "mxep::swiglu",
    fake=lambda gate_up, row_weight, offs, dtype, mode, block, folded, _, rest: empty_swiglu(
        gate_up, dtype, mode, block, folded, rest
    ),
    launcher="mxep.quant.kernels.swiglu:swiglu",
)
def _swiglu(
    gate_up: Tensor, row_weight: Tensor | None, offs: Tensor | None, dtype: torch.dtype, mode: str | None,
    block_size: int, folded: bool, activation: Sequence[float] | None, rest: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`swiglu` if mode is None, else `swiglu_quantize`. Returns h, and its scales as uint8 (`empty_swiglu`)."""
    gate_up = gate_up if rest is None else torch.cat((gate_up, rest))
    rows = gate_up.shape[0]
    h = _forward(gate_up, row_weight, valid_rows(offs, rows), activation)
    return _result(h, rows, dtype, mode, block_size, folded)


@op(
    "mxep::swiglu_backward",
    fake=lambda d_h, gate_up, row_weight, offs, out, *how: empty_swiglu_backward(d_h, *how[:4]),
    launcher="mxep.quant.kernels.swiglu:swiglu_backward",
    mutates_args=("out",),
)
def _swiglu_backward(  # scale_mode, because torch takes `mode` for itself in ops that write
    d_h: Tensor, gate_up: Tensor, row_weight: Tensor | None, offs: Tensor | None, out: Tensor, scale_mode: str | None,
    block_size: int, folded: bool, h_dtype: torch.dtype | None, activation: Sequence[float] | None,
    gate_up_scale: Tensor | None, rest: Tensor | None, rest_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`swiglu_backward` if scale_mode is None, else `swiglu_backward_quantize`. Fills `empty_swiglu_backward`.

    out: (R, 2F), overwritten with d_gate_up. If a row has one scale, it may share d_h's memory.
    gate_up_scale, rest_scale: one uint8 scale per row if gate_up and rest are qdata, else None.
    """
    rows, valid = d_h.shape[0], valid_rows(offs, d_h.shape[0])
    _, _, h, h_scale = empty_swiglu_backward(d_h, scale_mode, block_size, folded, h_dtype)
    if rest is not None:
        gate_up = torch.cat([rows.view(torch.uint8) for rows in (gate_up, rest)]).view(gate_up.dtype)
    if gate_up_scale is not None:
        gate_up_scale = gate_up_scale if rest_scale is None else torch.cat((gate_up_scale, rest_scale))
        gate_up = decode(gate_up[:valid], gate_up_scale[:valid], (1, gate_up.shape[1]), None)
    d_gate_up, d_row_weight = _backward(d_h, gate_up, row_weight, valid, activation)
    if h_dtype is not None:
        values = _forward(gate_up, row_weight, valid, activation)
        h, h_scale = _result(values, rows, h_dtype, scale_mode, min(block_size, values.shape[1]), folded)
    qdata, scale = _result(d_gate_up, rows, out.dtype, scale_mode, block_size, folded)
    out.copy_(qdata)
    return scale, fill_rows(d_row_weight, rows).squeeze(-1), h, h_scale
