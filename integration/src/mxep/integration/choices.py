"""Recipes, dispatch and capacity by their names in a checked Config."""

from __future__ import annotations

from mxep.comms import Capacity
from mxep.ep import Dispatch
from mxep.ep.auto import rows_per_expert
from mxep.gemm import Recipe
from mxep.gemm.auto import AUTO, recipe_of_experts

from .schema import Config


def make_recipe(config: Config) -> Recipe:
    """The recipe that the config names. Raises ValueError if there is none."""
    name = config.recipe.name
    return auto(config)[0] if name == AUTO else Recipe.named(name)


def auto(config: Config) -> tuple[Recipe, str]:
    """The recipe that "auto" picks for the experts of this run, the same on every rank, and why."""
    model = config.model
    rows = rows_per_expert(config.tokens_per_rank, model.top_k, config.ep, model.experts)
    return recipe_of_experts(rows, model.dim, model.hidden_dim)


def linear_recipe(config: Config, recipe: Recipe) -> Recipe | str | None:
    """The recipe of linears beside experts of `recipe`, or "auto": None where they stay torch's, as they do in a bf16
    baseline."""
    name = config.recipe.linear
    if name is None or recipe != make_recipe(config):
        return None
    return name if name == "auto" else Recipe.named(name)


def recipes(config: Config) -> list[Recipe]:
    """Recipes that task=train trains: bf16 first with train.compare, then the config's recipe."""
    recipe = make_recipe(config)
    return [Recipe.bf16(), recipe] if config.train.compare and recipe.scaling != "none" else [recipe]


def make_dispatch(config: Config) -> Dispatch:
    """How the config's layers dispatch tokens."""
    section = config.dispatcher
    return Dispatch(
        section.name,
        make_capacity(config),
        max_tokens=config.tokens_per_rank,
        timeout=None if section.name == "all_to_all" else section.timeout,
        ranks_per_node=section.ranks_per_node,
        nodes_per_token=section.nodes_per_token,
    )


def make_capacity(config: Config) -> Capacity:
    """The bound on a rank's rows."""
    if config.dispatcher.capacity == "factor":
        return Capacity.factor(config.dispatcher.factor, config.dispatcher.overflow)
    return Capacity.exact() if config.dispatcher.capacity == "exact" else Capacity.worst_case()
