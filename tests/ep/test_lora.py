"""LoRAExperts: gradients of A and B against those of the merged weights, over plain and frozen experts."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from mxep.comms import Capacity
from mxep.ep import ExpertParallel, Experts, FrozenExperts, LoRAExperts, MoE, freeze_experts
from mxep.ep.dtensors import local_tensor
from mxep.gemm import FrozenWeight
from mxep.quant import SwiGLU
from ranks import distributed
from records_on_cpu import assert_replays_are_alike, replays_on_the_cpu

T, DIM, HIDDEN_DIM, EXPERTS, TOP_K, RANK = 24, 64, 96, 4, 2, 8
ALPHA = 16.0
LETTERS = [f"{name}_lora_{letter}" for name in ("gate_up_proj", "down_proj") for letter in "AB"]


def make_layer(fmt: str | None, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> MoE:
    """With A and B that are not zero."""
    torch.manual_seed(0)
    how = {"recipe": "mxfp8", "dispatcher": "local", "dtype": dtype, **options}
    moe = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, **how)
    if fmt is not None:
        freeze_experts(moe, fmt)
    moe.experts = LoRAExperts(moe.experts, RANK, alpha=ALPHA, dtype=dtype)
    for name in LETTERS:
        if name.endswith("B"):
            parameter = local_tensor(getattr(moe.experts, name).data)
            seeds = torch.arange(len(parameter)) + 100 * parameter.shape[1]
            first = 0 if moe.dispatcher.world_size == 1 else moe.dispatcher.rank * len(parameter)
            for expert, seed in zip(parameter, seeds.tolist(), strict=True):
                expert.copy_(torch.randn(expert.shape, generator=torch.Generator().manual_seed(seed + first)) / 20)
    return moe


def merged(moe: MoE, **options: Any) -> MoE:
    """A layer in fp32 with W + scale B A."""
    how = {"recipe": "bf16", "dispatcher": "local", "dtype": torch.float32, **options}
    other = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, **how)
    other.router.load_state_dict(moe.router.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        base = getattr(moe.experts, name)
        values = base.dequantize(torch.float32) if isinstance(base, FrozenWeight) else base.data.float()
        A, B = (getattr(moe.experts, f"{name}_lora_{letter}").data.float() for letter in "AB")
        getattr(other.experts, name).data.copy_(values + moe.experts.scale * (B @ A))
    for name in ("gate_up_bias", "down_bias"):
        if (bias := getattr(moe.experts.base, name)) is not None:
            getattr(other.experts, name).data.copy_(bias.data)
    return other


def tokens(dtype: torch.dtype = torch.bfloat16, seed: int = 0, count: int = T) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(moe: MoE, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    ids, weights = moe.router(x.detach())
    weights = weights.detach().requires_grad_()
    moe.zero_grad()
    out = moe(x, expert_ids=ids, weights=weights)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    assert x.grad is not None
    assert weights.grad is not None
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: p.grad for name, p in moe.experts.named_parameters() if p.grad is not None}


def compare(moe: MoE, x: Tensor, tolerance: float, **options: Any) -> None:
    """Relative errors of out and all gradients against the merged layer."""
    got, want = gradients(moe, x), gradients(merged(moe, **options), x.float())
    for name in ("gate_up_proj", "down_proj"):
        A, B = (getattr(moe.experts, f"{name}_lora_{letter}").data.float() for letter in "AB")
        d_w = want.pop(name)
        want[f"{name}_lora_A"] = moe.experts.scale * (B.mT @ d_w)
        want[f"{name}_lora_B"] = moe.experts.scale * (d_w @ A.mT)
    assert set(LETTERS) <= set(got)
    for name, value in want.items():
        if name in got:
            error = (got[name].double() - value.double()).norm() / value.double().norm()
            assert error < tolerance, (name, float(error))


def test_over_plain_experts_it_is_the_merged_layer() -> None:
    compare(make_layer(None, dtype=torch.float32, recipe="bf16"), tokens(torch.float32), 1e-5)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        *((fmt, {}) for fmt in ("mxfp8", "mxfp4", "fp8_row")),
        ("mxfp4", {"bias": True, "activation": SwiGLU(1.702, 7.0, 1.0, interleaved=True)}),
        ("fp8_row", {"bias": True, "activation": SwiGLU(1.702, 7.0, 1.0, interleaved=True)}),
        ("mxfp8", {"score_before_experts": True}),
        ("mxfp8", {"capacity": Capacity.factor(4.0)}),
    ],
    ids=str,
)
def test_over_frozen_experts_it_is_the_merged_layer_but_for_fp8_activations(fmt: str, options: dict[str, Any]) -> None:
    compare(make_layer(fmt, **options), tokens(), 0.12, **options)
    compare(make_layer(fmt, **options, recipe="bf16"), tokens(), 0.02, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_row"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "activation": SwiGLU(1.702, 7.0, 1.0, interleaved=True)}], ids=str
)
def test_on_a_gpu_it_is_the_merged_layer_but_for_fp8_activations(fmt: str, options: dict[str, Any]) -> None:
    moe = make_layer(fmt, device="cuda", **options)
    for count in (T, 61, 61, 64):
        compare(moe, tokens(count=count).cuda(), 0.12, device="cuda", **options)


def test_a_new_one_changes_nothing_and_trains_nothing_else() -> None:
    moe = make_layer("mxfp8")
    x, base = tokens(), moe.experts.base
    moe.experts.reset_parameters()
    ids, weights = moe.router(x)
    out = moe(x, expert_ids=ids, weights=weights)
    trained = {name for name, p in moe.experts.named_parameters() if p.requires_grad}
    moe.experts = base
    torch.testing.assert_close(out, moe(x, expert_ids=ids, weights=weights), rtol=1e-2, atol=1e-2)
    assert trained == set(LETTERS)


def test_training_lowers_the_loss_and_leaves_the_base_alone() -> None:
    moe = make_layer("mxfp4")
    before = {name: value.clone() for name, value in moe.experts.base.state_dict().items()}
    x, target = tokens(count=64), tokens(seed=1, count=64)
    optimizer = torch.optim.AdamW([p for p in moe.experts.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(12):
        loss = (moe(x).float() - target.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for name, value in moe.experts.base.state_dict().items():
        assert torch.equal(value, before[name])


def check_ranks(ctx, fmt: str, dispatcher: str) -> None:
    """Two ranks with their own tokens, against one that has all experts."""
    more = {"device": ctx.device, "max_tokens": T} if dispatcher == "symmetric" else {"device": ctx.device}
    here, alone = make_layer(fmt, dispatcher=dispatcher, group=ctx.group, **more), make_layer(fmt, device=ctx.device)
    for _ in range(4):  # on GPUs GEMMs are played from the third on
        got = gradients(here, tokens(seed=ctx.rank).to(ctx.device))
    each = [gradients(alone, tokens(seed=rank).to(ctx.device)) for rank in range(2)]
    torch.testing.assert_close(got["out"], each[ctx.rank]["out"], rtol=2e-2, atol=2e-2)
    for name in LETTERS:
        local = slice(2 * ctx.rank, 2 * ctx.rank + 2)
        want = ((each[0][name].float() + each[1][name].float()) / 2)[local]
        error = (local_tensor(got[name]).float() - want).norm() / want.norm()
        assert error < 0.02, (name, float(error))


@distributed(2, device="cpu", fmt=("mxfp8", "mxfp4", "fp8_row"), dispatcher=("symmetric", "all_to_all"))
def test_ranks_hold_their_experts_lora_and_have_mean_gradients(ctx, fmt: str, dispatcher: str) -> None:
    check_ranks(ctx, fmt, dispatcher)


@distributed(2, device="cuda", fmt=("mxfp8", "mxfp4", "fp8_row"), dispatcher=("symmetric", "all_to_all"))
def test_gpus_hold_their_experts_lora_and_have_mean_gradients(ctx, fmt: str, dispatcher: str) -> None:
    check_ranks(ctx, fmt, dispatcher)


def test_its_passes_are_replayed_and_leave_the_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = make_layer("mxfp8")
    with replays_on_the_cpu(monkeypatch):
        assert_replays_are_alike(
            lambda x: list(gradients(moe, x).values()), [tokens(seed=seed) for seed in range(5)], held=False
        )
        passes = list(moe.dispatcher.passes.values())
        assert [each.function.__name__ for each in passes] == ["forward_pass", "backward_pass"]
        assert all(each.replays > 0 for each in passes)


@pytest.mark.parametrize("trained", ["A", "B", "nothing"])
def test_gradients_that_nobody_wants_change_no_other(trained: str) -> None:
    moe = make_layer("mxfp8")
    want = gradients(moe, tokens())
    for name in LETTERS:
        getattr(moe.experts, name).requires_grad_(name.endswith(trained))
    got = gradients(moe, tokens())
    assert set(want) - set(got) == {name for name in LETTERS if not name.endswith(trained)}
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


def test_the_gradient_of_x_alone_computes_none_of_a_or_b() -> None:
    moe = make_layer("mxfp8")
    x = tokens().requires_grad_()
    (want,) = torch.autograd.grad(moe(x).sum(), [x], retain_graph=True)
    with mock.patch("mxep.ep.lora.lora_wgrad", side_effect=AssertionError):
        (got,) = torch.autograd.grad(moe(x).sum(), [x])
    assert torch.equal(got, want)


def test_backward_runs_twice_through_a_retained_graph() -> None:
    moe = make_layer("mxfp8")
    x = tokens().requires_grad_()
    parameters = [getattr(moe.experts, name) for name in LETTERS]
    out = moe(x)
    both = torch.autograd.grad(out.sum(), [x, *parameters], retain_graph=True)
    alone = torch.autograd.grad(out.sum(), parameters, retain_graph=True)
    (dx,) = torch.autograd.grad(out.sum(), x)
    for got, want in zip((dx, *alone), both, strict=True):
        assert torch.equal(got, want)


def test_trained_weights_get_their_gradients_beside_those_of_lora() -> None:
    moe = make_layer(None, dtype=torch.float32, recipe="bf16")
    moe.experts.base.requires_grad_()
    got = gradients(moe, tokens(torch.float32))
    want = gradients(merged(moe), tokens(torch.float32))
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(got[f"base.{name}"], want[name], rtol=1e-4, atol=1e-5)
    assert set(LETTERS) < set(got)


def test_recipes_with_unquantized_wgrads_need_weights_without() -> None:
    moe = make_layer(None, recipe="mxfp8_wgrad_bf16")
    compare(moe, tokens(), 0.12)
    moe.experts.base.requires_grad_()
    with pytest.raises(ValueError, match="expected weights without gradients for recipe mxfp8_wgrad_bf16: freeze them"):
        moe(tokens())


def test_pefts_tensors_mean_the_same_update() -> None:
    lora = make_layer("mxfp8").experts
    state = lora.peft_state_dict()
    for prefix, name in (("", "down_proj"), ("base_layer.", "gate_up_proj")):
        A, B = state[f"{prefix}lora_A.weight"], state[f"{prefix}lora_B.weight"]
        out = getattr(lora, f"{name}_lora_B").shape[1]
        assert A.shape[0] == B.shape[1] == RANK * EXPERTS
        by_expert, columns = A.view(EXPERTS, RANK, -1), B.view(out, RANK, EXPERTS)
        for e in range(EXPERTS):
            want = getattr(lora, f"{name}_lora_B")[e] @ getattr(lora, f"{name}_lora_A")[e]
            assert torch.equal(columns[:, :, e].contiguous() @ by_expert[e], want)
    other = make_layer("mxfp8").experts
    other.reset_parameters()
    other.load_peft_state_dict(state)
    for name in LETTERS:
        assert torch.equal(getattr(other, name), getattr(lora, name))
    with pytest.raises(ValueError, match=r"load_peft_state_dict: expected .*'lora_A.weight': \(32, 96\)"):
        other.load_peft_state_dict({name: x[:8] for name, x in state.items()})


@distributed(2, device="cpu")
def test_spread_experts_save_and_load_pefts_whole_tensors(ctx: Any) -> None:
    spread = make_layer("mxfp8", group=ctx.group, dispatcher="symmetric", max_tokens=T).experts
    state = spread.peft_state_dict()
    whole = make_layer("mxfp8").experts
    whole.load_peft_state_dict(state)
    before = {name: local_tensor(getattr(spread, name).data).clone() for name in LETTERS}
    for name in LETTERS:
        here = len(before[name])
        assert torch.equal(getattr(whole, name)[ctx.rank * here :][:here], before[name])
    other = make_layer("mxfp8", group=ctx.group, dispatcher="symmetric", max_tokens=T).experts
    other.reset_parameters()
    other.load_peft_state_dict(state)
    assert all(torch.equal(local_tensor(getattr(other, name).data), x) for name, x in before.items())


@pytest.mark.parametrize("fmt", [None, "mxfp4"])
def test_compiled_it_is_one_graph_and_the_same_bits(fmt: str | None) -> None:
    torch._dynamo.reset()
    moe = make_layer(fmt, max_tokens=T, capacity=Capacity.factor(2.0))
    x, d_out = (tokens(seed=seed) for seed in (0, 7))

    def step(run: Any) -> list[Tensor]:
        moe.zero_grad()
        given = x.clone().requires_grad_()
        out = run(given)
        out.backward(d_out)
        return [out.detach(), given.grad, *(local_tensor(p.grad) for p in moe.parameters() if p.grad is not None)]  # type: ignore[list-item]

    want, got = step(moe), step(torch.compile(moe, backend="aot_eager", fullgraph=True))
    assert len(want) == 7
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_bad_input_is_said() -> None:
    experts = Experts(DIM, HIDDEN_DIM, EXPERTS)
    with pytest.raises(ValueError, match="expected a rank that is a multiple of 8, got 12"):
        LoRAExperts(experts, 12)
    for rank in (8.0, "8"):
        with pytest.raises(ValueError, match=f"expected a rank that is a multiple of 8, got {rank!r}"):
            LoRAExperts(experts, rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a finite alpha, got nan"):
        LoRAExperts(experts, 8, alpha=float("nan"))
    with pytest.raises(ValueError, match="expected Experts or FrozenExperts, got Linear"):
        LoRAExperts(torch.nn.Linear(2, 2), 8)
    with pytest.raises(ValueError, match="expected Experts or FrozenExperts, got LoRAExperts"):
        LoRAExperts(LoRAExperts(experts, 8), 8)
    assert isinstance(LoRAExperts(FrozenExperts.of(experts), 8).base, FrozenExperts)


@distributed(2, device="cpu")
def test_peers_are_told_what_its_backward_raised(ctx) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    moe = make_layer("mxfp8", dispatcher="symmetric", group=group, max_tokens=T)
    x = tokens(seed=ctx.rank).requires_grad_()
    out = moe(x)
    if ctx.rank == 1:
        failing = mock.patch("mxep.ep.layer.lora_backward", side_effect=MemoryError("no room for rows"))
        with failing, pytest.raises(MemoryError):
            out.sum().backward()
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 raised MemoryError: no room for rows \(\d+ s ago\)"):
            out.sum().backward()
    dist.barrier()


@distributed(2, device="cpu", fmt=("mxfp8", None))
def test_a_layer_is_spread_with_its_lora(ctx, fmt: str | None) -> None:
    alone = make_layer(fmt)
    spread = make_layer(fmt)
    parallelize_module(spread, init_device_mesh("cpu", (2,)), ExpertParallel(dispatcher="symmetric", max_tokens=T))
    assert len(local_tensor(spread.experts.down_proj_lora_A)) == EXPERTS // 2
    x = tokens(seed=ctx.rank)
    torch.testing.assert_close(spread(x), alone(x), rtol=2e-2, atol=2e-2)


@distributed(2, device="cpu")
def test_frozen_experts_that_are_spread_already_are_not_spread_again(ctx) -> None:
    moe = make_layer("mxfp8", group=ctx.group, dispatcher="symmetric", max_tokens=T)
    mesh = moe.experts.down_proj_lora_A.device_mesh
    with pytest.raises(ValueError, match="ExpertParallel wants an MoE that holds all its experts"):
        parallelize_module(moe, mesh, ExpertParallel(max_tokens=T))


def test_lora_of_other_shapes_is_said_before_any_exchange() -> None:
    moe = make_layer("mxfp8")
    moe.experts.down_proj_lora_B = torch.nn.Parameter(torch.zeros(EXPERTS, DIM, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"lora: expected A and B of down \(\(4, 8, 96\), \(4, 64, 8\)\)"):
        moe(tokens())
