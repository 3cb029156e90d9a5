"""load_quantized reads what models ship in: experts byte for byte, everything else to the last bit."""

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

from integration.quantized_checkpoints import change, write
from integration.tiny_models import force_routing, token_ids
from mxep.integration.metrics import snr
from mxep.integration.transformers import FrozenExperts, load_quantized, save_quantized
from mxep.integration.transformers.experts import weight_names
from mxep.quant import BlockFP8
from quant.checkpoints import KINDS
from ranks import Context, distributed

pytestmark = pytest.mark.usefixtures("one_thread")
RESCALED = ("deepseek-v3", "qwen3-fp8")
CASES = [
    ("gpt_oss", "gpt-oss"),
    ("mixtral", "minimax-m3"),
    ("deepseek_v3", "deepseek-v3"),
    ("deepseek_v3", "ue8m0"),
    ("deepseek_v4", "deepseek-v4"),
    *(("qwen3_moe", k) for k in ("qwen3-fp8", "ue8m0", "minimax-m3", "modelopt", "ct-mxfp8", "ct-mxfp4", "ct-fp8-row")),
]


def test_static_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    """As ModelOpt and compressed-tensors store them for serving. A router's, which is not quantized, is unexpected."""
    write(tmp_path, "qwen3_moe", "ct-fp8-row")
    expected = load_quantized(tmp_path).state_dict()
    names = load_file(tmp_path / "model.safetensors").keys()
    layers = [name.removesuffix("weight_scale") for name in names if name.endswith(".weight_scale")]
    attention = [name.removesuffix("q_proj.") for name in layers if name.endswith("q_proj.")]
    scales = [f"{x}input_scale" for x in layers] + [f"{x}{kv}_scale" for x in attention for kv in "kv"]
    assert len(scales) > 16
    change(tmp_path, **{name.replace(".", "__"): torch.tensor(0.1) for name in scales})
    got = load_quantized(tmp_path).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def same_routing(reference: Any, *models: Any) -> None:
    recorded = force_routing(reference)
    with torch.no_grad():
        reference(input_ids=token_ids())
    for model in (reference, *models):
        force_routing(model, recorded)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=token_ids()).logits.float()


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_a_checkpoint_becomes_the_model_of_its_values(tmp_path: Path, model: str, kind: str) -> None:
    reference = write(tmp_path, model, kind, shards=2)
    rescale = kind in RESCALED
    loaded = load_quantized(tmp_path, experts_implementation="mxep_bf16", dtype=torch.float32, rescale=rescale)
    assert type(loaded) is type(reference)
    assert not hasattr(loaded.config, "quantization_config")
    assert not loaded.training
    frozen = {name: module for name, module in loaded.named_modules() if isinstance(module, FrozenExperts)}
    assert len(frozen) == 2
    for name, experts in frozen.items():
        other = reference.get_submodule(name)
        for each in weight_names(experts):
            assert getattr(experts, each).format == (
                KINDS[kind][0] if KINDS[kind][0] in ("mxfp4", "fp8_row") else "mxfp8"
            )
            got, want = getattr(experts, each).shipped().dequantize(torch.float32), getattr(other, each)
            got = got.mT if other.is_transposed else got
            assert snr(want.detach(), got) > 28 if rescale else torch.equal(want, got)
    rest = {n: p for n, p in loaded.named_parameters() if ".experts." not in n or n.endswith("_bias")}
    assert all(torch.equal(p, reference.get_parameter(n)) for n, p in rest.items())
    assert len(rest) + 2 * len(frozen) == len(list(reference.parameters()))
    assert all(p.requires_grad is (".experts." not in n) for n, p in rest.items())
    same_routing(reference, loaded)
    assert snr(logits(reference), logits(loaded)) > (20 if rescale else 40)
    loaded.set_experts_implementation("mxep_mxfp8")
    assert snr(logits(reference), logits(loaded)) > 20


