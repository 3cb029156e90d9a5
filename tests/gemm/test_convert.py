"""A converted model multiplies by ours, forward and backward, and says where it does not."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from gemm.problem import snr
from mxep.gemm import convert, converted, grouped_mm, quantize_weights_once, revert
from mxep.quant import pad_groups, unpad_groups

E, D, H = 3, 64, 96
SIZES = (30, 0, 7)


class Experts(nn.Module):
    """As transformers has them: gate and up in one weight."""

    def __init__(self, num_experts: int = E, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * H, D, dtype=dtype) / 8)
        self.down_proj = nn.Parameter(torch.randn(num_experts, D, H, dtype=dtype) / 10)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=offs).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=offs)


class TitanExperts(nn.Module):
    """As torchtitan has them: three fp32 weights, cast where they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(E, H, D) / 8)
        self.w2_EDF = nn.Parameter(torch.randn(E, D, H) / 10)
        self.w3_EFD = nn.Parameter(torch.randn(E, H, D) / 8)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1_EFD.bfloat16().transpose(-2, -1), offs=offs))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3_EFD.bfloat16().transpose(-2, -1), offs=offs)
        return torch._grouped_mm(h, self.w2_EDF.bfloat16().transpose(-2, -1), offs=offs).type_as(x)


class Model(nn.Module):
    """Two layers of experts after a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        x = self.dense(x)
        for layer in self.layers:
            x = x + layer(x, offs)
        return x


def made(kind: Callable[[], nn.Module] = Experts) -> Any:
    torch.manual_seed(0)
    return kind()


def inputs(sizes: Sequence[int] = SIZES, rows: int = 37) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x, torch.tensor(sizes).cumsum(0).int()


def train(model: nn.Module, x: Tensor, offs: Tensor) -> dict[str, Tensor]:
    """Output, gradient of x and of all parameters of one forward and backward; rows in no group left out."""
    x = x.detach().requires_grad_()
    valid = int(offs[-1])
    model.zero_grad()
    out = model(x, offs)[:valid]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad[:valid], **grads}


def same(results: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return results.keys() == others.keys() and all(torch.equal(results[name], others[name]) for name in results)


def ours(x: Tensor, w: Tensor, offs: Tensor, recipe: str = "mxfp8") -> Tensor:
    """x (M, K), w (G, N, K): padded, multiplied and unpadded by hand."""
    padded = pad_groups(x, offs.diff(prepend=offs.new_zeros(1)), alignment=32)
    return unpad_groups(grouped_mm(padded.rows, w, padded.offs, recipe=recipe), padded.row_index, num_rows=len(x))


@pytest.mark.parametrize(
    ("kind", "recipe"), [(Experts, "mxfp8"), (TitanExperts, "fp8_e5m2"), (TitanExperts, "bf16"), (Model, "mxfp8")]
)
def test_a_converted_model_stays_close_to_itself_in_all_gradients(kind: Callable[[], nn.Module], recipe: str) -> None:
    plain, model = train(made(kind), *inputs()), train(convert(made(kind), recipe), *inputs())
    # Two or three products in a row, each at 28.4 dB (24.5 with E5M2), add their errors; bf16 rounds to 8 bits.
    floor = {"mxfp8": 20, "fp8_e5m2": 16, "bf16": 40}[recipe]
    for name in plain:
        assert snr(plain[name].double(), model[name]) > floor, name
        assert model[name].dtype == plain[name].dtype
    assert recipe == "bf16" or not same(plain, model)


def test_both_products_are_ours_forward_and_backward_bit_for_bit() -> None:
    x, offs = inputs()
    by_hand = made()

    def forward(x: Tensor, offs: Tensor) -> Tensor:
        gate, up = ours(x, by_hand.gate_up_proj, offs).chunk(2, -1)
        return ours(F.silu(gate) * up, by_hand.down_proj, offs)

    by_hand.forward = forward
    assert same(train(convert(made()), x, offs), train(by_hand, x, offs))


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w[:, :H],
        lambda w: w[1:][:2, 32:],
        lambda w: w.chunk(2, 1)[1],
        lambda w: torch.split(w, [32, 160], 1)[1],
        lambda w: w.narrow(1, 64, 32),
        lambda w: w.view(E, 2, H, D)[:, 1],
        lambda w: w.float(),
        lambda w: w.float()[:, 32:].to(torch.bfloat16),
        lambda w: w.mT.contiguous().permute(0, 2, 1),
        lambda w: w.detach().clone(),
        lambda w: w[torch.tensor([2, 0, 1])],
        lambda w: w[[2, 0, 1]],
        lambda w: w[..., None, :][:, :, 0],
    ],
)
def test_views_and_casts_of_a_weight_are_weights(view: Callable[[Tensor], Tensor]) -> None:
    wanted = view(made().gate_up_proj)
    x, offs = inputs()[0], torch.tensor([20, 33, 37][-len(wanted) :], dtype=torch.int32)
    model = with_forward(lambda self, x, offs: torch._grouped_mm(x, view(self.gate_up_proj).mT, offs=offs))
    with quantize_weights_once():
        for _ in range(2):
            out = model(x, offs)
            assert type(out) is Tensor
            assert torch.equal(out, ours(x, wanted, offs))


def with_forward(forward: Callable[..., Any], filter: Any = None, strict: bool = False, **options: Any) -> Any:
    """Experts with this forward, converted; by default gate_up_proj alone."""
    model = made(lambda: type("Experts", (Experts,), {"forward": forward})())
    return convert(model, filter=filter or (lambda fqn, p: "gate" in fqn), strict=strict, **options)


def test_a_copy_that_was_written_to_is_not_taken_for_the_weight() -> None:
    def forward(self: Any, x: Tensor, offs: Tensor, by: float) -> Tensor:
        w = self.gate_up_proj.clone()
        w.mul_(by)
        return torch._grouped_mm(x, w.mT, offs=offs)

    model, (x, offs) = with_forward(forward), inputs()
    with torch.no_grad(), quantize_weights_once():
        for by in (1.0, 4.0, 1.0):
            assert torch.equal(model(x, offs, by), by * ours(x, made().gate_up_proj, offs))


def test_arguments_may_be_given_by_position_as_to_torchs() -> None:
    x, offs = inputs()
    model = with_forward(lambda self, x, offs: torch._grouped_mm(x, self.gate_up_proj.mT, offs, None, torch.bfloat16))
    assert torch.equal(model(x, offs), ours(x, made().gate_up_proj, offs))


X3, X = torch.randn(E, 16, D), torch.randn(16, D)
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "3-D x 3-D": lambda w: torch._grouped_mm(X3.bfloat16(), w.mT),
    "2-D x 2-D": lambda w: torch._grouped_mm(
        w[0].mT, torch.ones(2 * H, 32).bfloat16(), offs=torch.tensor([96, 192]).int()
    ),
    "bmm": lambda w: torch.bmm(X3.bfloat16(), w.mT),
    "an expert at a time": lambda w: F.linear(X.bfloat16(), w[0]),
    "gathered": lambda w: X.bfloat16()[:3, None] @ w[[2, 0, 2]].mT,
}


@pytest.mark.parametrize(
    ("kind", "compiled"), [*((kind, False) for kind in OTHERS), ("3-D x 3-D", True), ("gathered", True)]
)
def test_other_products_are_torchs_own_and_named(kind: str, compiled: bool) -> None:
    product = OTHERS[kind]
    wanted = product(made().gate_up_proj)

    def run(strict: bool) -> Any:
        torch._dynamo.reset()
        layers = nn.ModuleList([made(lambda: type("Experts", (Experts,), {"forward": forward})())])
        convert(layers, filter=lambda fqn, p: "gate" in fqn, strict=strict, backend="reference")
        return torch.compile(layers[0], fullgraph=True, backend="aot_eager") if compiled else layers[0]

    def forward(self: Any) -> Tensor:
        return product(self.gate_up_proj)

    message = r"0.gate_up_proj: no product of this forward ran in mxfp8: torch's grouped mm"
    model = run(strict=False)
    with pytest.warns(UserWarning, match=message):
        out = model()
    assert type(out) is Tensor
    assert torch.equal(out, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model()  # once
    with pytest.raises(Exception, match=message) as caught:
        run(strict=True)()
    assert compiled or caught.type is RuntimeError


def test_nothing_is_said_of_a_forward_without_rows() -> None:
    model = with_forward(lambda self, x: F.linear(x, self.gate_up_proj[0]), strict=True)
    assert model(X.bfloat16()[:0]).shape == (0, 2 * H)
    with pytest.raises(RuntimeError, match="gate_up_proj: no product"):
        model(X.bfloat16())


def test_weights_in_lists_belong_to_the_module_around_them() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(E, D, D).bfloat16() / 8) for _ in range(2)])

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return F.grouped_mm(F.grouped_mm(x, self.weights[0].mT, offs=offs), self.weights[1].mT, offs=offs)

    model, (x, offs) = made(Listed), inputs()
    assert list(converted(convert(model, strict=True))) == ["weights.0", "weights.1"]
    assert torch.equal(model(x, offs), ours(ours(x, model.weights[0], offs), model.weights[1], offs))


def test_weights_that_another_module_multiplies_by_are_named() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return F.grouped_mm(x, self.experts.gate_up_proj.mT, offs=offs)

    message = "experts.gate_up_proj: it has a gradient, but no forward of its module ran a product in mxfp8"
    with pytest.warns(UserWarning, match=message):
        convert(made(Around))(*inputs()).square().sum().backward()
    with pytest.raises(RuntimeError, match=message):
        convert(made(Around), strict=True)(*inputs()).square().sum().backward()
    for strict in (False, True):
        model = convert(made(Around), strict=strict)
        model.experts.gate_up_proj = nn.Parameter(model.experts.gate_up_proj.detach().clone())  # as FSDP2 does
        optimizer, other = torch.optim.SGD(model.parameters()), torch.optim.SGD([nn.Parameter(torch.ones(1))])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(*inputs()).square().sum().backward()
            other.step()
        with pytest.raises(RuntimeError, match=message) if strict else pytest.warns(UserWarning, match=message):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            revert(model)
            optimizer.step()


class Delta(nn.Module):
    """What PEFT puts on a parameter for one forward."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.randn_like(like) / 32)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.delta


