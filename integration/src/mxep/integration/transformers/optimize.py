"""`optimize(model)`: one call that speeds up all parts of a transformers model.

    experts      mxep's, if their implementation is not one already
    linears      of attention and dense MLPs in a quantized recipe; those with the same input are one GEMM
    loss         in training, head and cross-entropy in chunks of rows, never logits of all tokens
    attention    SDPA, which is cuDNN's attention on Hopper from torch 2.11 on if no mask is needed
    compile      each decoder layer as a whole, experts' op included: fuses norms, RoPE, router and residuals

Trainers and training loops stay as they are. The loss:

    for h (rows, D) in hidden:    logits = h W^T -> loss, d_logits -> d_h = d_logits W,  dW += d_logits^T h

Forward computes the gradients as well, so that no chunk of logits is computed twice. Backward scales them by the
gradient of the loss. At T 8192, V 151936 and bf16 a chunk of 4096 rows has 1.2 GB of logits. All rows in fp32 would
take 5.0 GB, and as much again for their gradient. A model's own forward stays as it is:

    forward(labels=...) in training    lm_head returns its input, marked -> loss_function finds the mark, and the weight
    any other forward                  lm_head returns logits

T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mxep.ep.router import recomputing
from mxep.gemm import Recipe, convert, converted, join_linears
from mxep.gemm.recipe import recipe_name, recipe_of

from .experts import check_experts, experts_in, implementation_of, is_experts, prepare, registered, remade_by

ROWS = 4096
"""Rows of a chunk. Each chunk reads W twice and reads and writes dW: 2.5 GB at V 151936, D 2048, fp32 dW."""

IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_items: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    rows: int = ROWS,
    weight_gradient: torch.dtype = torch.float32,
) -> Tensor:
    """Sum of the cross-entropies of hidden @ weight.T, in nats, divided by num_items; 0-d fp32. Backward runs once.

    hidden: (T, D). weight: (V, D). labels: (T,) int64; ignore_index has no loss. num_items: the divisor; None: the
    number of labels that are not ignored, without a device-to-host sync. rows: rows per chunk. weight_gradient: dtype
    in which chunks sum the gradient of weight, before it is cast to weight's dtype.

    GEMMs are in hidden's dtype, or autocast's. Softmax and loss are in fp32. Raises ValueError for fp16, in which
    gradients would underflow. As with `torch.nn.functional.cross_entropy`, a label that is neither ignore_index nor
    below V raises RuntimeError; on CUDA the device raises it.
    """
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    if dtype == torch.float16:
        raise ValueError("linear_cross_entropy: expected GEMMs in bfloat16 or more, got float16: optimize(loss=False)")
    known = (labels >= 0) & (labels < len(weight)) | (labels == ignore_index)
    torch._assert_async(known.all(), f"labels: expected 0 to {len(weight) - 1} or {ignore_index}, got others")
    if num_items is None:
        num_items = (labels != ignore_index).sum()
    scale = torch.as_tensor(num_items, dtype=torch.float32, device=hidden.device).reciprocal()
    how = ignore_index, rows, weight_gradient
    with torch.autocast(kind, enabled=False):
        return _LinearCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, scale, *how)  # type: ignore[no-any-return, no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, ignore_index: int, rows: int, sums: Any
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=sums) if needs_weight else None
        for begin in range(0, len(hidden), rows):
            chunk = hidden[begin : begin + rows]
            logits = chunk @ weight.mT
            part, d_logits = loss_and_gradient(logits, labels[begin : begin + rows], scale, ignore_index)
            loss += part
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[begin : begin + rows])
            if d_weight is not None:
                _add_product(d_weight, d_logits.mT, chunk)
        ctx.gradients = d_hidden, None if d_weight is None else d_weight.to(weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: expected one backward, got a second: compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place
        return *(g if g is None else g.mul_(d_loss) for g in gradients), *(None,) * 5


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, summed in fp32 and rounded once to the dtype of `into`."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    elif into.is_cuda:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:  # no such kernel on CPUs
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def _loss_and_gradient(logits: Tensor, labels: Tensor, scale: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return scale * the summed loss (0-d fp32), and its gradient by logits (rows, V), in their dtype."""
    x, valid = logits.float(), labels != ignore_index
    log_sum = x.logsumexp(-1)
    target = x.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    loss = torch.where(valid, log_sum - target, 0).sum() * scale
    is_target = torch.arange(x.shape[1], device=x.device, dtype=torch.int64) == labels[:, None]
    gradient = (torch.exp(x - log_sum[:, None]) - is_target.float()) * scale
    return loss, torch.where(valid[:, None], gradient, 0).to(logits.dtype)


_compiled = torch.compile(_loss_and_gradient)


