"""A converted model is otherwise the model it was: checkpoints, optimizers, copies, compilers, FSDP2, DTensors."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gemm.problem import snr
from gemm.test_convert import D, Experts, H, Model, TitanExperts, inputs, made, same, train, with_forward
from host_sync import no_host_sync
from mxep.gemm import convert, converted, revert
from ranks import distributed


def test_parameters_and_checkpoints_are_untouched() -> None:
    model = made(Model)
    before = dict(model.named_parameters())
    convert(model)
    experts = [f"layers.{i}.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert list(converted(model)) == ["dense.weight", *experts]
    assert all(p is before[name] and type(p) is nn.Parameter for name, p in model.named_parameters())
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(type(value) is Tensor for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    wanted = train(model, *inputs())
    for other, assign in ((Model(), True), (convert(Model()), False), (convert(Model()), True)):
        other.load_state_dict(loaded, assign=assign)
        assert same(train(other if converted(other) else convert(other), *inputs()), wanted)


def test_optimizers_made_before_and_after_do_the_same_and_outlive_revert() -> None:
    early, late = made(), convert(made())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in (early, late)]
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
    assert optimizers[0].state[early.down_proj]["step"] == 4


def test_revert_gives_the_model_back() -> None:
    model = convert(made(Model))
    train(model, *inputs())
    assert revert(model) is model
    assert type(model.layers[0]) is Experts
    assert type(model.layers[0].down_proj) is nn.Parameter
    assert not converted(model)
    assert same(train(model, *inputs()), train(made(Model), *inputs()))


def test_copies_and_pickles_are_converted_models_of_their_own() -> None:
    model = convert(made(), strict=True)
    wanted = train(model, *inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other, Experts)
        assert list(converted(other)) == list(converted(model))
        assert same(train(other, *inputs()), wanted)
        with torch.no_grad():
            other.down_proj.zero_()
        revert(other)
        assert type(other) is Experts
    assert model.down_proj.any()
    assert same(train(model, *inputs()), wanted)


def test_frozen_weights_pass_gradients_on_and_get_none() -> None:
    model = convert(made()).requires_grad_(False)
    results = train(model, *inputs())
    assert results.keys() == {"out", "x"}
    assert torch.equal(results["x"], train(convert(made()), *inputs())["x"])


def test_inference_is_ours() -> None:
    model = convert(made())
    wanted = train(convert(made()), *inputs())["out"]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(model(*inputs())[:37], wanted)


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


def test_layers_compile_in_one_graph_and_share_it() -> None:
    torch._dynamo.reset()
    model = convert(made(Model), backend="reference", strict=True)
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


def test_functional_calls_and_tied_weights_are_converted() -> None:
    model = made(Model)
    model.layers[1].down_proj = model.layers[0].down_proj
    convert(model)
    assert len(converted(model)) == 5
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
    revert(model)
    assert type(model.layers[0]) is Experts


def test_wrong_use_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="no parameter that passes the filter, want a 3-D"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^bias: got torch.float32 \(2,\) of a LayerNorm, want a 3-D"):
        convert(nn.LayerNorm(2), filter=lambda fqn, p: fqn == "bias")
    with pytest.raises(ValueError, match=r"gate_up_proj: already converted.*revert"):
        convert(convert(made()))
    with pytest.raises(ValueError, match="backend: got 'cublas', want auto, reference"):
        convert(made(), backend="cublas")
    with pytest.raises(ValueError, match="recipe: got 'mx4'"):
        convert(made(), "mx4")


def test_errors_of_a_product_name_the_parameter() -> None:
    model = with_forward(lambda self, x, offs: F.grouped_mm(x, self.gate_up_proj[:, :, : x.shape[1]].mT, offs=offs))
    x, offs = inputs()
    with pytest.raises(ValueError, match=r"^gate_up_proj: K: got 40, want a multiple of 32"):
        model(x[:, :40], offs)
    with pytest.raises(ValueError, match=r"^gate_up_proj: offs: got torch.int32 \(2,\), want torch.int32 \(G,\)"):
        model(x, offs[:2])


@pytest.mark.slow
@distributed(2, first=["convert", "fully_shard"])
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
    for _ in range(2):
        results = [train(m, x, offs) for m in (model, wanted)]
        assert torch.equal(results[0]["out"], results[1]["out"])
        for name, grad in results[1].items():
            got = results[0][name]
            # The gathered weights are bf16 and so are their gradients.
            got, grad = (got.full_tensor(), grad.bfloat16().float()) if isinstance(got, DTensor) else (got, grad)
            torch.testing.assert_close(got, grad, rtol=2**-7, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    model.to(torch.float32)
    assert torch.equal(model(x, offs), wanted(x, offs))
    model.cpu().to(ctx.device)
    revert(model)
    assert not torch.equal(model(x, offs), wanted(x, offs))
    model.cpu()


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
    for move in (lambda: model.to(torch.float32), model.cpu, lambda: revert(model).to(torch.bfloat16)):
        move()
        model(*inputs((10, 20), 30))


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
    with no_host_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for sizes in ((37, 0, 0), (1, 35, 1)):
        offs.copy_(torch.tensor(sizes).cumsum(0).int())
        graph.replay()
        for got, wanted in zip(results, step()):
            assert torch.equal(got, wanted)
