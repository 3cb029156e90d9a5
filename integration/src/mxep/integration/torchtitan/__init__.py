"""Routed experts for torchtitan: overrides for 0.3 (`overrides.py`), a model converter for 0.2 (`converter.py`).

    --override.imports 'mxep.integration.torchtitan.routed_experts={"recipe": "mxfp8"}'

    --job.custom_config_module mxep.integration.torchtitan.converter --model.converters mxep --mxep.recipe mxfp8

`linears` is a second override, for the linears of attention, dense MLPs and shared experts.
"""

import importlib.util

from .options import Options

__all__ = ["Options"]

if importlib.util.find_spec("torchtitan.config.override"):  # torchtitan 0.3
    from .overrides import linears, routed_experts

    __all__ += ["linears", "routed_experts"]
