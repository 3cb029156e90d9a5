"""Write a model with quantized experts in layouts that transformers, vLLM and SGLang read.

    format      layout               a weight of an expert                                     read by
    mxfp8       mxfp8                X.weight E4M3, X.weight_scale_inv u8 (N, K/32)            transformers, SGLang
                modelopt             X.weight E4M3, X.weight_scale u8                          vLLM, SGLang
                compressed-tensors   X.weight E4M3, X.weight_scale u8                          vLLM
    mxfp4       mxfp4 (gpt-oss)      X_blocks u8 (E, N, K/32, 16), X_scales u8                 transformers, both
                deepseek-v4          X.weight i8 (N, K/2), X.scale e8m0, for that model only   transformers, both
                compressed-tensors   X.weight_packed u8 (N, K/2), X.weight_scale u8            transformers, vLLM
    fp8_block   fp8                  X.weight E4M3, X.weight_scale_inv fp32, one for 128x128   transformers, both
    fp8_row     compressed-tensors   X.weight E4M3, X.weight_scale fp32 (N, 1)                 transformers, both

"both" are vLLM and SGLang. Only experts are quantized; the config lists all other weights as unquantized. Tensors get
the original checkpoint's names, by transformers' conversions reversed. docs/guides/quantized-models.md has the layouts'
sources.

E experts, N out features, K in features.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from mxep.ep.frozen import PARTS, frozen_weight
from mxep.gemm import Recipe
from mxep.gemm.backends import select
from mxep.gemm.frozen import FORMATS, FP8_BLOCK, FP32_SCALES, block_of
from mxep.quant import BLOCK, E2M1, E4M3, BlockFP8, MXTensor, quantize, quantize_blocks, to_mxfp8
from mxep.quant.checkpoint import INDEX

from ..metrics import LIMIT, snr
from .experts import experts_in, implementation_of, weight_names
from .parallel import check_in_memory
from .quantized import CONVERSIONS, FrozenExperts

Format = Literal["mxfp8", "mxfp4", "fp8_block", "fp8_row"]
LAYOUTS = {
    "mxfp8": ("mxfp8", "modelopt", "compressed-tensors"),
    "mxfp4": ("mxfp4", "deepseek-v4", "compressed-tensors"),
    "fp8_block": ("fp8",),
    "fp8_row": ("compressed-tensors",),
}
SHARD = 5 * 2**30
"""Approximate bytes of a file."""
Weight = MXTensor | BlockFP8 | Tensor


@torch.no_grad()
def save_quantized(
    model: Any, folder: str | Path, fmt: Format = "mxfp8", *, layout: str | None = None
) -> dict[str, float]:
    """Write a transformers model with its experts in `fmt`. Returns each weight's SNR in dB against the model's.

    model: with frozen or trained experts. layout: of the table in this module; None: the first for `fmt` that fits.

    Experts are quantized anew, except in these cases. There the weights that forward uses are written. For frozen
    experts the SNR is then inf.

    - Frozen experts in their own format: the bytes as they came, unless gate and up share a block of block FP8.
    - Frozen MXFP4 as MXFP8: the same values.
    - Frozen MXFP8 experts as fp8_block or fp8_row, if they came in it with power-of-two scales.
    - Trained experts as MXFP8, on the device where a recipe of MXFP8 ran them: forward's bytes. On Hopper, a row's one
      scale is written for each of its blocks.

    Weights that are sharded over ranks are gathered one at a time: all ranks must call it, and rank 0 writes.

    Raises ValueError, before anything is written, for another format or layout, for a model without experts or with
    PEFT's adapters, for one other than gpt-oss that stores experts stacked, and for sizes that are no multiples of 32.
    """
    if fmt not in LAYOUTS:
        raise ValueError(f"save_quantized: expected fmt {', '.join(LAYOUTS)}, got {fmt!r}")
    experts = experts_in(model, "save_quantized")
    check_in_memory(model, "save_quantized")
    if not isinstance(model, PreTrainedModel):  # its tensors have other names
        raise ValueError(
            f"save_quantized: expected a PreTrainedModel, got {type(model).__name__}: merge PEFT's adapters"
        )
    if adapted := next((name for name, module in model.named_modules() if hasattr(module, "base_layer")), None):
        raise ValueError(
            f"save_quantized: expected a model without PEFT's adapters, got one on {adapted}: merge_and_unload(), or "
            "mxep.integration.transformers.merge_and_freeze"
        )
    held = {f"{name}.{each}": (module, each) for name, module in experts.items() for each in weight_names(module)}
    folder, found = Path(folder), {}
    if _is_taken(folder, spread=any(isinstance(parameter, DTensor) for parameter in model.parameters())):
        raise ValueError(f"save_quantized: expected a folder without safetensors, got {folder}")
    with _conversions(model) as converters:
        stacked = [name for name in held if not _is_apart(name, converters)]
        layout = _layout(fmt, layout, stacked, model.config.get_text_config().model_type)
        for name, (module, each) in held.items():
            n, k = getattr(module, each).shape[-2:][:: -1 if module.is_transposed else 1]
            if k % BLOCK:
                raise ValueError(f"{name}: expected input features in multiples of {BLOCK}, got {n} x {k}")
        parts = {f"{name}{part}" for name in held for part in ("", *(f"_{each}" for each in PARTS))}
        parts |= _other_names(model)
        rest = {name: _whole(x) for name, x in model.state_dict().items() if name not in parts}
        rest = revert_weight_conversion(model, remove_tied_weights_from_state_dict(rest, model))
        writer = _Writer(folder)
        for name, x in rest.items():
            writer.add(name, x)
        for name, (module, each) in held.items():
            source = _source(module, each, model)
            for piece, (made, snr_) in _pieces(model, name, module, source, fmt).items():
                found[piece] = snr_
                for stored, x in _stored(piece, made, layout).items():
                    writer.add(stored, x)
        if writer.close():
            plain = [
                name.removesuffix(".weight") for name, x in rest.items() if name.endswith(".weight") and x.dim() > 1
            ]
            _write_config(model, folder, layout, fmt, sorted(plain))
    return found


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _is_taken(folder: Path, *, spread: bool) -> bool:
    """Whether the folder already has safetensors.

    Only the writing rank looks, as late ranks would see its files. spread: tell its answer to all ranks.
    """
    found = [_writes() and any(folder.glob("*.safetensors*"))]  # an old index, too
    if spread:
        dist.broadcast_object_list(found)
    return found[0]


@contextmanager
def _conversions(model: Any) -> Iterator[list[WeightConverter]]:
    """While open, undo `keep_names`. Yields the model's conversions of tensors, reversed."""
    kept = model.__dict__.get("_weight_conversions")
    own = model.__dict__.get(CONVERSIONS) if kept == [] else kept
    if own is None:  # built, not loaded
        own = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    model._weight_conversions = own
    try:
        yield [each.reverse_transform() for each in own if isinstance(each, WeightConverter)]
    finally:
        if kept is None:
            del model._weight_conversions
        else:
            model._weight_conversions = kept


