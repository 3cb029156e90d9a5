"""A converted model multiplies by ours and is otherwise the model it was: checkpoints, optimizers, compilers, FSDP2."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gemm.problem import snr
from mxep.gemm import convert, converted, grouped_mm, quantize_weights_once, revert
from mxep.quant import pad_groups, unpad_groups
from ranks import distributed

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
    """Two layers of experts after a dense one, which is nobody's business."""

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
    live = int(offs[-1])
    model.zero_grad()
    out = model(x, offs)[:live]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad[:live], **grads}


def same(results: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return results.keys() == others.keys() and all(torch.equal(results[name], others[name]) for name in results)


def ours(x: Tensor, w: Tensor, offs: Tensor, recipe: str = "mxfp8") -> Tensor:
    """x (M, K), w (G, N, K): padded, multiplied and unpadded by hand."""
    padded = pad_groups(x, offs.diff(prepend=offs.new_zeros(1)), multiple=32)
    return unpad_groups(grouped_mm(padded.rows, w, padded.group_ends, recipe=recipe), padded.row_index, num_rows=len(x))


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
    plain, model = made(), convert(made())
    x, _ = inputs()
    w, wanted = view(model.gate_up_proj), view(plain.gate_up_proj)
    assert isinstance(w, ExpertWeight)
    offs = torch.tensor([20, 33, 37][-len(wanted) :], dtype=torch.int32)
    for _ in range(2):  # the second time out of the cache
        out = torch._grouped_mm(x, w.mT, offs=offs)
        assert type(out) is Tensor
        assert torch.equal(out, ours(x, wanted, offs))


def test_different_casts_of_one_weight_are_told_apart_in_the_cache() -> None:
    model = convert(made())
    x, offs = inputs()
    for _ in range(2):
        for half in (slice(0, H), slice(H, 2 * H)):
            out = torch._grouped_mm(x, model.gate_up_proj[:, half].float().mT, offs=offs)
            wanted = ours(x, made().gate_up_proj[:, half].float(), offs)
            assert torch.equal(out, wanted)
    cache = weight_cache(model)
    assert (cache.hits, cache.misses) == (2, 2)
    changed = model.gate_up_proj[:, :H].float()
    with torch.no_grad():
        changed.mul_(2)
    assert torch.equal(torch._grouped_mm(x, changed.mT, offs=offs), 2 * ours(x, made().gate_up_proj[:, :H], offs))


def scale(w: Tensor, by: float) -> None:
    w.mul_(by)


def scale_by_index(w: Tensor, by: float) -> None:
    w[:] = by * w


def scale_through_views(w: Tensor, by: float) -> None:
    w[1:].mT.mul_(by)
    w[0].mul_(by)


def scale_through_data(w: Tensor, by: float) -> None:
    w.data.mul_(by)


def put_other_data(w: Tensor, by: float) -> None:
    w.data = by * w.detach()


@pytest.mark.parametrize("write", [scale, scale_by_index, scale_through_views, scale_through_data, put_other_data])
@pytest.mark.parametrize("copied", [Tensor.bfloat16, Tensor.clone])
def test_a_copy_that_was_written_to_is_not_taken_for_the_parameter(
    copied: Callable[[Tensor], Tensor], write: Callable[[Tensor, float], None]
) -> None:
    model = convert(made(TitanExperts))
    x, offs = inputs()
    for by in (1.0, 4.0, 1.0):
        w = copied(model.w1_EFD)
        write(w, by)
        out = torch._grouped_mm(x, w.bfloat16().mT, offs=offs)
        assert torch.equal(out, by * ours(x, made(TitanExperts).w1_EFD.bfloat16(), offs))
    assert weight_cache(model).hits == 0


@pytest.mark.parametrize("write", [scale, put_other_data])
@pytest.mark.parametrize("read", [lambda w: w[:], Tensor.float, lambda w: w.float().data])
def test_what_was_read_before_a_write_is_not_taken_for_what_is_read_after(
    read: Callable[[Tensor], Tensor], write: Callable[[Tensor, float], None]
) -> None:
    model, plain = convert(made()), made()
    x, offs = inputs()
    with torch.no_grad():
        before = [read(m.gate_up_proj) for m in (model, plain)]
        for m in (model, plain):
            write(m.gate_up_proj, 4.0)
        after = [read(m.gate_up_proj) for m in (model, plain)]
        for w, wanted in (before, after, before, after):
            assert torch.equal(torch._grouped_mm(x, w.mT, offs=offs), ours(x, wanted, offs))


def test_long_arrays_as_indices_are_told_apart() -> None:
    numpy = pytest.importorskip("numpy")
    model, plain = convert(made(lambda: Experts(8))), made(lambda: Experts(8))
    x, offs = inputs((4,) * 8)
    with numpy.printoptions(threshold=4):
        for order in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 3, 5, 6, 7]):
            out = torch._grouped_mm(x, model.gate_up_proj[numpy.array(order)].mT, offs=offs)
            assert torch.equal(out, ours(x, plain.gate_up_proj[order], offs))


