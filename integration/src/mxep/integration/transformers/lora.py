"""PEFT's LoRA on modules of experts, with low-rank GEMMs for each expert (`mxep.ep.lora`).

    LoraConfig(r=16, target_modules=["q_proj", "v_proj"],
               target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])

PEFT's own layer adds B A to the weights of all experts in every forward. Frozen experts have no weights to add to,
and PEFT would not find them. Importing this module registers `ExpertsLoraModel` as PEFT's LoRA, which differs only for
modules of experts. Configs, adapters, `save_pretrained` and `PeftModel.from_pretrained` are PEFT's. So an adapter also
loads into the frozen model, the bf16 model and plain PEFT.

    in an adapter's file                     of                A                 B
    X.experts.lora_A.weight, lora_B.weight   down_proj         (r E, in)         (out, r E)
    X.experts.base_layer.lora_A.weight, ..   gate_up_proj      row e r + i       column i E + e

    frozen experts              always low-rank
    experts in bf16 or fp32     low-rank if mxep runs them without expert parallelism, and one active adapter, with r a
                                multiple of 8, adapts both weights; else PEFT's own way

E experts in all, e of them on this rank, r the adapter's rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftModel, PeftType
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.other import _get_submodules, get_pattern_key
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from mxep.ep.dtensors import local_experts, mesh_of
from mxep.ep.frozen import register_frozen
from mxep.ep.lora import RANK_MULTIPLE, LoRAWeights
from mxep.gemm import FrozenWeight, freeze
from mxep.gemm.frozen import FORMATS, FrozenFormat

from .callback import reaches_mxep
from .experts import implementation_of, is_experts, weight_names
from .parallel import check_adapters, replicate
from .quantized import FrozenExperts, forget_layer, naming, own_names, thaw

STARTS = True, False, "gaussian"
"""Values of `init_lora_weights` that experts allow. PEFT's other values read or change a linear's weight."""


class ParamWrapper(lora.ParamWrapper):  # type: ignore[misc]
    """PEFT's layer for one weight of a module of experts. If two are nested, the outermost runs both.

    PEFT recognizes the class by its name.
    """

    def _get_in_out_features(self, module: nn.Module) -> Any:
        features = super()._get_in_out_features(module)
        stored = module._parameters.get(f"{self.parameter_name}_qdata")
        if stored is not None:
            self.num_experts = stored.shape[0]  # over all ranks
        return features

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        super().update_layer(adapter_name, r, *args, **kwargs)
        mesh = _mesh(self.get_base_layer())
        if mesh is not None:
            for linear in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
                replicate(linear, mesh)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        experts = self.get_base_layer()
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or not active or kwargs.get("adapter_names"):
            return super().forward(x, *args, **kwargs)
        if isinstance(experts, FrozenExperts):
            active = [name for name in active if name not in self.merged_adapters]
        elif not self._is_low_rank(experts, active):
            return super().forward(x, *args, **kwargs)
        return experts(x, *args, lora=self._weights(active) if active else None, **kwargs)

    def _is_low_rank(self, experts: Any, active: list[str]) -> bool:
        """Whether mxep runs unfrozen experts with low-rank GEMMs. Otherwise PEFT adds B A to weights."""
        run, layers = implementation_of(experts.config), _wrappers(self)
        if run is None or len(layers) < 2 or len(active) > 1 or self.merged:
            return False
        if (own := experts.__dict__.get("forward")) is not None and not reaches_mxep(own):  # as Liger replaces it
            return False
        if any(layer.r[active[0]] % RANK_MULTIPLE or layer.get_param().requires_grad for layer in layers.values()):
            return False
        if len({(layer.scaling[active[0]], layer.num_experts) for layer in layers.values()}) > 1:  # LongCat's differ
            return False
        layer = run.ready_layer(experts)
        return not layer.parallel and layer.activation is not None

    def _weights(self, active: list[str]) -> LoRAWeights:
        if len(active) > 1:
            raise ValueError(f"LoRA on frozen experts: expected one active adapter, got {active}: set_adapter(NAME)")
        layers = _wrappers(self)
        (gate_up, down), (name,) = (layers[each] for each in weight_names(self.get_base_layer())), active
        if gate_up.scaling[name] != down.scaling[name]:
            scales = gate_up.scaling[name], down.scaling[name]
            raise ValueError(
                f"LoRA on frozen experts: expected one scaling for both weights, got {scales}: give gate_up_proj and "
                "down_proj the same rank and alpha (rank_pattern, alpha_pattern)"
            )
        return LoRAWeights(*gate_up.pair(name), *down.pair(name), scale=gate_up.scaling[name])

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """A (e, r, in) and B (e, out, r) of this rank's experts."""
        (A, share), (B, _) = (_local(each[name].weight, self.num_experts) for each in (self.lora_A, self.lora_B))
        A = A.view(self.num_experts, -1, A.shape[1])[share]
        return A, B.view(B.shape[0], -1, self.num_experts)[..., share].permute(2, 0, 1).contiguous()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if isinstance(self.get_base_layer(), FrozenExperts):
            raise ValueError(
                "merge: expected experts that are not frozen: merge_and_unload() makes them bf16, and "
                "mxep.integration.transformers.merge_and_freeze(model) quantizes them again"
            )
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

    def unmerge(self) -> None:
        if self.merged and isinstance(self.get_base_layer(), FrozenExperts):
            raise ValueError(
                f"unmerge: expected adapters beside frozen experts, got {self.merged_adapters}, which merge_and_freeze "
                "merged before it raised: call it again, with folded=False"
            )
        super().unmerge()

    @torch.no_grad()
    def merged_weights(self, adapter_names: list[str] | None) -> dict[str, Tensor]:
        """W + scaling B A (e, out, in), bf16, of each adapted weight of frozen experts. Empty if none is adapted."""
        experts: Any = self.get_base_layer()
        found: dict[str, Tensor] = {}
        for name, layer in _wrappers(self).items():
            adapters = [each for each in check_adapters_to_merge(layer, adapter_names) if each in layer.lora_A]
            if not adapters:
                continue
            frozen = getattr(experts, name)
            w = found[name] = torch.empty(frozen.shape, dtype=torch.bfloat16, device=frozen.device)
            updates = [(*layer.pair(each), layer.scaling[each]) for each in adapters]
            for e in range(len(w)):
                whole = frozen[e : e + 1].dequantize(torch.float32)[0]
                for A, B, scale in updates:
                    whole.addmm_(B[e].float(), A[e].float(), alpha=scale)
                w[e] = whole
        return found

    def tell_merged(self) -> None:
        """Record that the active adapters of both weights are merged."""
        for layer in _wrappers(self).values():
            layer.merged_adapters += [each for each in check_adapters_to_merge(layer) if each in layer.lora_A]

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        experts = self.get_base_layer()
        if not isinstance(experts, FrozenExperts):
            return super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)  # type: ignore[no-any-return]
        if merge and (weights := self.merged_weights(adapter_names)):
            if safe_merge and not all(w.isfinite().all() for w in weights.values()):
                raise ValueError(f"merge_and_unload: expected finite weights, got NaN or infinity from {adapter_names}")
            thaw(experts, weights)
        return experts


