"""Experts that stay quantized and are never trained: the base of a LoRA fine-tune, or of a decode.

    freeze_experts(model, "mxfp8")      replaces every `Experts` of a model, and frees its bf16 weights, one by one
    FrozenExperts(gate_up, down)        from quantized weights (`mxep.gemm.freeze`), without any bf16 copy

Forward and the gradient of x are those of `Experts` with the quantized weights.

E experts in all, e local experts, D model dim, F hidden dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mxep.gemm.frozen import FrozenFormat, FrozenWeight, freeze

from .dispatchers.base import Routing
from .dtensors import check_not_fsdp, local_tensor, mesh_of
from .experts import Experts, run_experts

PARTS = (*FrozenWeight.field_names, "block_scale")
"""Suffixes of parameter names: a weight's parameters are called f"{weight}_{suffix}".

A weight has "block_scale" if its qdata are folded, else "scale". If both had one name, torch.distributed.checkpoint
would load folded qdata into a model with unfolded ones.
"""


class FrozenExperts(nn.Module):
    """All experts of a layer in MXFP8, MXFP4, block or row-scaled FP8. With a mesh, each rank holds its share of them.

    Parameters of ``gate_up_proj``, and likewise of ``down_proj``, without gradients, as in
    `mxep.gemm.frozen.FrozenWeight`:

    - ``gate_up_proj_qdata`` and ``gate_up_proj_scale``; for MX formats also ``gate_up_proj_column_scale``;
    - if folded, ``gate_up_proj_block_scale`` instead of ``gate_up_proj_scale``, and also ``gate_up_proj_row_scale``,
      ``gate_up_proj_lost_index`` and ``gate_up_proj_lost_qdata``.

    ``gate_up_bias`` and ``down_bias`` are frozen, too, or None. With a mesh, parameters are DTensors sharded on
    dimension 0.

    The quantized parameters are integers. So `.to(torch.bfloat16)`, which casts only floating-point tensors, does not
    change them. They cannot have gradients: `model.requires_grad_(True)` raises. Call it for floating-point parameters
    only.
    """

    def __init__(
        self,
        gate_up_proj: FrozenWeight,
        down_proj: FrozenWeight,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """gate_up_proj: (e, 2F, D), this rank's. down_proj: (e, D, F). mesh: 1-D, of the ranks that share experts."""
        super().__init__()
        (experts, wide, dim), expected = gate_up_proj.shape, tuple(down_proj.shape)
        if expected != (experts, dim, wide // 2):
            raise ValueError(
                f"FrozenExperts: expected gate_up_proj (e, 2F, D) and down_proj (e, D, F), got "
                f"{tuple(gate_up_proj.shape)} and {expected}"
            )
        self.num_experts = experts * (1 if mesh is None else mesh.size())
        for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            register_frozen(self, name, weight, mesh)
        self.gate_up_bias, self.down_bias = _frozen(gate_up_bias, mesh), _frozen(down_bias, mesh)

    @staticmethod
    def of(experts: Experts, fmt: FrozenFormat = "mxfp8", *, folded: bool = True) -> "FrozenExperts":
        """Quantize `experts` to `fmt` with `mxep.gemm.freeze`. `experts` is not changed."""
        check_not_fsdp(experts, "freeze_experts")
        mesh = mesh_of(experts.down_proj)
        weights = (freeze(local_tensor(w.data), fmt, folded=folded) for w in (experts.gate_up_proj, experts.down_proj))
        biases = (None if b is None else local_tensor(b.data) for b in (experts.gate_up_bias, experts.down_bias))
        gate_up_bias, down_bias = biases
        return FrozenExperts(*weights, gate_up_bias=gate_up_bias, down_bias=down_bias, mesh=mesh)

    @property
    def gate_up_proj(self) -> FrozenWeight:
        """This rank's gate and up weights (e, 2F, D)."""
        return frozen_weight(self, "gate_up_proj")

    @property
    def down_proj(self) -> FrozenWeight:
        """This rank's down weights (e, D, F)."""
        return frozen_weight(self, "down_proj")

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, **how: Any) -> tuple[Tensor, Routing | None]:
        """Call :func:`mxep.ep.run_experts` with these weights."""
        how |= {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return run_experts(x, expert_ids, weights, self.gate_up_proj, self.down_proj, **how)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        check_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        weight = self.down_proj
        local, dim, hidden_dim = weight.shape
        here = "" if local == self.num_experts else f", local_experts={local}"
        return f"num_experts={self.num_experts}{here}, dim={dim}, hidden_dim={hidden_dim}, format={weight.format}"


def register_frozen(module: nn.Module, name: str, weight: FrozenWeight, mesh: DeviceMesh | None = None) -> None:
    """Register the tensors of `weight` as parameters ``{name}_{part}``. mesh: of the ranks that share the experts."""
    parts = {part: getattr(weight, part) for part in FrozenWeight.field_names} | {"block_scale": None}
    if weight.row_scale is not None:
        parts |= {"scale": None, "block_scale": weight.scale}
    for part, x in parts.items():
        module.register_parameter(f"{name}_{part}", _frozen(x, mesh))


def check_state(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Raise ValueError if a state dict has qdata of the module's shape, but was frozen in another way.

    Otherwise torch, with strict=False, would load such qdata and skip their scales. torch itself refuses other shapes.
    """
    parameters = dict(module.named_parameters(recurse=False))
    for name in ("gate_up_proj", "down_proj"):
        qdata = state.get(f"{prefix}{name}_qdata")
        own, got = _kind(parameters, name), _kind(state, prefix + name)
        if qdata is not None and qdata.shape == getattr(module, f"{name}_qdata").shape and own != got:
            raise ValueError(
                f"{prefix}{name}: expected a state of experts frozen with {own}, got {got}: freeze the model with "
                f"{got} before it loads"
            )


def _kind(tensors: Mapping[str, Any], name: str) -> str:
    """Return text that says how a weight was frozen. tensors: a state dict, or parameters by name."""
    if f"{name}_column_scale" in tensors:
        return f"folded={f'{name}_row_scale' in tensors}"
    qdata, scale = (tensors.get(f"{name}_{part}") for part in ("qdata", "scale"))
    return '"fp8_block"' if qdata is None or scale is None else f'"{FrozenWeight(qdata, scale).format}"'


def frozen_weight(module: nn.Module, name: str, convert: Callable[[Tensor], Tensor] = local_tensor) -> FrozenWeight:
    """Make this rank's weight of the parameters that `register_frozen` registered. convert: applied to each."""
    parts = {part: getattr(module, f"{name}_{part}") for part in PARTS}
    block_scale = parts.pop("block_scale")
    parts["scale"] = parts["scale"] if block_scale is None else block_scale
    return FrozenWeight(**{part: None if x is None else convert(x) for part, x in parts.items()})  # type: ignore[arg-type]


def _frozen(x: Tensor | None, mesh: DeviceMesh | None) -> nn.Parameter | None:
    if x is None:
        return None
    x = x if mesh is None else DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(x, requires_grad=False)


def freeze_experts(model: nn.Module, fmt: FrozenFormat = "mxfp8", *, folded: bool = True) -> int:
    """Replace every `Experts` in `model` by `FrozenExperts` in `fmt`. Returns the number of replaced `Experts`.

    Layers are frozen one by one, each on its own device. A layer's bf16 weights are freed before the next layer is
    frozen. Call this before fully_shard, and before making the optimizer.

    Raises ValueError, without changing anything, if the model has no `Experts`, or if FSDP2 has sharded any. If
    `freeze` raises later, some layers may already be frozen.
    """
    found: dict[Experts, list[tuple[nn.Module, str]]] = {}  # layers may share their experts
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Experts):
                found.setdefault(child, []).append((parent, name))
    if not found:
        raise ValueError("freeze_experts: expected a model with mxep.ep.Experts, got none")
    for experts, places in found.items():
        check_not_fsdp(experts, "freeze_experts")
        here = len(local_tensor(experts.down_proj.data))
        for parent, _ in places:
            wanted = getattr(parent, "dispatcher", None)
            if wanted is not None and here != wanted.num_local_experts:
                expected = wanted.num_local_experts
                raise ValueError(f"freeze_experts: expected {expected} experts of this rank, got {here}")
    count = len(found)
    del experts, places, child
    while found:
        experts, places = found.popitem()  # so that the weights before are freed
        frozen = FrozenExperts.of(experts, fmt, folded=folded)
        for parent, name in places:
            setattr(parent, name, frozen.train(parent.training))
    return count
