"""The layers that peers.py compares: the inputs, an fp64 reference, and one function per peer.

Each peer gets the same values in its own layout, and imports its package when it is made. A peer that is not installed
raises ImportError. No peer's code is copied here.

T tokens, K experts a token, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.baseline import PAD, BaselineLayer, Product, bf16_product
from mxep.ep import run_experts
from mxep.ep.dispatchers import LocalDispatcher
from mxep.gemm import Recipe, quantize_weights_once
from mxep.integration.verify import Problem, moe_layer

RESULTS = ("out", "dx", "d_weights", "d_gate_up", "d_down")


class Shape(NamedTuple):
    """D, F, E, K. arriving: tokens that arrive per token of this rank."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    arriving: int = 1

    def flop(self, tokens: int) -> float:
        """Floating-point operations of forward and backward."""
        return 18.0 * tokens * self.arriving * self.top_k * self.dim * self.hidden


# One rank of 8: E / 8 experts, T K token copies. A token of DeepSeek-V3 goes to 8 experts in 4 of 8 groups, so to 2
# experts on each of 4 ranks: 8 ranks with T tokens send a rank 4 T tokens with 2 experts each. Qwen3 is treated alike.
SHAPES = {
    "Qwen3-30B, rank of 8": Shape(2048, 768, 16, 2, 4),
    "Qwen3-235B, rank of 8": Shape(4096, 1536, 16, 2, 4),
    "DeepSeek-V3, rank of 8": Shape(7168, 2048, 32, 2, 4),
    "Mixtral 8x7B": Shape(4096, 14336, 8, 2),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "tiny": Shape(64, 32, 4, 2),
}


@dataclass(frozen=True)
class Inputs:
    """x, d_out: (T, D) bf16. ids: (T, K) int32. weights: (T, K) fp32, a token's sum to 1. w13: (E, 2F, D) bf16, gate
    first. w2: (E, D, F) bf16."""

    x: Tensor
    d_out: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor

    @classmethod
    def draw(cls, shape: Shape, tokens: int, device: torch.device) -> Inputs:
        """Draw the same values in every process on one kind of device. Experts are uniformly random."""
        generator = torch.Generator(device).manual_seed(1)
        tokens *= shape.arriving

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, device=device, generator=generator)

        scores = torch.rand(tokens, shape.experts, dtype=torch.float32, device=device, generator=generator)
        weights, ids = scores.topk(shape.top_k)
        return cls(
            normal(tokens, shape.dim),
            normal(tokens, shape.dim),
            ids.int(),
            weights / weights.sum(1, keepdim=True),
            normal(shape.experts, 2 * shape.hidden, shape.dim).mul_(shape.dim**-0.5),
            normal(shape.experts, shape.dim, shape.hidden).mul_(shape.hidden**-0.5),
        )


def reference(given: Inputs) -> dict[str, Tensor]:
    """All RESULTS, computed in fp64, as fp32 on the host."""
    x, d_out, weights, w13, w2 = (each.double() for each in (given.x, given.d_out, given.weights, given.w13, given.w2))
    found = moe_layer(Problem(x, d_out, given.ids, weights, w13, w2))
    return {name: getattr(found, field.name).float().cpu() for name, field in zip(RESULTS, dataclasses.fields(found))}


def same(w13: Tensor) -> Tensor:
    return w13


@dataclass(frozen=True)
class Layer:
    """call: forward. leaves: x, weights, w13, w2. gate_first: changes w13's layout to (E, 2F, D), gate first."""

    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    gate_first: Callable[[Tensor], Tensor] = same


Make = Callable[[Inputs, contextlib.ExitStack], Layer]
"""Makes a layer. Contexts on the stack stay open as long as the layer lives."""


def leaves(given: Inputs, w13: Tensor | None = None) -> tuple[Tensor, ...]:
    own = given.w13 if w13 is None else w13
    return tuple(each.detach().requires_grad_() for each in (given.x, given.weights, own, given.w2))


def pipeline(given: Inputs, product: Product = bf16_product, pad: int = PAD) -> Layer:
    """The baseline's gathers, SwiGLU and weighted sum around a grouped GEMM."""
    x, weights, w13, w2 = leaves(given)
    layer = BaselineLayer(w13, w2, product=product, pad=pad)
    return Layer(lambda: layer(x, given.ids, weights), (x, weights, w13, w2))