@pytest.mark.parametrize(("model", "kind"), [("deepseek_v3", "deepseek-v3"), ("qwen3_moe", "qwen3-fp8")])
def test_scales_that_do_not_fold_are_kept_with_their_bytes(tmp_path: Path, model: str, kind: str) -> None:
    """In whole blocks of 128 x 128, as such models have them."""
    reference = write(tmp_path, model, kind, hidden_size=256, moe_intermediate_size=128)
    loaded = load_quantized(tmp_path, experts_implementation="mxep_bf16", dtype=torch.float32)
    for name, experts in loaded.named_modules():
        if isinstance(experts, FrozenExperts):
            for each in ("gate_up_proj", "down_proj"):
                weight, want = getattr(experts, each), getattr(reference.get_submodule(name), each)
                assert weight.format == "fp8_block"
                assert torch.equal(weight.shipped().dequantize(torch.float32), want)
    same_routing(reference, loaded)
    assert snr(logits(reference), logits(loaded)) > 40
    again = load_quantized(tmp_path, rescale=True)
    assert again.model.layers[1].mlp.experts.down_proj.format == "mxfp8"


def test_one_scale_that_does_not_fold_keeps_the_bytes_of_its_whole_weight(tmp_path: Path) -> None:
    """The first expert's scales are powers of two, and all of the second layer's. down_proj has 2.5 blocks of rows."""
    write(tmp_path, "qwen3_moe", "deepseek-v3", hidden_size=320, moe_intermediate_size=128)
    state = load_file(tmp_path / "model.safetensors")
    folds = {n for n in state if "scale_inv" in n and (".experts.0." in n or ".layers.1." in n)}
    change(tmp_path, **{n: state[n].log2().round().exp2() for n in folds})
    state = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate(load_quantized(tmp_path).model.layers):
        assert {getattr(layer.mlp.experts, each).format for each in ("gate_up_proj", "down_proj")} == {
            ("fp8_block", "mxfp8")[i]
        }
        for e, got in enumerate(layer.mlp.experts.down_proj.shipped().dequantize(torch.float32)):
            name = f"model.layers.{i}.mlp.experts.{e}.down_proj.weight"
            assert torch.equal(got, BlockFP8(state[name], state[f"{name}_scale_inv"]).dequantize(torch.float32))


def test_scales_of_other_blocks_that_do_not_fold_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "ct-fp8-block", hidden_size=256, moe_intermediate_size=128)
    with pytest.raises(ValueError, match=r"blocks of \(128, 128\), got \(128, 256\) in blocks of \(64, 128\)"):
        load_quantized(tmp_path)


def test_matrices_of_one_scale_become_rows(tmp_path: Path) -> None:
    """Gate and up, which are joined, have a scale each. The second layer's scales are powers of two."""
    reference = write(tmp_path, "qwen3_moe", "ct-fp8-tensor")
    state = load_file(tmp_path / "model.safetensors")
    folds = {n: state[n].log2().round().exp2() for n in state if n.endswith("weight_scale") and ".layers.1." in n}
    change(tmp_path, **folds)
    first, second = (layer.mlp.experts for layer in load_quantized(tmp_path).model.layers)
    assert (first.gate_up_proj.format, second.gate_up_proj.format) == ("fp8_row", "mxfp8")
    assert len(first.gate_up_proj.shipped().scale[0].unique()) == 2
    for each in ("gate_up_proj", "down_proj"):
        want = getattr(reference.model.layers[0].mlp.experts, each)
        assert torch.equal(getattr(first, each).dequantize(torch.float32), want)


def load_on_ranks(ctx: Context, folder: Path, kind: str, layout: str) -> tuple[Any, Any]:
    """A new checkpoint's model, whole, and spread over two ranks."""
    if ctx.rank == 0:
        write(folder, kind, layout)
    dist.barrier(ctx.group)
    return load_quantized(folder), load_quantized(folder, mesh=init_device_mesh("cpu", (2,)))


