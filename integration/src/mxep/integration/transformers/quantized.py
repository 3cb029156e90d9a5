"""Experts of a transformers model that stay quantized and are never trained: the base of a LoRA fine-tune.

    freeze_experts(model, "mxfp8")   bf16 experts -> FrozenWeight, a module at a time: its bf16 is then freed
    load_quantized(folder)           bytes of the files -> FrozenWeight, an expert at a time
                                     the rest is dequantized once to `dtype`, or stays as it is stored

    parameters before       after, uint8 and int32, without gradients          as an attribute
    down_proj, gate_up_..   down_proj_qdata, down_proj_scale, ...              experts.down_proj, a FrozenWeight
    down_proj_bias          down_proj_bias, frozen

The module keeps its place, gate, biases and config. Its new class inherits from `FrozenExperts` and its old class.
A FrozenWeight is (E, N, K): gpt-oss' weights (E, K, N) are transposed, and `is_transposed` becomes False.

transformers' quantizers have their own modules of experts. So `load_quantized` builds the model from the config
without its `quantization_config`. transformers' conversions of the model rename tensors, as in `from_pretrained`.

    mxfp4, mxfp8                            FrozenWeight in the same   `FrozenWeight.shipped` returns the bytes
    fp8_*, scales that are powers of two    FrozenWeight in MXFP8      the elements as shipped, a scale for 32
    fp8_block, 128 x 128, other scales      FrozenWeight in fp8_block  the elements as shipped, scales in fp32
    fp8_row, fp8_tensor, other scales       FrozenWeight in fp8_row    the same, one scale per row
    fp8_block, others                       refused, or with rescale=True quantized again (`mxep.quant.rescale_blocks`)

Peak memory is the frozen model plus one expert. E experts, N out, K in features.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from mxep.ep.dtensors import check_not_fsdp, group_of, local_experts, local_tensor, mesh_of
from mxep.ep.frozen import PARTS, check_state, frozen_weight, register_frozen
from mxep.ep.lora import LoRAWeights
from mxep.gemm import FrozenWeight, freeze
from mxep.gemm.frozen import FORMATS, FP8_BLOCK, FP32_SCALES, FrozenFormat, block_of
from mxep.quant import BLOCK, BlockFP8, MXTensor, rescale_blocks, to_mxfp8
from mxep.quant.checkpoint import QuantizedCheckpoint, StoredWeight

from .experts import KEY, experts_in, implementation_of, is_experts, registered, remade_by, weight_names
from .parallel import adapters_on_experts, check_in_memory, expert_parallel


def _this_ranks(name: str) -> Any:
    return property(lambda experts: frozen_weight(experts, name), doc=f"This rank's {name}, a FrozenWeight.")


class FrozenExperts(nn.Module):
    """Base that freezing adds to the class of a module of experts. `mxep.ep.frozen` lists the parts of a weight.

    Casts leave the weights as they are: `.to(torch.bfloat16)` casts floating-point tensors only. Bytes can have no
    gradients, so `model.requires_grad_(True)` raises.

    A LoRA layer wraps the module, holds A and B, and calls it with ``lora=``: forward and backward are then those of
    `mxep.ep.LoRAExperts`.
    """

    config: Any

    gate_up_proj = _this_ranks("gate_up_proj")  # (e, 2F, D)
    up_proj = _this_ranks("up_proj")  # (e, F, D), of experts without a gate
    down_proj = _this_ranks("down_proj")  # (e, D, F)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, lora: LoRAWeights | None = None
    ) -> Tensor:
        """hidden_states (T, D), top_k_index, top_k_weights (T, K) -> (T, D). lora: as for `mxep.ep.run_experts`.

        Raises ValueError if the config's experts_implementation is not mxep's: others need floating-point weights.
        """
        if implementation_of(self.config) is None:
            got = repr(getattr(self.config, "_experts_implementation", None))
            cure = "model.set_experts_implementation('mxep_mxfp8')"
            raise ValueError(f"experts_implementation: expected one of mxep for frozen experts, got {got}: {cure}")
        how = {} if lora is None else {"lora": lora}  # the old class calls mxep; LongCat's runs its zero experts, too
        return super().forward(hidden_states, top_k_index, top_k_weights, **how)  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        check_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        weight = self.down_proj
        local, dim, hidden_dim = weight.shape
        return f"local_experts={local}, dim={dim}, hidden_dim={hidden_dim}, format={weight.format}"


@functools.cache
def _frozen_class(kind: type) -> type:
    own = {"__doc__": kind.__doc__, **remade_by(_frozen_class, kind)}
    return type(f"Frozen{kind.__name__}", (FrozenExperts, kind), own)


def freeze_experts(model: nn.Module, fmt: FrozenFormat = "mxfp8", *, folded: bool = True) -> list[str]:
    """Freeze every module of experts of a transformers model in `fmt`. Returns their names.

    model: with experts in bf16 or fp32. Modules are frozen in place, and the weights of one are freed before the next.
    After `expert_parallel`, each rank freezes its own experts. Make the optimizer and call fully_shard afterwards.
    folded: as for `mxep.gemm.freeze`.

    Raises ValueError, before any change, if transformers' registry reaches no experts, if all experts are frozen, if
    FSDP2 has sharded or accelerate offloaded them, and for sizes that are no multiples of 32. If `freeze` raises for a
    module, those before it are frozen: call this again with folded=False for the others.
    """
    if fmt not in FORMATS:
        raise ValueError(f"freeze_experts: expected fmt {' or '.join(FORMATS)}, got {fmt!r}")
    found = experts_in(model, "freeze_experts")
    check_in_memory(model, "freeze_experts")
    if adapters_on_experts(model):
        raise ValueError("freeze_experts: expected experts without adapters, got PEFT's: merge_and_unload() first")
    todo = {name: experts for name, experts in found.items() if not isinstance(experts, FrozenExperts)}
    for name, experts in found.items():
        if isinstance(experts, FrozenExperts):
            if not todo or experts.down_proj.format != fmt:
                raise ValueError(f"{name}: expected experts that are not frozen, got {experts.down_proj.format}")
            continue
        check_not_fsdp(experts, "freeze_experts")
        for each in weight_names(experts):
            shape, inputs = getattr(experts, each).shape, 1 if experts.is_transposed else 2
            if shape[inputs] % BLOCK:
                raise ValueError(f"{name}.{each}: expected input features in multiples of {BLOCK}, got {tuple(shape)}")
    for name, experts in todo.items():
        with naming(name):
            freeze_module(experts, fmt, folded=folded)
        keep_names(model)
    return list(found)


@contextlib.contextmanager
def naming(name: str, now: str = "as it was. Modules before it are done; call again for the others") -> Iterator[None]:
    """Add a note to a ValueError: its module or weight, and what has become of it."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"of {name}, which is {now}")
        raise


