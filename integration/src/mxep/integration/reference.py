"""An MoE layer in plain fp32, forward and backward by hand, expert by expert, with quantizers where a recipe has them.

    forward                                         backward
    x -> activation                                 d_out -> gradient
    gate_up = x @ rows(w13)^T                       dh = d_out @ cols(w2);  dw2 = tokens(d_out)^T @ tokens(h)
    h = silu(gate) * up * weight -> activation      d_gate_up -> gradient, d_weight = SwiGLU's backward of dh
    y = h @ rows(w2)^T                              dx = d_gate_up @ cols(w13);  dw13 = tokens(d_gate_up)^T @ tokens(x)
    out = sum of y over a token's experts

With `EXACT` quantizers this is the dense layer that results are compared with. With `quantizers(recipe)` it is the best
that a layer of that recipe can do: it has no other error than the recipe's. It shares no code with mxep.ep.
`plain_linear` is a linear's: rows are as many as a rank has tokens, no multiple of anything.

T tokens, K experts a token, D model dim, F hidden dim, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mxep.gemm import Recipe
from mxep.quant import MXFormat, quantize

Quantizer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A layer's input, weights and output gradient, all fp32.

    x, d_out: (T, D). expert_ids: (T, K) int, -1 for not routed. weights: (T, K). gate_up_proj: (E, 2F, D). down_proj:
    (E, D, F).
    """

    x: Tensor
    d_out: Tensor
    expert_ids: Tensor
    weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor


@dataclass(frozen=True)
class Results:
    """Results of a forward and a backward: out, dx (T, D), d_weights (T, K), and the gradients of both projections."""

    out: Tensor
    dx: Tensor
    d_weights: Tensor
    d_gate_up_proj: Tensor
    d_down_proj: Tensor


@dataclass(frozen=True)
class Quantizers:
    """A recipe's roundings, each fp32 -> fp32: rows of activations and gradients, weights along their last axis (rows)
    or the one before it (cols), rows of either kind along tokens for the weight gradients."""

    activation: Quantizer
    gradient: Quantizer
    rows: Quantizer
    cols: Quantizer
    activation_tokens: Quantizer
    gradient_tokens: Quantizer


def _exact(x: Tensor) -> Tensor:
    return x


EXACT = Quantizers(_exact, _exact, _exact, _exact, _exact, _exact)


def quantizers(recipe: Recipe) -> Quantizers:
    """The recipe's roundings as fp32 -> fp32. Covers 1x32 weights and wgrad "mx", which all names.CASES have."""
    if recipe.scaling == "none":
        return EXACT

    def rounding(fmt: MXFormat, axis: int = -1) -> Quantizer:
        return lambda x: quantize(x, fmt=fmt, mode=recipe.mode, axis=axis, block_size=recipe.block_size).dequantize(
            torch.float32
        )

    def along_tokens(fmt: MXFormat) -> Quantizer:
        if recipe.scaling == "row":  # the row-scaled qdata are multiplied as they are
            return _exact
        return lambda x: rounding(fmt, axis=-2)(F.pad(x, (0, 0, 0, -len(x) % recipe.group_alignment)))

    return Quantizers(
        activation=rounding(recipe.fmt),
        gradient=rounding(recipe.grad_fmt),
        rows=rounding(recipe.fmt),
        cols=rounding(recipe.fmt, axis=-2),
        activation_tokens=along_tokens(recipe.fmt),
        gradient_tokens=along_tokens(recipe.grad_fmt),
    )


def moe_layer(problem: Problem, q: Quantizers = EXACT) -> Results:
    """Forward and backward of the layer, rows of an expert in token order."""
    x, d_out = q.activation(problem.x), q.gradient(problem.d_out)
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    d_weights = torch.zeros_like(problem.weights)
    d_gate_up_proj = torch.zeros_like(problem.gate_up_proj)
    d_down_proj = torch.zeros_like(problem.down_proj)
    for expert, (w13, w2) in enumerate(zip(problem.gate_up_proj, problem.down_proj)):
        token, k = torch.where(problem.expert_ids == expert)
        if len(token) == 0:
            continue
        weight = problem.weights[token, k][:, None]
        rows, d_y = x[token], d_out[token]
        gate, up = (rows @ q.rows(w13).T).chunk(2, -1)
        h = q.activation(F.silu(gate) * up * weight)
        out.index_add_(0, token, h @ q.rows(w2).T)

        d_h = d_y @ q.cols(w2)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        d_gate = d_h * up * weight * (sigmoid + silu * (1 - sigmoid))
        d_gate_up = q.gradient(torch.cat((d_gate, d_h * silu * weight), -1))
        dx.index_add_(0, token, d_gate_up @ q.cols(w13))
        d_weights[token, k] = (d_h * silu * up).sum(-1)
        d_down_proj[expert] = q.gradient_tokens(d_y).T @ q.activation_tokens(h)
        d_gate_up_proj[expert] = q.gradient_tokens(d_gate_up).T @ q.activation_tokens(rows)
    return Results(out, dx, d_weights, d_gate_up_proj, d_down_proj)


@dataclass(frozen=True)
class LinearProblem:
    """x (T, D), w (N, D), bias (N,), d_out (T, N), fp32 with values that bf16 has."""

    x: Tensor
    w: Tensor
    bias: Tensor
    d_out: Tensor

    @staticmethod
    def gaussian(tokens: int, dim: int, width: int, seed: int) -> LinearProblem:
        generator = torch.Generator().manual_seed(seed)
        drawn = [
            torch.randn(s, generator=generator, dtype=torch.float32)
            for s in ((tokens, dim), (width, dim), (width,), (tokens, width))
        ]
        drawn[1] *= dim**-0.5
        return LinearProblem(*(each.bfloat16().float() for each in drawn))


@dataclass(frozen=True)
class LinearResults:
    """out (T, N), dx (T, D), dw (N, D), d_bias (N,)."""

    out: Tensor
    dx: Tensor
    dw: Tensor
    d_bias: Tensor


def plain_linear(problem: LinearProblem, q: Quantizers = EXACT) -> LinearResults:
    """Forward and backward of a linear, with what `q` rounds."""
    x, d_out = q.activation(problem.x), q.gradient(problem.d_out)
    out = x @ q.rows(problem.w).T + problem.bias
    dw = q.gradient_tokens(d_out).T @ q.activation_tokens(x)
    return LinearResults(out, d_out @ q.cols(problem.w), dw, problem.d_out.sum(0))


LIMIT = 300.0  # dB, of equal tensors
CHUNK = 1 << 26  # elements compared at a time: weight gradients are large


def snr(reference: Tensor, got: Tensor) -> float:
    """10 log10(sum reference^2 / sum (reference - got)^2) in dB, within -LIMIT and LIMIT; -LIMIT where not finite.

    ValueError for tensors of other shapes.
    """
    if reference.shape != got.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, wanted {tuple(reference.shape)}")
    signal = noise = 0.0
    for one, other in zip(reference.flatten().split(CHUNK), got.flatten().split(CHUNK)):
        exact = one.double()
        signal += float(exact.square().sum())
        noise += float((exact - other.double()).square().sum())
    if noise == 0.0:
        return LIMIT
    if not math.isfinite(signal + noise) or signal == 0.0:
        return -LIMIT
    return max(-LIMIT, min(LIMIT, 10 * math.log10(signal / noise)))