@distributed(2, device="cpu")
def test_ranks_read_row_scaled_experts(ctx: Context, tmp_path: Path) -> None:
    whole, model = load_on_ranks(ctx, tmp_path, "qwen3_moe", "ct-fp8-row")
    assert model.model.layers[1].mlp.experts.gate_up_proj.format == "fp8_row"
    assert snr(logits(whole), logits(model)) > 40
    assert set(save_quantized(model, tmp_path / "out", "fp8_row").values()) == {math.inf}
    dist.barrier(ctx.group)
    again = load_quantized(tmp_path / "out").state_dict()
    assert all(torch.equal(x, again[name]) for name, x in whole.state_dict().items())


def test_torch_dtype_is_dtype_as_in_from_pretrained(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "ct-mxfp8")
    for given in (torch.float32, torch.bfloat16):
        assert load_quantized(tmp_path, torch_dtype=given).dtype == given
    with pytest.raises(ValueError, match=r"dtype: expected torch\.bfloat16 or torch\.float32, got torch\.float16"):
        load_quantized(tmp_path, torch_dtype=torch.float16)


def test_fields_of_the_config_may_be_given_as_in_from_pretrained(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "ct-mxfp8")
    config = load_quantized(tmp_path, use_cache=False, output_router_logits=True, attn_implementation="eager").config
    assert (config.use_cache, config.output_router_logits, config._attn_implementation) == (False, True, "eager")
    with pytest.raises(TypeError, match="no_such_field"):
        load_quantized(tmp_path, no_such_field=1)


def test_a_model_that_is_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "minimax-m3")
    with torch.inference_mode():
        model = load_quantized(tmp_path)
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_ue8m0_scales_stored_as_floats_need_no_rescaling(tmp_path: Path) -> None:
    """DeepSeek-V3.1 stores powers of two in fp32: values decide, not dtypes."""
    write(tmp_path, "qwen3_moe", "ue8m0")
    state = load_file(tmp_path / "model.safetensors")
    change(tmp_path, **{n: x.float() for n, x in state.items() if n.endswith("weight_scale_inv")})
    load_quantized(tmp_path)