def torchao_row(given: Inputs, stack: contextlib.ExitStack) -> Layer:
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

    return pipeline(given, lambda a, w, offs: grouped_mm(a, w.mT, offs, pad_token_groups_for_grouped_mm=False))


def torchao_block(given: Inputs, stack: contextlib.ExitStack) -> Layer:
    import deep_gemm  # noqa: F401  # without it torchao would emulate, and say nothing
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

    product = grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm
    return pipeline(given, lambda a, w, offs: product(a, w.mT, offs, pad_token_groups_for_grouped_mm=False), 128)


def liger(given: Inputs, stack: contextlib.ExitStack) -> Layer:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, weights, w13, w2 = leaves(given)
    return Layer(lambda: LigerFusedMoEFunction.apply(x, w13, w2, given.ids, weights), (x, weights, w13, w2))


def sonic(given: Inputs, stack: contextlib.ExitStack) -> Layer:
    """Its default layout alternates rows of gate and up."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    experts, wide, _ = given.w13.shape
    w13 = given.w13.unflatten(1, (2, wide // 2)).transpose(1, 2).flatten(1, 2).contiguous()
    x, weights, w13, w2 = leaves(given, w13)
    tokens, top_k = given.ids.shape
    token = torch.arange(tokens, dtype=torch.int32, device=x.device).repeat_interleave(top_k)
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> Tensor:
        pairs = weights.flatten(), token, given.ids.flatten()
        projections = w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
        out: Tensor = moe_general_routing_inputs(x, *pairs, *projections, experts, stream, ActivationType.SWIGLU)[0]
        return out

    gate_first = lambda w: w.unflatten(1, (wide // 2, 2)).transpose(1, 2).flatten(1, 2)  # noqa: E731
    return Layer(call, (x, weights, w13, w2), gate_first)


def scattermoe(given: Inputs, stack: contextlib.ExitStack) -> Layer:
    """GLUMLP stores up before gate, and needs routing weights in the dtype of x."""
    from scattermoe.mlp import GLUMLP

    (experts, wide, dim), top_k = given.w13.shape, given.ids.shape[1]
    up_first = lambda w: torch.cat(w.chunk(2, 1)[::-1], 1)  # noqa: E731
    x, weights, w13, w2 = leaves(given, up_first(given.w13))
    with torch.device("meta"):
        mlp = GLUMLP(dim, wide // 2, experts, top_k)
    mlp.experts.weight, mlp.output_experts.weight = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
    w13, w2, ids = mlp.experts.weight, mlp.output_experts.weight, given.ids.long()
    return Layer(lambda: mlp(x, weights.to(x.dtype), ids), (x, weights, w13, w2), up_first)


def mxep(name: str, *, kept: bool = False) -> Make:
    def make(given: Inputs, stack: contextlib.ExitStack) -> Layer:
        x, weights, w13, w2 = leaves(given)
        how: dict[str, Any] = {"dispatcher": LocalDispatcher(len(w13)), "recipe": Recipe.named(name)}
        if kept:
            stack.enter_context(quantize_weights_once())
        return Layer(lambda: run_experts(x, given.ids, weights, w13, w2, **how)[0], (x, weights, w13, w2))

    return make


PEERS: dict[str, Make] = {
    "grouped_mm bf16": lambda given, stack: pipeline(given),
    "ScatterMoE bf16": scattermoe,
    "Liger bf16": liger,
    "SonicMoE bf16": sonic,
    "torchao fp8 row": torchao_row,
    "torchao fp8 block": torchao_block,
    "mxep bf16": mxep("bf16"),
    "mxep fp8": mxep("fp8"),
    "mxep mxfp8": mxep("mxfp8"),
    "mxep mxfp8, kept": mxep("mxfp8", kept=True),
}
PACKAGES = (
    *("torch", "triton", "torchao", "sgl-deep-gemm", "apache-tvm-ffi", "sonic-moe", "quack-kernels"),
    *("nvidia-cutlass-dsl", "liger-kernel", "scattermoe"),
)
