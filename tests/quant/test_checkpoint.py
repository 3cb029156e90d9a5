"""Checkpoints of every layout are read to the values that were written, and what is not read is refused by name."""

import builtins
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxep.quant import BlockFP8, MXTensor, checkpoint
from mxep.quant.checkpoint import QuantizedCheckpoint
from quant.checkpoints import EXPERTS, HIDDEN, KINDS, STACKED, WIDTH, save, write

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
every_kind = pytest.mark.parametrize("kind", KINDS)


def read_values(weight: Any, part: slice | None = None) -> torch.Tensor:
    read = weight.read(part)
    return read.dequantize(torch.float32) if isinstance(read, MXTensor | BlockFP8) else read.float()


@every_kind
def test_every_weight_has_the_values_that_were_written(kind: str, tmp_path: Path) -> None:
    expected = write(tmp_path, kind, shards=(1, 4)[list(KINDS).index(kind) % 2])
    with QuantizedCheckpoint(tmp_path) as found:
        assert found.weights.keys() == expected.keys()
        for name, weight in found.weights.items():
            plain = "gate" in name.split(".") or "norm" in name
            assert weight.format == ("plain" if plain else KINDS[kind][0])
            assert weight.shape == expected[name].shape
            if weight.format.startswith("mx"):
                assert weight.block_size == (1, 32)
            assert torch.equal(read_values(weight), expected[name])


@pytest.mark.parametrize("kind", STACKED)
def test_some_experts_of_a_stack_are_read_alone(kind: str, tmp_path: Path) -> None:
    expected = write(tmp_path, kind)
    with QuantizedCheckpoint(tmp_path) as found:
        weight = found.weights["model.layers.0.mlp.experts.down_proj"]
        assert weight.shape == (EXPERTS, HIDDEN, WIDTH)
        assert torch.equal(read_values(weight, slice(1, 3)), expected[weight.name][1:3])
        gate = found.weights["model.layers.0.mlp.gate.weight"]
        assert torch.equal(read_values(gate, slice(0, 1)), expected[gate.name][:1])


def test_a_part_of_a_matrix_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "minimax-m3")
    weight = QuantizedCheckpoint(tmp_path).weights["model.layers.0.mlp.experts.0.w1.weight"]
    with pytest.raises(ValueError, match=r"w1.weight: expected a stacked weight \(E, N, K\) to read a part of"):
        weight.read(slice(0, 1))


def test_opening_reads_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "gpt-oss", shards=3)
    read: list[str] = []
    tensor = QuantizedCheckpoint.tensor
    monkeypatch.setattr(
        QuantizedCheckpoint, "tensor", lambda self, name, part=None: (read.append(name), tensor(self, name, part))[1]
    )
    found = QuantizedCheckpoint(tmp_path)
    assert not read
    found.weights["model.layers.0.mlp.experts.down_proj"].read()
    assert read == [f"model.layers.0.mlp.experts.down_proj_{part}" for part in ("blocks", "scales")]


def test_what_the_config_calls_it(tmp_path: Path) -> None:
    for kind, quantization, block in (
        ("modelopt", "modelopt MXFP8", None),
        ("ct-mxfp8", "compressed-tensors mxfp8-quantized", None),
        ("deepseek-v3", "fp8", (128, 128)),
        ("ct-fp8-block", "compressed-tensors", (64, 128)),
        ("gpt-oss-original", "", None),
    ):
        write(tmp_path / kind, kind)
        found = QuantizedCheckpoint(tmp_path / kind)
        assert (found.quantization, found.block_size) == (quantization, block)
    config = tmp_path / "modelopt" / "config.json"
    config.write_text(json.dumps({"text_config": {"quantization_config": {"quant_method": "fp8"}}}))
    assert QuantizedCheckpoint(config.parent).quantization == "fp8"
    config.unlink()
    (config.parent / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "MXFP8"}}))
    assert QuantizedCheckpoint(config.parent).quantization == "modelopt MXFP8"


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