class Peak(TorchDispatchMode):
    """Most bytes of tensors alive at once that were made in it, mapped files apart."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                if storage.filename is None and storage.data_ptr() not in self.alive:
                    self.alive[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.alive.values()))
        return out


@pytest.mark.parametrize(("model", "kind"), [("gpt_oss", "gpt-oss"), ("qwen3_moe", "minimax-m3")])
def test_loading_takes_the_memory_of_the_model_and_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kind: str
) -> None:
    """A layer of its bytes; bf16 would be 2 or 4 times the model."""
    changes = {"moe_intermediate_size": 256, "intermediate_size": 256, "layer_types": ["full_attention"] * 4}
    write(tmp_path, model, kind, num_hidden_layers=4, hidden_size=128, **changes)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a mode sees its own thread
    gc.collect()
    with Peak() as peak:
        loaded = load_quantized(tmp_path)
    sizes = {n: p.nbytes for n, p in loaded.named_parameters()}
    layer = sum(size for n, size in sizes.items() if n.startswith("model.layers.0.mlp.experts."))
    assert layer > sum(sizes.values()) / 6, "experts are most of it"
    assert peak.most < sum(sizes.values()) + layer


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("minimax-m3", {"model__norm__weight": None}, "got missing .'model.norm.weight'"),
        ("minimax-m3", {"model__more__weight": torch.ones(3)}, "got unexpected .'model.more.weight'"),
        ("minimax-m3", {"model__norm__weight": torch.ones(3)}, "got mismatched .*model.norm.weight"),
        ("modelopt", {"model__layers__1__mlp__gate__input_scale": torch.ones(())}, "got unexpected .'model.layers"),
        (
            "minimax-m3",
            {f"model__layers__0__mlp__experts__3__up_proj__weight{end}": None for end in ("", "_scale_inv")},
            r"layers.0.mlp.experts.gate_up_proj: expected 4 experts of .*up_proj.weight, got 3",
        ),
        (
            "minimax-m3",
            {
                "model__layers__0__mlp__experts__2__up_proj__weight": None,
                "model__layers__0__mlp__experts__2__up_proj__weight_scale_inv": None,
                "model__layers__0__mlp__experts__4__up_proj__weight": torch.ones(32, 64).to(torch.float8_e4m3fn),
                "model__layers__0__mlp__experts__4__up_proj__weight_scale_inv": torch.ones(32, 2, dtype=torch.uint8),
            },
            r"gate_up_proj: expected 4 experts of .*up_proj.weight, from 0 on, got .*\.experts\.4\.up_proj",
        ),
        (
            "minimax-m3",
            {"model__layers__0__mlp__experts__3__up_proj__weight_scale_inv": torch.ones(32, 3, dtype=torch.uint8)},
            "experts.3.up_proj.weight: expected parts of a format",
        ),
        ("minimax-m3", {"model__layers__0__mlp__experts__3__up_proj__weight_scale_inv": None}, "expected a scale"),
        ("qwen3-fp8", {}, r"experts.0.gate_proj.weight: expected scales .* whole blocks of \(128, 128\).*rescale=True"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, kind: str, changes: Any, message: str) -> None:
    write(tmp_path, "qwen3_moe", kind)
    change(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_quantized(tmp_path)


def test_an_expert_that_does_not_fold_is_named(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "minimax-m3")
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    scale = load_file(tmp_path / "model.safetensors")[name]
    scale[:, 0] -= 40
    change(tmp_path, **{name: scale})
    with pytest.raises(ValueError, match=r"do not fold exactly, .*folded=False") as caught:
        load_quantized(tmp_path)
    assert caught.value.__notes__ == ["of expert 2 of model.layers.1.mlp.experts.gate_up_proj, which is not loaded"]


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "minimax-m3")
    plain = tmp_path / "values"
    with pytest.raises(ValueError, match=r"gate_proj.weight: expected quantized experts, .*freeze_experts"):
        load_quantized(plain)
    with pytest.raises(ValueError, match="experts_implementation: got 'eager', want one that mxep has registered"):
        load_quantized(tmp_path, experts_implementation="eager")
    with pytest.raises(ValueError, match=r"dtype: expected torch\.bfloat16 or torch\.float32, got 'auto'"):
        load_quantized(tmp_path, dtype="auto")
    config = json.loads((tmp_path / "config.json").read_text())
    for method in ("gptq", "bitsandbytes", "quark"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        with pytest.raises(ValueError, match=f"got '{method}'"):
            load_quantized(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"expected parts of one format that make \(4, 128, 64\), got \(4, 64, 64\)"):
        load_quantized(tmp_path)
    experts = {n: None for n in state if ".layers.1.mlp.experts." in n}
    (tmp_path / "config.json").write_text(json.dumps(config))
    change(tmp_path, **experts)
    with pytest.raises(ValueError, match=r"got none of model.layers.1.mlp.experts.down_proj"):
        load_quantized(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0, 1]}))
    with pytest.raises(ValueError, match="expected a model with experts that mxep runs, got Qwen3MoeForCausalLM"):
        load_quantized(tmp_path)


def test_a_loaded_model_trains_the_rest_and_generates(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss", "gpt-oss")
    model = load_quantized(tmp_path, attn_implementation="eager").train()
    assert model.config._attn_implementation == "eager"
    ids = token_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is None) is (".experts." in n) for n, p in model.named_parameters())
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 26)


@distributed(2, device="cpu")
def test_ranks_read_their_experts_alone(ctx: Context, tmp_path: Path) -> None:
    whole, model = load_on_ranks(ctx, tmp_path, "gpt_oss", "gpt-oss")
    experts, other = (each.model.layers[1].mlp.experts for each in (model, whole))
    here = slice(2 * ctx.rank, 2 * ctx.rank + 2)
    assert torch.equal(experts.down_proj.qdata, other.down_proj.qdata[here])
    assert torch.equal(experts.gate_up_proj_bias.to_local(), other.gate_up_proj_bias[here])
    assert snr(logits(whole), logits(model)) > 40
