"""A Trainer's callback, and its checks: device errors, expert load, and whether mxep computes the experts.

transformers takes `experts_implementation="mxep_mxfp8"` for every model, but applies it only to classes of experts that
`@use_experts_implementation` decorates. Other classes run their own code, as do modules with a forward that another
library replaced. Therefore `check` looks at modules and calls, not at the name in a config.

The callback also loads weights that a Trainer does not find in its own checkpoint:

    save_pretrained    mlp.experts.gate_up_proj (E, 2F, D)  ->  mlp.experts.0.gate_proj.weight, .. (a tensor for each)
    Trainer            load_state_dict(file, strict=False)  ->  finds no gate_up_proj, so the model keeps its old one

This happens with `train(resume_from_checkpoint=)` and `load_best_model_at_end` in transformers 5. `restore` reads
such weights as `from_pretrained` does, and copies them into the model's own parameters.

A Trainer also loads whole tensors into DTensors, which torch refuses. `take_parts` cuts each rank's part.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mxep.ep import accumulate_in_place
from mxep.gemm import quantize_weights_once

from ..mesh import local, part
from .experts import (
    ALL_EXPERTS_FUNCTIONS,
    KEY,
    Layer,
    implementation_of,
    is_experts,
    layers,
)
from .parallel import leave_to_ranks

_OF_EXPERTS = re.compile(r"(Experts?|M[oO][eEA])$")
"""How class names of modules that hold experts end: `DbrxExperts`, `JetMoeMoE`, `DogeCDMoE`."""

_CURE = (
    "mxep.integration.transformers.route_experts(model, {name!r}) prepares Llama 4, Step 3.7 and LongCat-Flash; if "
    "another library replaced them or their block, leave that out (Trainer: use_liger_kernel=False; Liger: "
    "swiglu=False; transformers: use_kernels=False); else load the model without a name of mxep"
)


def check(model: nn.Module, *, ran: bool = False) -> None:
    """Raise device errors since the last check, as `MoE.check` does. Call it before each optimizer step.

    Also raises errors of `raise_unserved`. ran: as for it.
    """
    raise_unserved(model, ran=ran)
    for dispatcher in {id(layer.dispatcher): layer.dispatcher for _, layer in layers(model)}.values():
        dispatcher.check()


@torch.no_grad()
def load_report(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return the load of each module of experts in its last forward, by name:

    ``rows``: rows that this rank's experts computed. ``padding``: padding rows among these. ``busiest``: tokens of the
    busiest expert divided by the mean, over all ranks that share the experts. ``dead``: experts without a token.

    Syncs with the device once. Collective over ranks that share experts. Leaves out modules without such a forward,
    as of compiled layers. Raises RuntimeError as `check` does, and if mxep never ran.
    """
    raise_unserved(model, ran=True)
    names, counted = [], []
    for name, layer in layers(model):
        if layer.last_routing is None:
            continue
        stats, ids = layer.last_routing.stats(), layer.last_routing.expert_ids.flatten().long()
        tokens = torch.zeros(layer.dispatcher.num_experts, dtype=torch.int64, device=ids.device)
        tokens.scatter_add_(0, ids.clamp_min(0), (ids >= 0).long())
        if layer.dispatcher.group is not None:
            dist.all_reduce(tokens, group=layer.dispatcher.group)
        busiest = tokens.max() / tokens.double().mean().clamp_min(1e-9)
        names.append(name)
        counted.append(torch.stack((stats["computed"], stats["padding"], busiest, (tokens == 0).sum())))
    if not counted:
        return {}
    keys = "rows", "padding", "busiest", "dead"
    return {name: dict(zip(keys, values)) for name, values in zip(names, torch.stack(counted).tolist())}


