"""Checks of the layer's weights before any exchange, eager and compiled alike.

e local experts, D model dim, F hidden dim.
"""

from torch import Tensor

from mxep.gemm.checks import check_weight
from mxep.gemm.frozen import FrozenWeight
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
    _check_bias(gate_up_bias, (e, 2 * hidden_dim), x)


def _check_bias(bias: Tensor | None, expected: tuple[int, int], x: Tensor) -> None:
    if bias is not None and (bias.shape != expected or bias.device != x.device):
        got = f"{tuple(bias.shape)} on {bias.device}"
        raise ValueError(f"gate_up_bias: got {got}, want (experts here, 2 F) = {expected} on {x.device}")


def check_frozen(
    x: Tensor,
    gate_up_proj: FrozenWeight,
    down_proj: FrozenWeight,
    gate_up_bias: Tensor | None,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
) -> None:
    """The same for frozen weights."""
    e, dim, hidden_dim = dispatcher.num_local_experts, x.shape[1], down_proj.shape[-1]
    alignment = config.recipe.group_alignment
    expected = ("gate_up_proj", gate_up_proj, (e, 2 * hidden_dim, dim)), ("down_proj", down_proj, (e, dim, hidden_dim))
    for name, w, shape in expected:
        if tuple(w.shape) != shape:
            raise ValueError(f"{name}: expected a frozen weight {shape} for these experts and x, got {tuple(w.shape)}")
        if w.device != x.device:
            raise ValueError(f"{name}: got device {w.device}, want {x.device}, where a is")
        if any(size % alignment for size in shape[1:]):
            raise ValueError(f"{name}: expected sizes in multiples of {alignment} for the recipe, got {shape[1:]}")
    _check_bias(gate_up_bias, (e, 2 * hidden_dim), x)
