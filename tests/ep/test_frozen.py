"""FrozenExperts: a layer with quantized weights that are never trained equals a layer with their values."""

import copy
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mxep.comms import Capacity
from mxep.ep import Experts, FrozenExperts, LoRAExperts, MoE, freeze_experts, run_experts
from mxep.ep.dispatchers import LocalDispatcher
from mxep.ep.dtensors import local_tensor
from mxep.ep.frozen import PARTS
from mxep.gemm import Recipe, freeze, quantize_weights_once
from mxep.gemm.backends import Hopper
from mxep.gemm.backends.reference import Reference
from mxep.gemm.frozen import FP32_SCALES
from mxep.quant import SwiGLU, quantize
from ranks import distributed
from records_on_cpu import assert_replays_are_alike, replays_on_the_cpu

T, DIM, HIDDEN_DIM, EXPERTS, TOP_K = 24, 64, 96, 4, 2
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class SameValuesBothWays(Reference):
    """dgrad multiplies the values of forward, as it does with frozen weights."""

    recordable = True

    def quantize_weight_colwise(self, w: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Tensor:
        return w if recipe.scaling == "none" else quantize(w.detach(), fmt=recipe.fmt, mode=recipe.mode)


class ExactWeights(Reference):
    """Multiplies weights as they are."""

    recordable = True

    def quantize_weight_rowwise(self, w: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return w.detach(), None

    def quantize_weight_colwise(self, w: Tensor, *_: Any) -> Tensor:
        return w.detach()


def make_layers(fmt: str, **options: Any) -> tuple[MoE, MoE]:
    """(frozen, one with the same values in bf16, or in fp32 if scales are fp32)."""
    torch.manual_seed(0)
    moe = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, **{"recipe": "mxfp8", "dispatcher": "local", **options})
    frozen = copy.deepcopy(moe)
    assert freeze_experts(frozen, fmt) == 1
    if fmt in FP32_SCALES:
        moe.experts.float()
    for name in ("gate_up_proj", "down_proj"):
        values = getattr(frozen.experts, name).dequantize(torch.float32)
        local_tensor(getattr(moe.experts, name).data).copy_(values)
    moe.backend = ExactWeights() if fmt in FP32_SCALES else SameValuesBothWays()
    return frozen, moe


def step(moe: MoE, x: Tensor, run: Any = None) -> list[Tensor]:
    """out, and the gradients of x and the router. run: moe, compiled."""
    x = x.clone().requires_grad_()
    moe.zero_grad()
    out = (moe if run is None else run)(x)
    out.backward(torch.ones_like(out) / 8)
    return [out.detach(), x.grad, moe.router.weight.grad]  # type: ignore[list-item]


def tokens(seed: int = 0, count: int = T) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("fmt", "recipe"),
    [
        *(("mxfp8", "mxfp8"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp8_e5m2"), ("mxfp8", "mxfp8_wgrad_bf16")),
        *(("mxfp4", "bf16"), ("fp8_block", "mxfp8"), ("fp8_block", "mxfp8_e5m2")),
        *(("fp8_row", "mxfp8"), ("fp8_row", "mxfp8_e5m2"), ("fp8_row", "fp8"), ("fp8_row", "bf16")),
    ],
)
def test_it_is_a_layer_with_the_values_of_its_weights(fmt: str, recipe: str) -> None:
    frozen, moe = make_layers(fmt, recipe=recipe)
    for seed in range(2):
        for got, want in zip(step(frozen, tokens(seed)), step(moe, tokens(seed)), strict=True):
            if recipe == "bf16" or "wgrad" in recipe:  # where the other layer is composed of other functions
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("mxfp4", {"activation": SwiGLU(1.702, 7.0, 1.0, interleaved=True), "bias": True}),
        ("mxfp8", {"score_before_experts": True, "bias": True}),
        ("mxfp8", {"num_shared_experts": 1}),
        ("fp8_row", {"activation": SwiGLU(1.702, 7.0, 1.0, interleaved=True), "bias": True}),
        ("mxfp4", {"capacity": Capacity.factor(0.5, overflow="drop")}),
    ],
    ids=str,
)
def test_options_of_the_layer_work_with_it(fmt: str, options: dict[str, Any]) -> None:
    frozen, moe = make_layers(fmt, **options)
    torch.manual_seed(1)
    for name in ("gate_up_bias", "down_bias"):
        if (bias := getattr(frozen.experts, name)) is not None:
            getattr(moe.experts, name).data = bias.data.normal_()
    shared = options.get("num_shared_experts")
    for got, want in zip(step(frozen, tokens()), step(moe, tokens()), strict=True):
        # A shared expert, which is trained, is quantized along N, too: with another backend, by other bytes.
        torch.testing.assert_close(got, want, rtol=0 if not shared else 5e-2, atol=0 if not shared else 5e-2)


