"""join_linears: a converted model computes what it did, its siblings in one product, whatever its forward does."""

import copy
import logging
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from gemm.problem import snr
from gemm.test_functional import Counting
from mxep.gemm import convert, converted, join_linears, quantize_weights_once, revert
from mxep.gemm.convert import state_of

D, KV, H = 64, 32, 96


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(D, D), nn.Linear(D, KV, bias=False)
        self.v_proj, self.o_proj = nn.Linear(D, KV, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (4, 16)).transpose(1, 2)
        other = x if encoded is None else encoded
        k, v = (proj(other).unflatten(-1, (2, 16)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.down_proj = nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))  # up before gate
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        out: Tensor = x + self.mlp(x)
        return out


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def given() -> Tensor:
    return torch.randn(2, 37, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


def train(module: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """The output, and gradients of x and all parameters."""
    x = given()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, *parameters])]


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    """The forward's first bits are the same; gradients of x are rounded fewer times."""
    return all(snr(b.double(), a) > 40 for a, b in zip(one, other, strict=True))


def test_a_joined_model_is_the_converted_one_with_fewer_products(caplog: pytest.LogCaptureFixture) -> None:
    apart, backend = convert(model(), "mxfp8", backend="reference"), Counting()
    with caplog.at_level(logging.INFO, "mxep.gemm"):
        joined = join_linears(convert(model(), "mxfp8", backend=backend))
    assert "join_linears: *.self_attn.q_proj + k_proj + v_proj (2), *.mlp.gate_proj + up_proj (2)" in caplog.text
    assert list(joined.state_dict()) == list(model().state_dict())
    wanted, got = (train(m, list(m.parameters())) for m in (apart, joined))
    assert torch.equal(got[0], wanted[0])
    assert close(got, wanted)
    assert [backend.asked.count(name) for name in ("forward", "dgrad", "wgrad")] == [8] * 3, "14 apart"
    states = [state_of(m) for m in joined.modules()]
    found = {id(state.joined): state.joined for state in states if state is not None and state.joined is not None}
    assert [one.held for one in found.values()] == [None] * 4, "nothing is left over"


