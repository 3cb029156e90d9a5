"""The guard's three ops: reference, CPU kernel and fake of each; `mxep.gemm.guard` says what they are for.

    trigger   spreads of both operands   -> fired
    moments   a weight, exact and folded -> mean and variance of each column, and of its errors
    check     an activation, moments     -> flag, noise and signal of each row

`fired` is an int32 on the device: where it is 0, moments and check compute nothing. `counters` (5,) int64: calls,
those that fired, calls that failed, rows that failed, the bits of the largest noise / signal (fp32) of a row.
"""

import torch
from torch import Tensor

from mxep.quant.fold import shift_codes
from mxep.quant.kernels import on_cuda
from mxep.quant.ops import pick_rows, values_of


def _parts(qdata: Tensor, scale: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, folded values, errors, variances of errors), fp64, in units of the row's scale; NaN rows are zero."""
    block_size = qdata.shape[-1] // scale.shape[-1]
    byte, top = (x.view(torch.uint8).int() for x in (scale, top))
    values = values_of(qdata).double().nan_to_num(0, 0, 0).masked_fill(top == 255, 0)
    if block_size == qdata.shape[-1]:
        info = torch.finfo(qdata.dtype)
        step = info.smallest_normal * info.eps
        variances = (values.abs() < info.smallest_normal).double() * (step**2 / 12)
        return values, values, torch.zeros_like(values), variances.masked_fill(top == 255, 0)
    shift = (top - byte).clamp(min=0).repeat_interleave(block_size, -1)
    folded = values_of(shift_codes(qdata, shift)).double().nan_to_num(0, 0, 0).masked_fill(top == 255, 0)
    values = values * torch.exp2(-shift.double())
    return values, folded, folded - values, torch.zeros_like(values)


@torch.library.custom_op("mxep::guard_trigger", mutates_args=("counters",))
def trigger_op(spread_a: Tensor | None, spread_w: Tensor | None, offs: Tensor, counters: Tensor, limit: int) -> Tensor:
    """() int32: whether a valid row's spread (M,), or one of w's (G, N), is above limit, or not given. Counts calls."""
    fired = True
    if spread_a is not None and spread_w is not None:
        valid = spread_a[: int(offs[-1])]
        fired = bool((valid > limit).any() | (spread_w > limit).any())
    counters[0] += 1
    counters[1] += fired
    return offs.new_full((), fired)


@trigger_op.register_fake
def _(spread_a: Tensor | None, spread_w: Tensor | None, offs: Tensor, counters: Tensor, limit: int) -> Tensor:
    return offs.new_empty(())


@torch.library.custom_op("mxep::guard_moments", mutates_args=())
def moments_op(qdata: Tensor, scale: Tensor, top: Tensor, fired: Tensor | None) -> Tensor:
    """qdata (G, N, K), scale (G, N, K/32) or (G, N, 1), top (G, N, 1) the folded scale -> (4, G, K) fp32.

    Mean and variance over N of the values, of the errors; in units of the group's largest scale, or its square.
    Unspecified if `fired` is 0.
    """
    values, _, errors, variances = _parts(qdata, scale, top)
    byte = top.view(torch.uint8).double()
    byte = byte.masked_fill(byte == 255, 0)
    unit = torch.exp2(byte - byte.amax(1, keepdim=True))
    values, errors = values * unit, errors * unit
    error_variance = errors.var(1, correction=0) + (variances * unit.square()).mean(1)
    return torch.stack((values.mean(1), values.var(1, correction=0), errors.mean(1), error_variance)).float()


@moments_op.register_fake
def _(qdata: Tensor, scale: Tensor, top: Tensor, fired: Tensor | None) -> Tensor:
    return qdata.new_empty((4, qdata.shape[0], qdata.shape[2]), dtype=torch.float32)


@torch.library.custom_op("mxep::guard_check", mutates_args=("counters",))
def check_op(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    top: Tensor,
    moments: Tensor,
    offs: Tensor,
    fired: Tensor,
    counters: Tensor,
    max_ratio: float,
) -> tuple[Tensor, Tensor]:
    """qdata (S, K), scale, row_index (M,), top (M, 1) -> flag () int32, (2, M) fp32: noise, signal in units of the row.

    counters: failed calls, failed rows, bits of the largest noise / signal. Nothing but a zero flag if `fired` is 0.
    """
    sums = top.new_zeros((2, top.shape[0]), dtype=torch.float32)
    valid = int(offs[-1]) if fired else 0
    if row_index is not None:
        qdata, scale = (pick_rows(x.view(torch.uint8), row_index[:valid]).view(x.dtype) for x in (qdata, scale))
    values, folded, errors, variances = _parts(qdata[:valid], scale[:valid], top[:valid])
    if row_index is not None:
        variances = variances.masked_fill((row_index[:valid] < 0).unsqueeze(1), 0)
    start = 0
    for of_group, end in zip(moments.double().unbind(1), offs.tolist() if fired else ()):
        mean, variance, error_mean, error_variance = of_group
        rows = slice(start, end)
        noise = (errors[rows] @ mean + folded[rows] @ error_mean).square()
        noise += errors[rows].square() @ variance + folded[rows].square() @ error_variance
        sums[0, rows] = (noise + variances[rows] @ (variance + mean.square())).float()
        sums[1, rows] = ((values[rows] @ mean).square() + values[rows].square() @ variance).float()
        start = end
    noise, signal = sums
    ratio = torch.where(signal > 0, noise / signal, 0.0)
    failed = (ratio > max_ratio).sum()
    counters[2] += failed > 0
    counters[3] += failed
    counters[4] = torch.maximum(counters[4], ratio.view(torch.int32).amax() if valid else counters[4])
    return (failed > 0).int(), sums


@check_op.register_fake
def _(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    top: Tensor,
    moments: Tensor,
    offs: Tensor,
    fired: Tensor,
    counters: Tensor,
    max_ratio: float,
) -> tuple[Tensor, Tensor]:
    return offs.new_empty(()), moments.new_empty((2, top.shape[0]))


for _op, _launcher in ((trigger_op, "trigger"), (moments_op, "moments"), (check_op, "check")):
    on_cuda(_op, "guard", _launcher, package="mxep.gemm.kernels")
