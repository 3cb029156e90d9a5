"""torch.export takes what torch.compile takes as one graph, or says why not; fake tensors go through a layer."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from mxep.comms import Capacity
from mxep.ep import LocalDispatcher, MoE, Router, combine, dispatch
from mxep.gemm import Recipe
from ranks import Context, distributed


def make(**options) -> nn.Module:
    torch.manual_seed(0)
    options = {"recipe": "mxfp8", "num_shared_experts": 1} | options
    return nn.Sequential(nn.LayerNorm(64), MoE(64, 32, 8, 2, dtype=torch.float32, **options)).eval()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_computes_what_the_model_does(strict: bool) -> None:
    model, x = make(), torch.randn(2, 8, 64)
    exported = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(exported.module()(2 * x), model(2 * x))
    assert any("layer_forward" in str(node.target) for node in exported.graph.nodes)


@pytest.mark.parametrize("options", [{}, {"capacity": Capacity.factor(1.25, "drop")}])
def test_an_exported_model_takes_any_number_of_tokens(options: dict) -> None:
    model, tokens = make(**options), torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(16, 64),), dynamic_shapes=({0: tokens},)).module()
    assert all(torch.equal(exported(x), model(x)) for x in (torch.randn(7, 64), torch.randn(40, 64)))


REFUSED: list[tuple[dict, str]] = [
    ({"recipe": "mxfp8_wgrad_bf16"}, "has weight gradients of unquantized operands"),
]


def refuses(model: nn.Module, x: torch.Tensor, reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"run_experts is in no exported graph: .*{reason}"):
        torch.export.export(model, (x,), strict=False)


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_no_graph_can_hold_is_refused_with_the_reason(options: dict, reason: str) -> None:
    refuses(make(**options), torch.randn(8, 64), reason)


@distributed(2, device="cpu")
def test_a_layer_of_ranks_exports_with_max_tokens_and_without_says_so(ctx: Context) -> None:
    x = torch.randn(8, 64)
    refuses(make(group=ctx.group), x, "give max_tokens")
    model = make(group=ctx.group, max_tokens=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (x,), strict=False)
    assert torch.equal(exported.module()(x), model(x))


def test_the_functions_of_a_layer_are_refused_by_name() -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            how = {"dispatcher": LocalDispatcher(4), "recipe": Recipe.mxfp8()}
            rows, _, routing = dispatch(x, ids, weights, **how)
            return combine(rows, routing, **how)

    given = torch.randn(4, 64), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    with pytest.raises(RuntimeError, match="dispatch is in no exported graph: export run_experts, or an MoE"):
        torch.export.export(Parts(), given, strict=False)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *(("fp8", {}), ("auto", {})),
        *((recipe, {"bias": True, "num_shared_experts": 1}) for recipe in ("mxfp8_wgrad_bf16", "mxfp8_gate_up_fp8")),
    ],
)
def test_a_layer_that_is_made_of_fake_tensors_runs_forward_and_backward(recipe: str, options: dict) -> None:
    with FakeTensorMode():
        router = Router(64, 8, 2, balance=True, keep_logits=True)
        moe = MoE(64, 32, 8, 2, recipe=recipe, router=router, **options)
        x = torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        out = moe(x, mask=torch.ones(2, 8, dtype=torch.bool))
        out.sum().backward()
        router.update_bias()
    assert out.shape == x.grad.shape == (2, 8, 64)
    real = MoE(64, 32, 8, 2, recipe=recipe, dispatcher="symmetric", max_tokens=16)
    real(torch.randn(16, 64, dtype=torch.bfloat16)).sum().backward()
    real.check()
