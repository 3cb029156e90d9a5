"""save_quantized writes what other libraries read, and the bytes that forward multiplied."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("transformers")

import transformers

from integration.quantized_checkpoints import change, write
from integration.tiny_models import step, tiny
from mxep.gemm import Recipe
from mxep.gemm.backends.reference import Reference
from mxep.integration.metrics import snr
from mxep.integration.transformers import expert_parallel, export, freeze_experts, load_quantized, save_quantized
from ranks import Context, distributed

pytestmark = pytest.mark.usefixtures("one_thread")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def experts_of(model: Any) -> dict[str, Tensor]:
    """fp32 values of all experts' weights (E, N, K) by name."""
    found = {}
    for name, module in model.named_modules():
        for each in ("gate_up_proj", "down_proj") if hasattr(module, "has_gate") else ():
            w = getattr(module, each)
            values = w.detach().float() if isinstance(w, Tensor) else w.shipped().dequantize(torch.float32)
            found[f"{name}.{each}"] = values.mT if module.is_transposed else values
    return found


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("model", "kind", "fmt", "layout"),
    [
        ("gpt_oss", "gpt-oss", "mxfp4", "mxfp4"),
        ("qwen3_moe", "minimax-m3", "mxfp8", "mxfp8"),
        ("mixtral", "modelopt", "mxfp8", "modelopt"),
        ("deepseek_v3", "ct-mxfp8", "mxfp8", "compressed-tensors"),
        ("qwen3_moe", "ct-mxfp4", "mxfp4", "compressed-tensors"),
        ("deepseek_v4", "deepseek-v4", "mxfp4", "deepseek-v4"),
        ("qwen3_moe", "ue8m0", "fp8_block", "fp8"),
        ("qwen3_moe", "ct-fp8-row", "fp8_row", "compressed-tensors"),
    ],
)
def test_experts_leave_as_they_came(tmp_path: Path, model: str, kind: str, fmt: Any, layout: str) -> None:
    """Byte for byte under the same names; scales of fp8_block and fp8_row become fp32."""
    write(tmp_path / "in", model, kind)
    loaded = load_quantized(tmp_path / "in")
    ratios = save_quantized(loaded, tmp_path / "out", fmt, layout=layout)
    assert set(ratios.values()) == {math.inf}
    came, left = ({n: x for n, x in stored(tmp_path / each).items() if ".experts." in n} for each in ("in", "out"))
    assert came.keys() == left.keys()
    for name, x in came.items():
        if fmt in ("fp8_block", "fp8_row") and left[name].dtype == torch.float32:
            assert torch.equal(x.float(), left[name])
        else:
            assert x.dtype == left[name].dtype
            assert torch.equal(x.view(torch.uint8), left[name].view(torch.uint8))
    again = load_quantized(tmp_path / "out")
    assert equal(dict(again.state_dict()), dict(loaded.state_dict()))
    assert loaded._weight_conversions == [], "as before"


def test_scales_that_do_not_fold_leave_as_they_came(tmp_path: Path) -> None:
    write(tmp_path / "in", "qwen3_moe", "qwen3-fp8", hidden_size=256, moe_intermediate_size=128)
    loaded = load_quantized(tmp_path / "in")
    ratios = save_quantized(loaded, tmp_path / "out", "fp8_block")
    assert set(ratios.values()) == {math.inf}
    came, left = ({n: x for n, x in stored(tmp_path / each).items() if ".experts." in n} for each in ("in", "out"))
    assert equal(came, left)
    ratios = save_quantized(loaded, tmp_path / "mxfp8", "mxfp8")
    assert 28 < min(ratios.values()) < 35
    unaligned = trained("qwen3_moe")
    freeze_experts(unaligned, "fp8_block")
    ratios = save_quantized(unaligned, tmp_path / "unaligned", "fp8_block")
    assert min(ratios.values()) > 28, "gate and up, which shared a block, have their own"
    assert min(save_quantized(unaligned, tmp_path / "rows", "fp8_row").values()) > 28