def test_it_survives_checkpoints_copies_pickles_and_shared_quantizations() -> None:
    joined = join_linears(convert(model(), "mxfp8", backend="reference"))
    wanted = train(joined, list(joined.parameters()))
    others = [copy.deepcopy(joined), pickle.loads(pickle.dumps(joined))]
    runs = [(other, other) for other in others]
    runs += [(lambda x: checkpoint(joined, x, use_reentrant=False), joined)]  # type: ignore[list-item]
    for run, owner in runs:
        assert all(torch.equal(a, b) for a, b in zip(train(run, list(owner.parameters())), wanted))
    with quantize_weights_once() as once:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(train(joined, list(joined.parameters())), wanted))
    assert once.quantizations == 2 * 8


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    joined = join_linears(convert(model()[0], "mxfp8", backend="reference"))  # type: ignore[index]
    compiled = torch.compile(joined, fullgraph=True, backend="aot_eager")
    results = [train(run, list(joined.parameters())) for run in (joined, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_main_grads_are_those_of_separate_products() -> None:
    joined = join_linears(convert(Attention(), "mxfp8", backend="reference"))
    joined(given()).sum().backward()
    want = joined.k_proj.weight.grad
    main_grad = joined.k_proj.weight.main_grad = torch.zeros(KV, D)  # type: ignore[attr-defined]
    joined.zero_grad()
    joined(given()).sum().backward()
    assert joined.k_proj.weight.grad is None
    torch.testing.assert_close(main_grad, want)


class Writing(nn.Module):
    """A forward that rotates q in place and joins rows and heads by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, n) for n in (D, KV, KV))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q *= 2
        k.mul_(3).add_(1)
        return torch.cat([each.view(-1, 16) for each in (q, k, v)])


def test_copies_may_be_written_to_and_viewed_anyhow(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    writing = convert(Writing(), "mxfp8", backend="reference")
    wanted = train(writing, list(writing.parameters()))
    with caplog.at_level(logging.INFO, "mxep.gemm"):
        join_linears(writing)
    assert "results are views of one, which no forward may write to (copies=True" in caplog.text
    with pytest.raises(RuntimeError, match="view"):
        writing(given())
    for x in (given(), given()[:1, :1]):  # a row, which is contiguous, is a view all the same
        join_linears(revert_and_convert(writing), copies=True)
        assert writing(x).shape == (x.shape[:-1].numel() * 8, 16)
    got = train(writing, list(writing.parameters()))
    assert torch.equal(got[0], wanted[0])
    assert close(got, wanted)


def revert_and_convert(module: nn.Module) -> nn.Module:
    return convert(revert(module), "mxfp8", backend="reference")


def test_grad_mode_is_part_of_what_an_input_is() -> None:
    attention, x = convert(Attention(), "mxfp8", backend="reference"), given().detach()
    join_linears(attention)
    with torch.no_grad():
        attention.q_proj(x)
    k = attention.k_proj(x)
    assert k.requires_grad, "what was computed without a graph does not serve"
    (gradient,) = torch.autograd.grad(k.sum(), attention.k_proj.weight)
    assert gradient.any()
    v = attention.v_proj(x)
    attention.q_proj(x)
    with torch.no_grad():
        assert not attention.k_proj(x).requires_grad
    assert v.requires_grad


def test_autocast_is_part_of_what_an_input_is() -> None:
    attention, x = convert(Attention(), "mxfp8", backend="reference"), given().detach()
    join_linears(attention)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.q_proj(x).dtype == torch.bfloat16
    assert attention.k_proj(x).dtype == torch.float32


def test_another_input_gets_a_product_of_its_own_and_a_warning() -> None:
    torch.manual_seed(0)
    attention, (x, y) = convert(Attention(), "mxfp8", backend="reference"), (given(), given() + 1)
    wanted = attention(x, y)
    join_linears(attention)
    with pytest.warns(UserWarning, match="q_proj, k_proj, v_proj: joined, but not all were called with one tensor"):
        assert torch.equal(attention(x, y), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attention(x, y), wanted)


def test_an_input_that_was_written_to_is_another() -> None:
    attention, x = convert(Attention(), "mxfp8", backend="reference"), given().detach()
    join_linears(attention)
    attention.q_proj(x)
    x.mul_(2)
    assert torch.equal(attention.k_proj(x), convert(copy.deepcopy(revert(attention)), "mxfp8").k_proj(x))


def test_weights_that_were_written_to_are_others() -> None:
    attention, x = convert(Attention(), "mxfp8", backend="reference"), given().detach()
    join_linears(attention)
    attention.q_proj(x)
    with torch.no_grad():
        attention.k_proj.weight.zero_()
    assert not attention.k_proj(x).any()


def prune_bias(linear: nn.Linear) -> None:
    if linear.bias is None:
        linear.bias = nn.Parameter(torch.ones(linear.out_features))
    prune.random_unstructured(linear, "bias", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.spectral_norm, prune_bias])
def test_joined_linears_with_computed_parameters_train_as_separate_ones_do(norm: Callable[[nn.Linear], object]) -> None:
    """weight_norm and pruning compute right before their own linear's forward, spectral_norm at each read."""
    models = [convert(Attention(), "mxfp8", backend="reference") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    join_linears(models[1])
    for attention in models:
        for i, layer in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            torch.manual_seed(i)
            norm(layer)
        optimizer = torch.optim.SGD(attention.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            attention(given()).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values()))


def test_revert_takes_siblings_apart_and_others_are_refused() -> None:
    attention = join_linears(convert(Attention(), "mxfp8"))
    revert(attention)
    assert not converted(attention)
    wanted = F.linear(x := given(), attention.k_proj.weight)
    attention.q_proj(x)
    assert torch.equal(attention.k_proj(x), wanted)
    with pytest.raises(ValueError, match=r"got no converted siblings, want nn\.Linear modules named q_proj"):
        join_linears(attention)
    with pytest.raises(ValueError, match="join_linears: got no converted siblings"):  # of two recipes
        join_linears(convert(convert(attention, "fp8", lambda fqn, _: "q_proj.weight" in fqn), "mxfp8",
                             lambda fqn, _: "k_proj" in fqn or "v_proj" in fqn))  # fmt: skip
