"""Gradients of two weights whose rows follow each other, (2, G, N / 2, K): the bits of the one product, each dense."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import problem
from gemm.test_hopper import BACKEND, DEVICE, here
from mxep.gemm import BACKENDS, Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.backends.hopper import fp8_grouped_wgrad
from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.quant import fold_for_wgrad, quantize


def joined(halves: Tensor) -> Tensor:
    """(G, N, K)."""
    return torch.cat(tuple(halves), 1)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_bf16"])
@pytest.mark.parametrize("name", ["reference", "dequant", "triton", "hopper"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_backend_writes_halves(name: str, recipe: str, out_dtype: torch.dtype) -> None:
    backend: Backend = BACKEND if name == "hopper" else BACKENDS[name]
    p, r = here(problem((64, 0, 96, 32), n=96, k=64)), Recipe.named(recipe)
    dy, a = (p.dy, p.a) if r.wgrad != "mx" or r.scaling == "none" else (quantize(p.dy), quantize(p.a))
    how: dict[str, Any] = {"out_dtype": out_dtype, "scale": 0.5}
    want = backend.wgrad(backend.prepare_wgrad(dy, a, p.offs, r), p.offs, **how)
    halves = torch.full((2, 4, 48, 64), torch.nan, dtype=out_dtype, device=DEVICE)
    assert backend.wgrad(backend.prepare_wgrad(dy, a, p.offs, r), p.offs, halves=halves, **how) is None
    assert want is not None
    assert torch.equal(joined(halves), want)


SHAPES = [
    ((1, 0, 127, 129, 64, 3), 384, 400),  # a tile of 128 rows has some of both
    ((64, 0, 200), 512, 272),
    ((64, 0, 200), 288, 128),  # 64 rows have some of both
    ((3000,), 384, 128),  # one group, cut into parts on a GPU
    ((0, 0), 128, 128),
]


@pytest.mark.parametrize(("sizes", "n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("out_dtype", "add"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)], ids=str
)
def test_folded_products_write_and_add_to_halves(
    sizes: tuple[int, ...], n: int, k: int, out_dtype: torch.dtype, add: bool
) -> None:
    args, groups = folded(sizes, n, k), len(sizes)
    whole = torch.full((groups, n, k), 3.0 if add else torch.nan, dtype=out_dtype, device=DEVICE)
    halves = torch.full((2, groups, n // 2, k), 3.0 if add else torch.nan, dtype=out_dtype, device=DEVICE)
    for out in (whole, halves):
        fp8_grouped_wgrad(out, *args, 0.5, add)
    assert torch.equal(joined(halves), whole)
    assert not whole.isnan().any()


def folded(sizes: tuple[int, ...], n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = here(problem(sizes, n=n, k=k, unused=64))
    x = fold_for_wgrad(*(quantize(y, block_size=None) for y in (p.a, p.dy)), p.offs, alignment=HOPPER_BLOCK_K)
    return x.y_t, x.x_t, x.exponent, x.offs


@pytest.mark.parametrize(("sizes", "n", "k"), SHAPES, ids=str)
def test_the_kernel_gets_halves_that_no_warpgroup_meets_the_end_of(
    sizes: tuple[int, ...], n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the reference in the kernel's place."""
    from mxep.gemm.kernels import hopper

    given = []

    def instead(out: Tensor, y: Tensor, x: Tensor, e: Tensor, _: None, __: None, offs: Tensor, *sizes: int, **how: Any):
        given.append(how["halves"])
        assert how["halves"] == (out.dim() == 4)
        assert not how["halves"] or sizes[0] % (2 * hopper.HALF_ROWS) == 0
        assert sizes == (*y.shape[:1], *x.shape)
        fp8_grouped_wgrad.reference(out, y, x, e, offs, how["factor"], how["add"])

    monkeypatch.setattr(hopper, "_launch", instead)
    monkeypatch.setattr(hopper, "num_sms_of", lambda device: 1)
    args = folded(sizes, n, k)
    whole, halves = (torch.full(shape, torch.nan) for shape in ((len(sizes), n, k), (2, len(sizes), n // 2, k)))
    fp8_grouped_wgrad.reference(whole, *(x.cpu() for x in args), 0.5, False)
    hopper.grouped_wgrad(halves, *(x.cpu() for x in args), 0.5)
    assert torch.equal(joined(halves), whole)
    assert given == ([False] if len(sizes) == 1 else [True] if n // 2 % 64 == 0 else [False, False])