@distributed(2, device="cpu", fmt=("mxfp8", "mxfp4", "fp8_block", "fp8_row"), dispatcher=("symmetric", "all_to_all"))
def test_ranks_hold_their_experts_alone(ctx, fmt: str, dispatcher: str) -> None:
    frozen, moe = make_layers(fmt, dispatcher=dispatcher, group=ctx.group)
    local = frozen.experts.gate_up_proj
    assert tuple(local.shape) == (EXPERTS // 2, 2 * HIDDEN_DIM, DIM)
    assert frozen.experts.num_experts == EXPERTS
    for got, want in zip(step(frozen, tokens(ctx.rank, 16 + ctx.rank)), step(moe, tokens(ctx.rank, 16 + ctx.rank))):
        assert torch.equal(got, want)
    state = frozen.state_dict()
    frozen.load_state_dict(state)
    assert state["experts.gate_up_proj_qdata"].shape[0] == EXPERTS, "a DTensor of all experts"


@pytest.mark.parametrize(("fmt", "held"), [("mxfp8", False), ("mxfp4", True), ("fp8_block", False), ("fp8_row", False)])
def test_it_is_replayed(monkeypatch: pytest.MonkeyPatch, fmt: str, held: bool) -> None:
    frozen, _ = make_layers(fmt)
    with replays_on_the_cpu(monkeypatch):
        assert_replays_are_alike(lambda x: step(frozen, x), [tokens(seed) for seed in range(5)], held=held)
        assert [each.replays for each in frozen.dispatcher.passes.values()] == [3, 3]


class HopperAnywhere(Hopper):
    """hopper by the references of its kernels."""

    recordable = True

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None


@pytest.mark.parametrize(("recipe", "lora"), [("mxfp8", True), ("fp8_e5m2", False)])
def test_hopper_is_replayed_with_scales_of_rows(monkeypatch: pytest.MonkeyPatch, recipe: str, lora: bool) -> None:
    frozen, exact = make_layers("fp8_row", recipe=recipe, bias=True)
    frozen.backend = HopperAnywhere()
    if lora:  # B is zero
        frozen.experts = LoRAExperts(frozen.experts, 8)
    with replays_on_the_cpu(monkeypatch):
        assert_replays_are_alike(lambda x: step(frozen, x), [tokens(seed) for seed in range(5)], held=False)
        assert [each.replays for each in frozen.dispatcher.passes.values()] == [3, 3]
        gots, wants = (step(moe, tokens(9)) for moe in (frozen, exact))
    bounds = (1e-3, 0.06, 0.06) if recipe == "mxfp8" else (1e-3, 0.12, 0.12)  # dy is rounded twice
    for got, want, bound in zip(gots, wants, bounds, strict=True):
        assert (got.float() - want.float()).norm() < bound * want.float().norm()


def test_its_parameters_are_bytes_that_nothing_trains_or_casts() -> None:
    frozen, _ = make_layers("mxfp8", bias=True)
    before = {name: value.clone() for name, value in frozen.experts.state_dict().items()}
    assert set(before) == {
        *(f"{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in set(PARTS) - {"scale"}),
        "gate_up_bias",
        "down_bias",
    }
    assert not any(p.requires_grad for p in frozen.experts.parameters())
    frozen.to(torch.float32).to(torch.bfloat16).half()
    for name, value in frozen.experts.state_dict().items():
        if "bias" not in name:
            assert value.dtype == (torch.int32 if name.endswith("lost_index") else torch.uint8)
            assert torch.equal(value, before[name]), name
    other, _ = make_layers("mxfp8", bias=True)
    other.experts.load_state_dict(before)
    assert "format=mxfp8" in repr(frozen.experts)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_a_state_is_loaded_only_by_experts_that_are_folded_alike(strict: bool, folded: bool) -> None:
    """With strict=False torch would load the codes of one kind, and keep the scales of the other."""
    one, other = (MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher="local") for _ in range(2))
    freeze_experts(one, folded=folded)
    freeze_experts(other, folded=not folded)
    before = other.state_dict()["experts.down_proj_qdata"].clone()
    with pytest.raises(
        ValueError, match=f"folded={not folded}, got folded={folded}: freeze the model with folded={folded}"
    ):
        other.load_state_dict(one.state_dict(), strict=strict)
    assert torch.equal(other.state_dict()["experts.down_proj_qdata"], before)
    freeze_experts(third := MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher="local"), folded=folded)
    third.load_state_dict(one.state_dict(), strict=strict)
    assert torch.equal(third(tokens()), one(tokens()))