def freeze_module(experts: Any, fmt: FrozenFormat, *, folded: bool = True) -> None:
    """Freeze one module of experts in place. If it raises, nothing has changed."""
    num_experts = experts.down_proj.shape[0]  # LongCat has rows for zero experts in gate_up_proj
    mesh = mesh_of(experts.down_proj)
    weights = {}
    for each in weight_names(experts):
        w = local_tensor(getattr(experts, each).data)[:num_experts]
        weights[each] = freeze(w.mT.contiguous() if experts.is_transposed else w, fmt, folded=folded)
    strip(experts)
    for each, weight in weights.items():
        register_frozen(experts, each, weight, mesh)


CONVERSIONS = "_mxep_conversions"
"""Attribute of a model: the `_weight_conversions` that it had before `keep_names`."""


def keep_names(model: nn.Module) -> None:
    """Make `save_pretrained`, and so a Trainer, write the model's own names.

    Otherwise transformers 5.17 would take gate_up_proj_qdata for gate_up_proj, and split it in two for each expert.
    """
    if isinstance(model, PreTrainedModel) and CONVERSIONS not in model.__dict__:
        model.__dict__[CONVERSIONS] = getattr(model, "_weight_conversions", None)
        model._weight_conversions = []


def own_names(model: nn.Module) -> None:
    """Undo `keep_names`, for a model without frozen experts."""
    kept = model.__dict__.pop(CONVERSIONS, None)
    if model.__dict__.pop("_weight_conversions", None) is not None and kept is not None:
        model._weight_conversions = kept


def strip(experts: Any) -> None:
    """Remove the weights of a module of experts, and change its class to that of frozen experts."""
    for name in weight_names(experts):
        del experts._parameters[name]
    experts.requires_grad_(False)  # biases
    experts.__class__ = _frozen_class(type(experts))  # type: ignore[arg-type]  # of mypy, a type is not Hashable
    experts.was_transposed, experts.is_transposed = experts.is_transposed, False
    forget_layer(experts)


