"""LoRA on experts: each expert computes with W + (alpha / rank) * B A, where W is frozen.

    rows (R_max, D)    gate_up = rows W13^T + scale * (rows A13^T) B13^T      h = SwiGLU(gate_up)
                       y       = h W2^T     + scale * (h A2^T) B2^T

W13, A13, B13 belong to gate_up_proj, and W2, A2, B2 to down_proj. scale is alpha / rank.

W is quantized (`FrozenExperts`) or plain (`Experts`). LoRA's GEMMs compute in x's dtype and read quantized rows without
a copy (`mxep.gemm.lora`). The product B A is never computed. These GEMMs are part of the layer's passes (`layer.py`),
so they are replayed with the layer.

R_max maximum rows of this rank's experts, D model dim, F hidden dim, E experts in all, e local experts, r rank. "in"
and "out" are the sizes of a weight (E, out, in).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mxep.gemm.backends.reference import parts_of
from mxep.gemm.lora import lora_expand, lora_shrink, lora_wgrad
from mxep.runtime.bundle import Bundle

from .dtensors import check_not_fsdp, empty_share, init_normal_, local_tensor, mesh_of

RANK_MULTIPLE = 8
"""A rank must be a multiple of this, so that rows of A and B are multiples of 16 bytes."""


@dataclass(frozen=True)
class LoRAWeights(Bundle):
    """A (e, r, in) and B (e, out, r) of both weights, for this rank's experts. scale: alpha / rank."""

    gate_up_A: Tensor
    gate_up_B: Tensor
    down_A: Tensor
    down_B: Tensor
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gate_up_A, self.gate_up_B, self.down_A, self.down_B


class LoRAGradients(NamedTuple):
    """The gradients of `LoRAWeights.tensors`, in the same order."""

    gate_up_A: Tensor | None
    gate_up_B: Tensor | None
    down_A: Tensor | None
    down_B: Tensor | None


def add_lora(out: Tensor, rows: Tensor, A: Tensor, B: Tensor, offs: Tensor, *, scale: float) -> Tensor:
    """Add scale * (rows A[g]^T) B[g]^T to the rows of each group g of out (R_max, N), in place.

    rows: (R_max, K), plain or MXTensor. A: (e, r, K). B: (e, N, r). offs: (e,) int32. (N, K: the weight's sizes.)
    Returns inner = scale * rows A^T, (R_max, r).
    """
    inner: Tensor = lora_shrink(*parts_of(rows), A, offs, scale, out.dtype)
    lora_expand(out, inner, B, offs)
    return inner