@pytest.mark.parametrize("strict", [False, True])
def test_a_state_of_another_format_is_refused(strict: bool) -> None:
    formats = {'"fp8_block"': "fp8_block", '"fp8_row"': "fp8_row", "folded=False": "mxfp8"}
    layers = {name: MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher="local") for name in formats}
    for name, fmt in formats.items():
        freeze_experts(layers[name], fmt, folded=False)
    for (own, target), (got, source) in itertools.permutations(layers.items(), 2):
        with pytest.raises(ValueError, match=f"frozen with {own}, got {got}: freeze the model with {got}"):
            target.load_state_dict(source.state_dict(), strict=strict)


@pytest.mark.parametrize(
    ("fmt", "folded"), [("mxfp8", True), ("mxfp8", False), ("mxfp4", True), ("fp8_block", True), ("fp8_row", True)]
)
def test_compiled_it_is_one_graph_and_the_same_bits(fmt: str, folded: bool) -> None:
    torch._dynamo.reset()
    moe = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local", bias=True)
    freeze_experts(moe, fmt, folded=folded)
    moe.experts.gate_up_bias.requires_grad_()
    want = [*step(moe, tokens()), moe.experts.gate_up_bias.grad]
    got = step(moe, tokens(), torch.compile(moe, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(*pair) for pair in zip([*got, moe.experts.gate_up_bias.grad], want, strict=True))


def test_a_model_is_frozen_layer_by_layer() -> None:
    layers = [MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local") for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(DIM, DIM, dtype=torch.bfloat16))
    assert freeze_experts(model) == 2
    assert all(isinstance(layer.experts, FrozenExperts) for layer in layers)
    out = model(tokens())
    with quantize_weights_once():
        assert torch.equal(model(tokens()), out)
    with pytest.raises(ValueError, match=r"expected a model with mxep\.ep\.Experts, got none"):
        freeze_experts(model)


def test_layers_that_share_experts_share_them_frozen() -> None:
    one, other = (MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local") for _ in range(2))
    other.experts = one.experts
    assert freeze_experts(nn.Sequential(one, other)) == 1
    assert isinstance(one.experts, FrozenExperts)
    assert one.experts is other.experts


def test_weights_are_freed_before_the_next_layer_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher="local") for _ in range(3)))
    layers, alive, freeze = [weakref.ref(moe.experts) for moe in model], [], FrozenExperts.of

    def count_and_freeze(*args: Any, **how: Any) -> FrozenExperts:
        alive.append(sum(layer() is not None for layer in layers))
        return freeze(*args, **how)

    monkeypatch.setattr(FrozenExperts, "of", count_and_freeze)
    freeze_experts(model)
    assert alive == [3, 2, 1]


def call(gate_up: Any, down: Any, dispatcher: LocalDispatcher | None = None, recipe: str = "mxfp8") -> None:
    ids, weights = torch.zeros(T, TOP_K, dtype=torch.int32), torch.ones(T, TOP_K)
    how: dict[str, Any] = {"dispatcher": dispatcher or LocalDispatcher(EXPERTS), "recipe": Recipe.named(recipe)}
    run_experts(tokens(), ids, weights, gate_up, down, **how)


def test_weights_that_do_not_fit_are_said() -> None:
    experts = Experts(DIM, HIDDEN_DIM, EXPERTS)
    gate_up, down = (freeze(w.data) for w in (experts.gate_up_proj, experts.down_proj))
    with pytest.raises(ValueError, match="expected both weights frozen or neither, got FrozenWeight and Parameter"):
        call(gate_up, experts.down_proj)
    with pytest.raises(
        ValueError, match=r"down_proj: got shape \(4, 64, 96\), want \(experts here, D, F\) = \(2, 64, 96\)"
    ):
        call(gate_up, down, LocalDispatcher(2))
    with pytest.raises(ValueError, match=r"expected gate_up_proj \(e, 2F, D\) and down_proj \(e, D, F\)"):
        FrozenExperts(down, gate_up)
    small = [freeze(torch.randn(EXPERTS, *shape).bfloat16()) for shape in ((2 * 24, 64), (64, 32))]
    with pytest.raises(ValueError, match=r"gate_up_proj: got shape \(4, 48, 64\), want"):
        call(*small)