def open_with(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> QuantizedCheckpoint:
    apart = {name: x.clone() for name, x in tensors.items()}  # safetensors refuses shared memory
    save(folder, apart, {"quantization_config": config} if config else {})
    return QuantizedCheckpoint(folder)


def test_the_block_is_the_declared_one_or_a_usual_one_that_fits(tmp_path: Path) -> None:
    for scale, config, kind, block in (
        (torch.ones(5, 3), {"weight_block_size": [128, 128]}, "fp8_block", (128, 128)),
        (torch.ones(5, 3), {}, "fp8_block", (128, 128)),
        (torch.ones(18, 9), {}, "fp8_block", (32, 32)),
        (torch.ones(9, 5), {"weight_block_size": [64, 64]}, "fp8_block", (64, 64)),
        (torch.ones(576, 1), {}, "fp8_row", (1, 288)),
        (torch.ones(576), {}, "fp8_row", (1, 288)),
        (torch.ones(1), {}, "fp8_tensor", (576, 288)),
        (torch.ones(()), {"weight_block_size": [128, 128]}, "fp8_tensor", (576, 288)),
        (torch.ones(576, 9).to(E8M0), {}, "mxfp8", (1, 32)),
    ):
        if config:
            config = {"quant_method": "fp8", **config}
        weight = open_with(tmp_path, {"a.weight": codes(576, 288), "a.weight_scale": scale}, **config).weights[
            "a.weight"
        ]
        assert (weight.format, weight.block_size) == (kind, block)
        assert read_values(weight).shape == (576, 288)


def test_stacked_fp8_experts_have_scales_under_their_own_name(tmp_path: Path) -> None:
    tensors = {"experts.down_proj": codes(4, 160, 288), "experts.down_proj_scale_inv": torch.ones(4, 2, 3)}
    weight = open_with(tmp_path, tensors).weights["experts.down_proj"]
    assert (weight.format, weight.shape) == ("fp8_block", (4, 160, 288))
    read = weight.read(slice(2, 4))
    assert isinstance(read, BlockFP8)
    assert read.shape == (2, 160, 288)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"a.qweight": torch.zeros(4, 4).int()}, "a.qweight: expected .*, got integers of GPTQ or AWQ"),
        ({"a.weight.absmax": torch.ones(4)}, "a.weight.absmax: expected .*, got bitsandbytes"),
        ({"a.weight_scale_2": torch.ones(())}, "a.weight_scale_2: expected .*, got NVFP4 of ModelOpt"),
        ({"a.weight": torch.zeros(4, 16).byte(), "a.weight_scale": codes(4, 2), "a.weight_scale_2": torch.ones(1)},
         "a.weight_scale_2: expected .*, got NVFP4 of ModelOpt"),
        ({"a.weight": codes(4, 32)}, r"a.weight: expected a scale beside F8_E4M3 \[4, 32\], got none"),
        ({"a.weight": torch.zeros(4, 32).to(torch.float8_e5m2)}, "a.weight: expected a scale beside F8_E5M2"),
        ({"a.weight": torch.zeros(4, 32).char(), "a.weight_scale": torch.ones(4, 1)},
         r"a.weight: expected parts of a format .*, got I8 \[4, 32\] with a.weight_scale F32 \[4, 1\]"),
        ({"a.weight_packed": torch.zeros(4, 16).byte(), "a.weight_scale": codes(4, 2)}, "got U8 .* F8_E4M3"),
        ({"a.weight_packed": torch.zeros(4, 4).int(), "a.weight_shape": torch.ones(2).int()}, "got packed integers"),
        ({"a_proj_qdata": torch.zeros(4, 32).byte(), "a_proj_scale": torch.zeros(4, 4).byte()}, "mxep's frozen"),
        ({"a.weight_scale": torch.zeros(4, 1).byte()}, r"a.weight_scale: expected a scale beside U8 \[4, 1\]"),
        ({"a_blocks": torch.zeros(4, 3, 16).byte(), "a_scales": torch.zeros(4, 2).byte()}, "a_blocks: expected parts"),
        ({"a.weight": codes(256, 256), "a.weight_scale": torch.ones(3, 2)}, r"a.weight: expected parts .* \[3, 2\]"),
        ({"a.weight": codes(4, 48), "a.weight_scale": torch.zeros(4, 1).byte()}, "a.weight: expected parts"),
        ({"a.weight": codes(4), "a.weight_scale": torch.ones(1)}, "a.weight: expected parts"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tensors: dict[str, torch.Tensor], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        open_with(tmp_path, tensors)


def test_scales_of_activations_are_no_weights(tmp_path: Path) -> None:
    one, e4m3 = torch.ones(()), codes(4, 32)
    linear = {"a.weight": e4m3, "a.weight_scale": one, "a.input_scale": one, "a.activation_scale": one}
    stack = {"up_proj": codes(2, 4, 32), "up_proj_scale": torch.ones(2, 4, 1), "up_proj_input_scale": torch.ones(2)}
    attention = {"attn.k_scale": one, "v_proj.v_scale": one}
    with open_with(tmp_path / "fp8", linear | stack | attention) as found:
        assert found.weights.keys() == {"a.weight", "up_proj"}
        left_out = {"a.input_scale", "a.activation_scale", "up_proj_input_scale", *attention}
        assert {*found.activation_scales} == left_out
        assert found.weights["a.weight"].format == "fp8_tensor"
    plain = {"b.weight": torch.ones(4, 32), "b.input_scale": one}
    with open_with(tmp_path / "one", linear | plain) as found:  # a parameter's name may end alike
        assert found.weights["b.input_scale"].format == "plain"
    with open_with(tmp_path / "none", plain | attention) as found:
        assert found.weights.keys() == plain.keys() | attention.keys()
        assert not found.activation_scales


def test_other_methods_and_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected quant_method \('mxfp4', .*\), got 'awq'"):
        open_with(tmp_path / "awq", {"a": torch.ones(2)}, quant_method="awq")
    with pytest.raises(FileNotFoundError, match=r"expected a folder with \*.safetensors, got none"):
        QuantizedCheckpoint(tmp_path / "none")
    write(tmp_path / "two", "modelopt", shards=2)
    (tmp_path / "two" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"00002-of-00002.safetensors: expected this file, which model"):
        QuantizedCheckpoint(tmp_path / "two")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match=r"model.safetensors: expected a safetensors file, got"):
        QuantizedCheckpoint(tmp_path / "none")
    (tmp_path / "none" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: expected JSON, got"):
        QuantizedCheckpoint(tmp_path / "none")
    (tmp_path / "none" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: expected a JSON object, got a list"):
        QuantizedCheckpoint(tmp_path / "none")


@pytest.mark.parametrize("size", [128, [0, 128], [128], ["128", 128]])
def test_a_config_whose_block_size_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    tensors = {"a.weight": codes(256, 256), "a.weight_scale_inv": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"expected a block size \[rows, columns\] in the config, got"):
        open_with(tmp_path, tensors, quant_method="fp8", weight_block_size=size)


def test_a_file_that_lacks_what_the_index_names_is_refused(tmp_path: Path) -> None:
    """fold_report would count the others, as if the model had no more."""
    write(tmp_path, "modelopt", shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    lost = min(tensors)
    save_file({name: x for name, x in tensors.items() if name != lost}, file)
    with pytest.raises(
        ValueError, match=rf"00002-of-00002.safetensors: expected {lost}, which model.* names, got none"
    ):
        QuantizedCheckpoint(tmp_path)


def test_files_without_an_index_are_all_read_and_a_closed_checkpoint_opens_again(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    with QuantizedCheckpoint(tmp_path) as found:
        assert list(found.weights) == ["a", "b"]
        assert (found.config, found.quantization) == ({}, "")
    assert torch.equal(read_values(found.weights["b"]), torch.zeros(3))


def test_without_safetensors_the_module_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, checkpoint.__name__)
    with pytest.raises(ImportError, match="expected safetensors, got none: pip install safetensors"):
        importlib.import_module(checkpoint.__name__)