def loss_and_gradient(logits: Tensor, labels: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """`_loss_and_gradient`; on CUDA compiled, which fuses its passes over logits."""
    if not logits.is_cuda:
        return _loss_and_gradient(logits, labels, *how)
    for tensor in (logits, labels):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(logits, labels, *how)


class DeferredHead(nn.Linear):
    """The class that `defer_head` gives a model's lm_head. While `defers` is true, the loss computes its GEMM.

    called: whether this forward called it. deferred: whether the loss is still to be computed.
    """

    defers = called = deferred = False
    rows = ROWS
    weight_gradient = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        if not self.defers:
            return super().forward(input)
        self.called = self.deferred = True
        marked = input.view_as(input)
        marked._mxep_head = self  # type: ignore[attr-defined]
        return marked


def reason_to_keep_loss(model: nn.Module) -> str | None:
    """Say why `defer_head` does not work for a model. None if it does."""
    head: Any = getattr(model, "lm_head", None)
    if not isinstance(model, PreTrainedModel):
        return f"it is a {type(model).__name__}, not a PreTrainedModel: call optimize before PEFT"
    if type(head) not in (nn.Linear, DeferredHead):
        return f"its lm_head is {type(head).__name__}, not nn.Linear"
    if head.bias is not None:
        return "its lm_head has a bias"
    if model.loss_function not in (ForCausalLMLoss, causal_loss):
        return f"its loss is {getattr(model.loss_function, '__name__', model.loss_function)}, not ForCausalLMLoss"
    return None


def defer_head(model: Any, *, rows: int = ROWS, weight_gradient: torch.dtype = torch.float32) -> None:
    """Change a model in place: training forwards with labels compute the loss by `linear_cross_entropy`.

    Such a forward returns no logits. The loss needs the head's whole weight: under FSDP2, keep the head in the root's
    group, not in a group of its own.
    """
    again = isinstance(model.lm_head, DeferredHead)
    model._mxep_loss = rows, weight_gradient
    _defer(model)
    if not again:
        model.loss_function = causal_loss
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True, always_call=True)


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
    """transformers' ForCausalLMLoss. logits may also come from a deferred head."""
    head: Any = getattr(logits, "_mxep_head", None)
    if head is None:
        if logits.shape[-1] != vocab_size:
            _raise_changed()
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, **kwargs)
    head.deferred = False
    ignore_index = kwargs.get("ignore_index", IGNORED)
    shifted = kwargs.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if isinstance(head.weight, DTensor):
        raise RuntimeError(
            "loss: expected the whole weight of lm_head, got a DTensor: leave lm_head in the root's group "
            "(no fully_shard(model.lm_head)), or optimize(model, loss=False)"
        )
    return linear_cross_entropy(
        logits.flatten(0, -2),
        head.weight,
        shifted.flatten().to(logits.device),
        num_items=num_items_in_batch,
        ignore_index=ignore_index,
        rows=head.rows,
        weight_gradient=head.weight_gradient,
    )


def _raise_changed() -> None:
    raise RuntimeError(
        "loss: expected what lm_head returned, got another tensor: this model changes its logits before the loss, "
        "leave its loss as it is: optimize(model, loss=False)"
    )


def _heads(model: Any) -> list[DeferredHead]:
    """The deferred head, or those within PEFT's layer for `modules_to_save`, which trains a copy of it."""
    copies = getattr(model.lm_head, "modules_to_save", {}).values()
    return [head for head in (model.lm_head, *copies) if isinstance(head, DeferredHead)]


def _defer(model: Any) -> None:
    model.lm_head.__class__ = DeferredHead
    model.lm_head.rows, model.lm_head.weight_gradient = model._mxep_loss