def test_weights_with_an_adapter_on_them_are_converted() -> None:
    model = convert(made(), strict=True)
    down_proj, adapter = model.down_proj, Delta(model.down_proj)
    for _ in range(2):  # PEFT does so at each forward
        parametrize.register_parametrization(model, "down_proj", adapter)
        results = train(model, *inputs())
        with pytest.raises(
            ValueError, match=r"gate_up_proj: got a parametrized .*Experts, want it plain: convert before"
        ):
            convert(parametrize.register_parametrization(made(), "down_proj", adapter))
        parametrize.remove_parametrizations(model, "down_proj", leave_parametrized=False)
        wanted = convert(made())
        wanted.down_proj.data = (down_proj + adapter.delta).detach()
        assert torch.equal(results["out"], train(wanted, *inputs())["out"])
        assert "parametrizations.down_proj.0.delta" in results
        assert model.down_proj is down_proj


def test_main_grad_gets_what_belongs_to_the_part_that_was_used() -> None:
    for forward in (
        lambda self, x, offs: F.grouped_mm(x, self.gate_up_proj.mT, offs=offs),
        lambda self, x, offs: F.grouped_mm(x, self.gate_up_proj[:, H:].transpose(-2, -1), offs=offs),
    ):
        plain, model = with_forward(forward), with_forward(forward, strict=True)
        results = train(plain, *inputs())
        model.gate_up_proj.main_grad = torch.ones(model.gate_up_proj.shape)
        others = train(model, *inputs())
        grad = results.pop("gate_up_proj").float()
        assert same(others, results)
        torch.testing.assert_close(model.gate_up_proj.main_grad.sub(1), grad, rtol=2**-7, atol=1e-5)
    cast = with_forward(lambda self, x, offs: F.grouped_mm(x, self.gate_up_proj.float().mT, offs=offs))
    cast.gate_up_proj.main_grad = torch.zeros(cast.gate_up_proj.shape)
    with pytest.warns(UserWarning, match="gate_up_proj: its main_grad gets nothing, .grad does"):
        assert "gate_up_proj" in train(cast, *inputs())
    assert not cast.gate_up_proj.main_grad.any()


