"""Routing replay: tokens go to the experts of another forward, with weights and gradients of the router."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from integration.tiny_models import force_routing, step, tiny, token_ids, worst
from mxep.integration.transformers import (
    freeze_experts,
    joined_routing,
    optimize,
    record_routing,
    replay_routing,
    route_experts,
)
from mxep.integration.transformers.experts import layers
from mxep.integration.transformers.replay import _Chosen

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, LENGTH, LAYERS, TOP_K, EXPERTS = 2, 24, 2, 2, 4
KINDS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v4", "gpt_oss")


def random_ids() -> Tensor:
    """(batch, length, L, K), distinct in a row."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(BATCH, LENGTH, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]


def used(model: Any) -> Tensor:
    """Ids of the last forward, (T, L, K)."""
    return torch.stack([layer.last_routing.expert_ids for _, layer in layers(model)], 1).long()


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_its_own_routing_changes_no_bit(kind: str) -> None:
    model = tiny(kind, "mxep_mxfp8", torch.bfloat16)
    with record_routing(model) as found:
        wanted = step(model)
    ids = joined_routing(found, BATCH)
    assert ids.shape == (BATCH, LENGTH, LAYERS, TOP_K)
    assert ids.dtype == torch.int32
    with replay_routing(model, ids):
        got = step(model)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert "forward" not in model.model.layers[0].mlp.__dict__


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_weights_are_the_routers_own_with_gradients(kind: str) -> None:
    """Equal to transformers' own code with a hook that computes each router's formula at these ids."""
    model, other = (tiny(kind, name, norm_topk_prob=True) for name in ("mxep_bf16", "eager"))
    ids = random_ids()
    force_routing(other, list(ids.flatten(0, 1).unbind(1)))
    with replay_routing(model, ids):
        got = step(model)
    assert torch.equal(used(model), ids.flatten(0, 1))
    wanted = step(other)
    router = next(name for name in wanted if ".mlp.gate.weight" in name or ".mlp.router.weight" in name)
    assert got[router].abs().sum() > 0
    assert worst(wanted, got)[0] > 90


def test_weights_are_of_scores_in_all_groups() -> None:
    """DeepSeek-V2's top k sees scores of 0 in groups that the router does not choose."""
    model, ids = tiny("deepseek_v2", "mxep_bf16"), random_ids()
    found: list[tuple[Tensor, Tensor]] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: found.append((given[0], given[2])))
    with replay_routing(model, ids):
        step(model)
    for layer, chosen, (x, weights) in zip(model.model.layers, ids.flatten(0, 1).unbind(1), found, strict=True):
        scores = torch.nn.functional.linear(x, layer.mlp.gate.weight).softmax(-1)
        torch.testing.assert_close(weights, scores.gather(1, chosen))


def test_scores_are_found_behind_a_mask_made_with_keywords() -> None:
    scores, ids = torch.rand(3, 4), torch.tensor([[0, 1]] * 3)
    with _Chosen("gate", 4, ids):
        masked = torch.masked_fill(input=scores, mask=scores < 2, value=0.0)
        top = torch.topk(input=masked, k=2)
    assert torch.equal(top.values, scores[:, :2])


def test_layers_that_choose_by_the_token_alone_go_on_doing_so() -> None:
    model, ids = tiny("deepseek_v4", "mxep_bf16", mlp_layer_types=["hash_moe", "moe"]), random_ids()
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(len(table), EXPERTS, generator=torch.Generator().manual_seed(5)).argsort(-1)[:, :TOP_K])
    with replay_routing(model, ids):
        step(model)
    hashed, chosen = used(model).unbind(1)
    assert torch.equal(hashed, table[token_ids().flatten()])
    assert torch.equal(chosen, ids[:, :, 1].flatten(0, 1))
    with record_routing(model) as calls:
        wanted = step(model)
    with replay_routing(model, joined_routing(calls, BATCH)):
        got = step(model)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_ids_come_in_any_shape_and_integer_type() -> None:
    """SGLang's and vLLM's (T, L, K), verl's (batch, length, L, K), Megatron's (T, K) a layer; dense layers in L."""
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    ids = random_ids()
    rows = ids.flatten(0, 1)
    parts = rows.to(torch.int16).unbind(1), [part.to(torch.int32) for part in ids.unbind(2)]
    for given in (ids, rows.to(torch.uint8), *parts):
        with replay_routing(model, given):
            model(input_ids=token_ids())
        assert torch.equal(used(model), rows)
    deep = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16, num_hidden_layers=3, mlp_only_layers=[1])
    with_dense = torch.stack([ids[:, :, 0], torch.zeros_like(ids[:, :, 0]), ids[:, :, 1]], 2)
    for given in (ids, with_dense):
        with replay_routing(deep, given):
            deep(input_ids=token_ids())
        assert torch.equal(used(deep), rows)


def test_a_token_without_ids_is_routed_by_the_router() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    ids = random_ids()
    ids[:, -1] = -1
    own = model.model.layers[0].mlp.gate
    choice: list[Tensor] = []
    hook = own.register_forward_hook(lambda module, given, out: choice.append(out[0].topk(TOP_K).indices))
    with replay_routing(model, ids):
        model(input_ids=token_ids())
    hook.remove()
    got = used(model).view(BATCH, LENGTH, LAYERS, TOP_K)
    assert torch.equal(got[:, :-1], ids[:, :-1])
    assert torch.equal(got[:, -1, 0], choice[0].view(BATCH, LENGTH, TOP_K)[:, -1])


