"""fp32_linear and top_k: their kernels, gradients and errors."""

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.gemm import fp32_linear, top_k
from mxep.gemm.kernels import router_ops as kernels
from mxep.gemm.router_ops import dgrad_op, linear_op, scores_of, top_k_backward_op, top_k_op, wgrad_op
from mxep.runtime.launch import cdiv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
TERM = 2**-8
"""A term of bf16 misses at most this of a number, two terms its square, and a rounding to bf16 is off by as much."""
WITH_ALL = (130, 96, 65)
CASES = [
    *((WITH_ALL, weights, FP32) for weights in ("random", "heavy", "wide", "positive")),
    *(((1, 16, 8), "heavy", FP32), ((37, 530, 60), "positive", FP32), ((530, 16, 12), "positive", FP32)),
    *((WITH_ALL, "random", BF16), ((129, 33, 7), "wide", BF16), ((530, 16, 12), "heavy", BF16)),
]
"""T, D, E; which weights; their dtype. Contractions of 530 are cut into parts."""


def draw(T: int, D: int, E: int, weights: str = "random", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D) bf16, w (E, D) and dy (T, E) fp32."""
    random = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(shape, generator=random) for shape in ((T, D), (E, D), (T, E)))
    if weights == "heavy":
        w, dy = w * torch.exp(3 * torch.randn(E, D, generator=random)), dy.pow(5)
    if weights == "wide":
        w, dy = (y * torch.exp2(40 * torch.rand(y.shape, generator=random) - 20) for y in (w, dy))
    if weights == "positive":  # each sum grows all the way, and what is cut off adds up
        x, w, dy = x.abs(), w.abs(), dy.abs()
    return x.bfloat16(), w, dy


def on_device(function: Any, *tensors: Tensor) -> Tensor:
    return function(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in tensors)).cpu()


def loss_of_sum(length: int) -> float:
    """Of a sum's sum of absolute values: a tensor core may cut 2^-23 off at each product, and an operand for 16 of
    them, of three terms; other additions are rounded."""
    return (4 * kernels.BLOCK_K * 2**-23 + cdiv(length, kernels.BLOCK_K) * 2**-24) * (1 + 3 * TERM)


def check(got: Tensor, a: Tensor, b: Tensor, lost: float, dtype: torch.dtype) -> None:
    """got against a @ b of float64; lost: of the sum of |a| |b|."""
    a, b = a.double(), b.double()
    want, lost_there = a @ b, lost * (a.abs() @ b.abs())
    bound = lost_there if dtype == FP32 else lost_there * (1 + TERM) + TERM * want.abs()
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize(("shape", "weights", "dtype"), CASES, ids=str)
def test_products_are_float64s_to_fp32_and_dx_to_bf16(
    shape: tuple[int, int, int], weights: str, dtype: torch.dtype
) -> None:
    """A weight in bf16 is one term and its gradient of two. What dx loses before it is rounded is seen in fp32."""
    x, w, dy = draw(*shape, weights)
    w = w.to(dtype)
    check(on_device(kernels.fp32_linear, x, w), x, w.t(), loss_of_sum(shape[1]), FP32)
    lost = TERM**2 * (dtype == BF16) + loss_of_sum(shape[0])
    check(on_device(kernels.fp32_wgrad, dy, x, dtype), dy.t(), x, lost, dtype)
    lost = (3 if dtype == FP32 else 1) * TERM**2 + 2 * 3 * shape[2] * 2**-23
    out_dtype = FP32 if shape == WITH_ALL else BF16
    check(on_device(kernels.fp32_dgrad, dy, w, out_dtype), dy, w, lost, out_dtype)


def test_errors_are_no_larger_than_those_of_torchs_fp32_product() -> None:
    """Root mean square, of long sums; twice for the tensor core, which truncates where torch rounds."""
    for weights in ("random", "positive"):
        x, w, dy = draw(64, 1024, 64, weights)
        pairs = [(on_device(kernels.fp32_linear, x, w), x, w.t())]
        x, _, dy = draw(1024, 64, 64, weights)
        pairs.append((on_device(kernels.fp32_wgrad, dy, x, FP32), dy.t(), x))
        for got, a, b in pairs:
            exact = a.double() @ b.double()
            error, torchs = ((y.double() - exact).square().mean().sqrt() for y in (got, a.float() @ b.float()))
            assert error <= 2 * torchs


def test_three_terms_are_the_number() -> None:
    x = torch.eye(128).bfloat16()
    _, w, dy = draw(128, 128, 64, "heavy")
    w[:, 0] = 1 + 2**-9 + 2**-23
    assert torch.equal(on_device(kernels.fp32_linear, x, w), w.t())
    assert torch.equal(on_device(kernels.fp32_wgrad, dy, x, FP32), dy.t())
    w[0, 1] = float("nan")
    out = on_device(kernels.fp32_linear, x, w)
    assert out[:, 0].isnan().all()
    assert torch.equal(out[:, 1:], w[1:].t())


def test_without_tokens_there_is_a_gradient_of_zeros() -> None:
    x, w, dy = draw(0, 32, 8)
    assert on_device(kernels.fp32_linear, x, w).shape == (0, 8)
    assert on_device(kernels.fp32_dgrad, dy, w, BF16).shape == (0, 32)
    assert torch.equal(on_device(kernels.fp32_wgrad, dy, x, FP32), torch.zeros(8, 32))


def test_parts_occupy_the_programs_and_give_the_same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._parts(8192, (2, 16), 264) == (16, 8)
    assert kernels._parts(0, (2, 16), 264) == (1, 1)
    for length, tiles, programs in itertools.product((1, 64, 1000, 1024, 16384), (1, 5, 300), (1, 132)):
        steps, parts = kernels._parts(length, (1, tiles), programs)
        assert (parts - 1) * steps * kernels.BLOCK_K < length <= parts * steps * kernels.BLOCK_K
        assert parts == 1 or tiles * parts <= programs
    x, w, dy = draw(70, 530, 8)
    check_parts(monkeypatch, kernels.fp32_linear, x, w, want=(x, w.t()))
    x, w, dy = draw(530, 70, 8)
    check_parts(monkeypatch, kernels.fp32_wgrad, dy, x, FP32, want=(dy.t(), x))


def check_parts(monkeypatch: pytest.MonkeyPatch, function: Any, *arguments: Any, want: tuple[Tensor, Tensor]) -> None:
    results = []
    for sms in (64, 64, 0):
        monkeypatch.setattr(kernels, "num_sms", lambda device, sms=sms: sms)
        results.append(on_device(function, *arguments))
    first, again, whole = results
    check(first, *want, loss_of_sum(want[1].shape[0]), FP32)
    assert torch.equal(first, again)
    assert not torch.equal(first, whole)


def by_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU's tensors go through the ops, as CUDA's do."""
    monkeypatch.setattr(sys.modules["mxep.gemm.router_ops"], "_DEVICE", DEVICE)


