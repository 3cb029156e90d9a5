"""Rows of task=verify for `mxep.gemm.linear`: its products beside plain fp32 ones, exact and with a recipe's roundings.

Rows are as many as a rank has tokens, no multiple of anything. It shares no code with mxep.gemm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.gemm import Recipe, linear

from .reference import EXACT, Quantizers

LINEAR_CASES = {f"{recipe}/linear": recipe for recipe in ("bf16", "fp8", "mxfp8")}
"""Name of a case -> name of its recipe."""


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
        drawn = [torch.randn(s, generator=generator) for s in ((tokens, dim), (width, dim), (width,), (tokens, width))]
        drawn[1] *= dim**-0.5
        return LinearProblem(*(each.bfloat16().float() for each in drawn))


@dataclass(frozen=True)
class LinearResults:
    """out (T, N), dx (T, D), dw (N, D), d_bias (N,)."""

    out: Tensor
    dx: Tensor
    dw: Tensor
    d_bias: Tensor


def run_linear(problem: LinearProblem, recipe: Recipe, device: torch.device, backend: str) -> LinearResults:
    """linear in bf16, forward and backward."""
    tensors = (problem.x, problem.w, problem.bias)
    leaves = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in tensors]
    out = linear(*leaves, recipe=recipe, backend=backend)
    gradients = torch.autograd.grad(out, leaves, problem.d_out.to(out))
    return LinearResults(*(tensor.detach().float().cpu() for tensor in (out, *gradients)))


def plain_linear(problem: LinearProblem, q: Quantizers = EXACT) -> LinearResults:
    """The same in fp32, with what `q` rounds."""
    x, d_out = q.activation(problem.x), q.gradient(problem.d_out)
    out = x @ q.rows(problem.w).T + problem.bias
    dw = q.gradient_tokens(d_out).T @ q.activation_tokens(x)
    return LinearResults(out, d_out @ q.cols(problem.w), dw, problem.d_out.sum(0))
