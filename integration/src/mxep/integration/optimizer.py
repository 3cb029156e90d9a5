"""AdamW over plain parameters and DTensors, and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from mxep.ep import parameter_groups

from .schema import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and the embedding do not."""
    constant = {p for name, p in model.named_parameters() if p.dim() <= 1 or "embed" in name}
    groups = []
    for group in parameter_groups(model):
        decaying = [p for p in group["params"] if p not in constant]
        rest = [p for p in group["params"] if p in constant]
        groups += [{"params": decaying, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then half a cosine from ``lr`` to ``lr * final``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * share)))