@pytest.mark.parametrize(
    ("wanted", "dtype", "compiled"),
    [((1, 1), FP32, False), ((1, 1), BF16, True), ((1, 0), FP32, True), ((0, 1), BF16, False)],
    ids=str,
)
def test_gradients(
    wanted: tuple[int, int], dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_ops(monkeypatch)
    x, w, dy = draw(37, 64, 12)
    w = w.to(dtype)
    leaves = [y.to(DEVICE).requires_grad_(bool(want)) for y, want in zip((x, w), wanted)]
    torch._dynamo.reset()
    function = torch.compile(fp32_linear, fullgraph=True, backend="aot_eager") if compiled else fp32_linear
    out = function(*leaves)
    out.backward(dy.to(DEVICE))
    check(out.detach().cpu(), x, w.t(), loss_of_sum(64), FP32)
    dx, dw = (None if leaf.grad is None else leaf.grad.cpu() for leaf in leaves)
    assert ((dx is not None), (dw is not None)) == wanted
    if dx is not None:
        check(dx, dy, w, 3 * TERM**2 + loss_of_sum(12), BF16)
    if dw is not None:
        check(dw, dy.t(), x, TERM**2 * (dtype == BF16) + loss_of_sum(37), dtype)


def test_only_gradients_that_are_asked_for_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_ops(monkeypatch)
    x, w, dy = (y.to(DEVICE) for y in draw(5, 32, 8))
    leaves, module = (x.requires_grad_(), w.requires_grad_()), sys.modules["mxep.gemm.router_ops"]
    out = fp32_linear(x * 1, w * 1)  # of a leaf that autograd.grad is asked about torch does not tell
    wanted = torch.autograd.grad(out, leaves, dy, retain_graph=True)
    for i, other in enumerate(("wgrad_op", "dgrad_op")):
        with monkeypatch.context() as patch:
            patch.setattr(module, other, None)
            (got,) = torch.autograd.grad(out, leaves[i], dy, retain_graph=True)
        assert torch.equal(got, wanted[i])


def test_only_what_backward_reads_is_kept_and_a_second_derivative_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    by_ops(monkeypatch)
    x, w, dy = (y.to(DEVICE) for y in draw(5, 32, 8))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        fp32_linear(x, w.requires_grad_())
    assert [y.data_ptr() for y in kept] == [x.data_ptr()]
    (dw,) = torch.autograd.grad(fp32_linear(x, w), w, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dw.sum().backward()


def test_the_rest_is_torchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    by_ops(monkeypatch)
    x, w, _ = (y.to(DEVICE) for y in draw(5, 32, 8))
    for a, b in ((x.float(), w), (x.double(), w.double()), (x.half(), w), (x, w.double())):
        assert torch.equal(fp32_linear(a, b), a.float() @ b.float().t())
    for a in (x, x.float()):
        without = fp32_linear(a, w)
        with torch.autocast(DEVICE, dtype=BF16):
            assert torch.equal(fp32_linear(a, w), without)


def test_ops_are_ops() -> None:
    x, w, dy = (y.to(DEVICE) for y in draw(5, 32, 8))
    for opdef, *arguments in ((linear_op, x, w), (dgrad_op, dy, w, BF16), (wgrad_op, dy, x, FP32)):
        torch.library.opcheck(opdef.opdef, tuple(arguments))


@pytest.mark.parametrize("shapes", [((5, 32), (8, 33)), ((2, 5, 32), (8, 32)), ((5, 32), (32,))], ids=str)
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"want x \(T, D\) and w \(E, D\)"):
        fp32_linear(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_captured_graph_follows_its_inputs() -> None:
    x, w, dy = (y.cuda() for y in draw(1030, 1040, 8))
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def step() -> list[Tensor]:
        out = fp32_linear(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        for y, new in zip((x, w, dy), draw(1030, 1040, 8, seed=1)):
            y.copy_(new)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, step()))


SCORES = ["softmax", "sigmoid"]
TOP_K = [(1, 1, 1), (37, 8, 2), (70, 60, 4), (33, 128, 8), (5, 130, 130), (9, 257, 6)]
"""T, E, K."""


def draw_logits(T: int, E: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (T, E), rows of other sizes, and a gradient (T, K)."""
    random = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1, 1, T)[:, None]
    return torch.randn(T, E, generator=random) * size, torch.randn(T, K, generator=random)


def on_device_top_k(function: Any, *arguments: Any) -> Any:
    out = function(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments))
    return out.cpu() if isinstance(out, Tensor) else [x.cpu() for x in out]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", TOP_K, ids=str)
def test_the_kernel_chooses_the_best_scores_and_weighs_them(case: tuple[int, int, int], score: str) -> None:
    logits, d_weights = draw_logits(*case)
    ids, weights, chosen = on_device_top_k(kernels.top_k, logits, None, case[2], score == "softmax")
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
    got = on_device_top_k(kernels.top_k_backward, *given)
    # A weight is off by some 2^-24 for each of the additions of its sum, and for exp; so is what it multiplies.
    bound = (case[2] + 32) * 2**-23 * d_weights.double().abs().sum(-1, keepdim=True)
    assert ((got.double() - gradient).abs() <= bound).all()
    assert not got.scatter(1, ids.long(), 0).any()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", TOP_K, ids=str)
def test_what_is_chosen_may_be_steered(case: tuple[int, int, int], score: str) -> None:
    logits, _ = draw_logits(*case)
    choice, _ = draw_logits(*case, seed=1)
    choice[:, 0] = -torch.inf  # as of a group that is left out
    best = choice.topk(case[2])
    ids, weights, chosen = on_device_top_k(kernels.top_k, logits, choice, case[2], score == "softmax")
    assert torch.equal(ids.long(), best.indices)
    assert torch.equal(chosen, logits.gather(1, ids.long()))
    scores = scores_of(logits.double(), score).gather(1, ids.long())
    torch.testing.assert_close(weights, (scores / scores.sum(-1, keepdim=True)).float())


def test_equal_logits_go_by_place_and_nan_comes_first() -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[2, 5, 5], [5, 5, 5], [0, nan, 5], [-inf, -1, inf], [-inf, -inf, -inf], [-2, -3, -1]]
    ids, _, chosen = on_device_top_k(kernels.top_k, torch.tensor(rows), None, 3, True)
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
        on_device_top_k(kernels.top_k, logits, given, k, score == "softmax"),
        top_k_op(logits, given, k, score[1] == "o"),
    ):
        assert torch.equal(got[0], ids)
        torch.testing.assert_close(got[1], weights.detach(), equal_nan=True)
        assert torch.equal(got[2].nan_to_num(7.0), logits.gather(1, ids.long()).nan_to_num(7.0))
    assert all(len(set(row)) == k for row in ids.tolist())
    assert weights[logits.isnan().any(1)].isnan().all(), "a NaN logit does not vanish, whatever is chosen"
    weights.sum().backward()
    chosen = logits.gather(1, ids.long())
    gradient = on_device_top_k(
        kernels.top_k_backward, torch.ones_like(weights), weights.detach(), ids, chosen, 6, score[1] == "o"
    )
    assert leaf.grad is not None
    assert torch.equal(gradient.isnan(), leaf.grad.isnan())


def test_of_equal_choices_the_larger_logit_is_taken_and_of_equal_logits_the_lower_id() -> None:
    logits, zeros = torch.tensor([[-200.0, -150.0, -300.0, -150.0]]), torch.zeros(1, 4)
    for choice in (None, zeros, logits.sigmoid(), torch.tensor([[-0.0, 0.0, 0.0, -0.0]])):
        for ids in (
            top_k(logits, 3, "sigmoid", choice=choice)[0],
            on_device_top_k(kernels.top_k, logits, choice, 3, False)[0],
        ):
            assert ids.tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("height", [-60.0, -120.0, -1e4])
def test_scores_that_underflow_have_weights_and_gradients(height: float) -> None:
    logits = height + torch.arange(8.0).repeat(3, 1)
    ids, weights, chosen = on_device_top_k(kernels.top_k, logits, None, 2, False)
    torch.testing.assert_close(weights, chosen.softmax(-1))
    gradient = on_device_top_k(kernels.top_k_backward, torch.tensor([[1.0, -1.0]] * 3), weights, ids, chosen, 8, False)
    torch.testing.assert_close(gradient[:, 7], 2 * weights.prod(-1))


def test_without_tokens() -> None:
    ids, weights, chosen = on_device_top_k(kernels.top_k, torch.zeros(0, 8), None, 2, True)
    assert ids.shape == weights.shape == chosen.shape == (0, 2)
    assert on_device_top_k(kernels.top_k_backward, weights, weights, ids, chosen, 8, True).shape == (0, 8)


@pytest.mark.parametrize(("score", "steered", "compiled"), [("softmax", True, True), ("sigmoid", False, False)])
def test_gradients_of_top_k(score: str, steered: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ops, and on the CPU by torch's functions."""
    logits, d_weights = (x.to(DEVICE) for x in draw_logits(37, 12, 3))
    choice = draw_logits(37, 12, 3, seed=1)[0] if steered else None
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
    logits, d_weights = (x.to(DEVICE).requires_grad_() for x in draw_logits(5, 8, 2))
    (d_logits,) = torch.autograd.grad(top_k(logits * 1, 2)[1], logits, d_weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_logits.sum().backward()


@pytest.mark.parametrize("score", SCORES)
def test_ops_of_top_k_are_ops(score: str) -> None:
    logits, d_weights = (x.to(DEVICE) for x in draw_logits(5, 8, 2))
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
