"""top_k: the kernel chooses what torch.topk of the scores does, weighs it alike, and its gradients are float64's."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.gemm import top_k
from mxep.gemm.kernels import router_ops as kernels
from mxep.gemm.router_ops import scores_of, top_k_backward_op, top_k_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = ["softmax", "sigmoid"]
CASES = [(1, 1, 1), (37, 8, 2), (70, 60, 4), (33, 128, 8), (5, 130, 130), (9, 257, 6)]
"""T, E, K."""


def draw(T: int, E: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (T, E), rows of other sizes, and a gradient (T, K)."""
    random = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1, 1, T)[:, None]
    return torch.randn(T, E, generator=random) * size, torch.randn(T, K, generator=random)


def on_device(function: Any, *arguments: Any) -> Any:
    out = function(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments))
    return out.cpu() if isinstance(out, Tensor) else [x.cpu() for x in out]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_chooses_the_best_scores_and_weighs_them(case: tuple[int, int, int], score: str) -> None:
    logits, d_weights = draw(*case)
    ids, weights, chosen = on_device(kernels.top_k, logits, None, case[2], score == "softmax")
    scores = scores_of(logits, score)
    assert ids.dtype == torch.int32
    assert torch.equal(scores.gather(1, ids.long()), scores.topk(case[2]).values)  # ids, but for equal scores
    assert torch.equal(chosen, logits.topk(case[2]).values)
    assert all(len(set(row)) == case[2] for row in ids.tolist())
    leaf = logits.double().requires_grad_()
    best = scores_of(leaf, score).gather(1, ids.long())
    want = best / best.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, want.float())
    given = d_weights, weights, ids, chosen, case[1], score == "softmax"
    (gradient,) = torch.autograd.grad(want, leaf, d_weights.double())
    got = on_device(kernels.top_k_backward, *given)
    # A weight is off by some 2^-24 for each of the additions of its sum, and for exp; so is what it multiplies.
    bound = (case[2] + 32) * 2**-23 * d_weights.double().abs().sum(-1, keepdim=True)
    assert ((got.double() - gradient).abs() <= bound).all()
    assert not got.scatter(1, ids.long(), 0).any()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_chosen_may_be_steered(case: tuple[int, int, int], score: str) -> None:
    logits, _ = draw(*case)
    choice, _ = draw(*case, seed=1)
    choice[:, 0] = -torch.inf  # as of a group that is left out
    best = choice.topk(case[2])
    ids, weights, chosen = on_device(kernels.top_k, logits, choice, case[2], score == "softmax")
    assert torch.equal(ids.long(), best.indices)
    assert torch.equal(chosen, logits.gather(1, ids.long()))
    scores = scores_of(logits.double(), score).gather(1, ids.long())
    torch.testing.assert_close(weights, (scores / scores.sum(-1, keepdim=True)).float())


def test_equal_logits_go_by_place_and_nan_comes_first() -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[2, 5, 5], [5, 5, 5], [0, nan, 5], [-inf, -1, inf], [-inf, -inf, -inf], [-2, -3, -1]]
    ids, _, chosen = on_device(kernels.top_k, torch.tensor(rows), None, 3, True)
    assert ids.tolist() == [[1, 2, 0], [0, 1, 2], [1, 2, 0], [2, 1, 0], [0, 1, 2], [2, 0, 1]]
    torch.testing.assert_close(chosen, torch.tensor(rows).gather(1, ids.long()), equal_nan=True)


NAN_OF_SIGN = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32).item()


