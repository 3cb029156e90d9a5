"""Checkpoints of tiny transformers models in the layouts that models ship in, and models with their values."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from integration.tiny_models import tiny
from quant.checkpoints import KINDS, save

QUANTIZED = re.compile(r"(experts\.\d+\.|self_attn\.[a-z]+_proj|shared_experts?\.).*weight$")
STACKED = re.compile(r"experts\.(gate_up|down)_proj$")


def write(folder: Path, model: str, kind: str, *, shards: int = 1, **changes: Any) -> Any:
    """A checkpoint of `tiny(model)` with experts and attention in `kind` of quant.checkpoints. Returns the model of its
    values, in fp32."""
    source = tiny(model, **changes)
    _, config, quantized, stored = KINDS[kind]
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in revert_weight_conversion(source, source.state_dict()).items():
        stacked = STACKED.search(name)
        if stacked or (QUANTIZED.search(name) and value.shape[-1] % 32 == 0):
            q = quantized(value.mT.contiguous() if stacked else value)  # gpt-oss is (E, K, N) in bf16
            tensors |= stored(name, q)
            values[name] = q.dequantize(torch.float32)
            if stacked:
                values[name] = values[name].mT
        else:
            tensors[name] = values[name] = value.bfloat16() if value.is_floating_point() else value
    own = source.config.to_dict() | {"architectures": [type(source).__name__]}
    save(folder, tensors, own | ({"quantization_config": config} if config else {}), shards=shards)
    save(folder / "values", values, own)
    return type(source).from_pretrained(folder / "values", dtype=torch.float32)


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Add tensors to a checkpoint of one file, or take those away that are None. Names have __ for dots."""
    state: dict[str, Any] = load_file(folder / "model.safetensors")
    state |= {name.replace("__", "."): value for name, value in tensors.items()}
    kept = {name: value.clone() for name, value in state.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