def test_parameters_are_found_and_put_anew_by_name() -> None:
    model, (x, offs) = convert(made(Model), strict=True), inputs()
    parameters = dict(model.named_parameters())
    assert model.get_parameter("layers.0.down_proj") is parameters["layers.0.down_proj"]
    assert model.layers[0].down_proj is parameters["layers.0.down_proj"]
    experts = model.layers[0]
    before = experts(x, offs)
    experts.down_proj = nn.Parameter(-experts.down_proj.detach())
    assert torch.equal(experts(x, offs), -before)
    experts.register_parameter("down_proj", nn.Parameter(-experts.down_proj.detach()))
    assert torch.equal(experts(x, offs), before)


class Fused(TitanExperts):
    """Gate and up are joined for one product, by arguments with and without names."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        joined = torch.cat(tensors=(self.w1_EFD, self.w3_EFD), dim=1).bfloat16()
        gate, up = torch._grouped_mm(x.bfloat16(), joined.transpose(-2, -1), offs=offs).chunk(2, -1)
        down = torch.mul(input=self.w2_EDF, other=2.0).bfloat16()
        return F.grouped_mm(mat_a=F.silu(gate) * up, mat_b=down.transpose(-2, -1), offs=offs).type_as(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_of_joined_weights_is_one_of_each(compiled: bool) -> None:
    """None of them is missing, whose product it is."""
    (x, offs), model = inputs(), convert(made(Fused), backend="reference", strict=True)
    plain = train(made(Fused), x, offs)
    results = train(torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model, x, offs)
    assert {name.removeprefix("_orig_mod.") for name in results} == plain.keys()
    assert not torch.equal(results["out"], plain["out"])


def test_main_grads_of_joined_weights_are_told_to_get_nothing() -> None:
    model = convert(made(Fused), backend="reference")
    model.w1_EFD.main_grad, model.w3_EFD.main_grad = (torch.zeros(E, H, D) for _ in range(2))
    with pytest.warns(UserWarning, match="main_grad gets nothing") as told:
        train(model, *inputs())
    assert [str(warning.message).split(":")[0] for warning in told] == ["w1_EFD", "w3_EFD"]
    assert model.w3_EFD.grad.any()


@pytest.mark.parametrize("strict", [False, True])
def test_a_converted_model_is_exported(strict: bool) -> None:
    model, (x, offs) = convert(made(), backend="reference", strict=True), inputs()
    with torch.no_grad():
        program = torch.export.export(model, (x, offs), strict=strict)
        assert torch.equal(program.module()(x, offs), model(x, offs))
    assert "down_proj" in program.state_dict


def test_a_forward_put_on_the_module_itself_is_refused() -> None:
    model = made()
    model.forward = lambda x, offs: x
    with pytest.raises(ValueError, match=r"gate_up_proj: got a Experts whose forward was replaced.*convert before"):
        convert(model)


def test_convolutions_are_left_alone() -> None:
    model = nn.ModuleList([nn.Conv1d(32, 32, 3), Experts()])
    assert list(converted(convert(model))) == ["1.gate_up_proj", "1.down_proj"]


class Transposed(Experts):
    """Transposes its weights in one of three ways. Transposed before its forward they are tensors of their own to
    torch.compile, in any version of torch."""

    way = "transpose"

    def operands(self) -> tuple[Tensor, ...]:
        weights = self.gate_up_proj, self.down_proj
        if self.way == "before":
            return self.before
        return tuple(w.mT if self.way == "mT" else w.transpose(-2, -1) for w in weights)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        ups, downs = self.operands()
        return F.grouped_mm(F.grouped_mm(x, ups, offs=offs)[:, :H], downs, offs=offs)


def transposed(way: str) -> Transposed:
    model = made(Transposed)
    model.way, model.before = way, tuple(p.detach().transpose(-2, -1) for p in model.parameters())
    return model


class Zeros(TorchFunctionMode):
    """Gives zeros for every function of torch that it is told of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(2, 2)