def test_arguments_may_be_given_by_position_as_to_torchs() -> None:
    model, plain = convert(made()), made()
    x, offs = inputs()
    out = torch._grouped_mm(x, model.gate_up_proj.mT, offs, None, torch.bfloat16)
    assert torch.equal(out, ours(x, plain.gate_up_proj, offs))
    x3 = torch.randn(E, 16, D).bfloat16()
    assert torch.equal(torch._grouped_mm(x3, model.gate_up_proj.mT, None), torch._grouped_mm(x3, plain.gate_up_proj.mT))


def test_everything_else_is_torchs_own() -> None:
    plain, model = made(Experts), convert(made(Experts))
    plain.float(), model.float()
    x3, x = torch.randn(E, 16, D), torch.randn(16, D)
    offs = torch.tensor([4, 8, 16], dtype=torch.int32)
    for product in (
        lambda w: torch._grouped_mm(x3.bfloat16(), w.bfloat16().mT),
        lambda w: torch._grouped_mm(w[0].bfloat16().mT, torch.ones(2 * H, 32, dtype=torch.bfloat16), offs=offs * 8),
        lambda w: torch.bmm(x3, w.mT),
        lambda w: F.linear(x, w[0]),
        lambda w: x @ w[1].mT + w[2].sum(),
        lambda w: w * 2,
        lambda w: torch.stack([w, w]),
        lambda w: x.type_as(w),
    ):
        out = product(model.gate_up_proj)
        assert type(out) is Tensor
        assert torch.equal(out, product(plain.gate_up_proj))


@pytest.mark.parametrize("sizes", [(0, 0, 0), (40, 0, 0), (1, 1, 1), (13, 14, 12)])
def test_groups_have_any_size_and_rows_in_none_are_zero(sizes: Sequence[int]) -> None:
    x, offs = inputs(sizes, rows=40)
    plain, model = made(), convert(made())
    out = model(x, offs)
    assert not out[sum(sizes) :].any()
    if sum(sizes):
        assert snr(plain(x, offs)[: sum(sizes)].detach().double(), out[: sum(sizes)].detach()) > 20


def test_parameters_and_checkpoints_are_untouched() -> None:
    model = made(Model)
    before = dict(model.named_parameters())
    convert(model)
    assert list(converted(model)) == [f"layers.{i}.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert all(p is before[name] and type(p) is nn.Parameter for name, p in model.named_parameters())
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(type(value) is Tensor for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (Model(), convert(Model())):
        for assign in (False, True):
            other.load_state_dict(loaded, assign=assign)
            assert same(train(convert(other) if not converted(other) else other, *inputs()), train(model, *inputs()))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_optimizers_made_before_and_after_do_the_same_and_outlive_revert(options: dict[str, bool]) -> None:
    early, late = made(Model), convert(made(Model))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, **options) for model in (early, late)]
    convert(early)
    for reverted in (False, True):
        for _ in range(2):
            results = [train(model, *inputs()) for model in (early, late)]
            assert same(*results)
            for optimizer in optimizers:
                optimizer.step()
        if not reverted:
            revert(early), revert(late)
    assert all(len(optimizer.state) == len(list(early.parameters())) for optimizer in optimizers)
    assert optimizers[0].state[early.layers[0].down_proj]["step"] == 4


