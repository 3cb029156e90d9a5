"""Tiny checkpoints in the layouts that models ship in, and the values that a reader must find.

`write(folder, kind)` returns {name of a weight: its fp32 values}. Sizes are ragged on purpose: 160 and 288 are no
multiples of 128. A weight and its scale lie in different files where there are several.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mxep.quant import BlockFP8, MXTensor, quantize, quantize_blocks

E8M0 = torch.float8_e8m0fnu
HIDDEN, WIDTH, EXPERTS = 288, 160, 3
Stored = dict[str, Tensor]


def values(*shape: int, seed: int, spread: int) -> Tensor:
    """Normal, blocks of 32 times 2**-spread to 2**spread, a block of zeros; bf16 values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    factors = torch.randint(-spread, spread + 1, (*shape[:-1], shape[-1] // 32), generator=generator)
    x = x * 2.0 ** factors.repeat_interleave(32, -1)
    x[..., 0, :32] = 0
    return x.bfloat16().float()


def mxfp4(x: Tensor) -> MXTensor:
    return quantize(x, fmt="E2M1", mode="floor")


def of_blocks(data: str, scale: str) -> Callable[[str, MXTensor], Stored]:
    def stored(name: str, mx: MXTensor) -> Stored:
        blocks = mx.qdata.view(torch.uint8).unflatten(-1, (-1, 16))
        return {f"{name}{data}": blocks, f"{name}{scale}": mx.scale.view(torch.uint8)}

    return stored


def packed(name: str, mx: MXTensor) -> Stored:
    return {f"{name}_packed": mx.qdata.view(torch.uint8), f"{name}_scale": mx.scale.view(torch.uint8)}


def as_int8(name: str, mx: MXTensor) -> Stored:
    return {name: mx.qdata.view(torch.uint8).view(torch.int8), f"{name.removesuffix('weight')}scale": mx.scale}


def with_scale(ending: str, dtype: torch.dtype | None = None) -> Callable[[str, Any], Stored]:
    """X.weight and X.`ending`; the scale seen as dtype."""

    def stored(name: str, q: MXTensor | BlockFP8) -> Stored:
        scale = q.scale if dtype is None else q.scale.view(dtype)
        return {name: q.qdata, f"{name.removesuffix('weight')}{ending}": scale}

    return stored


def blocks(scale_dtype: torch.dtype, size: tuple[int, int] = (128, 128)) -> Callable[[Tensor], BlockFP8]:
    return lambda x: quantize_blocks(x, block_size=size, scale_dtype=scale_dtype)


def rows(scale_dtype: torch.dtype) -> Callable[[Tensor], BlockFP8]:
    return lambda x: quantize_blocks(x, block_size=(1, x.shape[-1]), scale_dtype=scale_dtype)


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CT = {"quant_method": "compressed-tensors"}
# kind: (format, quantization_config, how a weight is quantized, how it is stored)
KINDS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Any], Callable[[str, Any], Stored]]] = {
    "gpt-oss": ("mxfp4", {"quant_method": "mxfp4"}, mxfp4, of_blocks("_blocks", "_scales")),
    "gpt-oss-original": ("mxfp4", {}, mxfp4, of_blocks(".blocks", ".scales")),
    "deepseek-v4": ("mxfp4", DEEPSEEK | {"scale_fmt": "ue8m0"}, mxfp4, as_int8),
    "ct-mxfp4": ("mxfp4", CT | {"format": "mxfp4-pack-quantized"}, mxfp4, packed),
    "minimax-m3": ("mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, quantize,
                   with_scale("weight_scale_inv", torch.uint8)),
    "modelopt": ("mxfp8", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, quantize,
                 with_scale("weight_scale", torch.uint8)),
    "ct-mxfp8": ("mxfp8", CT | {"format": "mxfp8-quantized"}, quantize, with_scale("weight_scale", torch.uint8)),
    "deepseek-v3": ("fp8_block", DEEPSEEK, blocks(torch.float32), with_scale("weight_scale_inv")),
    "qwen3-fp8": ("fp8_block", DEEPSEEK, blocks(torch.bfloat16), with_scale("weight_scale_inv")),
    "ue8m0": ("fp8_block", DEEPSEEK | {"scale_fmt": "ue8m0"}, blocks(E8M0), with_scale("weight_scale_inv")),
    "deepseek-v4.1-dense": ("fp8_block", DEEPSEEK | {"weight_block_size": [32, 32]}, blocks(E8M0, (32, 32)),
                            with_scale("scale")),
    "ct-fp8-block": ("fp8_block", CT | {"config_groups": {"g": {"weights": {"block_structure": [64, 128]}}}},
                     blocks(torch.bfloat16, (64, 128)), with_scale("weight_scale")),
    "ct-fp8-tensor": ("fp8_tensor", CT | {"format": "float-quantized"}, lambda x: blocks(torch.float32, (*x.shape,))(x),
                      lambda name, q: {name: q.qdata, f"{name}_scale": q.scale.flatten()}),
    "ct-fp8-row": ("fp8_row", CT | {"format": "float-quantized"}, rows(torch.bfloat16), with_scale("weight_scale")),
}  # fmt: skip
STACKED = ("gpt-oss", "gpt-oss-original")


def write(folder: Path, kind: str, *, shards: int = 1, seed: int = 0, spread: int = 2) -> Stored:
    """A layer of EXPERTS experts, a router and a norm."""
    _, config, quantized, stored = KINDS[kind]
    tensors: Stored = {}
    expected: Stored = {}

    def add(name: str, *shape: int) -> None:
        q = quantized(values(*shape, seed=seed + len(expected), spread=spread))
        tensors.update(stored(name, q))
        expected[name] = q.dequantize(torch.float32)

    if kind in STACKED:
        add("model.layers.0.mlp.experts.gate_up_proj", EXPERTS, 2 * WIDTH, HIDDEN)
        add("model.layers.0.mlp.experts.down_proj", EXPERTS, HIDDEN, WIDTH)
    else:
        for expert in range(EXPERTS):
            for name, n, k in (("w1", WIDTH, HIDDEN), ("w3", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
                add(f"model.layers.0.mlp.experts.{expert}.{name}.weight", n, k)
    for name, dtype in (("mlp.gate.weight", torch.float32), ("input_layernorm.weight", torch.bfloat16)):
        tensors[f"model.layers.0.{name}"] = values(EXPERTS, HIDDEN, seed=seed, spread=0).to(dtype)
        expected[f"model.layers.0.{name}"] = tensors[f"model.layers.0.{name}"].float()
    save(folder, tensors, {"quantization_config": config} if config else {}, shards=shards)
    return expected


def save(folder: Path, tensors: Stored, config: dict[str, Any], *, shards: int = 1) -> None:
    """Round robin over the files, with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    index = {}
    for i, file in enumerate(names):
        part = {name: tensors[name].contiguous() for name in [*tensors][i::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