def raise_unserved(model: nn.Module, *, ran: bool = False) -> None:
    """Raise RuntimeError, with a cure, if mxep does not compute a module of experts although its config names mxep.

    ran: the model has certainly run a forward.
    """
    found = list(_unserved(model, ran))
    if not found:
        return
    modules = ", ".join(f"{name} ({kind})" for name, kind, _ in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    name = found[0][2]
    raise RuntimeError(
        f"experts_implementation: got {name!r}, but mxep does not compute {modules}{more}: {_CURE.format(name=name)}"
    )


def _unserved(model: nn.Module, ran: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (name, class, implementation in its config) of each module that mxep should compute but does not."""
    never = ran and not any(layer.called for _, layer in layers(model))
    decorated = [name for name, module in model.named_modules() if is_experts(module)]
    configs: dict[str, Any] = {}  # by module, its own or the nearest one around it
    outer: tuple[str, ...] = ()
    for name, module in model.named_modules():
        own = getattr(module, "config", None)
        configs[name] = own if hasattr(own, "_experts_implementation") else configs.get(name.rpartition(".")[0])
        how: Any = implementation_of(configs[name])
        if is_experts(module):
            layer: Layer | None = module.__dict__.get(KEY)
            how = layer.made_for if how is None and layer is not None and layer.parallel else how
            called = layer is not None and layer.called
            skipped = not called and (never or any(p.grad is not None for p in module.parameters()))
            if how is not None and (skipped or not reaches_mxep(module.forward)):
                yield name, type(module).__name__, how.name
            continue
        holds = name.rpartition(".")[2] == "experts" or _OF_EXPERTS.search(type(module).__name__)
        inside = name.startswith(outer)
        if holds and name and not inside and not any(inner.startswith(f"{name}.") for inner in decorated):
            outer += (f"{name}.",)
            if how is not None:
                yield name, type(module).__name__, how.name


def reaches_mxep(forward: Any, depth: int = 6) -> bool:
    """Whether a forward is transformers' decorated one, mxep's, or a wrapper of either.

    Wrappers are those of functools, accelerate, torch.compile and transformers' expert parallelism.
    """
    if forward is ALL_EXPERTS_FUNCTIONS or isinstance(forward, Layer):
        return True
    if str(getattr(forward, "__module__", "")).startswith("mxep."):
        return True
    if depth == 0 or isinstance(forward, nn.Module | Tensor | type) or not hasattr(forward, "__dict__"):
        return False
    inner = [getattr(forward, name, None) for name in ("__func__", "func", "__wrapped__", "_torchdynamo_orig_callable")]
    inner += [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    inner += vars(forward).values()
    return any(reaches_mxep(each, depth - 1) for each in inner if each is not None)


class MxepCallback(TrainerCallback):  # type: ignore[misc]
    """Checks, logs and loads experts in a Trainer: `Trainer(callbacks=[MxepCallback()])`.

    Before each optimizer step it raises device errors (`check`), so that the step is not taken. It raises RuntimeError
    if a module of experts runs its own code although its config names mxep: as training begins if the module's class
    shows it, otherwise before the first optimizer step.

    With each loss it logs `load_report` of the last micro-batch: `mxep/rows` and `mxep/padding` are sums over all
    modules of experts, `mxep/busiest` and `mxep/dead` maxima. per_layer=True also logs each module's own figures, as
    `mxep/NAME/busiest`.

    A Trainer of transformers 5 leaves out experts when it resumes from a checkpoint or loads the best one
    (`load_best_model_at_end`). The callback loads them.

    All micro-batches of a step, and recomputation by checkpointing, share one quantization of each weight. It takes a
    little over 2 bytes per element of the experts until the optimizer steps. share_quantized_weights=False quantizes
    anew each time.

    After `expert_parallel` a Trainer cannot save. Training then raises ValueError unless `save_strategy` is "no".

    Making a callback patches `Trainer.train`, which tells its callbacks the checkpoint that it resumes, and frees
    quantized weights even if training raises.
    """

    resumed: Any = None  # `resume_from_checkpoint` of this training

    def __init__(self, *, share_quantized_weights: bool = True, per_layer: bool = False) -> None:
        self.share_quantized_weights = share_quantized_weights
        self.per_layer = per_layer
        self._shared = contextlib.ExitStack()
        _patch_trainer()

    def close(self) -> None:
        """Free the quantized weights."""
        self._shared.close()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if hasattr(model, "_ddp_params_and_buffers_to_ignore"):  # PEFT may have wrapped the model since
            leave_to_ranks(model)
        if model is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            model.register_load_state_dict_pre_hook(take_parts)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        raise_unserved(model)
        if state.global_step and self.resumed and not args.deepspeed:
            restore(model, Path(get_last_checkpoint(args.output_dir) if self.resumed is True else self.resumed))
        for _, layer in layers(model):
            layer.called = False  # the first step then notices replaced forwards, such as Liger's
        whole = getattr(model, "is_distributed_loading_by_transformers", False)  # a Trainer saves it on all ranks
        if args.save_strategy != "no" and not whole and any(layer.parallel for _, layer in layers(model)):
            raise ValueError(
                f"save_strategy: got {args.save_strategy.value!r}, want 'no' after expert_parallel: a Trainer saves on "
                "one rank, which would wait for the others' experts; save after training (docs/guides/transformers.md)"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        best = state.best_model_checkpoint if args.load_best_model_at_end and not args.deepspeed else None
        if best is not None:
            restore(model, Path(best))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        used_again = args.gradient_accumulation_steps > 1 or args.gradient_checkpointing
        if self.share_quantized_weights and used_again:
            self._shared.enter_context(quantize_weights_once())
        if args.gradient_accumulation_steps > 1:
            self._shared.enter_context(accumulate_in_place())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        check(model, ran=True)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        report = load_report(model)
        if not report:
            return
        values = list(report.values())
        found = {f"mxep/{key}": sum(each[key] for each in values) for key in ("rows", "padding")}
        found |= {f"mxep/{key}": max(each[key] for each in values) for key in ("busiest", "dead")}
        if self.per_layer:
            found |= {f"mxep/{name}/{key}": value for name, each in report.items() for key, value in each.items()}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


def _patch_trainer() -> None:
    """Make `Trainer.train` tell mxep's callbacks the checkpoint that it resumes, and close them when it ends. A Trainer
    tells callbacks neither, if training raises."""
    from transformers import Trainer  # takes long, and needs accelerate

    own = Trainer.train
    if hasattr(own, "_tells_mxep"):
        return

    @functools.wraps(own)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callbacks = [each for each in self.callback_handler.callbacks if isinstance(each, MxepCallback)]
        for callback in callbacks:
            callback.resumed = resume_from_checkpoint
        try:
            return own(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            for callback in callbacks:
                callback.close()

    train._tells_mxep = True  # type: ignore[attr-defined]
    Trainer.train = train


_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@torch.no_grad()
def restore(model: Any, folder: Path) -> list[str]:
    """Copy weights that `save_pretrained` stored under other names into the model. Returns their names in the model.

    Each rank copies its part of a DTensor. If any name differs, each rank reads the whole model into host memory.
    Checkpoints of adapters, FSDP and DeepSpeed have the model's names, and are not read. Raises ValueError if weights
    are missing.
    """
    names = _saved_names(folder)
    own = _tensors(model)
    others = {name for name in own if name not in names} - set(getattr(model, "_tied_weights_keys", None) or ())
    if not names or not others:
        return []
    config = copy.deepcopy(model.config)
    config.distributed_config = None
    config._experts_implementation = "eager"
    dtype = torch.promote_types(*(own[name].dtype for name in (min(others), max(others))))
    read, told = type(model).from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    saved = read.state_dict()
    if missing := others.intersection(told["missing_keys"]):
        raise ValueError(f"{folder}: got no {min(missing)}, want all weights of {type(model).__name__}")
    for name in others:
        local(own[name]).copy_(saved[name][part(own[name])])
    return sorted(others)


def take_parts(model: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    """A pre-hook of `load_state_dict`: cut this rank's part from a whole tensor if the model has a DTensor."""
    for name, own in _tensors(model).items():
        given = state_dict.get(name)
        if isinstance(own, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            here = given[part(own)].to(own.to_local())
            how: dict[str, Any] = {"shape": own.shape, "stride": own.stride(), "run_check": False}
            state_dict[name] = DTensor.from_local(here, own.device_mesh, own.placements, **how)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _saved_names(folder: Path) -> set[str]:
    if (folder / _INDEX).is_file():
        return set(json.loads((folder / _INDEX).read_text())["weight_map"])
    if not (folder / _WEIGHTS).is_file():
        return set()
    with safe_open(folder / _WEIGHTS, framework="pt") as file:
        return set(file.keys())
