"""The head's loss in chunks: as exact as logits in fp32, and the same for a Trainer."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("transformers")


from integration.tiny_models import tiny, token_ids
from mxep.integration.metrics import snr
from mxep.integration.transformers.optimize import defer_head, linear_cross_entropy, reason_to_keep_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(dtype: torch.dtype, tokens: int = 50, dim: int = 32, vocabulary: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator).mul(dim**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[::7] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("rows", [1, 16, 50, 4096])
@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(11)])
def test_loss_and_gradients_are_those_of_whole_logits(rows: int, num_items: Any) -> None:
    hidden, weight, labels = inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, num_items=num_items, rows=rows, weight_gradient=torch.float64)
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    whole = F.cross_entropy(hidden @ weight.T, labels, reduction="sum") / (num_items or (labels >= 0).sum())
    torch.testing.assert_close(loss.double(), whole, rtol=1e-6, atol=0)
    for one, other in zip(found, torch.autograd.grad(3 * whole, (hidden, weight))):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # softmax is in fp32


@pytest.mark.parametrize("weight_gradient", [torch.float32, torch.bfloat16])
def test_gradients_in_bf16_lose_a_rounding_of_their_operands(weight_gradient: torch.dtype) -> None:
    """An error of at most 2^-9 in each operand is -20 log10(2^-9 / sqrt 3) = 59 dB: three such leave over 50 dB. In
    bf16 each of 16 chunks rounds the sum once more."""
    hidden, weight, labels = inputs(torch.bfloat16, tokens=256)
    loss = linear_cross_entropy(hidden, weight, labels, rows=16, weight_gradient=weight_gradient)
    loss.backward()
    exact = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    whole = F.cross_entropy(exact[0] @ exact[1].T, labels)
    whole.backward()
    torch.testing.assert_close(loss, whole, rtol=1e-3, atol=0)
    assert snr(exact[0].grad, hidden.grad) > 44
    assert snr(exact[1].grad, weight.grad) > (44 if weight_gradient == torch.float32 else 36)


def test_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match="expected GEMMs in bfloat16 or more, got float16"):
        linear_cross_entropy(*inputs(torch.float16))


def test_under_autocast_products_are_bf16_and_gradients_the_parameters_dtype() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels, rows=16).backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    whole = [each.detach().bfloat16().requires_grad_() for each in (hidden, weight)]
    linear_cross_entropy(*whole, labels, rows=16).backward()
    assert torch.equal(weight.grad, whole[1].grad.float())


def test_what_needs_no_gradient_gets_none() -> None:
    for frozen in (0, 1):
        tensors = inputs(torch.float32)
        tensors[frozen].requires_grad_(False)
        linear_cross_entropy(*tensors).backward()
        assert tensors[frozen].grad is None
        assert tensors[1 - frozen].grad.any()


@pytest.mark.parametrize("label", [-1, 96])
def test_a_label_of_no_word_is_refused(label: int) -> None:
    hidden, weight, labels = inputs(torch.float32)
    labels[3] = label
    with pytest.raises(RuntimeError, match=r"labels: expected 0 to 95 or -100, got others"):
        linear_cross_entropy(hidden, weight, labels)


def test_a_second_backward_is_refused() -> None:
    loss = linear_cross_entropy(*inputs(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward, got a second"):
        loss.backward()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("kwargs", [{}, {"num_items_in_batch": 100}, {"return_dict": False}, {"shift": True}])
def test_a_models_loss_and_gradients_stay(kind: str, kwargs: dict[str, Any]) -> None:
    ids, kwargs = token_ids(), dict(kwargs)
    if kwargs.pop("shift", False):
        kwargs["shift_labels"] = ids.roll(3, 1)
    plain, deferred = tiny(kind), tiny(kind)
    assert reason_to_keep_loss(deferred) is None
    defer_head(deferred, rows=16)
    found = []
    for model in (plain, deferred):
        model.train()
        out = model(input_ids=ids, labels=ids, **kwargs)
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        found.append((loss, out, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0])
    for one, other in zip(found[0][2], found[1][2]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    if kwargs.get("return_dict", True):
        assert found[1][1].logits is None
        assert "logits" not in found[1][1]
    else:
        assert len(found[1][1]) == len(found[0][1]) - 1


def test_an_auxiliary_loss_is_added() -> None:
    plain, deferred = (tiny("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5) for _ in range(2))
    defer_head(deferred)
    ids = token_ids()
    losses = [model.train()(input_ids=ids, labels=ids).loss for model in (plain, deferred)]
    torch.testing.assert_close(*losses)
    assert losses[0] > tiny("qwen3_moe")(input_ids=ids, labels=ids).loss


def test_logits_are_there_without_labels_in_evaluation_and_without_gradients() -> None:
    model, ids = tiny(), token_ids()
    expected = model.eval()(input_ids=ids).logits
    defer_head(model)
    assert torch.equal(model(input_ids=ids, labels=ids).logits, expected)
    model.train()
    assert torch.equal(model(input_ids=ids).logits, expected)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=ids).logits, expected)
    with pytest.raises(IndexError):
        model(input_ids=ids + 1000, labels=ids)  # no state is left behind an error
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_copies_and_pickles_have_their_own_head() -> None:
    model, ids = tiny(), token_ids()
    defer_head(model)
    expected = model.train()(input_ids=ids, labels=ids).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.zero_()
        loss = other.train()(input_ids=ids, labels=ids).loss
        assert loss.item() == pytest.approx(torch.log(torch.tensor(64.0)).item(), rel=1e-5)
        loss.backward()
        assert other.lm_head.weight.grad.any()
    assert model.lm_head.weight.grad is None
    assert torch.equal(model(input_ids=ids, labels=ids).loss, expected)


def test_a_model_that_changes_its_heads_output_is_told() -> None:
    model, ids = tiny(), token_ids()
    defer_head(model)
    model.lm_head.register_forward_hook(lambda head, args, out: out * 2)
    with pytest.raises(RuntimeError, match=r"expected what lm_head returned.*optimize\(model, loss=False\)"):
        model.train()(input_ids=ids, labels=ids)


def test_a_head_that_peft_trains_a_copy_of_is_deferred() -> None:
    peft = pytest.importorskip("peft")
    ids, out = token_ids(), []
    for defers in (False, True):
        model = tiny()
        if defers:
            defer_head(model)
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
        out.append(adapted.train()(input_ids=ids, labels=ids))
        out[-1].loss.backward()
        head = adapted.base_model.model.lm_head.modules_to_save["default"]
        out.append(head.weight.grad)
    assert out[2].logits is None
    torch.testing.assert_close(out[0].loss, out[2].loss)
    torch.testing.assert_close(out[1], out[3])
    assert adapted.eval()(input_ids=ids, labels=ids).logits is not None
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(input_ids=ids).logits, tiny().eval()(input_ids=ids).logits)


def test_a_head_of_another_vocabulary_is_deferred_again() -> None:
    model, ids = tiny(), token_ids()
    defer_head(model, rows=16)
    model.resize_token_embeddings(80)
    out = model.train()(input_ids=ids, labels=ids)
    assert out.logits is None
    assert model.lm_head.rows == 16
    out.loss.backward()
    whole = model.eval()(input_ids=ids, labels=ids)
    assert whole.logits.shape[-1] == 80
    torch.testing.assert_close(out.loss, whole.loss)


def test_a_new_head_with_a_bias_keeps_its_logits() -> None:
    model, ids = tiny(), token_ids()
    defer_head(model)
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    torch.nn.init.normal_(model.lm_head.bias)
    out, whole = (each(input_ids=ids, labels=ids) for each in (copy.deepcopy(model).train(), model.eval()))
    assert out.logits is not None
    torch.testing.assert_close(out.loss, whole.loss)
