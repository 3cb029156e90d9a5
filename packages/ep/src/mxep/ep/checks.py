"""Checks of the layer's weights before any exchange, eager and compiled alike.

e local experts, D model dim, F hidden dim.
"""

from torch import Tensor

from mxep.gemm.checks import check_weight
from mxep.gemm.several import Weight

from .dispatchers.base import TokenDispatcher
from .mlp import LayerConfig


def check_weights(
    x: Tensor,
    gate_up_proj: Weight,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Raise ValueError for weights that do not fit x, each other, the dispatcher or the recipe, before any exchange."""
    recipe = config.recipe
    e, dim, hidden_dim = dispatcher.num_local_experts, x.shape[1], down_proj.shape[-1] if down_proj.dim() else 0
    wanted = [("down_proj", down_proj, main_grads[1], "(experts here, D, F)", (e, dim, hidden_dim))]
    if isinstance(gate_up_proj, Tensor):
        shape = e, 2 * hidden_dim, dim
        wanted.append(("gate_up_proj", gate_up_proj, main_grads[0], "(experts here, 2 F, D)", shape))
    else:
        if config.activation.interleaved:
            raise ValueError("activation: got interleaved gate and up, which are apart; join them, or not interleaved")
        if main_grads[0] is not None:
            raise ValueError("main_grad: got one of gate and up, which are apart; none, or join them")
        shape = e, hidden_dim, dim
        wanted += [(name, w, None, "(experts here, F, D)", shape) for name, w in zip(("gate", "up"), gate_up_proj)]
    for name, w, main_grad, meant, shape in wanted:
        if w.shape != shape:
            raise ValueError(f"{name}: got shape {tuple(w.shape)}, want {meant} = {shape}")
        check_weight(w, recipe=recipe, device=x.device, main_grad=main_grad, name=name)
    if gate_up_bias is not None and (gate_up_bias.shape != (e, 2 * hidden_dim) or gate_up_bias.device != x.device):
        got = f"{tuple(gate_up_bias.shape)} on {gate_up_bias.device}"
        raise ValueError(f"gate_up_bias: got {got}, want (experts here, 2 F) = {(e, 2 * hidden_dim)} on {x.device}")
