"""LoRA on experts: W + (alpha / rank) B A for each expert, W frozen.

    rows (R_max, D)    gate_up = rows W13^T + scale (rows A13^T) B13^T      h = SwiGLU(gate_up)
                       y       = h W2^T     + scale (h A2^T) B2^T

W is quantized (`FrozenExperts`) or plain (`Experts`, with its weights frozen here). A and B are multiplied in x's
dtype by grouped GEMMs of `rank` columns; no B A of an expert is ever made. Rows and h are dequantized for them.

The layer is composed of the functions of `functional.py`, so it is slower than a frozen layer without LoRA, and is no
record as a whole. R_max rows, D model dim, F hidden dim, e local experts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from mxep.gemm.backends import Backend
from mxep.gemm.backends.base import AlongTokens
from mxep.gemm.functional import joined, taken_apart
from mxep.quant import MXTensor

from .shares import check_not_fsdp, empty_share, init_normal_, local_tensor

Watched = Callable[[], AbstractContextManager[None]]
RANK_MULTIPLE = 8
"""torch's grouped GEMM needs rows of 16 bytes."""


class LoRAWeights(NamedTuple):
    """This rank's A (e, r, in) and B (e, out, r) of both weights, and alpha / rank."""

    gate_up_A: Tensor
    gate_up_B: Tensor
    down_A: Tensor
    down_B: Tensor
    scale: float


def add_lora(
    out: Tensor,
    rows: Tensor,
    A: Tensor,
    B: Tensor,
    offs: Tensor,
    *,
    scale: float,
    wgrad_scale: float = 1.0,
    backend: Backend,
    watched: Watched | None = None,
) -> Tensor:
    """out (R_max, N) + scale (rows A^T) B^T by group, differentiable in all four.

    rows: (R_max, K), plain or MXTensor. A: (e, r, K). B: (e, N, r). offs: (e,) int32. wgrad_scale: factor of the
    gradients of A and B. watched: makes a context that backward runs in, for callers that have to know its exceptions.
    The gradient of out is the incoming one as it is, an MXTensor, too.
    """
    result: Tensor = _AddLoRA.apply(out, rows, A, B, offs, scale, wgrad_scale, backend, watched)  # type: ignore[no-untyped-call]
    return result


