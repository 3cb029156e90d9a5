"""nn.Linear under convert: what is converted, what is left alone, and that the model is otherwise the model it was."""

import copy
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from gemm.problem import snr
from gemm.test_convert import same
from mxep.gemm import Linear, convert, converted, linear, quantize_weights_once, revert

D, H, V = 64, 96, 160


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate_proj = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.sigmoid(self.gate_proj(x)) * (q * k + v)


class MLP(nn.Module):
    """A dense layer with what a mixture has beside: a router, a gate of the shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)
        self.gate, self.shared_expert_gate = nn.Linear(D, 32, bias=False), nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down_proj(self.up_proj(x).relu())
        return y * self.gate(x).softmax(-1).amax(-1, keepdim=True) * self.shared_expert_gate(x).sigmoid()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(H, D)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": Attention(), "mlp": MLP()}) for _ in range(2))
        self.project, self.output = nn.Linear(D, 40), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = x + layer["attention"](x)
            x = x + layer["mlp"](x)
        out: Tensor = self.output(x) + self.project(x).sum(-1, keepdim=True)
        return out


LINEAR = [f"layers.{i}.{name}.weight" for i in (0, 1) for name in
          ("attention.qkv", "attention.gate_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
IDS = torch.arange(2 * 37).view(2, 37) % V


def train(model: nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(ids)
    out.float().square().mean().backward()
    return {"out": out.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def test_default_converts_projections_and_says_what_it_leaves_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mxep.gemm"):
        model = convert(Model())
    assert list(converted(model)) == LINEAR
    said = caplog.text
    assert "convert: mxfp8: layers.*.attention.qkv.weight (2), layers.*.attention.gate_proj.weight (2)" in said
    assert "(a router, by its name): layers.*.mlp.gate.weight (2), layers.*.mlp.shared_expert_gate.weight (2)" in said
    assert "(the head: by its name, or has as many outputs as the embedding rows): output.weight" in said
    assert "(its sizes are no multiples of 32, which recipe mxfp8 wants): project.weight" in said


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda: nn.ModuleDict({"a": nn.Linear(32, 32), "lm_head": nn.Linear(32, 64)}), "lm_head"),
        (lambda: nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.ModuleDict({"lora_A": nn.Linear(32, 64)})}), "lora_A"),
        (lambda: nn.ModuleDict({"a": nn.Linear(32, 32), "router": nn.Sequential(nn.Linear(32, 64))}), "router.0"),
        (lambda: nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32).half()}), "b"),
        (lambda: nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.MultiheadAttention(32, 1)}), "out_proj"),
        (lambda: nn.ModuleDict({"a": nn.Linear(32, 32), "b": Linear(32, 32)}), "b"),
    ],
)  # fmt: skip
def test_default_leaves_alone(make: Callable[[], nn.Module], left: str) -> None:
    model = convert(make())
    assert list(converted(model)) == ["a.weight"]
    assert any(left in name for name, _ in model.named_modules())


def pruned(linear: nn.Linear) -> nn.Module:
    prune.l1_unstructured(linear, "weight", 0.5)
    return linear


COMPUTED: list[Callable[[nn.Linear], nn.Module]] = [
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
    pruned,
    nn.utils.parametrizations.weight_norm,
    nn.utils.parametrizations.orthogonal,
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("compute", COMPUTED)
def test_a_weight_that_is_computed_before_each_forward_is_left_alone(
    compute: Callable[[nn.Linear], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    made, x = compute(nn.Linear(32, 32)), torch.randn(4, 32)
    model = nn.Sequential(made, nn.Linear(32, 32))
    wanted = made.eval()(x)
    with caplog.at_level(logging.INFO, "mxep.gemm"):
        convert(model)
    assert list(converted(model)) == ["1.weight"]
    assert re.search(r"left alone \((parametrized|its weight is computed before each forward.*)\): 0\.", caplog.text)
    assert torch.equal(made(x), wanted)
    model(x).sum().backward()
    other = compute(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"got no parameter that passes the filter.*(parametrized|is computed before)"):
        convert(nn.Sequential(other))
    with pytest.raises(ValueError, match="want it plain: convert before"):
        convert(nn.Sequential(other), filter=lambda fqn, _: "bias" not in fqn)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("compute", COMPUTED)
def test_a_converted_linear_multiplies_by_the_weight_that_is_computed_later(
    compute: Callable[[nn.Linear], nn.Module],
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 32), torch.randn(4, 32)
    convert(nn.Sequential(layer))
    compute(layer)
    layer.eval()
    out = layer(x)
    assert torch.equal(out, linear(x, layer.weight, layer.bias, recipe="mxfp8"))
    out.sum().backward()
    assert any(p.grad is not None and p.grad.any() for name, p in layer.named_parameters() if name != "bias")


def test_a_spectral_norm_takes_one_power_iteration_a_forward_as_in_f_linear() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 32)
    ours = convert(nn.Sequential(copy.deepcopy(plain)))[0]
    for layer in (plain, ours):
        torch.manual_seed(1)
        nn.utils.parametrizations.spectral_norm(layer)(torch.ones(4, 32))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))


def test_linears_with_a_forward_of_their_own_are_named_where_nothing_is_converted() -> None:
    class Float8Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    with pytest.raises(ValueError, match=r"left alone: .*a Float8Linear, which has a forward of its own.*0\.weight"):
        convert(nn.Sequential(Float8Linear(32, 32)))


def test_a_linear_without_a_shape_or_another_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight: got a parameter without a shape, want one: run the model once"):
        convert(nn.Sequential(nn.LazyLinear(32)))

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32)
            self.scale = nn.Parameter(torch.ones(32))

    assert list(converted(convert(Scaled()))) == ["weight"]
    with pytest.raises(ValueError, match="scale: got a parameter of a linear, want its weight"):
        convert(Scaled(), filter=lambda fqn, _: True)


def test_a_filter_decides_and_biases_follow_their_weights() -> None:
    model = convert(Model(), "fp8", lambda fqn, p: fqn.startswith(("output", "layers.1.attention")))
    assert list(converted(model)) == [
        "layers.1.attention.qkv.weight",
        "layers.1.attention.gate_proj.weight",
        "output.weight",
    ]
    assert same(train(convert(model, "mxfp8", lambda fqn, p: fqn == LINEAR[0])), train(model))


def test_a_converted_model_is_close_and_each_product_is_linear() -> None:
    plain, model = train(Model()), convert(Model())
    got = train(model)
    # The two layers' eight products and the products of their results add up; one has 28.4 dB.
    assert snr(plain["out"].double(), got["out"]) > 28
    assert all(snr(plain[name].double(), got[name]) > 14 for name in LINEAR)
    x, layer = torch.randn(5, D), model.layers[0]["attention"].qkv
    assert torch.equal(layer(x), linear(x, layer.weight, layer.bias, recipe="mxfp8"))
    assert type(layer).__name__ == "Linear"
    assert isinstance(layer, nn.Linear)
    assert same(train(revert(model)), plain)
    assert type(layer) is nn.Linear


def test_main_grad_checkpointing_and_one_quantization_a_step() -> None:
    model, wanted = convert(Model()), train(convert(Model()))
    weight = model.get_parameter(LINEAR[2])
    weight.main_grad = torch.zeros(H, D)  # type: ignore[attr-defined]
    with quantize_weights_once() as once:
        for _ in range(2):
            model.zero_grad()
            checkpoint(model, IDS, use_reentrant=False).square().mean().backward()
        assert once.quantizations == 2 * len(LINEAR)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 2 * wanted[LINEAR[2]])  # type: ignore[attr-defined]
    assert torch.equal(model.get_parameter(LINEAR[3]).grad, wanted[LINEAR[3]])  # type: ignore[arg-type]


def test_one_that_is_never_called_is_reported_once() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x) @ self.idle.weight.T
            return out

    model, x = convert(Partly()), torch.randn(3, D)
    with pytest.warns(UserWarning, match=r"^idle.weight: it has a gradient, but no forward of its module ran a"):
        model(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"idle\.weight"):
        convert(Partly(), strict=True)(x).sum().backward()


def test_wrong_use_says_what_to_do() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    with pytest.raises(ValueError, match=r"0.weight: got torch.float32 \(32, 32\) of a Own, want .* an nn.Linear"):
        convert(nn.Sequential(Own(32, 32)), filter=lambda fqn, p: "weight" in fqn)
    with pytest.raises(ValueError, match=r"left alone: .*a router, by its name.*gate\.weight"):
        convert(nn.ModuleDict({"gate": nn.Linear(32, 32)}))
    with pytest.raises(ValueError, match="already converted"):
        convert(convert(nn.Linear(32, 32)))
    with pytest.raises(ValueError, match=r"weight: N: got 40, want a multiple of 32"):
        convert(nn.Linear(32, 40), filter=lambda fqn, p: True)(torch.randn(2, 32))
    with pytest.raises(ValueError, match="parametrized Parametrized"):
        convert(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), filter=lambda fqn, p: True)


@pytest.mark.slow
def test_peft_adapts_a_converted_linear_and_a_converted_base() -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=32, target_modules=["qkv", "up_proj"])
    x = torch.arange(37)[None] % V
    before = peft.get_peft_model(convert(Model()), config)
    after = convert(peft.get_peft_model(Model(), config))
    assert [name for name in converted(after) if "lora" in name] == []
    results = []
    for model in (before, after):
        assert len(converted(model)) == len(LINEAR)
        torch.manual_seed(1)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p)
            elif "lora_A" in name:
                nn.init.constant_(p, 0.1)
        results.append(train(model, x))
    assert same(*results)
    assert all("lora" in name for name in results[0] if name != "out")


def test_a_linear_that_the_model_has_at_several_places_is_converted_once_and_nothing_is_told() -> None:
    shared = nn.Linear(D, D)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    convert(model, "mxfp8", strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(8, D)).sum().backward()
    assert converted(model)["0.weight"] is converted(model)["2.weight"]