def test_revert_gives_the_model_back() -> None:
    model = convert(made(Model))
    train(model, *inputs())
    assert revert(model) is model
    assert type(model.layers[0]) is Experts
    assert type(model.layers[0].down_proj) is nn.Parameter
    assert not converted(model)
    assert same(train(model, *inputs()), train(made(Model), *inputs()))


def test_copies_and_pickles_are_converted_models_with_caches_of_their_own() -> None:
    model = convert(made(Model))
    wanted = train(model, *inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other.layers[0], Experts)
        assert same(train(other, *inputs()), wanted)
        assert weight_cache(other) is not weight_cache(model)
        assert weight_cache(other).misses == 4
        assert len({id(how.cache) for how in converted(other).values()}) == 1
        with torch.no_grad():
            other.layers[0].down_proj.zero_()
    assert model.layers[0].down_proj.any()


def test_reading_a_weight_stands_for_the_parameter() -> None:
    model = convert(made())
    w, parameter = model.down_proj, dict(model.named_parameters())["down_proj"]
    train(model, *inputs())
    assert w.grad is parameter.grad
    assert w.is_leaf
    assert w.shape == parameter.shape
    w.requires_grad_(False)
    assert not parameter.requires_grad
    w.requires_grad_(True)
    w.data = torch.zeros_like(parameter)
    assert not parameter.any()
    with torch.no_grad():
        w.fill_(1)
    assert parameter.eq(1).all()
    w.grad = None
    assert parameter.grad is None
    (grad,) = torch.autograd.grad(model(*inputs()).sum(), [model.down_proj])
    assert grad.shape == parameter.shape


def test_frozen_weights_pass_gradients_on_and_get_none() -> None:
    model = convert(made()).requires_grad_(False)
    results = train(model, *inputs())
    assert results.keys() == {"out", "x"}
    assert torch.equal(results["x"], train(convert(made()), *inputs())["x"])


def test_inference_is_ours_and_cached() -> None:
    model = convert(made())
    wanted = train(convert(made()), *inputs())["out"]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(model(*inputs())[:37], wanted)
    assert weight_cache(model).hits == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    model = convert(made())
    wanted = train(model, *inputs())
    forward = model.forward
    model.forward = lambda x, offs: checkpoint(forward, x, offs, use_reentrant=reentrant)
    assert same(train(model, *inputs()), wanted)


def test_autocast_activations_meet_fp32_weights() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.experts = nn.Linear(D, D), Experts(dtype=torch.float32)

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return self.experts(self.dense(x.float()), offs)

    model = convert(made(Block))
    with torch.autocast("cpu", torch.bfloat16):
        results = train(model, *inputs())
    assert results["out"].dtype == torch.bfloat16
    assert results["experts.down_proj"].dtype == torch.float32
    plain = train(made(Block), *inputs())
    for name in plain:
        assert snr(plain[name].double(), results[name]) > 20, name


