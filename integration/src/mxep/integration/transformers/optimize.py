"""One call that makes what is not expert fast, too, in a model of transformers: `optimize(model)`.

    experts      mxep's, if their implementation is not one already
    linears      of attention and dense MLPs in a quantized recipe; those that read one tensor are one GEMM
    loss         head and cross-entropy in chunks of rows, in training: no logits of all tokens (loss.py)
    attention    SDPA, which is cuDNN's attention on Hopper from torch 2.11 on if no mask is needed
    compile      each decoder layer as a whole, experts' op included: norms, RoPE, router and residuals are fused

Trainers and training loops stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mxep.ep.router import recomputing
from mxep.gemm import Recipe, convert, converted, join_linears
from mxep.gemm.recipe import recipe_name, recipe_of

from .implementation import Implementation, prepare
from .layer import check_experts, is_experts
from .loss import ROWS, defer_head, reason_to_keep_loss
from .versions import ALL_EXPERTS_FUNCTIONS

CAUSAL = "mxep_causal"
"""SDPA with is_causal and no mask. transformers (5.17 to 5.23) makes none for a name of others; for "sdpa" it does
while a graph is captured, and attention takes longer with it."""
ALL_ATTENTION_FUNCTIONS.register(CAUSAL, sdpa_attention_forward)

_COMPILED, _EAGER, _EXPERTS = "_mxep_compiled", "_mxep_eager", "_mxep_experts"
"""Attributes of a compiled decoder layer: whether its last training forward was compiled, whether the next ones are to
be eager, and its modules of experts."""


def optimize(
    model: Any,
    *,
    experts: str | None = "mxep_mxfp8",
    linears: Recipe | str | None = None,
    loss: bool = True,
    attention: Literal["sdpa", "causal"] | None = "sdpa",
    compile: bool = True,
    loss_rows: int = ROWS,
    head_gradient: torch.dtype = torch.float32,
) -> dict[str, str]:
    """Speed up training of a causal model of transformers, in place; returns what changed, by part, and logs it.

    Call it after `expert_parallel` and before `fully_shard`, PEFT and the optimizer. Parameters keep their names and
    objects. A second call changes only what the first left. A part that cannot be served is left, and named with the
    reason as `left: ...`.

    experts: a registered implementation for experts that mxep does not compute yet; None leaves them.
    linears: a recipe, as "mxfp8"; None leaves them.
    loss: by `linear_cross_entropy`, in chunks of loss_rows tokens, in forwards with labels in training, which then
        return no logits. head_gradient: dtype in which chunks add to the head's gradient, fp32 or bf16.
    attention: "sdpa" instead of the eager one. "causal" never makes a mask, nor waits for the device to find that none
        is needed: for batches without padding on the left and without packing. None leaves it.
    compile: `torch.compile` of each decoder layer, in training; one graph serves all layers. Compiled experts keep no
        routing: `load_report` has nothing of them. Checkpointed layers stay eager with use_reentrant=True.

    ValueError, before anything changed, for a name or recipe that is none, experts that mxep cannot serve, and
    attention="causal" in a model with attention windows.
    """
    config = model.config.get_text_config()
    found = [module for module in model.modules() if is_experts(module)]
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    name = getattr(config, "_experts_implementation", None)
    how = ALL_EXPERTS_FUNCTIONS.get(name, None)
    swapped = experts is not None and not isinstance(how, Implementation)
    if swapped:
        how = ALL_EXPERTS_FUNCTIONS.get(experts, None)
        if not isinstance(how, Implementation):
            raise ValueError(f"experts: expected a name that mxep registered, as 'mxep_mxfp8', got {experts!r}")
        if not found:
            raise ValueError(
                f"{type(model).__name__}: expected experts that transformers' registry reaches, got none: "
                "route_llama4 or route_experts prepares some models; else optimize(model, experts=None)"
            )
        for module in found:
            check_experts(module, how.name, how.recipe, spread=False)
    if attention == "causal" and not attends_to_all(config):
        raise ValueError(
            "attention: expected a model whose layers attend to all tokens before, got attention windows: "
            'attention="sdpa"'
        )
    recipe = None if linears is None else recipe_of(linears)

    done: dict[str, str] = {}
    if swapped:
        model.set_experts_implementation(experts)
        done["experts"] = f"{len(found)} modules by {experts}"
    if recipe is not None:
        parts = [part for block in blocks for part in block.children() if not any(map(is_experts, part.modules()))]
        before = len(converted(model))
        for part in parts:
            if not converted(part):
                multiply_by(recipe, part, "auto")
        if count := len(converted(model)) - before:
            done["linears"] = f"{count} in {recipe_name(recipe)}"
    if loss:
        if reason := reason_to_keep_loss(model):
            done["loss"] = f"left: {reason}"
        else:
            defer_head(model, rows=loss_rows, weight_gradient=head_gradient)
            done["loss"] = f"chunks of {loss_rows} tokens, head's gradient in {head_gradient}"
    if attention is not None:
        implementation = CAUSAL if attention == "causal" else attention
        was = config._attn_implementation
        if was == "eager" and not model._supports_sdpa:
            done["attention"] = f"left: {type(model).__name__} has no SDPA"
        elif was != implementation and (was == "eager" or attention == "causal"):
            model.set_attn_implementation(implementation)
            done["attention"] = f"{implementation} instead of {was}, cuDNN {torch.backends.cudnn.version()}"
    if compile:
        todo = [block for block in blocks if not hasattr(type(block), "_mxep_base")]
        for block in todo:
            block.__class__ = _compiled_class(type(block))  # type: ignore[arg-type]
            block.__dict__[_EXPERTS] = [module for module in block.modules() if is_experts(module)]
        if todo:
            done["compile"] = f"{len(todo)} decoder layers"
    for part, what in done.items():
        logging.getLogger("mxep.transformers").info("optimize: %s: %s", part, what)
    return done


def attends_to_all(config: Any) -> bool:
    """Whether a token attends to all before it in every layer of a model."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return not getattr(config, "sliding_window", None) and kinds == {"full_attention"}


def multiply_by(recipe: Recipe | str | None, part: nn.Module, backend: str) -> None:
    """Convert the linears of a part that has any; those that read one tensor become one product."""
    if recipe is None or not any(isinstance(module, nn.Linear) for module in part.modules()):
        return
    convert(part, recipe, backend=backend)
    with contextlib.suppress(ValueError):  # there are none of the names that are known
        join_linears(part)


@functools.cache
def _compiled_class(base: Any) -> Any:
    """`base` with a compiled forward. A class, as copies of a model must not run the layers of the original.

    transformers' checkpointing is around this forward, not in the graph. What it recomputes must run as its forward
    did: a reentrant checkpoint's forward, which has no gradients, was eager.
    """
    compiled = torch.compile(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trains and not recomputing():
            own[_COMPILED] = not own.get(_EAGER)
        if not trains or not own.get(_COMPILED):
            return base.forward(self, hidden_states, *args, **kwargs)
        for experts in own[_EXPERTS]:
            prepare(experts, hidden_states)
        return compiled(self, hidden_states, *args, **kwargs)  # type: ignore[no-untyped-call]

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, "forward": forward, "_mxep_base": base})


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run everything eagerly that is compiled: graphs leave out hooks and forwards that came after them."""
    compiled = [module.__dict__ for module in model.modules() if hasattr(type(module), "_mxep_base")]
    before = [own.get(_EAGER, False) for own in compiled]
    for own in compiled:
        own[_EAGER] = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for own, was in zip(compiled, before):
            own[_EAGER] = was
