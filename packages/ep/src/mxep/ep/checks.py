"""Checks of the layer's arguments. They run before any exchange, eagerly and under torch.compile.

T tokens, K experts per token, e local experts, D model dim, F hidden dim.
"""

from typing import Any

import torch
from torch import Tensor

from mxep.comms import narrow_ids
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.quantize_once import Weight
from mxep.gemm.recipe import check_weight

from .dispatchers.base import TokenDispatcher
from .dtensors import local_tensor
from .formats import LayerConfig
from .lora import LoRAWeights

FLOATS = torch.bfloat16, torch.float32
"""Dtypes that tokens and parameters of a layer may have."""


def checked_tokens(x: Tensor, expert_ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher) -> Tensor:
    """Check shapes and dtypes. Returns a copy of expert_ids, as int32, or if eager and on a CPU in its own dtype."""
    # Not len(x): torch.export would make the number of tokens a constant.
    fits = x.dim() == expert_ids.dim() == 2 and weights.shape == expert_ids.shape and x.shape[0] == expert_ids.shape[0]
    if not fits or expert_ids.shape[1] == 0:
        raise ValueError(
            "dispatch wants x (T, D), expert_ids (T, K), weights (T, K), K at least 1, "
            f"got {tuple(x.shape)}, {tuple(expert_ids.shape)}, {tuple(weights.shape)}"
        )
    if x.dtype not in FLOATS:
        raise ValueError(f"x: got {x.dtype}, want one of {FLOATS} (torch.autocast wants dtype=torch.bfloat16)")
    if weights.dtype != torch.float32 or expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"weights must be float32 and ids int32 or int64, got {weights.dtype}, {expert_ids.dtype} "
                         "(of FSDP2's MixedPrecisionPolicy: cast_forward_inputs=False)")  # fmt: skip
    widest = dispatcher.row_dtype
    if widest is not None and x.dtype.itemsize > widest.itemsize:
        raise ValueError(
            f"the dispatcher has room for rows of {widest}, got {x.dtype}: cast x, or make the layer "
            f"(or its dispatcher) with dtype={x.dtype}"
        )
    if expert_ids.is_cpu and not torch.compiler.is_compiling():
        return expert_ids.clone(memory_format=torch.contiguous_format)  # the dispatcher's errors quote them
    ids = narrow_ids(expert_ids)
    # A copy, because backward reads the ids, and the caller may overwrite them before.
    return ids.clone(memory_format=torch.contiguous_format) if ids is expert_ids else ids


def check_weights(
    x: Tensor,
    gate_up_proj: Weight,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Raise ValueError if weights do not fit x, each other, the dispatcher or the recipe."""
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


def check_lora(x: Tensor, lora: LoRAWeights, experts: int, gate_up_proj: Any, down_proj: Any) -> None:
    """Raise ValueError if A or B does not fit the weights. experts: number of experts on this rank."""
    pairs = ("gate_up", gate_up_proj, lora.gate_up_A, lora.gate_up_B), ("down", down_proj, lora.down_A, lora.down_B)
    for name, weight, *both in pairs:
        if isinstance(weight, tuple):
            raise ValueError("lora: expected one gate_up_proj, got gate and up apart: join them")
        A, B = map(local_tensor, both)
        expected = (experts, A.shape[1], weight.shape[2]), (experts, weight.shape[1], A.shape[1])
        if (tuple(A.shape), tuple(B.shape)) != expected or {A.device, B.device} != {x.device}:
            got = f"{tuple(A.shape)} and {tuple(B.shape)} on {A.device}"
            raise ValueError(f"lora: expected A and B of {name} {expected} on {x.device}, got {got}")