def test_row_scales_leave_as_they_came_also_from_bf16_and_powers_of_two(tmp_path: Path) -> None:
    write(tmp_path / "in", "qwen3_moe", "ct-fp8-row")
    change(tmp_path / "in", **{n: x.log2().round().exp2() for n, x in stored(tmp_path / "in").items() if "scale" in n})
    loaded = load_quantized(tmp_path / "in")
    assert loaded.model.layers[0].mlp.experts.down_proj.format == "mxfp8"
    assert set(save_quantized(loaded, tmp_path / "out", "fp8_row").values()) == {math.inf}
    came, left = ({n: x for n, x in stored(tmp_path / each).items() if ".experts." in n} for each in ("in", "out"))
    assert came.keys() == left.keys()
    assert all(torch.equal(x.float(), left[n].float()) for n, x in came.items())
    model = trained("qwen3_moe")
    weights = experts_of(model)
    freeze_experts(model, "fp8_row")
    assert set(save_quantized(model, tmp_path / "bf16", "fp8_row").values()) == {math.inf}
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["format"], group["weights"]["strategy"]) == ("float-quantized", "channel")
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    again = load_quantized(tmp_path / "bf16")
    assert equal(dict(again.state_dict()), dict(model.state_dict()))
    for name, x in experts_of(again).items():
        assert 28 < snr(weights[name], x) < 40


def trained(kind: str, implementation: str = "mxep_mxfp8", **changes: Any) -> Any:
    return tiny(kind, implementation, torch.bfloat16, **changes)


@pytest.mark.parametrize(
    ("kind", "fmt"),
    [
        ("gpt_oss", "mxfp4"),
        ("deepseek_v4", "mxfp4"),
        *(("qwen3_moe", fmt) for fmt in ("mxfp8", "fp8_block", "fp8_row")),
    ],
)
def test_transformers_reads_it(tmp_path: Path, kind: str, fmt: Any) -> None:
    """Sizes are multiples of 128: transformers dequantizes others wrongly."""
    if fmt == "fp8_row":
        pytest.importorskip("compressed_tensors")
    model = trained(kind, hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
    save_quantized(model, tmp_path, fmt)
    how = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if kind == "gpt_oss" else {}
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **how)
    ours = load_quantized(tmp_path, rescale=fmt != "fp8_row")
    if fmt == "fp8_block":
        assert min(snr(x, experts_of(model)[name]) for name, x in experts_of(read).items()) > 28
    else:
        assert equal(experts_of(read), experts_of(ours))
    rest = {n: p for n, p in model.named_parameters() if ".experts." not in n}
    assert all(torch.equal(p.float(), read.get_parameter(n)) for n, p in rest.items())


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_row"])
def test_compressed_tensors_reads_it(tmp_path: Path, fmt: Any) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = trained("qwen3_moe")
    freeze_experts(model, fmt)
    save_quantized(model, tmp_path, fmt, layout="compressed-tensors")
    declared = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(declared)
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    tensors = stored(tmp_path)
    want = experts_of(model)["model.layers.1.mlp.experts.gate_up_proj"][3]
    found = []
    for part in ("gate", "up"):
        stem = f"model.layers.1.mlp.experts.3.{part}_proj."
        state = {n.removeprefix(stem): x for n, x in tensors.items() if n.startswith(stem)}
        found.append(compressor.decompress(state, config.config_groups["group_0"])["weight"])
    assert torch.equal(torch.cat(found).float(), want)


class Rows(Reference):
    """Quantizes weights as Hopper does."""

    wants_rowwise = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", [Reference(), Rows()])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32"])