def _is_apart(name: str, converters: list[WeightConverter]) -> bool:
    """Whether the checkpoint has a tensor for each expert of the weight, not one stacked tensor."""
    for converter in converters:
        if converter.rename_source_key(name)[1] is not None:
            for each in converter.operations:
                if not isinstance(each, SplitModulelist | Chunk):
                    raise ValueError(f"{name}: expected experts that transformers splits and cuts, got {each}")
            return True
    return False


def _layout(fmt: str, layout: str | None, stacked: list[str], kind: str) -> str:
    if stacked and kind != "gpt_oss":  # its layout names modules of gpt-oss: others would load without experts
        raise ValueError(
            f"save_quantized: expected gpt-oss, or a model with a stored tensor for each expert, got {kind}, which "
            f"stores {stacked[0]} stacked: save_pretrained its bf16 experts, and freeze_experts when they are loaded"
        )
    if stacked and fmt != "mxfp4":
        raise ValueError(f"save_quantized: expected fmt mxfp4 for {stacked[0]}, stored stacked as gpt-oss's, got {fmt}")
    is_v4 = kind == "deepseek_v4"
    possible = [
        each for each in LAYOUTS[fmt] if (each == "mxfp4") is bool(stacked) and (each != "deepseek-v4" or is_v4)
    ]
    if layout is not None and layout not in possible:
        raise ValueError(f"layout: expected {' or '.join(possible)} for {fmt} of this model, got {layout!r}")
    return layout or possible[0]


