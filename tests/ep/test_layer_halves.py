"""Gate and up apart: the same bits as joined, forward and backward, also where only some gradients are asked for."""

import pytest
import torch

from mxep.ep import LocalDispatcher, run_experts
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend, select
from mxep.runtime.replay import no_replays

E, K, D, F, T = 4, 2, 64, 32, 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("recipe", "hidden_dim"), [("bf16", 64), ("mxfp8", 32), ("mxfp8", 192)])
def test_halves_give_the_bits_of_the_whole(recipe: str, hidden_dim: int) -> None:
    torch.manual_seed(0)
    whole, down = torch.randn(E, 2 * hidden_dim, D, device=DEVICE), torch.randn(E, D, hidden_dim, device=DEVICE)
    x, ids, weights = (x.to(DEVICE) for x in (torch.randn(T, D), torch.rand(T, E).topk(K).indices, torch.rand(T, K)))
    how = {"dispatcher": LocalDispatcher(E), "recipe": Recipe.named(recipe)}
    d_out = torch.randn(T, D, device=DEVICE)

    def run(apart: bool) -> tuple[torch.Tensor, ...]:
        proj, w2 = whole.clone().requires_grad_(), down.clone().requires_grad_()
        halves = tuple(half.clone().detach().requires_grad_() for half in whole.chunk(2, 1))
        given = (halves[0], halves[1]) if apart else proj
        out, _ = run_experts(x, ids, weights, given, w2, **how)
        leaves = halves if apart else (proj,)
        some = torch.autograd.grad(out, leaves[-1:], d_out, retain_graph=True)
        grads = torch.autograd.grad(out, (*leaves, w2), d_out)
        assert torch.equal(some[0], grads[len(leaves) - 1])
        assert all(grad.is_contiguous() for grad in grads)
        return out, torch.cat(grads[:-1], 1), grads[-1]

    for reference, got in zip(run(False), run(True)):
        assert torch.equal(reference, got)


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        *(("bf16", None), ("mxfp8", None), ("mxfp8", "aot_eager")),
        pytest.param("mxfp8", "inductor", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_halves_are_taken_as_they_are_written(
    recipe: str, compiled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd copies a gradient that is not dense, or that others hold."""
    written, backend = [], select("auto", DEVICE)
    monkeypatch.setattr(type(backend), "wgrad", lambda self, *args, halves=None, **how: (
        written.append(None if halves is None else (halves[0].data_ptr(), halves[1].data_ptr())),
        Backend.wgrad(self, *args, halves=halves, **how),
    )[1])  # fmt: skip
    shapes = (F, D), (F, D), (D, F)
    gate, up, down = (torch.randn(E, *shape, device=DEVICE, requires_grad=True) for shape in shapes)
    ids = torch.rand(T, E, device=DEVICE).topk(K).indices
    how = {"dispatcher": LocalDispatcher(E), "recipe": Recipe.named(recipe)}
    how["dispatcher"].rehearsed = True  # a rehearsal would write gradients, too

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return run_experts(x, ids, weights, (gate, up), down, **how)[0] * 1

    run = layer if compiled is None else torch.compile(layer, fullgraph=True, backend=compiled)
    with no_replays():
        run(torch.randn(T, D, device=DEVICE), torch.rand(T, K, device=DEVICE)).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert written == [None, (gate.grad.data_ptr(), up.grad.data_ptr())]
    assert gate.grad.is_contiguous()
    assert up.grad.is_contiguous()


def test_errors_name_the_half() -> None:
    gate, up, down = torch.randn(E, F, D), torch.randn(E, F + 32, D), torch.randn(E, D, F)
    ids, how = torch.rand(T, E).topk(K).indices, {"dispatcher": LocalDispatcher(E), "recipe": Recipe.named("bf16")}
    with pytest.raises(ValueError, match=r"up: got shape \(4, 64, 64\)"):
        run_experts(torch.randn(T, D), ids, torch.rand(T, K), (gate, up), down, **how)
