"""Every module of experts that transformers decorates, alone, against its own eager code."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

from mxep.ep import LocalDispatcher, run_experts
from mxep.gemm import Recipe, grouped_mm
from mxep.integration.metrics import snr
from mxep.integration.transformers import NAMES
from mxep.integration.transformers import experts as experts_module
from mxep.quant import SwiGLU

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, DIM = 40, 64
MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"@use_experts_implementation(?:\(.*?\))?\s*\nclass (\w+)")


class Sizes:
    """A config that has every field, by what its name says."""

    def __init__(self) -> None:
        self._experts_implementation = "eager"
        self.moe_latent_size = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {
            r"act": "silu", r"per_tok|topk|top_k": 2, r"experts": 4, r"eps": 1e-6, r"limit": 7.0, r"alpha": 1.7,
            r"hidden_size|hidden_dim|d_model": DIM, r"bias": False, r"": 32,
        }  # fmt: skip
        return next(value for pattern, value in known.items() if re.search(pattern, name))


def made(folder: str, name: str) -> Any:
    torch.manual_seed(0)
    experts = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)(Sizes())
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=DIM**-0.5)
    return experts


def run(experts: Any, implementation: str | Recipe) -> dict[str, Tensor]:
    """Output and all gradients: by a name, or by mxep.ep's function of a recipe, where no name is looked up."""
    experts.zero_grad()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, DIM, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, generator=generator, requires_grad=True)
    if isinstance(implementation, Recipe):
        how = {"dispatcher": LocalDispatcher(4), "recipe": implementation}
        out, _ = run_experts(x, ids, weights, experts.gate_up_proj, experts.down_proj, **how)
    else:
        experts.config._experts_implementation = implementation
        out = experts(x, ids, weights)
    out.backward(torch.randn(out.shape, generator=generator))
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad} | grads


class Garbage(torch.autograd.Function):
    """NaN past the last group; the gradient as it comes, which may be quantized."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offs: Tensor) -> Tensor:
        return rows.masked_fill((torch.arange(len(rows)) >= offs[-1])[:, None], torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_each_name_gives_the_bits_of_its_recipe_and_of_no_other() -> None:
    """An SNR cannot tell FP8 from MXFP8. Rows of weights differ by up to 2^15, so that tiles have other scales."""
    experts = made("qwen3_moe", "Qwen3MoeExperts")
    for parameter in experts.parameters():
        powers = torch.randint(-15, 1, parameter.shape[:2], generator=torch.Generator().manual_seed(2))
        parameter.data *= torch.exp2(powers.float())[..., None]
    wanted = {name: run(experts, Recipe.named(name.removeprefix("mxep_"))) for name in NAMES if name != "mxep_auto"}
    for name in wanted:
        got = run(experts, name)
        equal = [other for other, its in wanted.items() if all(torch.equal(got[each], its[each]) for each in got)]
        assert equal == [name]


@pytest.mark.parametrize(
    ("folder", "name", "wanted"),
    [
        ("qwen3_moe", "Qwen3MoeExperts", SwiGLU()),
        ("gpt_oss", "GptOssExperts", SwiGLU(1.7, 7.0, 1.0, interleaved=True)),
        ("deepseek_v4", "DeepseekV4Experts", SwiGLU(1.0, 7.0)),  # it has `limit`
        ("minimax_m3_vl", "MiniMaxM3VLExperts", SwiGLU(1.7, 7.0, 1.0)),  # `swiglu_limit` and `swiglu_alpha`
        ("hy_v4", "HYV4Experts", SwiGLU(1.0, 7.0)),  # `swiglu_limit`
        ("nemotron_h", "NemotronHExperts", None),
    ],
)
def test_a_gate_is_known_with_its_limits(folder: str, name: str, wanted: SwiGLU | None) -> None:
    file = MODELS / folder / f"modeling_{folder}.py"
    if not file.exists() or name not in DECORATED.findall(file.read_text()):
        pytest.skip(f"this transformers does not decorate {name}")
    assert experts_module.activation_of(made(folder, name)) == wanted


def test_a_gate_of_its_own_keeps_what_it_wants_and_refuses_fp8() -> None:
    with pytest.raises(
        ValueError, match=r"NemotronHExperts: got recipe mxfp8_gate_up_fp8 for a gate of the model's own"
    ):
        run(made("nemotron_h", "NemotronHExperts"), "mxep_mxfp8_gate_up_fp8")


@pytest.mark.slow
def test_all_of_them_equal_their_own_code() -> None:
    fused = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        for name in DECORATED.findall(file.read_text()):
            experts = made(file.parent.name, name)
            wanted, got = run(experts, "eager"), run(experts, "mxep_bf16")
            lowest = min(snr(wanted[each], got[each]) for each in wanted)
            assert lowest > 125, name  # fp32, two products, sums in another order
            fused[name] = getattr(experts, experts_module.KEY).activation is not None
    assert len(fused) > 40
    assert sum(fused.values()) > 0.7 * len(fused)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("qwen3_moe", "Qwen3MoeExperts"),
        ("aria", "AriaExperts"),
        ("gpt_oss", "GptOssExperts"),
        ("nemotron_h", "NemotronHExperts"),
        ("muse_spark", "MuseSparkExperts"),
    ],
)
def test_each_layout_in_mxfp8_whatever_lies_in_rows_without_a_token(
    folder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MODELS / folder / f"modeling_{folder}.py"
    if not file.exists() or name not in DECORATED.findall(file.read_text()):
        pytest.skip(f"this transformers does not decorate {name}")

    def garbage(rows: Tensor, w: Tensor, offs: Tensor, **options: Any) -> Tensor:
        return Garbage.apply(grouped_mm(rows, w, offs, **options), offs)  # type: ignore[no-any-return]

    monkeypatch.setattr(experts_module, "grouped_mm", garbage)
    experts = made(folder, name)
    wanted, got = run(experts, "eager"), run(experts, "mxep_mxfp8")
    for each in wanted:
        # Two products of two quantized operands, 28.4 dB each, and as many behind each gradient.
        assert snr(wanted[each], got[each]) > 20, each


@pytest.mark.parametrize("name", ["limit", "swiglu_limit"])
@pytest.mark.parametrize("alpha", [None, "alpha", "swiglu_alpha"])
def test_a_limit_and_an_alpha_are_found_by_either_name(name: str, alpha: str | None) -> None:
    class Experts(torch.nn.Module):
        has_gate, is_concatenated = True, True

        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, 5.0)
            if alpha is not None:
                setattr(self, alpha, 1.5)

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, -1)
            gate, up = gate.clamp(max=5.0), up.clamp(-5.0, 5.0)
            return up * gate * torch.sigmoid(gate * (1.0 if alpha is None else 1.5))

    assert experts_module.activation_of(Experts()) == SwiGLU(1.0 if alpha is None else 1.5, 5.0)
