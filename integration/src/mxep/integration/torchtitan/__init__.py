"""Routed experts for torchtitan 0.3, as overrides of its configs.

    --override.imports 'mxep.integration.torchtitan.routed_experts={"recipe": "mxfp8"}'

`linears` is a second override, for the linears of attention, dense MLPs and shared experts. `metrics` is a third, which
logs the experts' loads.
"""

from .options import Options
from .overrides import linears, metrics, routed_experts

__all__ = ["Options", "linears", "metrics", "routed_experts"]