@torch.compile(fullgraph=True, backend="eager")
def zeros_for_mT(w: Tensor) -> Tensor:
    with Zeros():
        return w.mT


def compile_shows_mT() -> bool:
    """Whether torch.compile tells a mode of .mT: torch 2.15 does, 2.13 does not."""
    return not zeros_for_mT(torch.ones(2, 2)).any()


@pytest.mark.parametrize("way", ["transpose", "mT", "before"])
def test_weights_converted_differently_compile_or_say_how(way: str) -> None:
    torch._dynamo.reset()
    model = convert(transposed(way), filter=lambda fqn, p: "gate" in fqn, backend="reference")
    convert(model, "fp8", filter=lambda fqn, p: "down" in fqn, backend="reference")
    wanted = model(*inputs())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if way == "transpose" or (way == "mT" and compile_shows_mT()):
        assert torch.equal(compiled(*inputs()), wanted)
    else:
        with pytest.raises(Exception, match=r"gate_up_proj, down_proj: torch.compile does not show which"):
            compiled(*inputs())


@pytest.mark.parametrize("way", ["mT", "before"])  # by transpose: test_convert_model.py
def test_weights_converted_alike_compile_however_they_are_transposed(way: str) -> None:
    torch._dynamo.reset()
    model = convert(transposed(way), backend="reference", strict=True)
    wanted = model(*inputs())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs()), wanted)
    assert not torch.equal(wanted, transposed(way)(*inputs()))