def _before(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if type(model.lm_head) is nn.Linear and model.lm_head.bias is None:  # a new one, as of resize_token_embeddings
        _defer(model)
    for head in _heads(model):
        head.called = head.deferred = False
        head.defers = model.training and torch.is_grad_enabled() and kwargs.get("labels") is not None


def _after(model: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Drop logits that the head deferred from the model's output."""
    heads = _heads(model)
    for head in heads:
        head.defers = False
    if out is None or not any(head.called for head in heads):
        return out
    if any(head.deferred for head in heads):
        _raise_changed()
    if isinstance(out, tuple):
        return tuple(each for each in out if not hasattr(each, "_mxep_head"))
    return type(out)(**{name: value for name, value in out.items() if name != "logits"})


CAUSAL = "mxep_causal"
"""SDPA with is_causal and no mask. transformers (5.17 to 5.23) makes no mask for a name that is not its own. For "sdpa"
it makes one while a graph is captured, and attention takes longer with a mask."""
MASKED = "mxep_masked"
"""The same with SDPA's masks, for forwards of such a model that do not train, or that continue a cache."""
for _name in (CAUSAL, MASKED):
    ALL_ATTENTION_FUNCTIONS.register(_name, sdpa_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, sdpa_mask)

_COMPILED, _EAGER, _EXPERTS = "_mxep_compiled", "_mxep_eager", "_mxep_experts"
"""Attributes of a compiled decoder layer: whether its last training forward was compiled, whether the next ones must
be eager, and its modules of experts."""


def attends_to_all(hf_config: Mapping[str, Any]) -> bool:
    """Whether a token attends to all earlier tokens in every layer of a transformers model."""
    kinds = set(hf_config.get("layer_types") or ["full_attention"])
    return not hf_config.get("sliding_window") and kinds == {"full_attention"}


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
    """Speed up training of a causal model of transformers, in place. Returns and logs the changes by part.

    Call it after `expert_parallel` and before `fully_shard`, PEFT and the optimizer. Parameters keep their names and
    objects. A second call changes the parts that the first left. If a part cannot be changed, its entry is `left: `
    and the reason.

    experts: a registered implementation for experts that mxep does not compute yet; None leaves them.
    linears: a recipe, as "mxfp8"; None leaves them.
    loss: compute it by `linear_cross_entropy`, loss_rows tokens at a time, in training forwards with labels. These
        return no logits. head_gradient: dtype in which chunks sum the head's gradient, fp32 or bf16.
    attention: "sdpa" replaces eager attention. "causal" also makes no mask in training, nor syncs to see if one is
        needed: for batches without padding on the left and without packing. None leaves attention.
    compile: `torch.compile` of each decoder layer, in training; one graph serves all layers. Compiled experts keep no
        routing, so `load_report` leaves them out. Layers checkpointed with use_reentrant=True stay eager.
        Training forwards make no cache unless the caller passes use_cache=True or a cache, with which layers stay
        eager.

    Raises ValueError, before any change, for an unknown name or recipe, experts that mxep cannot compute, and
    attention="causal" in a model with attention windows.
    """
    config = model.config.get_text_config()
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    swapped: dict[str, Any] = {}
    if experts is not None and implementation_of(config) is None:
        how = registered(experts, "experts")
        swapped = experts_in(model, "optimize(experts=)")
        for module in swapped.values():
            check_experts(module, how.name, how.recipe, spread=False)
    if attention == "causal" and not attends_to_all(config.to_dict()):
        raise ValueError(
            "attention: expected a model whose layers attend to all tokens before, got attention windows: "
            'attention="sdpa"'
        )
    recipe = None if linears is None else recipe_of(linears)

    done: dict[str, str] = {}
    if swapped:
        model.set_experts_implementation(experts)
        done["experts"] = f"{len(swapped)} modules by {experts}"
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
        elif was not in (implementation, MASKED) and (was == "eager" or attention == "causal"):
            model.set_attn_implementation(implementation)
            if attention == "causal":
                model.base_model.register_forward_pre_hook(_choose_masks, with_kwargs=True)
            done["attention"] = f"{implementation} instead of {was}, cuDNN {torch.backends.cudnn.version()}"
    if compile:
        todo = [block for block in blocks if not hasattr(type(block), "_mxep_base")]
        for block in todo:
            block.__class__ = _compiled_class(type(block))  # type: ignore[arg-type]
            block.__dict__[_EXPERTS] = [module for module in block.modules() if is_experts(module)]
        if todo:
            model.base_model.register_forward_pre_hook(_leave_out_cache, with_kwargs=True)
            done["compile"] = f"{len(todo)} decoder layers"
    for part, what in done.items():
        logging.getLogger("mxep.transformers").info("optimize: %s: %s", part, what)
    return done


def _choose_masks(base: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Make masks in evaluation, and after a cache: without one, the first query sees the first key only."""
    config = base.config.get_text_config()
    if config._attn_implementation in (CAUSAL, MASKED):
        alone = base.training and torch.is_grad_enabled() and not _has_cache(kwargs)
        config._attn_implementation = CAUSAL if alone else MASKED


def _leave_out_cache(base: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Make no cache in training unless the caller asks for one. Each layer's part of it would need its own graph."""
    if base.training and torch.is_grad_enabled() and kwargs.get("use_cache") is None and not _has_cache(kwargs):
        kwargs["use_cache"] = False


def _has_cache(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))


def multiply_by(recipe: Recipe | str | None, part: nn.Module, backend: str) -> None:
    """Convert a part's linears, if there are any. Linears with the same input become one GEMM."""
    if recipe is None or not any(isinstance(module, nn.Linear) for module in part.modules()):
        return
    convert(part, recipe, backend=backend)
    with contextlib.suppress(ValueError):  # the part has no linears with these names
        join_linears(part)


@functools.cache
def _compiled_class(base: Any) -> Any:
    """Derive a class from `base` with a compiled forward. A forward on an instance would run the original in copies.

    transformers' checkpointing is around this forward, not in the graph. A recomputation must run as its forward did,
    which is eagerly for a reentrant checkpoint, as gradients were off.
    """
    compiled = torch.compile(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        trains = trains and not _has_cache(kwargs)  # a graph with a cache is of one layer alone
        if trains and not recomputing():
            own[_COMPILED] = not own.get(_EAGER)
        if not trains or not own.get(_COMPILED):
            return base.forward(self, hidden_states, *args, **kwargs)
        for experts in own[_EXPERTS]:
            prepare(experts, hidden_states)
        # Without guards a graph also serves layers with hooks, which it lacks: those of router logits, for example.
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            return compiled(self, hidden_states, *args, **kwargs)  # type: ignore[no-untyped-call]

    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    own = {"forward": forward, "_mxep_base": base, **remade_by(_compiled_class, base)}
    return type(base.__name__, (base,), names | own)


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run compiled layers eagerly: graphs do not call hooks and forwards that were added later."""
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