def test_trained_experts_leave_as_forward_multiplied_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, backend: Reference, dtype: torch.dtype
) -> None:
    """fp32 weights are quantized as they are, never from bf16."""
    model = tiny("qwen3_moe", f"mxep_{recipe}", dtype)
    monkeypatch.setattr(export, "select", lambda *_: backend)
    ratios = save_quantized(model, tmp_path, "mxfp8")
    assert all(28 < each < 40 for each in ratios.values())
    again = experts_of(load_quantized(tmp_path))
    for name, w in experts_of(model).items():
        want, _ = backend.quantize_weight_rowwise(w.to(dtype), Recipe.named(recipe))
        assert torch.equal(again[name], want.dequantize(torch.float32))


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_a_model_trained_with_mxfp4_weights_is_exported_at_the_same_loss(tmp_path: Path, kind: str) -> None:
    """Bit for bit: forward multiplied what is written."""
    trained(kind).save_pretrained(tmp_path / "from")  # read again, as `tiny` casts what from_pretrained does not
    how = {"dtype": torch.bfloat16, "experts_implementation": "mxep_mxfp8_mxfp4_weights"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "from", **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = step(model)["logits"]
    optimizer.step()
    wanted = step(model)["logits"]
    assert not torch.equal(first, wanted)
    ratios = save_quantized(model, tmp_path / "to", "mxfp4")
    assert max(ratios.values()) < 25, "weights are not MXFP4 themselves"
    assert torch.equal(step(load_quantized(tmp_path / "to"))["logits"], wanted)


@pytest.mark.parametrize(
    ("held", "fmt", "lowest"),
    [
        ("bf16", "mxfp4", 15),
        ("bf16", "fp8_block", 28),
        ("bf16", "fp8_row", 28),
        ("mxfp4", "mxfp8", math.inf),
        ("mxfp8", "mxfp4", 15),
        ("mxfp8", "fp8_block", 28),
    ],
)
def test_the_snr_of_what_is_written_is_told(tmp_path: Path, held: str, fmt: Any, lowest: float) -> None:
    model = trained("qwen3_moe")
    if held != "bf16":
        freeze_experts(model, held)
    ratios = save_quantized(model, tmp_path, fmt)
    assert lowest <= min(ratios.values()) <= lowest + 8
    assert ratios.keys() == {
        n.removesuffix("_packed") for n, x in stored(tmp_path).items() if x.itemsize == 1 and "scale" not in n
    }
    again = experts_of(load_quantized(tmp_path, rescale=True))
    for name, w in experts_of(model).items():
        assert snr(w, again[name]) > min(lowest, 100) - 4, "rescaled, where blocks have other scales"


def test_files_are_split_and_tied_embeddings_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD", 40_000)
    model = trained("qwen3_moe", tie_word_embeddings=True)
    save_quantized(model, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert set(index) == set(stored(tmp_path))
    assert "lm_head.weight" not in index
    loaded = load_quantized(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_errors_name_the_cure_before_anything_is_written(tmp_path: Path) -> None:
    model, gpt = trained("qwen3_moe"), trained("gpt_oss")
    for given, how, message in (
        (model, {"fmt": "fp8"}, "expected fmt mxfp8, mxfp4, fp8_block, fp8_row, got 'fp8'"),
        (model, {"layout": "fp8"}, "expected mxfp8 or modelopt or compressed-tensors for mxfp8 .*, got 'fp8'"),
        (model, {"fmt": "mxfp4", "layout": "mxfp4"}, "expected compressed-tensors for mxfp4"),
        (gpt, {"fmt": "mxfp8"}, "expected fmt mxfp4 for .*gate_up_proj, stored stacked as gpt-oss's, got mxfp8"),
        (torch.nn.ModuleList([model]), {}, "expected a PreTrainedModel, got ModuleList: merge PEFT's adapters"),
        (torch.nn.Linear(2, 2), {}, "expected a model with experts that mxep runs, got Linear"),
        (trained("qwen3_moe", "mxep_bf16", moe_intermediate_size=16), {}, "expected input features in multiples of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            save_quantized(given, tmp_path, **how)
        assert not list(tmp_path.iterdir())
    save_quantized(gpt, tmp_path, "mxfp4")
    with pytest.raises(ValueError, match="expected a folder without safetensors"):
        save_quantized(gpt, tmp_path, "mxfp4")
    (tmp_path / "index").mkdir()
    (tmp_path / "index/model.safetensors.index.json").touch()  # which a reader would believe
    with pytest.raises(ValueError, match="expected a folder without safetensors"):
        save_quantized(gpt, tmp_path / "index", "mxfp4")


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_stacked_experts_of_another_model_than_gpt_oss_are_refused(tmp_path: Path, fmt: str) -> None:
    """transformers would look for them under other names, and start with random ones."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    config = transformers.GraniteMoeConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="mxep_mxfp8")
    with pytest.raises(ValueError, match=r"expected gpt-oss, or .*, got granitemoe, which stores .*_proj stacked"):
        save_quantized(model, tmp_path, fmt)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["q_proj", "experts"])
def test_a_model_that_peft_changed_within_is_refused(tmp_path: Path, target: str) -> None:
    """Its base model is a PreTrainedModel, whose weights have PEFT's names."""
    peft = pytest.importorskip("peft")
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    how = {"target_parameters": both} if target == "experts" else {"target_modules": [target]}
    model = trained("qwen3_moe")
    freeze_experts(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**how))
    with pytest.raises(ValueError, match=f"without PEFT's adapters, got one on .*{target}.*merge_and_unload"):
        save_quantized(adapted.get_base_model(), tmp_path)
    assert not list(tmp_path.iterdir())


@distributed(2, device="cpu")
def test_ranks_write_one_checkpoint(ctx: Context, tmp_path: Path) -> None:
    model = trained("gpt_oss")
    freeze_experts(model, "mxfp4")
    expert_parallel(model, init_device_mesh("cpu", (2,)))
    save_quantized(model, tmp_path, "mxfp4")
    dist.barrier(ctx.group)
    whole = trained("gpt_oss")
    freeze_experts(whole, "mxfp4")
    assert equal(dict(load_quantized(tmp_path).state_dict()), dict(whole.state_dict()))
    with pytest.raises(ValueError, match="expected a folder without safetensors"):  # of both
        save_quantized(model, tmp_path, "mxfp4")


@distributed(2, device="cpu")
def test_ranks_with_whole_models_may_come_late(ctx: Context, tmp_path: Path) -> None:
    """Rank 0 writes, and others do not take its files for those of another model."""
    if ctx.rank == 1:
        dist.barrier(ctx.group)
    save_quantized(trained("qwen3_moe"), tmp_path)
    if ctx.rank == 0:
        dist.barrier(ctx.group)


@distributed(2, device="cpu")
def test_experts_that_fsdp_casts_leave_as_cast(ctx: Context, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for param_dtype in (torch.bfloat16, None):
        model = tiny("qwen3_moe", "mxep_mxfp8")
        wanted = {name: w.to(param_dtype or w.dtype) for name, w in experts_of(model).items()}
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
        save_quantized(model, tmp_path / str(param_dtype))
        dist.barrier(ctx.group)
        found = experts_of(load_quantized(tmp_path / str(param_dtype)))
        for name, w in wanted.items():
            want, _ = Reference().quantize_weight_rowwise(w, Recipe.mxfp8())
            assert torch.equal(found[name], want.dequantize(torch.float32)), (name, param_dtype)


@distributed(2, device="cpu")
def test_tied_embeddings_that_fsdp_shards_are_written_once(ctx: Context, tmp_path: Path) -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16, tie_word_embeddings=True)
    embeddings = model.lm_head.weight.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    save_quantized(model, tmp_path)
    torch.distributed.barrier()
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(load_quantized(tmp_path).lm_head.weight, embeddings)
