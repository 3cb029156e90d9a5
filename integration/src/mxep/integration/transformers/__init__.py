"""Run the experts of transformers models by mxep: one argument changes, the model's code does not.

    import mxep.integration.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="mxep_mxfp8")

Importing it registers `mxep_bf16`, `mxep_fp8`, `mxep_mxfp8`, `mxep_auto` and others with transformers, for
`experts_implementation=` and, if transformers has expert parallelism of its own, for `ep_implementation=`.
docs/guides/transformers.md has examples to paste.

    experts, routed            run experts; experts that transformers' registry does not reach
    quantized, lora, export    quantized experts: load, fine-tune, save
    parallel, replay           expert parallelism; the routing of a rollout
    optimize, callback         speed of all other parts; a Trainer's checks
    model                      models of the `mxep` command
"""

from importlib.util import find_spec

from mxep.gemm import Recipe
from mxep.gemm.recipe import AUTO

from .experts import Implementation  # first: is transformers there?

# isort: split
from .callback import MxepCallback, check, load_report
from .export import save_quantized
from .optimize import linear_cross_entropy, optimize
from .parallel import expert_parallel, register
from .quantized import FrozenExperts, freeze_experts, load_quantized
from .replay import joined_routing, record_routing, replay_routing
from .routed import route_experts

__all__ = [
    "NAMES",
    "FrozenExperts",
    "Implementation",
    "MxepCallback",
    "check",
    "expert_parallel",
    "freeze_experts",
    "joined_routing",
    "linear_cross_entropy",
    "load_quantized",
    "load_report",
    "optimize",
    "record_routing",
    "register",
    "replay_routing",
    "route_experts",
    "save_quantized",
]

_CHANGES = "", "_e5m2", "_32x32", "_mxfp4_weights", "_wgrad_bf16", "_gate_up_fp8"
_RECIPES = ("bf16", "fp8", "fp8_e5m2", *(f"mxfp8{change}" for change in _CHANGES))

for _recipe in _RECIPES:
    register(Implementation(f"mxep_{_recipe}", Recipe.named(_recipe)))

register(Implementation("mxep_auto", AUTO))

if find_spec("peft") is not None:
    from .lora import MergeError, merge_and_freeze

    __all__ += ["MergeError", "merge_and_freeze"]

NAMES = (*(f"mxep_{recipe}" for recipe in _RECIPES), "mxep_auto")
"""Names that importing this module registers."""