class _AddLoRA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        rows: Tensor,
        A: Tensor,
        B: Tensor,
        offs: Tensor,
        scale: float,
        wgrad_scale: float,
        backend: Backend,
        watched: Watched | None,
    ) -> Tensor:
        x = _plain(rows, out.dtype)
        inner = backend.forward(x, A.to(x.dtype), offs, bias=None, out_dtype=x.dtype) * scale
        parts, ctx.rest = taken_apart(rows)
        ctx.save_for_backward(*parts, A, B, offs, inner)
        ctx.how, ctx.watched = (scale, wgrad_scale, backend), watched
        return out + backend.forward(inner, B.to(x.dtype), offs, bias=None, out_dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with nullcontext() if ctx.watched is None else ctx.watched():
            return _AddLoRA._backward(ctx, d_out)

    @staticmethod
    def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *parts, A, B, offs, inner = ctx.saved_tensors
        scale, wgrad_scale, backend = ctx.how
        dtype = inner.dtype
        dy = _plain(d_out, dtype)
        d_inner = backend.dgrad(dy, B.to(dtype), offs, out_dtype=dtype) * scale
        d_rows = d_A = d_B = None
        if ctx.needs_input_grad[1]:
            d_rows = backend.dgrad(d_inner, A.to(dtype), offs, out_dtype=dtype)
        if ctx.needs_input_grad[2]:
            operands = AlongTokens(d_inner, _plain(joined(parts, ctx.rest), dtype))
            d_A = backend.wgrad_product(operands, offs, A.dtype, wgrad_scale)
        if ctx.needs_input_grad[3]:
            d_B = backend.wgrad_product(AlongTokens(dy, inner), offs, B.dtype, wgrad_scale)
        return d_out, d_rows, d_A, d_B, *[None] * 5


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.dequantize(dtype) if isinstance(x, MXTensor) else x.to(dtype)


class LoRAExperts(nn.Module):
    """`FrozenExperts` or `Experts`, frozen, with LoRA: a drop-in for the ``experts`` of an `MoE`.

    Parameters: ``gate_up_proj_lora_A`` (E, r, D), ``gate_up_proj_lora_B`` (E, 2F, r), ``down_proj_lora_A`` (E, r, F),
    ``down_proj_lora_B`` (E, D, r); DTensors if the experts' are. A is normal with std 1/sqrt(3 in), the variance of
    PEFT's, and B zero, so a new one changes nothing.
    """

    def __init__(
        self, base: nn.Module, rank: int, *, alpha: float | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """base: its parameters stop requiring gradients. rank: r, a multiple of 8. alpha: default r. dtype: of A and B.

        Raises ValueError for another rank, or a base without experts.
        """
        super().__init__()
        if not hasattr(base, "gate_up_proj") or not hasattr(base, "down_proj"):
            raise ValueError(f"LoRAExperts: expected Experts or FrozenExperts, got {type(base).__name__}")
        check_not_fsdp(base, "LoRAExperts")
        if rank < 1 or rank % RANK_MULTIPLE:
            raise ValueError(f"LoRAExperts: expected a rank that is a multiple of {RANK_MULTIPLE}, got {rank}")
        self.base, self.rank, self.alpha = base.requires_grad_(False), rank, float(rank if alpha is None else alpha)
        a_parameter = next(base.parameters())
        mesh = a_parameter.device_mesh if isinstance(a_parameter, DTensor) else None
        experts, device = int(base.num_experts), local_tensor(a_parameter).device  # type: ignore[arg-type]
        for name in ("gate_up_proj", "down_proj"):
            _, out, width = getattr(base, name).shape
            for letter, shape in (("A", (experts, rank, width)), ("B", (experts, out, rank))):
                made = nn.Parameter(empty_share(shape, mesh, device=device, dtype=dtype))
                self.register_parameter(f"{name}_lora_{letter}", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A, and set B to zero."""
        for name in ("gate_up_proj", "down_proj"):
            A = getattr(self, f"{name}_lora_A")
            init_normal_(A, (3 * A.shape[2]) ** -0.5, per_expert=True)
            nn.init.zeros_(getattr(self, f"{name}_lora_B"))

    @property
    def num_experts(self) -> int:
        return int(self.base.num_experts)  # type: ignore[arg-type]

    @property
    def gate_up_proj(self) -> Any:
        """The frozen weight."""
        return self.base.gate_up_proj

    @property
    def down_proj(self) -> Any:
        """The frozen weight."""
        return self.base.down_proj

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, **how: Any) -> tuple[Tensor, Any]:
        """:func:`mxep.ep.run_experts` with these weights and their LoRA."""
        gate_up, down = ([getattr(self, f"{name}_lora_{x}") for x in "AB"] for name in ("gate_up_proj", "down_proj"))
        lora = LoRAWeights(gate_up[0], gate_up[1], down[0], down[1], self.scale)
        out: tuple[Tensor, Any] = self.base(x, expert_ids, weights, lora=lora, **how)
        return out

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"

    def peft_state_dict(self) -> dict[str, Tensor]:
        """A and B as PEFT's `target_parameters` saves them: ``lora_A.weight`` (r E, in) and ``lora_B.weight`` (out,
        r E) of down_proj, and under ``base_layer.`` of gate_up_proj. On one rank that has all experts.

        A is expert-major: row e r + i. In B the expert is innermost: column i E + e. Weights are (E, out, in), as in
        transformers' experts that are not transposed.
        """
        found = {}
        for name, prefix in (("down_proj", ""), ("gate_up_proj", "base_layer.")):
            A, B = getattr(self, f"{name}_lora_A").data, getattr(self, f"{name}_lora_B").data
            found[f"{prefix}lora_A.weight"] = A.flatten(0, 1)
            found[f"{prefix}lora_B.weight"] = B.permute(1, 2, 0).flatten(1)
        return found

    @torch.no_grad()
    def load_peft_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy tensors of `peft_state_dict`. Raises ValueError for missing names and other shapes, before any copy."""
        wanted = self.peft_state_dict()
        got = {name: tuple(state[name].shape) if name in state else None for name in wanted}
        expected = {name: tuple(x.shape) for name, x in wanted.items()}
        if got != expected:
            raise ValueError(f"load_peft_state_dict: expected {expected}, got {got}")
        for name, prefix in (("down_proj", ""), ("gate_up_proj", "base_layer.")):
            A, B = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
            A.copy_(state[f"{prefix}lora_A.weight"].view(A.shape))
            B.copy_(state[f"{prefix}lora_B.weight"].view(*B.shape[1:], B.shape[0]).permute(2, 0, 1))