class ExpertsLoraModel(lora.LoraModel):  # type: ignore[misc]
    """PEFT's LoRA, which also finds the weights of frozen experts (`target_parameters`)."""

    def _prepare_model(self, peft_config: LoraConfig, model: nn.Module) -> None:
        super()._prepare_model(peft_config, model)
        for name, module in model.named_modules():
            start = peft_config.init_lora_weights
            if is_experts(module) and start not in STARTS and _targeted(peft_config, _plain(name), module):
                raise ValueError(
                    f"init_lora_weights: expected {', '.join(map(repr, STARTS))} for weights of experts, got {start!r} "
                    f"and {_plain(name)}: adapt experts by a config, and an adapter, of their own"
                )
        for name, experts in _frozen(model):
            if not (wanted := _targeted(peft_config, name, experts)):
                continue
            if len(wanted) < 2:
                raise ValueError(
                    f"target_parameters: expected both {' and '.join(weight_names(experts))} of {name}, whose weights "
                    f"are frozen, got {wanted[0]}"
                )
            for each in wanted:
                key = get_pattern_key(peft_config.rank_pattern.keys(), f"{name}.{each}")
                rank = peft_config.rank_pattern.get(key, peft_config.r)
                if rank % RANK_MULTIPLE:
                    raise ValueError(
                        f"r: expected a multiple of {RANK_MULTIPLE} for {name}.{each}, which is frozen, got {rank}"
                    )
            if (mesh := _mesh(experts)) is not None:
                check_adapters(mesh)

    def _inject_parameters(
        self, peft_config: LoraConfig, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool
    ) -> list[str]:
        how = {"adapter_name": adapter_name, "low_cpu_mem_usage": low_cpu_mem_usage}
        found = super()._inject_parameters(peft_config=peft_config, model=model, **how)
        found = self.targeted_parameter_names if found is None else found  # None in PEFT 0.18
        for name, experts in list(_frozen(model)):
            for each in _targeted(peft_config, name, experts):
                parent, outer, child = _get_submodules(model, name)
                target = _wrappers(outer).get(each, outer)
                with init_empty_weights() if low_cpu_mem_usage else nullcontext():
                    self._create_and_replace(
                        *(peft_config, adapter_name, target, child, parent),
                        current_key=f"{name}.{each}",
                        parameter_name=each,
                    )
                found.append(f"{name}.{each}")
        return found  # type: ignore[no-any-return]

    @staticmethod
    def _create_new_module(lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base: Any = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if kwargs.get("parameter_name") is None and isinstance(base, FrozenExperts):
            raise ValueError(
                f"target_modules: expected no module of frozen experts, got {kwargs.get('target_name')}: name its "
                f"weights in target_parameters, {[f'mlp.experts.{each}' for each in weight_names(base)]}"
            )
        if kwargs.get("parameter_name") is not None and is_experts(base):
            kwargs.pop("device_map", None)
            return ParamWrapper(target, adapter_name, config=lora_config, **kwargs)
        return lora.LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)  # type: ignore[no-any-return]

    def _unload_and_optionally_merge(self, merge: bool = True, **kwargs: Any) -> nn.Module:
        was_frozen = any(True for _ in _frozen(self.model))
        model: nn.Module = super()._unload_and_optionally_merge(merge=merge, **kwargs)
        if was_frozen and not any(True for _ in _frozen(model)):
            own_names(model)
        return model


PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = ExpertsLoraModel


class MergeError(NamedTuple):
    """Error from quantizing a merged weight.

    snr: of the quantized weight against the merged one, in dB. changed: share of elements that the merge changed. If it
    is small, most of a small update is lost.
    """

    snr: float
    changed: float


def merge_and_freeze(
    model: PeftModel, fmt: FrozenFormat | None = None, *, folded: bool | None = None
) -> tuple[Any, dict[str, MergeError]]:
    """Merge as PEFT's `merge_and_unload` does, and quantize frozen experts again, one layer after another.

    Returns the model, and the error of each weight by name.

    fmt: "mxfp8", "mxfp4", "fp8_block" or "fp8_row". folded: as for `mxep.gemm.freeze`. None: as each weight was.

    Raises ValueError for another fmt, and without active adapters on frozen experts. If `freeze` raises for a module,
    those before it are merged: call `merge_and_freeze` again with folded=False for the others.
    """
    if fmt is not None and fmt not in FORMATS:
        raise ValueError(f"merge_and_freeze: expected fmt {' or '.join(FORMATS)}, got {fmt!r}")
    tuner, errors = model.base_model, {}
    for name, layer in list(tuner.model.named_modules()):
        experts = layer.get_base_layer() if isinstance(layer, ParamWrapper) else None
        if not isinstance(experts, FrozenExperts) or not (weights := layer.merged_weights(None)):
            continue
        before: dict[str, FrozenWeight] = {each: getattr(experts, each) for each in weights}
        with naming(name):
            after = {each: _frozen_as(before[each], w, fmt, folded) for each, w in weights.items()}
        for each, w in weights.items():
            register_frozen(experts, each, after[each], _mesh(experts))
            errors[f"{name}.{each}"] = _error(before[each], w, after[each])
        forget_layer(experts)
        layer.tell_merged()
    if not errors:
        raise ValueError("merge_and_freeze: expected active adapters on frozen experts, got none: merge_and_unload()")
    return model.merge_and_unload(), errors


def _frozen_as(before: FrozenWeight, w: Tensor, fmt: FrozenFormat | None, folded: bool | None) -> FrozenWeight:
    """Freeze w as `before` was, unless fmt or folded says otherwise."""
    was_folded = before.format != "mxfp8" or before.row_scale is not None  # other formats are never folded
    return freeze(w, fmt or before.format, folded=was_folded if folded is None else folded)


def _error(before: FrozenWeight, merged: Tensor, after: FrozenWeight) -> MergeError:
    """Error of the quantized weight, computed expert by expert."""
    signal, noise, changed = torch.zeros(3, dtype=torch.float64, device=merged.device)
    for e, w in enumerate(merged.split(1)):
        old, new = (each[e : e + 1].dequantize() for each in (before, after))
        signal += w.float().square().sum()
        noise += (new.float() - w.float()).square().sum()
        changed += (new != old).sum()
    return MergeError(float(10 * torch.log10(signal / noise)), float(changed / merged.numel()))


def _wrappers(layer: nn.Module) -> dict[str, ParamWrapper]:
    """PEFT's layers around a module of experts, by the weight that each adapts, outermost first."""
    found = {}
    while isinstance(layer, lora.ParamWrapper):
        found[layer.parameter_name] = layer
        layer = layer.base_layer
    return found


def _frozen(model: nn.Module) -> Iterator[tuple[str, FrozenExperts]]:
    """Yield (name, module) of frozen experts. The names leave out PEFT's layers."""
    for name, module in model.named_modules():
        if isinstance(module, FrozenExperts):
            yield _plain(name), module


def _plain(name: str) -> str:
    return name.replace(".base_layer", "")


def _targeted(config: LoraConfig, name: str, experts: nn.Module) -> list[str]:
    """The weights of this module of experts that `target_parameters` names."""
    targets = config.target_parameters or ()
    return [each for each in weight_names(experts) if any(f".{name}.{each}".endswith(f".{t}") for t in targets)]


def _mesh(experts: nn.Module) -> DeviceMesh | None:
    stored = experts._parameters.get("down_proj_qdata")
    return None if stored is None else mesh_of(stored)


def _local(weight: Tensor, num_experts: int) -> tuple[Tensor, slice]:
    """A replicated weight as a local tensor, and the slice of this rank's experts. Its gradients sum over ranks."""
    if not isinstance(weight, DTensor):
        return weight, slice(num_experts)
    here = local_experts(num_experts, weight.device_mesh)
    whole = weight.redistribute(placements=[Replicate()])  # its backward sums; casts of PEFT's lose a parameter's hooks
    return whole.to_local(grad_placements=[Partial()]), slice(here.start, here.stop)