def test_micro_batches_share_quantized_weights_until_the_optimizer_steps() -> None:
    model = convert(made(TitanExperts))
    cache = weight_cache(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        train(model, *inputs())
    assert (cache.hits, cache.misses) == (6, 3)
    held = cache.nbytes
    optimizer.step()
    after = train(model, *inputs())
    assert (cache.hits, cache.misses) == (6, 6)
    assert cache.nbytes == held
    cache.clear()
    assert same(train(model, *inputs()), after)
    del model, optimizer
    assert cache.nbytes == 0


def test_layers_compile_in_one_graph_and_share_it() -> None:
    torch._dynamo.reset()
    model = convert(made(Model), backend="reference")
    wanted = train(model, *inputs())
    graphs = torch._dynamo.utils.counters["stats"]
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    before = graphs["unique_graphs"]
    results = train(model, *inputs())
    assert graphs["unique_graphs"] == before + 1
    for name in wanted:  # torch 2.11 compiles some sums otherwise
        torch.testing.assert_close(results[name], wanted[name], rtol=2**-7, atol=1e-3)
    assert not torch.allclose(results["out"], train(made(Model), *inputs())["out"], rtol=2**-7, atol=1e-3)


def test_a_weight_transposed_by_its_property_compiles() -> None:
    class Up(Experts):
        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return F.grouped_mm(x, self.gate_up_proj.mT, offs=offs)

    torch._dynamo.reset()
    model = convert(made(Up), backend="reference")
    wanted = model(*inputs())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs()), wanted)


def test_functional_calls_and_tied_weights_are_converted() -> None:
    model = made(Model)
    model.layers[1].down_proj = model.layers[0].down_proj
    convert(model)
    assert len(converted(model)) == 4
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    other = Model()
    other.layers[1].down_proj = other.layers[0].down_proj
    other.load_state_dict(doubled, strict=False)
    convert(other)
    assert torch.equal(torch.func.functional_call(model, doubled, inputs()), other(*inputs()))


def test_parts_of_a_model_take_different_recipes() -> None:
    model = made(Model)
    convert(model, "fp8", lambda fqn, p: "down" in fqn, backend="dequant")
    convert(model, "mxfp8", lambda fqn, p: fqn == "layers.0.gate_up_proj")
    recipes = {fqn: how.recipe.name for fqn, how in converted(model).items()}
    assert recipes == {"layers.0.gate_up_proj": "mxfp8", "layers.0.down_proj": "fp8", "layers.1.down_proj": "fp8"}
    train(model, *inputs())
    assert weight_cache(model).misses == 3
    revert(model)
    assert type(model.layers[0]) is Experts


def test_wrong_use_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="no parameter that passes the filter, want a 3-D"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^bias: got torch.float32 \(2,\), want a 3-D"):
        convert(nn.Linear(2, 2), filter=lambda fqn, p: fqn == "bias")
    with pytest.raises(ValueError, match=r"gate_up_proj: already converted.*revert"):
        convert(convert(made()))
    with pytest.raises(ValueError, match="backend: got 'cublas', want auto, reference"):
        convert(made(), backend="cublas")
    with pytest.raises(ValueError, match="recipe: got 'mx4'"):
        convert(made(), "mx4")
    with pytest.raises(ValueError, match="nothing converted"):
        weight_cache(made())


def test_errors_of_a_product_name_the_parameter() -> None:
    model = nn.ModuleDict({"experts": Experts()})
    experts: Any = convert(model)["experts"]
    x, offs = inputs()
    with pytest.raises(ValueError, match=r"experts.gate_up_proj: K: got 40, want a multiple of 32"):
        F.grouped_mm(x[:, :40], experts.gate_up_proj[:, :, :40].mT, offs=offs)
    with pytest.raises(
        ValueError, match=r"experts.down_proj: group_ends: got torch.int32 \(2,\), want torch.int32 \(G,\)"
    ):
        F.grouped_mm(x[:, :64].repeat(1, 2)[:, :H], experts.down_proj.mT, offs=offs[:2])