def thaw(experts: Any, weights: dict[str, Tensor]) -> None:
    """Restore a frozen module's old class, with this rank's weights (e, N, K) in bf16, not trainable."""
    mesh = mesh_of(experts.down_proj_qdata)
    for name in weight_names(experts):
        for part in PARTS:
            del experts._parameters[f"{name}_{part}"]
    experts.__class__ = type(experts).__bases__[1]
    experts.is_transposed = experts.was_transposed
    for name, w in weights.items():
        w = (w.mT if experts.is_transposed else w).to(torch.bfloat16).contiguous()
        w = w if mesh is None else DTensor.from_local(w, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(w, requires_grad=False))
    forget_layer(experts)


def forget_layer(experts: Any) -> None:
    """Make the next forward create a new layer, unless experts are spread over ranks."""
    layer = experts.__dict__.get(KEY)
    if layer is not None and not layer.parallel:
        del experts.__dict__[KEY]


def load_quantized(
    folder: str | Path,
    *,
    experts_implementation: str = "mxep_mxfp8",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    rescale: bool = False,
    folded: bool = True,
    **how: Any,
) -> Any:
    """Load the model of a folder (config.json, safetensors), with frozen experts (`FrozenExperts`), in evaluation mode.

    experts_implementation: a registered name of mxep. dtype: bf16 or fp32, for weights other than experts'.
    device: None: the CPU. mesh: 1-D, of ranks that share experts. Each reads only its own. Ends with `expert_parallel`.
    rescale: quantize experts to MXFP8 if their FP8 scales are no powers of two; random weights then have 31.5 dB SNR.
    folded: as for `mxep.gemm.freeze`, which raises for weights that fold badly. how: arguments of `from_pretrained`.

    Raises ValueError for unknown formats and quantization methods, for experts that are missing, not quantized or of
    other shapes, for other tensors that are missing or unexpected, and, without `rescale`, for blocks other than
    128 x 128 or rows whose scales are no powers of two. The message names the tensor.
    """
    registered(experts_implementation, "experts_implementation")
    if (dtype := how.pop("torch_dtype", dtype)) not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype: expected torch.bfloat16 or torch.float32, got {dtype!r}")
    device = torch.device(device or "cpu")
    with QuantizedCheckpoint(folder) as checkpoint, torch.inference_mode(False):  # a later forward may train
        config, how = _config(checkpoint, how)
        kind = _class_of(config)
        with torch.device("meta"):
            skeleton = kind._from_config(copy.deepcopy(config), dtype=dtype)
        names = _Names(skeleton)
        weights, rest = names.sort(checkpoint)
        for weight in weights.values():
            weight.check()
        frozen = {
            name: weight.read(device, _share(weight.shape[0], mesh), rescale=rescale, folded=folded)
            for name, weight in weights.items()
        }
        model, found = _without_experts(kind).from_pretrained(
            None,
            config=config,
            state_dict={name: _Dequantized(stored, dtype) for name, stored in rest.items()},
            dtype=dtype,
            experts_implementation=experts_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they raise below, by name
            **how,
        )
        for what in ("missing", "unexpected", "mismatched"):
            if keys := found[f"{what}_keys"]:
                raise ValueError(f"{folder}: expected the weights of {kind.__name__}, got {what} {sorted(keys)[:3]}")
        model.__class__ = kind
        model.config.name_or_path = str(folder)
        if (Path(folder) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        model.to(device)
    for name, each in frozen.items():
        module, _, attribute = name.rpartition(".")
        register_frozen(model.get_submodule(module), attribute, each, mesh)
    for module in model.modules():
        if is_experts(module):
            module.requires_grad_(False)  # transformers made new parameters of biases
    model._weight_conversions = [each for each in names.conversions if each.was_used()]
    keep_names(model)
    if mesh is not None:
        expert_parallel(model, mesh, experts_implementation)
    return model


@dataclass(frozen=True)
class _ExpertsWeight:
    """A weight of a module of experts, and its parts in the files.

    name: of the parameter. shape: (E, N, K). parts: for each name pattern of a WeightConverter its stored weights in
    order, a single one (E, N', K) or one (N', K) per expert. converter: the WeightConverter of transformers that joins
    the parts; None if transformers has none for this weight.
    """

    name: str
    shape: tuple[int, ...]
    parts: dict[str, list[StoredWeight]]
    converter: WeightConverter | None

    def check(self) -> None:
        """Raise ValueError if the parts do not make this weight. Reads no file."""
        rows = 0
        patterns = self.converter.source_patterns if self.converter else [*self.parts]
        for pattern in patterns:
            stored = self.parts.get(pattern, [])
            stacked = len(stored) == 1 and len(stored[0].shape) == 3
            count = stored[0].shape[0] if stacked else len(stored)
            if count != self.shape[0]:
                raise ValueError(f"{self.name}: expected {self.shape[0]} experts of {pattern}, got {count}")
            names = zip(*(each.name.split(".") for each in stored))
            if [each for each in names if len({*each}) > 1] not in ([], [tuple(map(str, range(count)))]):
                last = stored[-1].name
                raise ValueError(f"{self.name}: expected {count} experts of {pattern}, from 0 on, got {last}")
            for each in stored:
                if each.format == "plain":
                    raise ValueError(
                        f"{each.name}: expected quantized experts, got {tuple(each.shape)} in plain numbers: "
                        "from_pretrained, then mxep.integration.transformers.freeze_experts"
                    )
                if each.shape[-2:] != stored[0].shape[-2:] or each.format != stored[0].format:
                    both = [f"{x.format} {x.shape}" for x in (stored[0], each)]
                    raise ValueError(f"{each.name}: expected {both[0]} as of the first expert, got {both[1]}")
            rows += stored[0].shape[-2]
        kinds = {stored[0].format == "mxfp4" for stored in self.parts.values()}
        got = self.shape[0], rows, stored[0].shape[-1]
        if got != self.shape or len(kinds) > 1:
            raise ValueError(f"{self.name}: expected parts of one format that make {self.shape}, got {got}")

    def format(self, rescale: bool) -> FrozenFormat:
        """The format to freeze in. Reads all scales of FP8 blocks."""
        stored = [each for part in self.parts.values() for each in part]
        if stored[0].format == "mxfp4":
            return "mxfp4"
        if rescale or (other := next((each for each in stored if not each.has_exponents()), None)) is None:
            return "mxfp8"
        if all(each.format in ("fp8_row", "fp8_tensor") for each in stored):
            return "fp8_row"
        rows = 1 if len(self.parts) == 1 else FP8_BLOCK[0]  # several parts are joined along N, where blocks begin
        if any(each.block_size != FP8_BLOCK or each.shape[-2] % rows for each in stored):
            raise ValueError(
                f"{other.name}: expected scales that are powers of two, or whole blocks of {FP8_BLOCK}, got "
                f"{other.shape} in blocks of {other.block_size}: rescale=True (docs/guides/quantized-models.md)"
            )
        return "fp8_block"

    def read(self, device: torch.device, experts: range, *, rescale: bool, folded: bool) -> FrozenWeight:
        """Read and freeze these experts, one after another."""
        whole: dict[str, Any] = {}
        fmt = self.format(rescale)
        for i, e in enumerate(experts):
            with naming(f"expert {e} of {self.name}", "not loaded"):
                one = freeze(self._expert(e, device, fmt), fmt, folded=folded)
            for part in fields(one):
                if (x := getattr(one, part.name)) is None:
                    whole[part.name] = None
                else:
                    whole.setdefault(part.name, x.new_empty((len(experts), *x.shape[1:])))[i] = x[0]
        return FrozenWeight(**whole)

    def _expert(self, e: int, device: torch.device, fmt: FrozenFormat) -> MXTensor | BlockFP8:
        """Read an expert: (1, N, K)."""
        read = {pattern: self._part(stored, e, device, fmt) for pattern, stored in self.parts.items()}
        qdata, scale = (
            self._converted({pattern: getattr(x, name).view(torch.uint8) for pattern, x in read.items()})
            for name in ("qdata", "scale")
        )
        qdata = qdata.view(FORMATS[fmt].dtype)
        if fmt in FP32_SCALES:
            return BlockFP8(qdata, scale.view(torch.float32), block_of(fmt, qdata.shape[-1]))
        return MXTensor.from_qdata_and_scales(qdata, scale)

    def _part(self, stored: list[StoredWeight], e: int, device: torch.device, fmt: str) -> MXTensor | BlockFP8:
        """Read a part of an expert: (N', K), or (1, N', K) from a stack."""
        weight = stored[e] if len(stored) > 1 or len(stored[0].shape) == 2 else stored[0]
        x: Any = weight.read(slice(e, e + 1) if len(weight.shape) == 3 else None)
        if isinstance(x, MXTensor):
            qdata, scale = (part.view(torch.uint8).to(device) for part in (x.qdata, x.scale))
            return MXTensor.from_qdata_and_scales(qdata.view(x.qdata.dtype), scale)
        blocks = BlockFP8(x.qdata.to(device), x.scale.to(device), x.block_size)
        if fmt == "fp8_block":
            return BlockFP8(blocks.qdata, blocks.scale_values(), blocks.block_size)
        return blocks.by_rows() if fmt == "fp8_row" else to_mxfp8(rescale_blocks(blocks)[0])

    def _converted(self, parts: dict[str, Tensor]) -> Tensor:
        """Join the bytes of an expert's parts as the model does: (1, N, .)."""
        if self.converter is None:
            (part,) = parts.values()
            return part if part.dim() == 3 else part[None]
        made: Any = {pattern: [part] for pattern, part in parts.items()}
        patterns = {name: getattr(self.converter, name) for name in ("source_patterns", "target_patterns")}
        for operation in self.converter.operations:
            made = operation.convert(made, **patterns)
        (result,) = made.values()
        return result[0] if isinstance(result, list) else result  # type: ignore[no-any-return]


class _Names:
    """Translates a checkpoint's names into the model's, by transformers' conversions for this model."""

    def __init__(self, skeleton: Any) -> None:
        self.conversions = get_model_conversion_mapping(skeleton)
        self.renamings = [each for each in self.conversions if isinstance(each, WeightRenaming)]
        self.converters = [each for each in self.conversions if isinstance(each, WeightConverter)]
        self.prefix, self.state = skeleton.base_model_prefix, skeleton.state_dict()
        self.experts: dict[str, tuple[int, ...]] = {}
        for name, module in experts_in(skeleton, "load_quantized").items():
            for each in weight_names(module):
                e, n, k = getattr(module, each).shape
                self.experts[f"{name}.{each}"] = (e, k, n) if module.is_transposed else (e, n, k)

    def sort(self, checkpoint: QuantizedCheckpoint) -> tuple[dict[str, _ExpertsWeight], dict[str, StoredWeight]]:
        """Return experts' weights by their names in the model, and all others by their names in the checkpoint."""
        parts: dict[str, dict[str, list[StoredWeight]]] = defaultdict(lambda: defaultdict(list))
        rest = {}
        for name in sorted(checkpoint.weights, key=_natural):
            own, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
            if own in self.experts:
                parts[own][pattern or name].append(checkpoint.weights[name])
            else:
                rest[name] = checkpoint.weights[name]
        if missing := self.experts.keys() - parts.keys():
            raise ValueError(f"{checkpoint.folder}: expected all experts of the model, got none of {min(missing)}")
        weights = {
            own: _ExpertsWeight(own, shape, dict(parts[own]), self._converter(own, parts[own]))
            for own, shape in self.experts.items()
        }
        return weights, rest

    def _converter(self, own: str, parts: dict[str, list[StoredWeight]]) -> WeightConverter | None:
        for converter in self.converters:
            if parts.keys() <= set(converter.source_patterns):
                for each in converter.operations:
                    if not isinstance(each, MergeModulelist | Concatenate):
                        raise ValueError(f"{own}: expected experts that transformers stacks and joins, got {each}")
                return converter
        return None


class _Dequantized:
    """Replaces a slice of safetensors by a stored weight, read and dequantized when transformers indexes it."""

    def __init__(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        self.stored, self.dtype = stored, dtype

    def __getitem__(self, _: Any) -> Tensor:
        x = self.stored.read()
        return x.dequantize(self.dtype) if isinstance(x, MXTensor | BlockFP8) else x


def _config(checkpoint: QuantizedCheckpoint, how: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The folder's config, without its quantization_config and with the fields in `how`; and the rest of `how`."""
    config, rest = AutoConfig.from_pretrained(checkpoint.folder, return_unused_kwargs=True, **how)
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return config, rest


def _class_of(config: Any) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)  # type: ignore[no-any-return]
    return AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[no-any-return]


def _without_experts(kind: type[PreTrainedModel]) -> Any:
    """A model class that makes its frozen experts without weights, so that transformers allocates none."""

    def __init__(self: Any, *given: Any, **how: Any) -> None:
        kind.__init__(self, *given, **how)
        for module in self.modules():
            if is_experts(module):
                strip(module)
                module._is_hf_initialized = True

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


def _share(num_experts: int, mesh: DeviceMesh | None) -> range:
    if mesh is None:
        return range(num_experts)
    group_of(mesh)
    if num_experts % mesh.size():
        raise ValueError(f"load_quantized: expected experts in a multiple of {mesh.size()} ranks, got {num_experts}")
    return local_experts(num_experts, mesh)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: numbers between dots as numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