def test_checkpointing_recomputes_with_the_same_experts() -> None:
    model = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16).train()
    ids = random_ids()
    with replay_routing(model, ids):
        wanted = step(model)
        model.gradient_checkpointing_enable()
        got = step(model)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_recorded_once(reentrant: bool) -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with record_routing(model) as found:
        step(model)
    assert [len(calls) for calls in found] == [1] * len(found)


@pytest.mark.parametrize("way", ["optimize", "torch.compile"])
def test_compiled_layers_record_and_replay_eagerly(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    count = {"optimize": LAYERS, "torch.compile": 1}[way]  # the latter compiles all of the model
    model, expected = (
        tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16, num_hidden_layers=count).train() for _ in range(2)
    )
    run: Any = model
    if way == "optimize":
        optimize(model, loss=False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        run = torch.compile(model)
    with record_routing(expected) as wanted:
        step(expected)
    step(run)
    with record_routing(model) as found:
        loss = run(input_ids=token_ids(), labels=token_ids()).loss
    loss.backward()
    assert [len(calls) for calls in found] == [1] * count
    assert torch.equal(joined_routing(found, BATCH), joined_routing(wanted, BATCH))
    ids = random_ids()[:, :, :count]
    with replay_routing(model, ids):
        step(run)
        assert torch.equal(used(model), ids.flatten(0, 1))
    step(run)
    assert all(layer.last_routing is None for _, layer in layers(model)), "compiled again"


def test_a_generations_routing_is_replayed_in_training() -> None:
    """As in GRPO: the policy generates, and trains on what it generated with the experts that it used."""
    model = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16)
    freeze_experts(model, "mxfp4")
    with record_routing(model) as found:
        sequences = model.generate(token_ids(), max_new_tokens=4, do_sample=False, eos_token_id=None)
    ids = joined_routing(found, BATCH)
    assert ids.shape == (BATCH, LENGTH + 3, LAYERS, TOP_K)
    assert sequences.shape == (BATCH, LENGTH + 4)
    with replay_routing(model, ids):
        logits = model(input_ids=sequences[:, :-1]).logits
        logits.float().log_softmax(-1).gather(-1, sequences[:, 1:, None]).sum().backward()
    assert torch.equal(used(model), ids.flatten(0, 1).long())
    assert all(layer.mlp.router.weight.grad.abs().sum() > 0 for layer in model.model.layers)


def test_an_evaluation_has_the_bits_of_a_training_forward() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    ids = random_ids()
    with replay_routing(model, ids):
        wanted = model.train()(input_ids=token_ids()).logits
        with torch.no_grad():
            got = model.eval()(input_ids=token_ids()).logits
    assert torch.equal(wanted, got)


def test_llama_4_replays_too() -> None:
    model = tiny("llama4")
    route_experts(model, "mxep_bf16")
    ids = random_ids()[..., :1]
    with replay_routing(model, ids):
        step(model)
    assert torch.equal(used(model).view(-1, LAYERS, 1), ids.flatten(0, 1))


def test_errors_say_what_is_expected_and_leave_the_model() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    ids = random_ids()
    for given, message in (
        (ids[:, :, :1], r"expected \(..., L, K\) with L 2 MoE layers or 2 layers, got \(2, 24, 1, 2\)"),
        (ids[0, 0], "expected .* got .2, 2."),
        ([ids[:, :, 0]], "expected .T, K. for each of 2 MoE layers, got 1"),
        (ids.float(), "expected integers, got torch.float32"),
        (ids + 1, "mlp: expected ids from -1 to 3, got 1 to 4"),
        (ids - 2, "mlp: expected ids from -1 to 3, got -2 to 1"),
    ):
        with pytest.raises(ValueError, match=message), replay_routing(model, given):
            pass
    with pytest.raises(ValueError, match="expected a model with experts"), replay_routing(torch.nn.Linear(2, 2), ids):
        pass
    with pytest.raises(ValueError, match="mlp: expected ids of 48 tokens, got 24"), replay_routing(model, ids[:1]):
        model(input_ids=token_ids())
    with (
        pytest.raises(ValueError, match=r"mlp: expected ids of 2 experts per token, got 1"),
        replay_routing(model, ids[..., :1]),
    ):
        model(input_ids=token_ids())
    choose = model.model.layers[0].mlp.gate.forward

    def unseen(*given: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return choose(*given)

    model.model.layers[0].mlp.gate.forward = unseen
    with (
        pytest.raises(ValueError, match=r"mlp: expected a router that calls torch\.topk over 4 experts"),
        replay_routing(model, ids),
    ):
        model(input_ids=token_ids())
    with record_routing(model) as calls:
        with pytest.raises(ValueError, match="expected forwards within record_routing, got none"):
            joined_routing(calls, 2)
        model(input_ids=token_ids())
    for batch in (0, 5):
        with pytest.raises(ValueError, match=f"batch: expected the number of sequences of 48 tokens, got {batch}"):
            joined_routing(calls, batch)
    assert "forward" not in model.model.layers[0].mlp.__dict__