def lora_backward(
    dy: Tensor,
    dx: Tensor,
    A: Tensor,
    B: Tensor,
    inner: Tensor | None,
    offs: Tensor,
    *,
    scale: float,
    wgrad_scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Backward of `add_lora`: adds LoRA's part of the gradient of rows to dx, in place.

    dy: the gradient of out. inner: from `add_lora`; None if A and B need no gradients. wgrad_scale: factor for B's
    gradient. Returns (gradient of inner, for `gradient_of_A`; gradient of B, or None).
    """
    d_inner: Tensor = lora_shrink(*parts_of(dy), B.mT, offs, scale, dx.dtype)
    lora_expand(dx, d_inner, A.mT, offs)
    if inner is None:
        return d_inner, None
    d_B = torch.empty(B.shape, dtype=B.dtype, device=B.device)
    lora_wgrad(d_B.mT, inner, *parts_of(dy), offs, wgrad_scale)
    return d_inner, d_B


def gradient_of_A(d_inner: Tensor, rows: Tensor, A: Tensor, offs: Tensor, *, wgrad_scale: float) -> Tensor:
    """Compute the gradient of A (e, r, K) from the gradient of inner and rows. wgrad_scale: factor for it."""
    d_A = torch.empty(A.shape, dtype=A.dtype, device=A.device)
    lora_wgrad(d_A, d_inner, *parts_of(rows), offs, wgrad_scale)
    return d_A


class LoRAExperts(nn.Module):
    """Frozen experts (`FrozenExperts` or `Experts`) with LoRA. Replaces the ``experts`` of an `MoE`.

    Parameters: ``gate_up_proj_lora_A`` (E, r, D), ``gate_up_proj_lora_B`` (E, 2F, r), ``down_proj_lora_A`` (E, r, F),
    ``down_proj_lora_B`` (E, D, r). They are DTensors if the experts' parameters are. A is normal with std
    1 / sqrt(3 * in), which is PEFT's variance. B is zero, so a new layer computes what its base computes.
    """

    def __init__(
        self, base: nn.Module, rank: int, *, alpha: float | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """base: the experts. Their parameters are set to requires_grad=False.
        rank: r, a multiple of 8. alpha: default r. dtype: dtype of A and B.

        Raises ValueError for another rank, an alpha that is not finite, or a base without experts.
        """
        super().__init__()
        if not hasattr(base, "gate_up_proj") or not hasattr(base, "down_proj") or isinstance(base, LoRAExperts):
            raise ValueError(f"LoRAExperts: expected Experts or FrozenExperts, got {type(base).__name__}")
        check_not_fsdp(base, "LoRAExperts")
        if not isinstance(rank, int) or rank < 1 or rank % RANK_MULTIPLE:
            raise ValueError(f"LoRAExperts: expected a rank that is a multiple of {RANK_MULTIPLE}, got {rank!r}")
        if alpha is not None and not math.isfinite(alpha):
            raise ValueError(f"LoRAExperts: expected a finite alpha, got {alpha}")
        self.base, self.rank, self.alpha = base.requires_grad_(False), rank, float(rank if alpha is None else alpha)
        a_parameter = next(base.parameters())
        mesh = mesh_of(a_parameter)
        experts, device = int(base.num_experts), local_tensor(a_parameter).device  # type: ignore[arg-type]
        for name in ("gate_up_proj", "down_proj"):
            _, out, width = getattr(base, name).shape
            for letter, shape in (("A", (experts, rank, width)), ("B", (experts, out, rank))):
                made = nn.Parameter(empty_share(shape, mesh, device=device, dtype=dtype))
                self.register_parameter(f"{name}_lora_{letter}", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in ("gate_up_proj", "down_proj"):
            A = getattr(self, f"{name}_lora_A")
            init_normal_(A, (3 * A.shape[2]) ** -0.5, per_expert=True)
            nn.init.zeros_(getattr(self, f"{name}_lora_B"))

    @property
    def num_experts(self) -> int:
        return int(self.base.num_experts)  # type: ignore[arg-type]

    @property
    def gate_up_proj(self) -> Any:
        return self.base.gate_up_proj

    @property
    def down_proj(self) -> Any:
        return self.base.down_proj

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, **how: Any) -> tuple[Tensor, Any]:
        """Call :func:`mxep.ep.run_experts` with these weights and their LoRA."""
        gate_up, down = ([getattr(self, f"{name}_lora_{x}") for x in "AB"] for name in ("gate_up_proj", "down_proj"))
        lora = LoRAWeights(gate_up[0], gate_up[1], down[0], down[1], self.scale)
        out: tuple[Tensor, Any] = self.base(x, expert_ids, weights, lora=lora, **how)
        return out

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"

    def peft_state_dict(self) -> dict[str, Tensor]:
        """Return A and B with the names and shapes that PEFT's `target_parameters` saves.

        ``lora_A.weight`` (r * E, in) and ``lora_B.weight`` (out, r * E) are those of down_proj. With the prefix
        ``base_layer.`` they are those of gate_up_proj. If experts are spread over ranks, this is collective, and each
        rank gets the tensors of all experts.

        For expert e of E and i in 0 .. r-1: row i of A[e] is row e * r + i of lora_A.weight. Column i of B[e] is column
        i * E + e of lora_B.weight. Weights are (E, out, in), as in transformers' experts that are not transposed.
        """
        found = {}
        for key, x in self._by_pefts_names().items():
            x = x.full_tensor() if isinstance(x, DTensor) else x
            found[key] = x.flatten(0, 1) if key.endswith("A.weight") else x.permute(1, 2, 0).flatten(1)
        return found

    @torch.no_grad()
    def load_peft_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors of a `peft_state_dict` into A and B. A rank copies only the parts of its own experts.

        Raises ValueError, before any copy, if a name is missing or a shape differs.
        """
        shares, expected = self._by_pefts_names(), {}
        for key, share in shares.items():
            E, rows, columns = share.shape
            expected[key] = (E * rows, columns) if key.endswith("A.weight") else (rows, columns * E)
        got = {key: tuple(state[key].shape) if key in state else None for key in expected}
        if got != expected:
            raise ValueError(f"load_peft_state_dict: expected {expected}, got {got}")
        for key, share in shares.items():
            E, rows, columns = share.shape
            x = state[key]
            x = x.view(share.shape) if key.endswith("A.weight") else x.view(rows, columns, E).permute(2, 0, 1)
            if isinstance(share, DTensor):
                x = distribute_tensor(x.contiguous(), share.device_mesh, share.placements, src_data_rank=None)
            share.copy_(x)

    def _by_pefts_names(self) -> dict[str, Tensor]:
        """The parameters A (E, r, in) and B (E, out, r), by their names in `peft_state_dict`."""
        prefixes = {"down_proj": "", "gate_up_proj": "base_layer."}
        return {
            f"{prefix}lora_{letter}.weight": getattr(self, f"{name}_lora_{letter}").data
            for name, prefix in prefixes.items()
            for letter in "AB"
        }