class Sizes(TorchDispatchMode):
    """Elements of each tensor that an op makes, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.largest[x.dtype] = max(self.largest.get(x.dtype, 0), x.numel())
        return out


@needs_gpu
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_block", "fp8_row"])
def test_on_hopper_it_has_the_values_of_its_weights_and_makes_no_bf16_copy(fmt: str) -> None:
    torch.manual_seed(0)
    moe = MoE(256, 512, 16, 2, recipe="mxfp8", dispatcher="local", device="cuda")
    freeze_experts(moe, fmt)
    exact = MoE(256, 512, 16, 2, recipe="bf16", dispatcher="local", device="cuda", dtype=torch.float32)
    exact.router.load_state_dict(moe.router.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        getattr(exact.experts, name).data.copy_(getattr(moe.experts, name).dequantize(torch.float32))
    for tokens_ in (64, 61, 61, 61, 64):
        x = torch.randn(tokens_, 256, device="cuda", dtype=torch.bfloat16)
        ids, weights = moe.router(x)
        given = x.clone().requires_grad_(), x.float().requires_grad_()
        outs = [
            layer(x, expert_ids=ids, weights=weights.detach()) for layer, x in zip((moe, exact), given, strict=True)
        ]
        d_out = torch.randn_like(outs[0])
        for out in outs:
            out.backward(d_out.to(out.dtype))
        twice = 1.3 if fmt == "fp8_row" else 1.0  # both dgrads round dy a second time: 0.062 instead of 0.049
        for got, want, bound in ((outs[0], outs[1], 0.06), (given[0].grad, given[1].grad, 0.06 * twice)):
            noise = (got.double() - want.double()).norm() / want.double().norm()
            assert noise < bound, (tokens_, noise)  # of activations and gradients in E4M3
    with Sizes() as sizes:
        x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        moe(x).sum().backward()
    elements = moe.experts.down_proj.qdata.numel()
    assert sizes.largest[torch.bfloat16] < elements
    assert sizes.largest[torch.float32] < elements


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of torch 2.11 takes floating-point parameters only")
@distributed(2, device="cpu", fmt=("mxfp8", "mxfp4", "fp8_block", "fp8_row"))
def test_fsdp_shards_the_bytes_and_gathers_them(ctx, fmt: str) -> None:
    """With LoRA, under a policy that casts parameters: bytes are none that it casts. Gradients are means."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local")
    freeze_experts(alone, fmt)
    alone.experts = LoRAExperts(alone.experts, 8)
    for name in ("gate_up_proj_lora_B", "down_proj_lora_B"):
        getattr(alone.experts, name).data.normal_(std=0.05)
    sharded = copy.deepcopy(alone)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    fully_shard(sharded.experts, mesh=mesh, mp_policy=policy)
    held = sharded.experts.base.gate_up_proj_qdata
    assert (held.dtype, len(held.to_local())) == (torch.uint8, EXPERTS // 2)
    each = [step(alone, tokens(rank))[:2] for rank in range(2)]
    gradients = []
    for rank in range(2):
        step(alone, tokens(rank))
        gradients.append(alone.experts.down_proj_lora_A.grad)
    got = step(sharded, tokens(ctx.rank))[:2]
    for one, want in zip(got, each[ctx.rank], strict=True):
        assert torch.equal(one, want)
    mean = (gradients[0].float() + gradients[1].float()) / 2
    grad = sharded.experts.down_proj_lora_A.grad.full_tensor().float()
    assert (grad - mean).norm() < 1e-2 * mean.norm()


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_block", "fp8_row"])
def test_its_bytes_go_through_torchs_distributed_checkpoints(fmt: str, tmp_path: Path) -> None:
    source, target = make_layers(fmt)[0], make_layers(fmt)[0]
    for parameter in target.experts.parameters():
        parameter.data.zero_()
    dcp.save(source.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = target.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    target.load_state_dict(state)
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


@pytest.mark.parametrize("folded", [False, True])
def test_torchs_distributed_checkpoints_of_experts_folded_otherwise_are_refused(folded: bool, tmp_path: Path) -> None:
    """They read the names of the model that loads. Folded qdata under the scales of unfolded ones are other values."""
    one, other = (MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, dispatcher="local") for _ in range(2))
    freeze_experts(one, folded=folded)
    freeze_experts(other, folded=not folded)
    dcp.save(one.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: experts\.down_proj_"):
        dcp.load(other.state_dict(), checkpoint_id=tmp_path, no_dist=True)


def test_it_is_frozen_on_meta_and_under_inference_mode() -> None:
    with torch.inference_mode():
        moe = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local")
        frozen = FrozenExperts.of(moe.experts)
    assert not any(p.is_inference() for p in frozen.parameters())
    empty = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local", device="meta")
    freeze_experts(empty)
    empty.experts.to_empty(device="cpu")
    empty.experts.load_state_dict(frozen.state_dict())
    assert torch.equal(empty.experts.gate_up_proj.dequantize(), frozen.gate_up_proj.dequantize())


@distributed(2, device="cpu")
def test_experts_that_fsdp_has_sharded_are_refused_before_anything_changes(ctx) -> None:
    for whole in (False, True):
        moe = MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe="mxfp8", dispatcher="local")
        fully_shard(moe if whole else moe.experts, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="freeze_experts: expected"):
            freeze_experts(moe)
        assert isinstance(moe.experts, Experts)
    with pytest.raises(ValueError, match="LoRAExperts: expected experts before fully_shard"):
        LoRAExperts(fully_shard(Experts(DIM, HIDDEN_DIM, EXPERTS), mesh=init_device_mesh("cpu", (2,))), 8)
