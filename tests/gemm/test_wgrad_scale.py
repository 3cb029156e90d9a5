"""wgrad_scale multiplies the gradient of the weight, and nothing else, on every backend, returned or added."""

from typing import Any

import pytest
import torch
import triton  # noqa: F401  # where there is no GPU this sets TRITON_INTERPRET, for which the backend looks
from torch import Tensor

from gemm.problem import Problem, problem, snr
from gemm.test_blackwell import decoded as decoded
from gemm.test_hopper import BACKEND as HOPPER
from mxep.gemm import BACKENDS, grouped_mm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IN_TURN = [
    *((name, recipe) for name in ("reference", "dequant") for recipe in ("bf16", "fp8", "mxfp8", "mxfp8_wgrad_bf16")),
    *(("hopper", recipe) for recipe in ("bf16", "fp8", "mxfp8")),
    *(("triton", recipe) for recipe in ("mxfp8", "mxfp8_wgrad_bf16")),
    *(("blackwell", recipe) for recipe in ("mxfp8", "mxfp8_wgrad_bf16")),
]
backends = pytest.mark.parametrize(("backend", "recipe"), IN_TURN)


def run(p: Problem, backend: str, recipe: str, scale: float, main_grad: Tensor | None = None) -> dict[str, Any]:
    a, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
    bias = torch.ones(p.w.shape[:2], device=p.a.device, requires_grad=True)
    chosen = HOPPER if backend == "hopper" else BACKENDS[backend]
    how = {"main_grad": main_grad, "wgrad_scale": scale}
    out = grouped_mm(a, w, p.offs, recipe=recipe, backend=chosen, bias=bias, **how)
    out.backward(p.dy)
    assert a.grad is not None
    return {"out": out[: p.valid], "da": a.grad[: p.valid], "dbias": bias.grad, "dw": w.grad}


@pytest.mark.usefixtures("decoded")
@backends
def test_the_weights_gradient_is_scaled_and_no_other(backend: str, recipe: str) -> None:
    device = torch.device("cpu") if backend == "blackwell" else DEVICE
    q = problem(n=32, k=64)
    p = Problem(*(x.to(device) for x in (q.a, q.w, q.dy, q.offs)))
    plain, quarter, third = (run(p, backend, recipe, scale) for scale in (1.0, 0.25, 1 / 3))
    assert torch.equal(quarter["dw"], plain["dw"] / 4)
    assert snr(plain["dw"].double() / 3, third["dw"]) > 48  # one or two roundings to bf16
    for name in ("out", "da", "dbias"):
        assert torch.equal(quarter[name], plain[name])
    main_grads = torch.zeros(p.w.shape, device=device), torch.zeros(p.w.shape, device=device)
    for main_grad, scale in zip(main_grads, (1.0, 0.25)):
        assert run(p, backend, recipe, scale, main_grad)["dw"] is None
    assert main_grads[0].any()
    assert torch.equal(main_grads[1], main_grads[0] / 4)


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [(b, r) for b, r in IN_TURN if b == "reference" or (b in ("hopper", "triton") and r in ("fp8", "mxfp8"))],
)
@pytest.mark.parametrize("strided", [False, True])
def test_what_main_grad_takes_was_not_rounded_before(backend: str, recipe: str, strided: bool) -> None:
    q = problem(n=32, k=64)
    p = Problem(*(x.to(DEVICE) for x in (q.a, q.w.float(), q.dy, q.offs)))
    plain = run(p, backend, recipe, 1.0)["dw"]
    shape = (4, 64, 32) if strided else (4, 32, 64)
    main_grad = torch.zeros(shape, device=DEVICE)
    main_grad = main_grad.mT if strided else main_grad
    run(p, backend, recipe, 1.0, main_grad)
    assert not torch.equal(plain, plain.bfloat16().float())
    assert torch.equal(main_grad, plain)
