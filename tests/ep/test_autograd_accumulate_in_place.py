"""accumulate_in_place: the GEMM adds weight gradients to .grad, bit for bit as autograd would."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.ep import MoE, accumulate_in_place
from mxep.ep.dtensors import local_tensor
from mxep.gemm.backends.base import Backend
from ranks import Context, distributed


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of what GEMMs have added to."""
    return spy(monkeypatch)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    plain = Backend.wgrad

    def wgrad(self: Backend, *args: Any, accumulate_into: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if accumulate_into is not None:
            found.append(accumulate_into.data_ptr())
        return plain(self, *args, accumulate_into=accumulate_into, **kwargs)

    monkeypatch.setattr(Backend, "wgrad", wgrad)
    return found


def layer(ctx: Context | None = None, **options: Any) -> MoE:
    torch.manual_seed(0)
    options = {"recipe": "mxfp8", "max_tokens": 64, "device": "cpu" if ctx is None else ctx.device} | options
    return MoE(64, 32, 4, 2, group=None if ctx is None else ctx.group, **options)


def gradients(
    moe: MoE, *, in_place: bool, model: Any = None, rank: int = 0, sizes: tuple[int, ...] = (33, 64, 17)
) -> list[Tensor]:
    """Of all parameters, after three micro-batches."""
    random = torch.Generator().manual_seed(rank)
    device = local_tensor(next(moe.parameters())).device
    with accumulate_in_place() if in_place else nullcontext():
        for n in sizes:
            x = torch.randn(n, 64, generator=random).to(device, torch.bfloat16)
            (moe if model is None else model)(x).square().sum().backward()
    return [local_tensor(p.grad) for p in moe.parameters()]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    assert all(b.any() for b in wanted)


@distributed(1, 2, case=[("mxfp8", "mean"), ("bf16", "sum")])
def test_micro_batches_have_the_sums_of_autograd(ctx: Context, case: tuple[str, str]) -> None:
    recipe, gradient_reduction = case
    how = {"recipe": recipe, "gradient_reduction": gradient_reduction, "num_shared_experts": 1}
    wanted = gradients(layer(ctx, **how), in_place=False, rank=ctx.rank)
    with pytest.MonkeyPatch.context() as patches:
        added = spy(patches)
        moe = layer(ctx, **how)
        assert_same(gradients(moe, in_place=True, rank=ctx.rank), wanted)
    both = [local_tensor(w.grad).data_ptr() for w in (moe.experts.down_proj, moe.experts.gate_up_proj)]
    assert added == 2 * both


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_second_backward_of_a_retained_graph_adds_once(added: list[int], dtype: torch.dtype) -> None:
    x, runs = torch.randn(8, 64).to(dtype), []
    for in_place in (False, True):
        moe = layer(dtype=dtype)
        with accumulate_in_place() if in_place else nullcontext():
            moe(x).square().sum().backward()
            out = moe(x).square().sum()
            out.backward(retain_graph=True)
            out.backward()
        runs.append([p.grad for p in moe.parameters()])
    assert_same(*runs)
    assert len(added) == 4


def hooked(moe: MoE) -> None:
    for weight in moe.experts.parameters():
        weight.register_hook(lambda grad: grad * 2)


def hooked_after(moe: MoE) -> None:
    def double(weight: Tensor) -> None:
        weight.grad.mul_(2)

    for weight in moe.experts.parameters():
        weight.register_post_accumulate_grad_hook(double)


def strided(moe: MoE) -> None:
    for weight in moe.experts.parameters():
        weight.grad = torch.ones_like(weight).mT.contiguous().mT


@pytest.mark.parametrize("prepare", [hooked, hooked_after, strided])
def test_autograd_accumulates_where_it_must(added: list[int], prepare: Any) -> None:
    runs = []
    for in_place in (False, True):
        moe = layer()
        prepare(moe)
        runs.append(gradients(moe, in_place=in_place))
    assert_same(*runs)
    assert not added


@pytest.mark.parametrize("both", [False, True])
def test_a_main_grad_goes_before_a_grad(both: bool) -> None:
    runs = []
    for in_place in (False, True):
        moe = layer()
        held = [moe.experts.down_proj, *([moe.experts.gate_up_proj] if both else [])]
        for weight in held:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        random = torch.Generator().manual_seed(0)
        with accumulate_in_place() if in_place else nullcontext():
            for n in (33, 64, 17):
                moe(torch.randn(n, 64, generator=random).bfloat16()).square().sum().backward()
        assert all(weight.grad is None for weight in held)
        runs.append([getattr(weight, "main_grad", weight.grad) for weight in moe.experts.parameters()])
    assert_same(*runs)


def test_without_the_context_and_after_it_autograd_accumulates(added: list[int]) -> None:
    with pytest.raises(RuntimeError, match="mine"), accumulate_in_place():
        raise RuntimeError("mine")
    gradients(layer(), in_place=False)
    assert not added


def test_a_forward_within_it_may_have_its_backward_after_it(added: list[int]) -> None:
    moe, x = layer(), torch.randn(8, 64).bfloat16()
    moe(x).sum().backward()
    with accumulate_in_place():
        out = moe(x).sum()
    out.backward()
    assert len(added) == 2


def test_gradients_of_x_alone_add_nothing(added: list[int]) -> None:
    moe, x = layer(), torch.randn(8, 64).bfloat16().requires_grad_()
    with accumulate_in_place():
        moe(x).sum().backward()
        before = [p.grad.clone() for p in moe.parameters()]
        torch.autograd.grad(moe(x).sum(), x)
    assert_same([p.grad for p in moe.parameters()], before)
    assert not added


def test_a_compiled_layer_breaks_its_graph_and_has_the_same_gradients(added: list[int]) -> None:
    sizes = 33, 33, 33
    wanted = gradients(layer(), in_place=False, sizes=sizes)
    moe = layer()
    compiled = torch.compile(moe, backend="aot_eager")
    assert_same(gradients(moe, in_place=True, model=compiled, sizes=sizes), wanted)
    assert len(added) == 4
