"""The model: causal, ignorant at first, with shared experts or without."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from mxep.comms import Capacity
from mxep.ep import Dispatch, TokenDispatcher, make_dispatcher
from mxep.gemm import Linear, Recipe
from mxep.integration.model import Transformer, linear_recipe, make_recipe, rotate
from mxep.integration.schema import VOCABULARY, Config
from mxep.integration.train import make_model as of_config


def make_model(config: Config, **changes: int) -> Transformer:
    torch.manual_seed(0)
    sizes = dataclasses.replace(config.model, **changes)
    model = Transformer(sizes, make_dispatcher("local", sizes.experts, dim=sizes.dim), Recipe.bf16())
    torch.nn.init.normal_(model.head.weight)
    return model


def test_a_byte_does_not_change_the_logits_before_it(make_config: Callable[..., Config]):
    model = make_model(make_config())
    inputs = torch.randint(0, VOCABULARY, (2, 16))
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
    before, after = model(inputs), model(changed)
    assert before.shape == (2, 16, VOCABULARY)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-3, atol=1e-3)
    assert (before[:, 9:] - after[:, 9:]).abs().max() > 0.1


def test_a_new_model_knows_nothing(make_config: Callable[..., Config]):
    config = make_config()
    model = Transformer(
        config.model, make_dispatcher("local", config.model.experts, dim=config.model.dim), Recipe.bf16()
    )
    inputs = torch.randint(0, VOCABULARY, (2, 16))
    assert abs(model.loss(inputs, inputs).item() - torch.log(torch.tensor(VOCABULARY)).item()) < 1e-5


@pytest.mark.parametrize(
    ("given", "linear"), [(["recipe=mxfp8_linear"], Recipe.mxfp8()), (["recipe=mxfp8", "recipe.linear=auto"], "auto")]
)
def test_projections_have_a_recipe_of_their_own(
    make_config: Callable[..., Config], given: list[str], linear: Recipe | str
):
    config = make_config(*given)
    recipe = make_recipe(config)
    assert (recipe, linear_recipe(config, recipe)) == (Recipe.mxfp8(), linear)
    assert linear_recipe(config, Recipe.bf16()) is None, "the baseline has torch's"
    models = []
    for each in (None, linear):
        torch.manual_seed(0)
        dispatcher = make_dispatcher("local", config.model.experts, dim=config.model.dim)
        models.append(Transformer(config.model, dispatcher, recipe, linear=each))
        torch.nn.init.normal_(models[-1].head.weight, generator=torch.Generator().manual_seed(1))
    plain, other = models
    assert {m.recipe for m in other.modules() if isinstance(m, Linear)} == {linear}
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters()))
    inputs = torch.randint(0, VOCABULARY, (2, 16))
    losses = [model.loss(inputs, inputs) for model in models]
    assert linear == "auto" or losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.05 * losses[0]
    losses[1].backward()
    assert all(p.grad is not None for p in other.parameters())


def test_shared_experts_are_there_if_the_config_has_some(make_config: Callable[..., Config]):
    for shared in (0, 1):
        names = [name for name, _ in make_model(make_config(), shared_experts=shared).named_parameters()]
        assert any(".moe.shared." in name for name in names) == bool(shared)


def test_the_dispatcher_is_made_of_all_that_the_config_says(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
):
    seen = []

    def make(dispatch: Dispatch, experts: int, *, dim: int, group: None) -> TokenDispatcher:
        seen.append(dispatch)
        return make_dispatcher("local", experts, dim=dim)

    monkeypatch.setattr("mxep.integration.train.make_dispatcher", make)
    nodes = "dispatcher=hierarchical", "dispatcher.nodes_per_token=2", "dispatcher.ranks_per_node=1"
    limits = "dispatcher.capacity=factor", "dispatcher.factor=1.25", "dispatcher.timeout=7", "train.micro_batches=2"
    for given in (nodes, ["dispatcher=all_to_all"]):
        of_config(make_config(*given, *limits), Recipe.bf16(), SimpleNamespace(ep=None), torch.device("cpu"))
    same = {"capacity": Capacity.factor(1.25), "max_tokens": 32}  # 4 sequences of 32 over 2 ranks, in halves
    assert seen == [
        Dispatch("hierarchical", timeout=7.0, ranks_per_node=1, nodes_per_token=2, **same),
        Dispatch("all_to_all", **same),
    ]


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    q, k = torch.randn(8), torch.randn(8)
    angle = torch.arange(6)[:, None] * torch.rand(4)
    turned_q, turned_k = (rotate(x.expand(6, 8), angle.cos(), angle.sin()) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=1), q.norm().expand(6))
    torch.testing.assert_close(turned_q[4] @ turned_k[2], turned_q[5] @ turned_k[3])