@pytest.mark.parametrize("sizes", [(0, 0, 0), (40, 0, 0), (1, 1, 1), (13, 14, 12)])
def test_groups_have_any_size_and_rows_in_none_are_zero(sizes: Sequence[int]) -> None:
    x, offs = inputs(sizes, rows=40)
    plain, model = made(), convert(made())
    out = model(x, offs)
    assert not out[sum(sizes) :].any()
    if sum(sizes):
        assert snr(plain(x, offs)[: sum(sizes)].detach().double(), out[: sum(sizes)].detach()) > 20


@pytest.mark.parametrize("strict", [False, True])
def test_a_conversion_that_multiplies_nothing_is_told_at_the_first_gradient(strict: bool) -> None:
    """Whoever replaces both the class and the forward of what was converted takes the other warnings with it."""
    x, offs = inputs()
    model = convert(made(), strict=strict)
    model.__class__ = Experts
    loss = model(x, offs).square().sum()
    expected = "(gate_up_proj|down_proj): it has a gradient, but no forward of its module ran a product in mxfp8"
    if strict:
        with pytest.raises(RuntimeError, match=expected):
            loss.backward()
        return
    with pytest.warns(UserWarning, match=expected) as told:
        loss.backward()
    assert len(told) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, offs).square().sum().backward()


def test_gradients_of_reverted_and_of_multiplied_weights_tell_nothing() -> None:
    x, offs = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revert(convert(made()))(x, offs).square().sum().backward()
        model = convert(made())
        model(x, offs).square().sum().backward()
        model.__class__ = Experts  # from here on nobody knows
        model(x, offs).square().sum().backward()


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_main_grads_may_be_views_of_one_flat_buffer(recipe: str) -> None:
    """As Megatron has them: each lies at an offset of its own."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(2, 64, 64, dtype=torch.bfloat16)) for _ in range(2))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            hidden = torch._grouped_mm(x, self.first.mT, offs=offs)
            out: Tensor = torch._grouped_mm(hidden, self.second[:, :32].mT, offs=offs)
            return out

    torch.manual_seed(0)
    model, x = convert(Two(), recipe), torch.randn(64, 64, dtype=torch.bfloat16)
    offs = torch.tensor([32, 64], dtype=torch.int32)
    model(x, offs).sum().backward()
    wanted = [p.grad for p in (model.first, model.second)]
    model.first.grad = model.second.grad = None
    flat = torch.ones(3, 2 * 64 * 64)
    model.first.main_grad, model.second.main_grad = (flat[i].view(2, 64, 64) for i in (1, 2))  # type: ignore[attr-defined]
    model(x, offs).sum().backward()
    assert model.first.grad is None
    assert model.second.grad is None
    assert (flat[0] == 1).all(), "nothing is written beside them"
    for got, grad in zip(flat[1:], wanted):
        assert grad is not None
        torch.testing.assert_close(got.view(2, 64, 64) - 1, grad.float(), rtol=2**-7, atol=2**-6)
