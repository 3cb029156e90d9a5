"""Any MoE model of transformers, with the interface of `mxep.integration.model.Transformer`.

    section `model` -> model on meta -> experts spread over the ep group -> drawn on this rank's device
    model.pretrained -> model on the CPU -> experts spread, one weight after the other -> the rest moved
    parallel.fsdp    -> FSDP2: experts over their copies, all else over all ranks

Weights are fp32 (master weights). Autocast runs GEMMs in bf16, and those of experts run in the recipe. Alternatively
everything is in one dtype (train.precision).

b sequences of S tokens on this rank, V tokens in the model's vocabulary (the data's tokens come first), E experts,
T tokens of this rank, K experts a token.

With FSDP2:

    all but experts       sharded over all ranks, gathered block by block, gradients averaged over all ranks
    experts, dp > 1       each of dp copies of an ep rank's experts keeps a part; gradients averaged over the copies
    experts, dp = 1       left alone: each rank holds its own experts, and their gradients are final

With `bf16-mixed` there is no autocast: parameters stay fp32, all but experts are gathered in bf16, and blocks compute
in it. Gradients are reduced in fp32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar
from transformers.utils.output_capturing import OutputRecorder

from mxep.ep import load_balancing_loss
from mxep.ep.dtensors import init_normal_
from mxep.ep.router import recomputing
from mxep.gemm import Recipe

from ..config import ConfigError
from ..mesh import Mesh
from ..model import linear_recipe, make_dispatch
from ..schema import Config
from .experts import KEY, Implementation, Layer
from .optimize import multiply_by
from .parallel import expert_parallel, register

_numbers = itertools.count()
"""Make registered names unique: two models of one recipe may differ in other settings."""


BIAS = "e_score_correction_bias"
"""Buffer of routers that are balanced by a bias (DeepSeek-V3)."""


class CausalLM(nn.Module):
    """The config's transformers model on ``device``, with experts in ``recipe``, spread over ``mesh.ep``.

    Weights come from the default generators: with one seed, all ranks have the same model and share the same experts.
    Raises ConfigError for settings that the model cannot have, and errors of `expert_parallel` and transformers.
    """

    def __init__(self, config: Config, recipe: Recipe, mesh: Mesh, device: torch.device) -> None:
        super().__init__()
        section = config.model
        if config.train.precision == "32-true" and device.type != "cpu" and config.backend != "reference":
            raise ConfigError(
                f"train.precision=32-true: got backend={config.backend}, want backend=reference: on GPUs "
                "the others round what is not quantized to bf16"
            )
        how = Implementation(
            f"mxep_train_{recipe.name}_{next(_numbers)}", recipe, config.backend, make_dispatch(config)
        )
        register(how)
        assert section.transformers is not None
        dtype = torch.bfloat16 if config.train.precision == "bf16-true" else torch.float32
        mixed = config.train.precision == "bf16-mixed"
        self.autocast = mixed and not config.parallel.fsdp
        sizes = AutoConfig.for_model(**section.transformers)
        made: dict[str, Any] = {"dtype": dtype}
        if section.pretrained is None:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(sizes, **made)
        else:
            disable_progress_bar()
            self.model = AutoModelForCausalLM.from_pretrained(
                section.pretrained, config=sizes, local_files_only=True, use_safetensors=True, **made
            )
        for module in self.model.modules():
            if (bias := module._buffers.get(BIAS)) is not None:
                module._buffers[BIAS] = bias.float()  # in bf16, steps of 1e-3 would round away
        names = expert_parallel(self.model, mesh.grid["ep"], how.name)
        if section.pretrained is None:
            self.model.to_empty(device=device)
            _draw(self.model)
        self.to(device).train()
        self.blocks = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for key in ("parallel.fsdp", "train.activation_checkpointing", "train.compile", "recipe.linear"):
            if not self.blocks and attrgetter(key)(config):
                raise ConfigError(f"{key}: leave it out: {sizes.model_type} has no blocks that transformers names")
        self.experts = [self.model.get_submodule(name) for name in names]
        for part in (part for block in self.blocks for part in block.children()):
            if set(self.experts).intersection(part.modules()):
                continue  # others are attention, norms, dense MLPs
            multiply_by(linear_recipe(config, recipe), part, config.backend)
            if config.train.compile:
                part.forward = torch.compile(part.forward)  # without transformers' hooks, which break a graph
        if config.train.activation_checkpointing:
            for block in self.blocks:  # a wrapper would change the parameters' names
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if config.parallel.fsdp:
            shard(self.model, self.blocks, self.experts, mesh, mixed)
        # These stand for the `mxep.ep.MoE`s of mxep's own decoder.
        self.moes: list[Layer] = [module.__dict__[KEY] for module in self.experts]
        blocks = [self.model.get_submodule(name.rpartition(".")[0]) for name in names]
        self.routers = [RouterView(*each, device) for each in zip(self.experts, self.moes, blocks)]
        self.options = {"use_cache": False}
        self.aux_weight = 0.0
        if getattr(sizes, "output_router_logits", False):
            self.options["output_router_logits"] = False  # else the model computes a loss of its own
            self.aux_weight = getattr(sizes, "router_aux_loss_coef", None) or 0.0
        if self.aux_weight:
            recorders = _recorders(self.model)
            if not all(router.keep_logits(block, recorders) for router, block in zip(self.routers, blocks)):
                raise ConfigError(
                    f"model.transformers.output_router_logits: got true, want false: models of {sizes.model_type} do "
                    "not say what their routers' logits are"
                )
        if section.balance_rate and any(router.bias is None for router in self.routers):
            raise ConfigError(
                f"model.balance_rate: got {section.balance_rate}, want 0: routers of {sizes.model_type} have no bias "
                "(model.transformers.output_router_logits=true trains some to balance)"
            )

    def forward(self, inputs: Tensor) -> Any:
        """``inputs`` (b, S) int64 -> the model's output with `logits` (b, S, V)."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.autocast):
            return self.model(input_ids=inputs, **self.options)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token. In training its gradient includes that of the weighted auxiliary loss.

        The auxiliary loss is the mean over layers of K * `load_balancing_loss`: K at balance. transformers' own first
        adds up loads and scores of all layers, so layers that overload different experts look balanced.
        """
        out = self(inputs)
        loss = F.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten())
        if self.aux_weight and self.training:
            aux = torch.stack([router.balancing_loss() for router in self.routers]).mean()
            loss = loss + self.aux_weight * (aux - aux.detach())
        return loss


class RouterView:
    """The router of ``experts`` in ``block``, with the interface of `mxep.ep.Router`.

    load: (E,) int64, this rank's tokens of each expert since the last update, over all micro-batches. Recomputed
    forwards count once.
    """

    def __init__(self, experts: nn.Module, moe: Layer, block: nn.Module, device: torch.device) -> None:
        self.moe = moe
        biases = [b for name, b in block.named_buffers() if name.endswith(BIAS)]
        self.bias = biases[0] if biases else None
        self.load = torch.zeros(moe.dispatcher.num_experts, device=device, dtype=torch.int64)
        self.logits: Tensor | None = None
        experts.register_forward_hook(self._count)

    def keep_logits(self, block: nn.Module, recorders: list[OutputRecorder]) -> bool:
        """Keep training forwards' logits for `balancing_loss`. Returns False if no recorder finds any in ``block``."""
        for router, one in itertools.product(block.modules(), recorders):
            if isinstance(router, one.target_class):
                router.register_forward_hook(functools.partial(self._keep, one.index))
                return True
        return False

    def _keep(self, index: int, router: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        if router.training and torch.is_grad_enabled() and not recomputing():
            self.logits = out[index] if isinstance(out, tuple) else out

    def balancing_loss(self) -> Tensor:
        """Return K * `load_balancing_loss` (softmax, 0-d) of the last training forward, and forget its logits."""
        routing, logits, self.logits = self.moe.last_routing, self.logits, None
        assert routing is not None
        assert logits is not None
        return routing.expert_ids.shape[1] * load_balancing_loss(logits.flatten(0, -2), routing.expert_ids)

    @torch.no_grad()
    def _count(self, experts: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        routing = self.moe.last_routing
        if not experts.training or routing is None or recomputing():
            return
        ids = routing.expert_ids.flatten().long()
        self.load.scatter_add_(0, ids.clamp_min(0), (ids >= 0).long())

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Move each expert's bias, if any, by ``rate`` towards balance over all ranks. Clears the load. Collective."""
        if self.bias is not None and rate:
            dist.all_reduce(self.load)
            towards_balance = torch.sign(self.load.sum() - len(self.load) * self.load)
            self.bias.add_(towards_balance.to(self.bias.dtype), alpha=rate)
        self.load.zero_()


def _recorders(model: Any) -> list[OutputRecorder]:
    """transformers' recorders of a model's router logits: each has a class of modules, and the index of its output."""
    found = model.can_record_outputs.get("router_logits", [])
    every = found if isinstance(found, list) else [found]
    return [one for one in every if isinstance(one, OutputRecorder) and one.target_class is not None]


@torch.no_grad()
def _draw(model: Any) -> None:
    """Initialize an empty model by its own code. Each rank draws only its own experts."""
    std = model.config.initializer_range
    for module in model.modules():
        if KEY not in module.__dict__:
            model._init_weights(module)
            continue
        for weight in module.parameters(recurse=False):
            init_normal_(weight, std if weight.dim() == 3 else 0.0, per_expert=True)


def shard(model: nn.Module, blocks: Iterable[nn.Module], experts: Iterable[nn.Module], mesh: Mesh, mixed: bool) -> None:
    """Shard ``model`` by FSDP2, after its experts were spread, before the optimizer is made. mixed: compute in bf16."""
    copies, world = mesh.grid["dp"], init_device_mesh(mesh.grid.device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32)
    alone: set[nn.Parameter] = set()
    for module in experts:
        if copies.size() > 1:
            fully_shard(module, mesh=copies)
        else:
            alone |= set(module.parameters())
    for module in (*blocks, model):
        fully_shard(module, mesh=world, mp_policy=policy, ignored_params=alone)