def rows_of_all_kinds() -> tuple[Tensor, Tensor]:
    """Logits and choice (T, 6): NaNs and zeros of both signs, infinities, ties, what underflows as a score."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [
            [1, nan, 3, 2, 0, -1],
            [nan, nan, 3, nan, 0, nan],
            [-inf, -inf, -inf, -inf, -inf, -inf],
            [inf, 1, inf, -inf, 0, 2],
            [0.0, -0.0, 0.0, -0.0, -1, -2],
            [-200, -150, -300, -400, -120, -500],
            [-150, -150, -150, -151, -150, -149],
            [5, 5, 5, 5, 5, 5],
            [nan, inf, -inf, 0, 1, 2],
            [88, 89, 90, 100, -100, 0],
        ]
    )
    logits[8, 0] = NAN_OF_SIGN
    choice = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    choice[1] = torch.tensor([1, -inf, 3, 2, 0, 5])
    choice[4] = choice[5] = 0.0
    choice[6], choice[7] = torch.tensor([0.0, -0.0, -inf, 0.0, nan, NAN_OF_SIGN]), -inf
    return logits, choice


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_kernel_reference_and_autograd_agree_about_what_is_no_number(score: str, steered: bool, k: int) -> None:
    logits, choice = rows_of_all_kinds()
    given = choice if steered else None
    leaf = logits.clone().requires_grad_()
    ids, weights = top_k(leaf, k, score, choice=given)
    for got in (
        on_device(kernels.top_k, logits, given, k, score == "softmax"),
        top_k_op(logits, given, k, score[1] == "o"),
    ):
        assert torch.equal(got[0], ids)
        torch.testing.assert_close(got[1], weights.detach(), equal_nan=True)
        assert torch.equal(got[2].nan_to_num(7.0), logits.gather(1, ids.long()).nan_to_num(7.0))
    assert all(len(set(row)) == k for row in ids.tolist())
    assert weights[logits.isnan().any(1)].isnan().all(), "a NaN logit does not vanish, whatever is chosen"
    weights.sum().backward()
    chosen = logits.gather(1, ids.long())
    gradient = on_device(
        kernels.top_k_backward, torch.ones_like(weights), weights.detach(), ids, chosen, 6, score[1] == "o"
    )
    assert leaf.grad is not None
    assert torch.equal(gradient.isnan(), leaf.grad.isnan())


def test_of_equal_choices_the_larger_logit_is_taken_and_of_equal_logits_the_lower_id() -> None:
    logits, zeros = torch.tensor([[-200.0, -150.0, -300.0, -150.0]]), torch.zeros(1, 4)
    for choice in (None, zeros, logits.sigmoid(), torch.tensor([[-0.0, 0.0, 0.0, -0.0]])):
        for ids in (
            top_k(logits, 3, "sigmoid", choice=choice)[0],
            on_device(kernels.top_k, logits, choice, 3, False)[0],
        ):
            assert ids.tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("height", [-60.0, -120.0, -1e4])
def test_scores_that_underflow_have_weights_and_gradients(height: float) -> None:
    logits = height + torch.arange(8.0).repeat(3, 1)
    ids, weights, chosen = on_device(kernels.top_k, logits, None, 2, False)
    torch.testing.assert_close(weights, chosen.softmax(-1))
    gradient = on_device(kernels.top_k_backward, torch.tensor([[1.0, -1.0]] * 3), weights, ids, chosen, 8, False)
    torch.testing.assert_close(gradient[:, 7], 2 * weights.prod(-1))


def test_without_tokens() -> None:
    ids, weights, chosen = on_device(kernels.top_k, torch.zeros(0, 8), None, 2, True)
    assert ids.shape == weights.shape == chosen.shape == (0, 2)
    assert on_device(kernels.top_k_backward, weights, weights, ids, chosen, 8, True).shape == (0, 8)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_gradients(score: str, steered: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ops, and on the CPU by torch's functions."""
    logits, d_weights = (x.to(DEVICE) for x in draw(37, 12, 3))
    choice = draw(37, 12, 3, seed=1)[0] if steered else None
    want = top_k(logits.cpu().requires_grad_(), 3, score, choice=choice)
    monkeypatch.setattr(sys.modules["mxep.gemm.router_ops"], "_DEVICE", DEVICE)
    torch._dynamo.reset()
    function = torch.compile(top_k, fullgraph=True, backend="aot_eager") if compiled else top_k
    leaf = logits.clone().requires_grad_()
    ids, weights = function(leaf * 1, 3, score, choice=None if choice is None else choice.to(DEVICE))
    assert torch.equal(ids.cpu(), want[0])
    assert not ids.requires_grad
    torch.testing.assert_close(weights.cpu(), want[1])
    (got,) = torch.autograd.grad(weights, leaf, d_weights)
    monkeypatch.undo()
    plain = logits.cpu().requires_grad_()
    (wanted,) = torch.autograd.grad(top_k(plain, 3, score, choice=choice)[1], plain, d_weights.cpu())
    torch.testing.assert_close(got.cpu(), wanted)


def test_a_second_derivative_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mxep.gemm.router_ops"], "_DEVICE", DEVICE)
    logits, d_weights = (x.to(DEVICE).requires_grad_() for x in draw(5, 8, 2))
    (d_logits,) = torch.autograd.grad(top_k(logits * 1, 2)[1], logits, d_weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_logits.sum().backward()


@pytest.mark.parametrize("score", SCORES)
def test_ops_are_ops(score: str) -> None:
    logits, d_weights = (x.to(DEVICE) for x in draw(5, 8, 2))
    for choice in (None, -logits):
        torch.library.opcheck(top_k_op.opdef, (logits, choice, 2, score == "softmax"))
    ids, weights, chosen = top_k_op(logits, None, 2, score == "softmax")
    torch.library.opcheck(top_k_backward_op.opdef, (d_weights, weights, ids, chosen, 8, score == "softmax"))


@pytest.mark.parametrize(
    ("logits", "k", "score", "says"),
    [
        (torch.zeros(5, 8).double(), 2, "softmax", r"logits: got torch.float64 \(5, 8\), want torch.float32"),
        (torch.zeros(8), 2, "softmax", "logits: got"),
        (torch.zeros(5, 8), 9, "softmax", r"k must lie in 1\.\.8, got 9"),
        (torch.zeros(5, 8), 0, "softmax", r"k must lie in 1\.\.8, got 0"),
        (torch.zeros(5, 8), 2, "tanh", "score must be"),
    ],
)
def test_what_does_not_fit(logits: Tensor, k: int, score: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        top_k(logits, k, score)
    with pytest.raises(ValueError, match="choice: got"):
        top_k(torch.zeros(5, 8), 2, choice=torch.zeros(5, 9))
