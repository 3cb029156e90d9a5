"""How fast a step was, in units that models and machines are compared in.

    tokens_per_s   of all ranks
    tflops         of a rank, 10^12 FLOPs of the model a second: what a step must compute, so that neither padding nor
                   what checkpointed blocks compute again counts
    mfu            tflops over the peak of this GPU in bf16, whatever the recipe; none where no peak is known
    peak_gib       the most memory that torch's tensors took on any rank since the run began; none on CPUs

A token costs 6 FLOPs, 2 forward and 4 backward, for each weight of a matrix that it meets (of E experts K, of the
embedding none), and 6 S (query-key width + value width) for the attention of a layer, S the length of its sequence:
causality gives no discount, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from .schema import Config

if TYPE_CHECKING:
    from .model import Transformer
    from .transformers.model import CausalLM

PEAKS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 312.0,
}
"""Dense bf16 TFLOP/s of vendors' data sheets, by part of the device's name: the first that is in it."""


def weights_met(model: nn.Module, experts: Iterable[nn.Module], share: float) -> float:
    """Elements of matrices that a token is multiplied by. share: K / E, of the weights in ``experts``."""
    routed = {p for module in experts for p in module.parameters()}
    looked_up = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = (p for p in model.parameters() if p.dim() >= 2 and p not in looked_up)
    return sum(p.numel() * (share if p in routed else 1.0) for p in matrices)


def flops_per_token(model: Transformer | CausalLM, config: Config) -> float:
    """Of loss and gradients."""
    met = weights_met(model, model.experts, config.model.top_k / config.model.experts)
    return 6 * met + 6 * config.model.layers * config.data.length * model.attention_width


def peak_of(name: str) -> float | None:
    """TFLOP/s of the device of this name."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class Speed:
    """Of the steps of one run on this rank. Making it begins to count memory."""

    def __init__(self, model: Transformer | CausalLM, config: Config, device: torch.device) -> None:
        self.tokens = config.data.batch * config.data.length
        self.tflop = self.tokens / config.ranks * flops_per_token(model, config) / 1e12
        self.device = device
        self.peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def memory(self) -> int:
        """The most bytes so far; 0 on CPUs."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def of(self, seconds: float, peak_bytes: int) -> dict[str, float | None]:
        """The metrics of a step. peak_bytes: the most of any rank."""
        tflops = self.tflop / seconds
        return {
            "seconds": seconds,
            "tokens_per_s": self.tokens / seconds,
            "tflops": tflops,
            "mfu": None if self.peak is None else tflops / self.peak,
            "peak_gib": peak_bytes / 2**30 if peak_bytes else None,
        }