def _other_names(model: Any) -> set[str]:
    """Second names of tied parameters. Once gathered, they would have storages of their own, and be written again."""
    spread = {name for name, x in model.named_parameters(remove_duplicate=False) if isinstance(x, DTensor)}
    return spread.difference(name for name, _ in model.named_parameters())


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _pieces(
    model: Any, name: str, module: Any, source: Weight, fmt: str
) -> dict[str, tuple[MXTensor | BlockFP8, float]]:
    """Name in the checkpoint -> (quantized weight, its SNR). Weights are (N, K), or (E, N, K) if stacked."""
    values = _split(model, name, source)
    if fmt in FP32_SCALES:
        made: dict[str, Any] = {piece: _blocks(x, block_of(fmt, x.shape[-1])) for piece, x in values.items()}
    else:
        made = _split(model, name, _mx(source, fmt, module))
    ratios = {piece: snr(_float(values[piece]), _float(x)) for piece, x in made.items()}
    return {piece: (x, math.inf if ratios[piece] >= LIMIT else ratios[piece]) for piece, x in made.items()}


def _source(module: Any, name: str, model: Any) -> Weight:
    """(E, N, K), gathered from all ranks: a frozen weight's shipped bytes, or a trained weight in forward's dtype."""
    if isinstance(module, FrozenExperts):
        return frozen_weight(module, name, _whole).shipped()
    own = getattr(module, name)
    w: Tensor = _whole(own).detach().to(_dtype_in_forward(own, model))
    return w.mT.contiguous() if module.is_transposed else w


