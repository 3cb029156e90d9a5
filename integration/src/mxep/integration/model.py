"""A language model over bytes or tokens: a decoder with mixtures of experts as feed-forward layers.

    tokens (b, S) -> embedding -> [ x + attention(norm(x)) ; x + moe(norm(x)) ] x layers -> norm -> logits (b, S, V)

Weights, attention and the residual stream are fp32, and tokens enter each MoE in bf16. So two runs that are compared
differ only in the recipe. The fp32 weights are the master weights: recipes quantize from them, and there is no second
copy. Attention's projections are nn.Linear, or mxep's linears in a recipe. On CPUs without bf16 matrix units, bf16
attention is also 3 to 6 times slower than fp32 (2048 x 192 x 576 on one core: 26 GFLOPS in bf16, 102 in fp32).

b sequences of S tokens on this rank, D model dim, H heads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxep.comms import Capacity
from mxep.ep import Dispatch, Experts, MoE, Router, SharedExpert, TokenDispatcher
from mxep.ep.moe import rows_per_expert
from mxep.gemm import Linear, Recipe
from mxep.gemm.recipe import AUTO, recipe_of_experts

from .schema import VOCABULARY, Config, ModelConfig


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
    """The recipe of linears, or "auto". None: they stay nn.Linear, as in the bf16 run that a recipe is compared with.

    recipe: the experts'.
    """
    name = config.recipe.linear
    if name is None or recipe != make_recipe(config):
        return None
    return name if name == "auto" else Recipe.named(name)


def recipes(config: Config) -> list[Recipe]:
    """The recipes that task=train trains: with train.compare bf16, then the config's."""
    recipe = make_recipe(config)
    return [Recipe.bf16(), recipe] if config.train.compare and recipe.scaling != "none" else [recipe]


def make_dispatch(config: Config) -> Dispatch:
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
    if config.dispatcher.capacity == "factor":
        return Capacity.factor(config.dispatcher.factor, config.dispatcher.overflow)
    return Capacity.worst_case()


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (b, S, D) -> (b, S, D)."""

    def __init__(self, dim: int, heads: int, recipe: Recipe | str | None = None, backend: str = "auto") -> None:
        super().__init__()
        self.heads = heads
        make = nn.Linear if recipe is None else functools.partial(Linear, recipe=recipe, backend=backend)
        self.qkv = make(dim, 3 * dim, bias=False)
        self.out = make(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, *rotation), rotate(k, *rotation), v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x: (b, H, S, d). cos, sin: (S, d / 2), of each position's angles."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    """Attention, then the experts, both with a pre-norm and a residual connection."""

    def __init__(self, attention: Attention, moe: MoE, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = attention
        self.moe_norm = nn.RMSNorm(dim)
        self.moe = moe

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        y: Tensor = self.moe(self.moe_norm(x).bfloat16())
        return x + y.float()


class Transformer(nn.Module):
    """The model of the module's docstring.

    dispatcher: shared by all layers. recipe, backend: the MoE layers'. linear: recipe of attention's projections, or
    "auto"; None: they are nn.Linear. vocabulary: V.

    Weights come from the default generator: with one seed, all ranks have the same model and parts of the same experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        dispatcher: TokenDispatcher,
        recipe: Recipe,
        backend: str = "auto",
        linear: Recipe | str | None = None,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        dim, experts, top_k = config.dim, config.experts, config.top_k
        self.head_dim, self.vocabulary = dim // config.heads, vocabulary
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList()
        for _ in range(config.layers):
            attention = Attention(dim, config.heads, linear, backend)
            moe = MoE(
                dim,
                config.hidden_dim,
                experts,
                top_k,
                recipe=recipe,
                backend=backend,
                dispatcher=dispatcher,
                num_shared_experts=config.shared_experts,
                router=Router(dim, experts, top_k, balance=True),
                dtype=torch.float32,
            )
            self.blocks.append(Block(attention, moe, dim))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Layers that write to the residual stream start smaller, by the square root of their number."""
        small = (2 * len(self.blocks)) ** -0.5
        self.embedding.weight.normal_(std=1.0)
        self.head.weight.zero_()
        for module in self.modules():
            if isinstance(module, Attention):
                module.out.weight.mul_(small)
            elif isinstance(module, Experts | SharedExpert):
                module.down_proj.mul_(small)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (b, S) int64 -> logits (b, S, V) fp32."""
        x = self.embedding(inputs)
        rotation = self._rotation(inputs.shape[1], x.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    @property
    def moes(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    @property
    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def _rotation(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        frequency = 1e4 ** (-torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim)
        angle = torch.arange(length, device=device, dtype=torch.int64)[:, None] * frequency
        return angle.cos(), angle.sin()
