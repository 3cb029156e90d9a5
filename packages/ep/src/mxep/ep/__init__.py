"""mxep.ep: differentiable expert-parallel mixture-of-experts layers.

`MoE` is the layer. `dispatch`, `expert_mlp` and `combine` are the differentiable parts of which it consists. A
dispatcher (`mxep.ep.dispatchers`) sends the tokens to their experts and back.
"""

from .autograd import accumulate_in_place
from .dispatchers import (
    DISPATCHERS,
    AllToAllDispatcher,
    Dispatch,
    DispatchFields,
    HierarchicalDispatcher,
    LocalDispatcher,
    Routing,
    SymmetricDispatcher,
    TokenDispatcher,
    make_dispatcher,
)
from .dispatchers.base import installed_version
from .experts import Experts, run_experts
from .frozen import FrozenExperts, freeze_experts
from .functional import combine, dispatch, expert_mlp, swiglu
from .lora import LoRAExperts
from .moe import MoE
from .parallel import ExpertParallel, clip_grad_norm_, data_parallel, parameter_groups
from .router import Router, load_balancing_loss, router_z_loss
from .shared_expert import SharedExpert

__version__ = installed_version()

__all__ = [
    "DISPATCHERS",
    "AllToAllDispatcher",
    "Dispatch",
    "DispatchFields",
    "ExpertParallel",
    "Experts",
    "FrozenExperts",
    "HierarchicalDispatcher",
    "LoRAExperts",
    "LocalDispatcher",
    "MoE",
    "Router",
    "Routing",
    "SharedExpert",
    "SymmetricDispatcher",
    "TokenDispatcher",
    "accumulate_in_place",
    "clip_grad_norm_",
    "combine",
    "data_parallel",
    "dispatch",
    "expert_mlp",
    "freeze_experts",
    "load_balancing_loss",
    "make_dispatcher",
    "parameter_groups",
    "router_z_loss",
    "run_experts",
    "swiglu",
]
