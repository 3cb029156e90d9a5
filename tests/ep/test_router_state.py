"""What a layer keeps in fp32, and its counts, stay what they are, whatever casts, moves, copies or loads it."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mxep.ep import ExpertParallel, MoE, Router, SymmetricDispatcher
from mxep.ep.router import _warn_of_cast
from ranks import Context, distributed


def make(device: str = "cpu", **options) -> MoE:
    torch.manual_seed(0)
    router = Router(64, 8, 2, balance=True, device=device)
    options = {"recipe": "bf16", "dispatcher": "local", "num_shared_experts": 1} | options
    return MoE(64, 32, 8, 2, router=router, device=device, **options)


def used() -> MoE:
    """After a step: a bias that bf16 cannot hold, and a load."""
    moe = make()
    moe.router.expert_bias.copy_(1 + torch.arange(8) * 2.0**-12)
    moe(torch.randn(20, 64, dtype=torch.bfloat16))
    assert moe.router.load.sum() == 40
    return moe


def cast(moe: MoE, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in moe.state_dict().items()}


def swapped(moe: MoE) -> MoE:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return moe.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def with_gradient(moe: MoE) -> MoE:
    moe(torch.randn(20, 64, dtype=torch.bfloat16)).sum().backward()
    moe.half()
    assert moe.router.weight.grad.dtype == torch.float32
    return moe


CASTS: dict[str, Callable[[MoE], MoE]] = {
    "to a dtype": lambda moe: moe.to(torch.bfloat16),
    "to a device and a dtype": lambda moe: moe.to("cpu", torch.bfloat16),
    "bfloat16": lambda moe: moe.bfloat16(),
    "half": lambda moe: moe.half(),
    "float": lambda moe: moe.float(),
    "double": lambda moe: moe.double(),
    "type": lambda moe: moe.type(torch.float16),
    "_apply": lambda moe: moe._apply(lambda t: t.bfloat16() if t.is_floating_point() else t),
    "of the whole model": lambda moe: nn.Sequential(nn.Linear(2, 2), moe).to(torch.bfloat16)[1],
    "of the router": lambda moe: (moe.router.to(torch.bfloat16), moe)[1],
    "there and back": lambda moe: moe.bfloat16().float(),
    "swapping": swapped,
    "with gradients": with_gradient,
    "deepcopy": copy.deepcopy,
    "pickle": lambda moe: pickle.loads(pickle.dumps(moe)),
    "bfloat16, then pickle": lambda moe: pickle.loads(pickle.dumps(moe.bfloat16())),
}


@pytest.mark.parametrize("entrance", CASTS)
def test_no_cast_or_copy_changes_a_bit_of_the_router(entrance: str) -> None:
    moe = used()
    wanted = [tensor.clone() for tensor in (moe.router.weight.detach(), moe.router.expert_bias)]
    router = CASTS[entrance](moe).router
    assert router.weight.dtype == router.expert_bias.dtype == torch.float32
    assert router.load.dtype == torch.int64
    assert all(map(torch.equal, (router.weight, router.expert_bias), wanted))
    assert router.load.sum() in (40, 80)  # of two forwards
    assert isinstance(router.weight, nn.Parameter)
    assert router.weight.requires_grad


def loads() -> Iterator[tuple[str, Callable[[MoE, dict], object], str]]:
    for device in ("cpu", "meta", "emptied"):
        for strict in (True, False):
            if device != "meta":
                yield f"{device}, strict={strict}", lambda moe, s, strict=strict: moe.load_state_dict(s, strict), device
            assign = lambda moe, s, strict=strict: moe.load_state_dict(s, strict, assign=True)  # noqa: E731
            yield f"{device}, assign, strict={strict}", assign, device
    yield (
        "of a model",
        lambda moe, s: nn.ModuleDict({"m": moe}).load_state_dict(
            {f"m.{name}": tensor for name, tensor in s.items()}, assign=True
        ),
        "meta",
    )
    yield "set_model_state_dict", lambda moe, s: set_model_state_dict(moe, s), "emptied"


LOADS = {name: (load, device) for name, load, device in loads()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("entrance", LOADS)
def test_whatever_is_loaded_the_router_is_fp32_and_balances(entrance: str, dtype: torch.dtype) -> None:
    load, device = LOADS[entrance]
    state = cast(used(), dtype)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    moe = make("cpu" if device == "cpu" else "meta")
    if device == "emptied":
        moe.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    load(moe, state)
    router = moe.router
    assert router.weight.dtype == router.expert_bias.dtype == torch.float32
    assert torch.equal(router.weight, state["router.weight"].float())
    assert torch.equal(router.expert_bias, state["router.expert_bias"].float())
    assert router.load.tolist() == [0] * 8
    router(torch.randn(40, 64))
    assert router.load.sum() == 80
    before, counts = router.expert_bias.clone(), router.load.clone()
    router.update_bias(1e-3)
    torch.testing.assert_close(router.expert_bias, before + 1e-3 * torch.sign(10 - counts), rtol=0, atol=1e-7)
    assert not (router.expert_bias == before).all(), "an update of 1e-3 was rounded away"


def test_after_to_empty_and_reset_parameters_a_router_is_a_new_one() -> None:
    router = make("meta").to_empty(device="cpu").router
    router.reset_parameters()
    assert router.load.tolist() == router.expert_bias.tolist() == [0] * 8
    assert router.weight.std() > 0.05


def test_tensors_that_were_put_in_one_by_one_make_a_router_that_counts() -> None:
    moe, source = make("meta"), used()
    for name, parameter in source.named_parameters():  # as accelerate's set_module_tensor_to_device does
        module, _, last = name.rpartition(".")
        setattr(moe.get_submodule(module), last, nn.Parameter(parameter.detach().clone()))
    moe.router.expert_bias = source.router.expert_bias.bfloat16()
    moe(torch.randn(20, 64, dtype=torch.bfloat16))
    assert moe.router.load.sum() == 40
    moe.router.update_bias()
    assert moe.router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoint_of_dcp_loads_into_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    source = used()
    dcp.save(cast(source, dtype), checkpoint_id=tmp_path, no_dist=True)
    moe = make("meta").to_empty(device="cpu")
    state = moe.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    moe.load_state_dict(state, assign=True)
    assert moe.router.expert_bias.dtype == torch.float32
    assert torch.equal(moe.router.expert_bias, source.router.expert_bias.to(dtype).float())
    assert moe.router.load.tolist() == [0] * 8


def test_counts_go_on_past_what_fp32_can_count() -> None:
    router = Router(64, 2, 1, balance=True)
    router.load.fill_(2**24 + 1)
    router(torch.randn(1000, 64))
    assert (router.load - 2**24 - 1).sum() == 1000
    router.load[:] = torch.tensor([2**60, 2**60 + 1])
    router.update_bias(0.5)
    assert router.expert_bias.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("how", ["float", "assign"])
def test_a_layer_that_became_fp32_computes_as_one_that_was_made_so(recipe: str, how: str) -> None:
    options = {"recipe": recipe, "max_tokens": 20}
    moe, x = make(**options), torch.randn(20, 64)
    moe(x.bfloat16())
    wanted = make(**options, dtype=torch.float32)
    if how == "float":
        wanted.load_state_dict(cast(moe, torch.float32))
        moe.float()
    else:
        moe.load_state_dict(wanted.state_dict(), assign=True)
    results = []
    for layer in (moe, wanted):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.sum().backward()
        results.append((out, leaf.grad, *(p.grad for p in layer.parameters())))
    assert all(map(torch.equal, *results))
    assert moe.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    moe.check()
    moe.close()


@distributed(2)
def test_layers_of_ranks_become_fp32_together(ctx: Context) -> None:
    """Over a dispatcher that two layers share, whose transport stays."""
    moe, other = (make(ctx.device.type, dispatcher="symmetric", group=ctx.group, max_tokens=8) for _ in range(2))
    assert moe.dispatcher is other.dispatcher
    x = torch.randn(8, 64, device=ctx.device)
    moe(x.bfloat16()).sum().backward()
    moe.float()
    moe(x).sum().backward()
    other(x.bfloat16()).sum().backward()
    plan = ExpertParallel(max_tokens=8)
    whole = make(ctx.device.type)
    plan._apply(whole, DeviceMesh.from_group(ctx.group, ctx.device.type))
    whole.float()(x).sum().backward()


def test_a_dispatcher_to_share_keeps_its_dtype_and_the_error_says_so() -> None:
    shared = SymmetricDispatcher(8, dim=64)
    moe = make(dispatcher=shared).float()
    assert moe.dispatcher is shared
    with pytest.raises(ValueError, match=r"room for rows of torch.bfloat16, got torch.float32.*its dispatcher"):
        moe(torch.randn(4, 64))


@distributed(1)
def test_fsdp2_that_casts_a_router_is_told_of_and_apart_it_is_not_cast(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    x = torch.randn(8, 64, device=ctx.device, dtype=torch.bfloat16)
    for apart in (False, True):
        _warn_of_cast.cache_clear()
        moe = make(ctx.device.type, dtype=torch.float32)
        if apart:
            fully_shard(moe.router, mesh=mesh)
        fully_shard(moe, mesh=mesh, mp_policy=policy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moe(x)
            moe(x)
        told = [str(each.message) for each in caught if "a router's weight was cast" in str(each.message)]
        assert len(told) == (not apart)
        assert moe.router.expert_bias.dtype == torch.float32
