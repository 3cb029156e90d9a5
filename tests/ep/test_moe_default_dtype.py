"""torch's default dtype and device are the user's: what layers and products compute has the same bits under each.

So do kernels: under the interpreter, or on a GPU, by the tests of each package.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxep.comms import sum_slots
from mxep.ep import MoE, Router, clip_grad_norm_, load_balancing_loss, router_z_loss
from mxep.gemm import convert, fp32_linear, linear, linear_together, top_k
from mxep.quant import SwiGLU, fold_with_stats, pad_groups, quantize, swiglu_quantize, unpad_groups
from ranks import Context, distributed

BF16 = torch.bfloat16
DEFAULTS = [torch.float64, torch.float16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced, in groups": {"router": {"score": "sigmoid", "balance": True, "num_groups": 4, "top_groups": 2}},
    "biased, clamped": {"bias": True, "activation": SwiGLU(1.702, 7.0, 1.0, True)},
    "score before experts": {"score_before_experts": True},
    "shared expert": {"num_shared_experts": 1, "shared_expert_gate": True},
}


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype or was)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(was)
        torch.set_default_device(None)


def bits(found: Any) -> list[Tensor]:
    """All tensors of nested results, as bytes."""
    if isinstance(found, Tensor):
        found = found.dequantize() if hasattr(found, "qdata") else found
        return [found.detach().contiguous().view(-1).view(torch.uint8)]
    return [x for each in found for x in bits(each)] if isinstance(found, (tuple, list)) else []


def assert_same(compute: Callable[[], Any]) -> None:
    """compute() has the same bits under every default dtype, and under a default device of tensors without values."""
    wanted = bits(compute())
    assert wanted
    for how in (*({"dtype": dtype} for dtype in DEFAULTS), {"device": "meta"}):
        with default(**how):  # type: ignore[arg-type]
            got = bits(compute())
        assert len(got) == len(wanted)
        for i, (a, b) in enumerate(zip(got, wanted)):
            assert torch.equal(a, b), (how, i)


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    random = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(dtype)


def layer(recipe: str, dtype: torch.dtype, **options: Any) -> MoE:
    if "router" in options:
        options = {"router": Router(64, 8, 2, **options["router"])}
    moe = MoE(64, 32, 8, 2, recipe=recipe, dispatcher="local", dtype=dtype, **options)
    for i, parameter in enumerate(moe.parameters()):
        parameter.data.copy_(drawn(*parameter.shape, dtype=torch.float32, seed=i) / 8)
    return moe


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, "plain") for recipe in ("bf16", "mxfp8_32x32_gate_up_fp8", "auto")),
        *(("mxfp8", options) for options in OPTIONS if options != "plain"),
        *(("mxfp8_wgrad_bf16", options) for options in ("plain", "biased, clamped")),
    ],
)
def test_a_layer_has_the_same_bits(recipe: str, options: str) -> None:
    for dtype in (torch.float32, BF16):
        moe = layer(recipe, dtype, **OPTIONS[options])

        def compute(moe: MoE = moe, dtype: torch.dtype = dtype) -> Any:
            moe.zero_grad()
            x = drawn(9, 64, dtype=dtype).requires_grad_()
            out = moe(x)
            out.backward(drawn(9, 64, dtype=dtype, seed=1))
            grads = [parameter.grad for parameter in moe.parameters() if parameter.grad is not None]
            norm = clip_grad_norm_(moe.parameters(), 0.1)
            rest = []
            if moe.router.expert_bias is not None:
                assert moe.router.load is not None
                moe.router.expert_bias.zero_()
                rest = [moe.router.load.clone()]
                moe.router.update_bias(1e-3)
                rest += [moe.router.expert_bias.clone()]
            return [out, x.grad, *grads, norm, *rest]

        assert_same(compute)


def test_products_have_the_same_bits() -> None:
    x, w = drawn(33, 64), drawn(96, 64, seed=1)

    def products() -> Any:
        found = []
        for recipe in ("bf16", "fp8", "mxfp8", "mxfp8_wgrad_bf16"):
            for given in (x.detach().float(), x.detach()):
                a, b = given.requires_grad_(), w.detach().to(given.dtype).requires_grad_()
                out = linear(a, b, recipe=recipe)
                found += [out, *torch.autograd.grad(out.float().square().sum(), (a, b))]
                found += linear_together(a, [b, b], [None, b[:, 0]], recipe=recipe)
        found += [fp32_linear(x, w), *top_k(x.float(), 3), *top_k(x.float(), 3, "sigmoid", choice=-x.float())]
        return found

    assert_same(products)
    model = convert(nn.Sequential(nn.Linear(64, 64, dtype=BF16), nn.Linear(64, 32, dtype=BF16)), "mxfp8")
    assert_same(lambda: model(x))


def test_quantized_data_and_sums_have_the_same_bits() -> None:
    x = drawn(64, 64, dtype=torch.float32)
    sizes = torch.tensor([5, 0, 59], dtype=torch.int32)

    def quantized() -> Any:
        mx = quantize(x)
        padded = pad_groups(x, sizes, alignment=32)
        stats = fold_with_stats(mx)[1]
        found = [mx, quantize(x, axis=-2), mx.dequantize(), padded.rows, stats.changed, stats.flushed, stats.spread]
        return [*found, unpad_groups(padded.rows, padded.row_index, num_rows=64), swiglu_quantize(x)]

    assert_same(quantized)
    rows = torch.tensor([[1.0], [2.0**-10]] * 4)
    index = torch.arange(8, dtype=torch.int32).view(1, 8)
    assert_same(lambda: sum_slots(rows, index))
    logits, ids = drawn(7, 8, dtype=torch.float32), drawn(7, 8).topk(2).indices
    assert_same(lambda: [load_balancing_loss(logits, ids), router_z_loss(logits)])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_layer_that_is_told_its_dtype_is_made_alike(dtype: torch.dtype) -> None:
    made = MoE(64, 32, 8, 2, dispatcher="local", dtype=dtype, bias=True)
    for other in DEFAULTS:
        with default(other):
            moe = MoE(64, 32, 8, 2, dispatcher="local", dtype=dtype, bias=True)
            router = Router(64, 8, 2, balance=True)
        assert {name: x.dtype for name, x in moe.state_dict().items()} == {
            name: x.dtype for name, x in made.state_dict().items()
        }
        assert router.expert_bias is not None
        assert router.load is not None
        assert (router.expert_bias.dtype, router.load.dtype) == (torch.float32, torch.int64)
    with default(device="meta"):
        assert all(x.is_meta for x in MoE(64, 32, 8, 2, dispatcher="local").parameters())


@distributed(2, dispatcher=["symmetric", "all_to_all", "hierarchical"])
def test_an_exchange_has_the_same_bits(ctx: Context, dispatcher: str) -> None:
    options = {"ranks_per_node": 1} if dispatcher == "hierarchical" else {}
    moe = MoE(64, 32, 8, 2, group=ctx.group, recipe="mxfp8", dispatcher=dispatcher, device=ctx.device, **options)

    def compute() -> Any:
        moe.zero_grad()
        x = drawn(9, 64, seed=ctx.rank).to(ctx.device).requires_grad_()
        out = moe(x)
        out.backward(drawn(9, 64, seed=2).to(ctx.device))
        norm = clip_grad_norm_(moe.parameters(), 0.1)
        moe.check()
        return [x.cpu() for x in (out, x.grad, norm) if x is not None]

    wanted = bits(compute())
    for dtype in DEFAULTS:
        with default(dtype):
            assert all(map(torch.equal, bits(compute()), wanted)), dtype