def _dtype_in_forward(weight: Tensor, model: Any) -> torch.dtype:
    """A weight's dtype in forward: FSDP2's mixed precision casts weights as it gathers them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one
            for group in groups:
                if group is not None and any(each.sharded_param is weight for each in group.fsdp_params):
                    return group.mp_policy.param_dtype or weight.dtype
    return weight.dtype


def _mx(source: Weight, fmt: str, module: Any) -> MXTensor:
    """(E, N, K) in `fmt`, blocks of 32 along K."""
    if isinstance(source, BlockFP8):
        return quantize(source.dequantize(torch.float32), fmt=FORMATS[fmt])
    if isinstance(source, MXTensor):
        if fmt == "mxfp8" or source.qdata.dtype == E2M1.dtype:
            return to_mxfp8(source) if fmt == "mxfp8" else source
        return quantize(source.dequantize(torch.bfloat16), fmt=E2M1)
    if fmt == "mxfp4":
        return quantize(source.bfloat16(), fmt=E2M1)  # as `Recipe.rounded_weight`
    how = implementation_of(module.config)
    recipe = None if how is None else how.recipe
    if not isinstance(recipe, Recipe) or recipe.scaling == "none" or recipe.fmt != E4M3:
        return quantize(source, fmt=E4M3)
    assert how is not None
    forward: Any = select(how.backend, source.device).quantize_weight_rowwise(source, recipe)[0]
    rows, columns = (size // scales for size, scales in zip(source.shape[-2:], forward.scale.shape[-2:]))
    scale = forward.scale.view(torch.uint8).repeat_interleave(rows, -2).repeat_interleave(columns // BLOCK, -1)
    return MXTensor.from_qdata_and_scales(forward.qdata, scale)


def _blocks(x: Weight, block: tuple[int, int]) -> BlockFP8:
    """(N, K) in blocks of this size. Elements are not rounded again if all scales of each block are equal."""
    if isinstance(x, BlockFP8) and x.block_size == block:
        return x
    if isinstance(x, MXTensor):
        e4m3 = to_mxfp8(x)
        (n, k), (rows, columns) = x.shape, block
        scale, columns = e4m3.scale.view(torch.uint8), columns // BLOCK
        first = scale[::rows, ::columns]
        if torch.equal(first.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, : k // BLOCK], scale):
            return BlockFP8(e4m3.qdata, first.contiguous().view(torch.float8_e8m0fnu).float(), block)
    return quantize_blocks(_float(x), block_size=block)


def _float(x: Any) -> Tensor:
    return x.dequantize(torch.float32) if isinstance(x, MXTensor | BlockFP8) else x.float()


def _split(model: Any, name: str, x: Weight) -> dict[str, Any]:
    """Split a weight (E, N, K) into the checkpoint's tensors, by name. Block FP8 is dequantized if blocks are cut."""
    if isinstance(x, Tensor) and not isinstance(x, MXTensor):
        return dict(revert_weight_conversion(model, {name: x}))
    qdata = revert_weight_conversion(model, {name: x.qdata.view(torch.uint8)})
    block = x.block_size if isinstance(x, BlockFP8) else None
    height = 1 if block is None else block[0]
    if any(q.shape[-2] != x.shape[-2] and q.shape[-2] % height for q in qdata.values()):
        return _split(model, name, x.dequantize(torch.float32))
    scales = revert_weight_conversion(model, {name: x.scale.view(torch.uint8)})
    made: dict[str, Any] = {}
    for piece, q in qdata.items():  # transformers 5.17 squeezes scales
        scale = scales[piece].view(*q.shape[:-2], -(-q.shape[-2] // height), -1).view(x.scale.dtype)
        q = q.view(x.qdata.dtype)
        made[piece] = MXTensor.from_qdata_and_scales(q, scale) if block is None else BlockFP8(q, scale, block)
    return made


def _stored(name: str, x: MXTensor | BlockFP8, layout: str) -> dict[str, Tensor]:
    if isinstance(x, BlockFP8):
        return {name: x.qdata, f"{name}_scale{'_inv' if layout == 'fp8' else ''}": x.scale}
    scale = x.scale.view(torch.uint8)
    if x.qdata.dtype == E4M3.dtype:
        return {name: x.qdata, f"{name}_scale{'_inv' if layout == 'mxfp8' else ''}": scale}
    packed = x.qdata.view(torch.uint8)
    if layout == "mxfp4":
        return {f"{name}_blocks": packed.unflatten(-1, (-1, BLOCK // 2)), f"{name}_scales": scale}
    if layout == "deepseek-v4":
        return {name: packed.view(torch.int8), f"{name.removesuffix('weight')}scale": x.scale}
    return {f"{name}_packed": packed, f"{name}_scale": scale}


class _Writer:
    """Safetensors of about `SHARD` bytes, with an index if there are several. Only rank 0 writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.waiting, self.bytes = folder, [], {}, 0  # type: ignore[var-annotated]
        self.writes = _writes()

    def add(self, name: str, x: Tensor) -> None:
        if self.writes:
            self.waiting[name] = x.detach().to("cpu", copy=True).contiguous()
            self.bytes += x.nbytes
            if self.bytes >= SHARD:
                self._flush()

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"part-{len(self.files)}.safetensors"
        save_file(self.waiting, file, metadata={"format": "pt"})
        self.files.append((file, {name: x.nbytes for name, x in self.waiting.items()}))
        self.waiting, self.bytes = {}, 0

    def close(self) -> bool:
        """Finish the files. Returns whether this rank writes."""
        if not self.writes:
            return False
        if self.waiting:
            self._flush()
        count, size = len(self.files), 0
        where: dict[str, str] = {}
        for i, (file, sizes) in enumerate(self.files):
            name = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            file.rename(self.folder / name)
            where |= dict.fromkeys(sizes, name)
            size += sum(sizes.values())
        if count > 1:
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2))
        return True


def _write_config(model: Any, folder: Path, layout: str, fmt: str, plain: list[str]) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if layout == "deepseek-v4":
        config.expert_dtype = "fp4"
    config.quantization_config = _quantization(layout, fmt, plain)
    config.save_pretrained(folder)
    if layout == "modelopt":
        declared = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "group_size": BLOCK, "exclude_modules": plain}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}, indent=2))
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _quantization(layout: str, fmt: str, plain: list[str]) -> dict[str, Any]:
    """config.json's quantization_config. plain: modules that are not quantized."""
    if layout == "mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]  # as gpt-oss
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    deepseek = {"activation_scheme": "dynamic", "fmt": "e4m3"}
    if layout == "mxfp8":
        block = {"scale_fmt": "ue8m0", "weight_block_size": [1, BLOCK]}
        return {"quant_method": "mxfp8", **deepseek, **block, "ignored_layers": plain}
    if layout == "deepseek-v4":
        deepseek |= {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    if layout in ("fp8", "deepseek-v4"):
        return {"quant_method": "fp8", **deepseek, "weight_block_size": [*FP8_BLOCK], "modules_to_not_convert": plain}
    if layout == "modelopt":
        group = {"dynamic": False, "num_bits": 8, "type": "float", "group_size": BLOCK}
        groups = {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}}
        return {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": plain, "config_groups": groups}
    packing = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized", "fp8_row": "float-quantized"}[fmt]
    weights: dict[str, Any] = {"num_bits": 4 if fmt == "mxfp4" else 8, "type": "float", "strategy": "group"}
    weights |= {"group_size": BLOCK, "symmetric": True, "dynamic": False}
    weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    if fmt == "fp8_row":
        weights |= {"strategy": "channel", "group_size": None, "scale_dtype": None, "zp_dtype": None}
    inputs = weights | {"dynamic": True} | ({"strategy": "token"} if fmt == "fp8_row" else {})
    groups = {"group_0": {"format": packing, "targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": packing,
        "ignore": plain,
        "config_groups": groups,
    }