@distributed(2)
@pytest.mark.parametrize("first", ["convert", "fully_shard"])
def test_fsdp2_gathers_weights_that_are_converted(ctx: Any, first: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    def whole() -> Any:
        return made(lambda: nn.Sequential(TitanExperts(), TitanExperts())).to(ctx.device)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = whole()

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, offs)
            return x

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    x, offs = (t.to(ctx.device) for t in inputs())
    model, wanted = Both(), convert(Both())
    if first == "convert":
        convert(model)
    for part in (*model.layers, model):  # 3 experts on 2 ranks
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if first == "fully_shard":
        convert(model)
    assert isinstance(dict(model.named_parameters())["layers.0.w1_EFD"], DTensor)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, wanted)]
    for _ in range(3):
        results = [train(m, x, offs) for m in (model, wanted)]
        assert torch.equal(results[0]["out"], results[1]["out"])
        for name, grad in results[1].items():
            got = results[0][name]
            # The gathered weights are bf16 and so are their gradients.
            got, grad = (got.full_tensor(), grad.bfloat16().float()) if isinstance(got, DTensor) else (got, grad)
            torch.testing.assert_close(got, grad, rtol=2**-7, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    assert weight_cache(model).misses == 0, "FSDP's memory changes unseen: nothing of it is cached"
    assert model.layers[0].w1_EFD.grad is dict(model.named_parameters())["layers.0.w1_EFD"].grad
    revert(model)
    assert not torch.equal(model(x, offs), wanted(x, offs))


@distributed(2, device="cpu")
def test_experts_sharded_as_dtensors_multiply_their_local_part(ctx: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)

    class LocalExperts(Experts):
        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            up = self.gate_up_proj.to_local() if isinstance(self.gate_up_proj, DTensor) else self.gate_up_proj
            down = self.down_proj.to_local() if isinstance(self.down_proj, DTensor) else self.down_proj
            return F.grouped_mm(F.grouped_mm(x, up.mT, offs=offs)[:, :H], down.mT, offs=offs)

    model, wanted = made(lambda: LocalExperts(4)), convert(made(lambda: LocalExperts(4)))
    for name, p in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    convert(model)
    half = slice(2 * ctx.rank, 2 * ctx.rank + 2)
    for name, p in list(wanted.named_parameters()):
        wanted.register_parameter(name, nn.Parameter(p.detach()[half].clone()))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (model, wanted)]
    for _ in range(2):
        results = [train(m, *inputs((10, 20), 30)) for m in (model, wanted)]
        for name, value in results[1].items():
            got = results[0][name]
            assert torch.equal(got.to_local() if isinstance(got, DTensor) else got, value)
        for optimizer in optimizers:
            optimizer.step()
    assert weight_cache(model).misses == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
@pytest.mark.parametrize("kind", [Experts, TitanExperts])
def test_on_a_gpu_nothing_waits_for_the_host_and_a_graph_replays_with_other_groups(kind: Callable[[], Any]) -> None:
    model = convert(made(kind).cuda())
    x, offs = (t.cuda() for t in inputs((13, 14, 10)))
    x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = model(x, offs)
        weights = [p for _, p in model.named_parameters()]
        return (out.detach(), *torch.autograd.grad(out.sum(), [x, *weights]))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for sizes in ((37, 0, 0), (1, 35, 1)):
        offs.copy_(torch.tensor(sizes).cumsum(0).int())
        graph.replay()
        for got, wanted in zip(results, step()):
            assert torch.equal(got, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
@pytest.mark.parametrize("kind", [Experts, TitanExperts])
def test_a_graph_captured_with_a_warm_cache_follows_the_weights(kind: Callable[[], Any]) -> None:
    model = convert(made(kind).cuda())
    cache = weight_cache(model)
    x, offs = (t.cuda() for t in inputs((13, 14, 10)))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        before = model(x, offs)
    torch.cuda.synchronize()
    seen = (cache.hits, cache.misses, cache.nbytes)
    assert seen[1] > 0
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        out = model(x, offs)
    assert (cache.hits, cache.misses, cache.nbytes) == seen
    graph.replay()
    assert torch.equal(out, before)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    graph.replay()
    assert not torch.equal(out, before)
    assert torch.equal(out, model(x, offs))
