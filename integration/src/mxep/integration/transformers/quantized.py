"""A model of transformers from a checkpoint with quantized experts, which stay quantized.

    load_quantized(folder)    experts:    bytes of the files -> FrozenWeight, expert after expert
                              the rest:   dequantized once to `dtype`, or as it is stored

transformers' own quantizers bring their own modules of experts, so the model is built from the config without its
`quantization_config`. Names are changed by transformers' own conversions of the model, so experts are found as
`from_pretrained` finds them. Formats are those of `mxep.quant.checkpoint`, recognized by names, dtypes and shapes.

    mxfp4                                   FrozenWeight in MXFP4      the bytes as shipped
    mxfp8                                   FrozenWeight in MXFP8      come back from `FrozenWeight.shipped`
    fp8_*, scales that are powers of two    FrozenWeight in MXFP8      the elements as shipped, a scale for 32
    fp8_*, other scales                     refused, or with rescale=True quantized again (`mxep.quant.rescale_blocks`)

Memory: the model as it becomes, and an expert. E experts, N out features, K in features.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from mxep.ep.dtensors import group_of, local_experts
from mxep.ep.frozen import register_frozen
from mxep.gemm import FrozenWeight, freeze
from mxep.gemm.frozen import FORMATS, FrozenFormat
from mxep.quant import BlockFP8, MXTensor, rescale_blocks, to_mxfp8
from mxep.quant.checkpoint import QuantizedCheckpoint, StoredWeight

from .frozen import keep_names, strip
from .implementation import Implementation
from .layer import is_experts, weight_names
from .parallel import expert_parallel
from .versions import ALL_EXPERTS_FUNCTIONS


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
    """The model of a folder with config.json and safetensors, in evaluation mode, its experts frozen (`FrozenExperts`).

    experts_implementation: a registered name of mxep. dtype: of what is no expert's. device: default the CPU.
    mesh: 1-D, of ranks that share the experts. Each reads its own alone, and `expert_parallel` follows.
    rescale: quantize experts again whose FP8 scales are no powers of two; random weights keep 31.5 dB of theirs.
    folded: as for `mxep.gemm.freeze`. how: more for the model's `from_pretrained`, such as attn_implementation.

    Raises ValueError that names the tensor for formats and quantization methods that are not read, for experts that
    are missing, not quantized or of other shapes, for scales that are no powers of two without `rescale`, and for
    missing and unexpected tensors of the rest. `freeze` raises for norms that fold badly: pass folded=False.
    """
    implementation = ALL_EXPERTS_FUNCTIONS.get(experts_implementation, None)
    if not isinstance(implementation, Implementation):
        raise ValueError(
            f"experts_implementation: expected a registered name of mxep, got {experts_implementation!r}: 'mxep_mxfp8'"
        )
    device = torch.device(device or "cpu")
    with QuantizedCheckpoint(folder) as checkpoint:
        config = _config(checkpoint)
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
    """A weight of a module of experts, and where its parts are.

    name: of the parameter in the model. shape: (E, N, K). parts: pattern of a source -> a stored weight (E, N', K), or
    one of each expert in order. converter: of transformers, for several parts.
    """

    name: str
    shape: tuple[int, ...]
    parts: dict[str, list[StoredWeight]]
    converter: WeightConverter | None

    def check(self) -> None:
        """ValueError for parts that do not make this weight. Reads nothing."""
        rows = 0
        patterns = self.converter.source_patterns if self.converter else [*self.parts]
        for pattern in patterns:
            stored = self.parts.get(pattern, [])
            stacked = len(stored) == 1 and len(stored[0].shape) == 3
            count = stored[0].shape[0] if stacked else len(stored)
            if count != self.shape[0]:
                raise ValueError(f"{self.name}: expected {self.shape[0]} experts of {pattern}, got {count}")
            for each in stored:
                if each.format == "plain":
                    raise ValueError(
                        f"{each.name}: expected quantized experts, got {tuple(each.shape)} in plain numbers: "
                        "from_pretrained, then mxep.integration.transformers.freeze_experts"
                    )
                if each.shape[-2:] != stored[0].shape[-2:] or each.format != stored[0].format:
                    raise ValueError(
                        f"{each.name}: expected {stored[0].format} {stored[0].shape} as of the first expert, got "
                        f"{each.format} {each.shape}"
                    )
            rows += stored[0].shape[-2]
        kinds = {stored[0].format == "mxfp4" for stored in self.parts.values()}
        got = self.shape[0], rows, stored[0].shape[-1]
        if got != self.shape or len(kinds) > 1:
            raise ValueError(f"{self.name}: expected parts of one format that make {self.shape}, got {got}")

    @property
    def format(self) -> FrozenFormat:
        (first, *_), *_ = self.parts.values()
        return "mxfp4" if first.format == "mxfp4" else "mxfp8"

    def read(self, device: torch.device, experts: range, *, rescale: bool, folded: bool) -> FrozenWeight:
        """Some of the experts, one after another."""
        whole: FrozenWeight | None = None
        for i, e in enumerate(experts):
            one = freeze(self._expert(e, device, rescale), self.format, folded=folded)
            if whole is None:
                parts: Any = (_room(getattr(one, part.name), len(experts)) for part in fields(one))
                whole = FrozenWeight(*parts)
            for part in fields(one):
                if (x := getattr(one, part.name)) is not None:
                    getattr(whole, part.name)[i] = x[0]
        assert whole is not None
        return whole

    def _expert(self, e: int, device: torch.device, rescale: bool) -> MXTensor:
        """(1, N, K)"""
        read = {pattern: self._part(stored, e, device, rescale) for pattern, stored in self.parts.items()}
        dtype = FORMATS[self.format].dtype
        qdata, scale = (
            self._converted({pattern: getattr(mx, name).view(torch.uint8) for pattern, mx in read.items()})
            for name in ("qdata", "scale")
        )
        return MXTensor.from_qdata_and_scales(qdata.view(dtype), scale)

    def _part(self, stored: list[StoredWeight], e: int, device: torch.device, rescale: bool) -> MXTensor:
        """(N', K) of an expert, or (1, N', K) of a stack."""
        weight = stored[e] if len(stored) > 1 or len(stored[0].shape) == 2 else stored[0]
        x: Any = weight.read(slice(e, e + 1) if len(weight.shape) == 3 else None)
        if isinstance(x, MXTensor):
            qdata, scale = (part.view(torch.uint8).to(device) for part in (x.qdata, x.scale))
            return MXTensor.from_qdata_and_scales(qdata.view(x.qdata.dtype), scale)
        x = BlockFP8(x.qdata.to(device), x.scale.to(device), x.block_size)
        if x.scale_exponents() is None:
            if not rescale:
                raise ValueError(
                    f"{weight.name}: expected scales that are powers of two to freeze, got others in {x.scale.dtype}: "
                    "rescale=True quantizes these experts again (docs/guides/quantized-models.md)"
                )
            x, _ = rescale_blocks(x)
        return to_mxfp8(x)

    def _converted(self, parts: dict[str, Tensor]) -> Tensor:
        """Bytes of an expert's parts as the model has them, (1, N, .)."""
        if self.converter is None:
            (part,) = parts.values()
            return part if part.dim() == 3 else part[None]
        made: Any = {pattern: [part] for pattern, part in parts.items()}
        patterns = {
            "source_patterns": self.converter.source_patterns,
            "target_patterns": self.converter.target_patterns,
        }
        for operation in self.converter.operations:
            made = operation.convert(made, **patterns)
        (result,) = made.values()
        whole: Tensor = result[0] if isinstance(result, list) else result
        return whole


class _Names:
    """Names of a checkpoint in the words of a model. conversions: transformers' own for this model."""

    def __init__(self, skeleton: Any) -> None:
        self.conversions = get_model_conversion_mapping(skeleton)
        self.renamings = [each for each in self.conversions if isinstance(each, WeightRenaming)]
        self.converters = [each for each in self.conversions if isinstance(each, WeightConverter)]
        self.prefix, self.state = skeleton.base_model_prefix, skeleton.state_dict()
        self.experts: dict[str, tuple[int, ...]] = {}
        for name, module in skeleton.named_modules():
            for each in weight_names(module) if is_experts(module) else ():
                e, n, k = getattr(module, each).shape
                self.experts[f"{name}.{each}"] = (e, k, n) if module.is_transposed else (e, n, k)
        if not self.experts:
            kind = type(skeleton).__name__
            raise ValueError(f"load_quantized: expected a model with experts that mxep runs, got {kind}")

    def sort(self, checkpoint: QuantizedCheckpoint) -> tuple[dict[str, _ExpertsWeight], dict[str, StoredWeight]]:
        """Weights of experts by their names in the model, and all others by theirs in the checkpoint."""
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
    """A stored weight in place of a slice of safetensors: read, and dequantized, where transformers asks for it."""

    def __init__(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        self.stored, self.dtype = stored, dtype

    def __getitem__(self, _: Any) -> Tensor:
        x = self.stored.read()
        return x.dequantize(self.dtype) if isinstance(x, MXTensor | BlockFP8) else x


def _config(checkpoint: QuantizedCheckpoint) -> Any:
    """The folder's config, without a word of quantization."""
    config = AutoConfig.from_pretrained(checkpoint.folder)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _class_of(config: Any) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            kind: type[PreTrainedModel] = getattr(transformers, name)
            return kind
    return AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[no-any-return]


def _without_experts(kind: type[PreTrainedModel]) -> Any:
    """A class whose models have frozen experts without weights, so that transformers makes none."""

    def __init__(self: Any, *given: Any, **how: Any) -> None:
        kind.__init__(self, *given, **how)
        for module in self.modules():
            if is_experts(module):
                strip(module)
                module._is_hf_initialized = True

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


def _share(num_experts: int, mesh: DeviceMesh | None) -> range:
    """Experts of this rank."""
    if mesh is None:
        return range(num_experts)
    group_of(mesh)
    if num_experts % mesh.size():
        raise ValueError(f"load_quantized: expected experts in a multiple of {mesh.size()} ranks, got {num_experts}")
    return local_experts(num_experts, mesh)


def _room(part: Tensor | None, experts: int) -> Tensor | None:
    return None if part is None else part.new_empty((experts, *part.shape[1:]))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers between dots as numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
