"""What a Trainer has to call: a check before the optimizer, the experts' load in its log, one quantization a step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from mxep.gemm import quantize_weights_once

from .checks import check, load_report, raise_unserved
from .layer import layers
from .parallel import leave_to_ranks
from .restore import is_saved_under_other_names, restore, resumed_folder, take_parts
from .versions import TrainerCallback


class MxepCallback(TrainerCallback):  # type: ignore[misc]
    """For `Trainer(callbacks=[MxepCallback()])`.

    Before each optimizer step it raises what went wrong on the device (`check`): the step is not taken.

    It raises RuntimeError where a module of experts runs code of its own although its config names mxep: as training
    begins where that shows in its class, else before the first optimizer step.

    With each loss it logs, of the last micro-batch and over all modules of experts, `mxep/rows` and `mxep/padding`
    (sums), `mxep/busiest` and `mxep/dead` (maxima); per_layer=True: also `mxep/NAME/busiest` and so on of each.

    It loads the experts of the checkpoint that training resumes from, and of the best one (`load_best_model_at_end`),
    which a Trainer of transformers 5 leaves out. ValueError where it does not find the checkpoint.

    Where gradients are accumulated, micro-batches share one quantization of each weight. That takes 2 bytes and a
    little for each element of the experts until the optimizer steps. share_quantized_weights=False: they do not.

    After `expert_parallel` a Trainer cannot save: unless `save_strategy` is "no", ValueError as training begins.

    After training ended by an exception call `close()`, or train with the same callback again.
    """

    def __init__(self, *, share_quantized_weights: bool = True, per_layer: bool = False) -> None:
        self.share_quantized_weights = share_quantized_weights
        self.per_layer = per_layer
        self._shared = contextlib.ExitStack()

    def close(self) -> None:
        """Let go of quantized weights."""
        self._shared.close()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if hasattr(model, "_ddp_params_and_buffers_to_ignore"):  # of a model that PEFT has wrapped since
            leave_to_ranks(model)
        if model is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            model.register_load_state_dict_pre_hook(take_parts)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        raise_unserved(model)
        if state.global_step and not args.deepspeed and is_saved_under_other_names(model):
            restore(model, resumed_folder(args, state))
        for _, layer in layers(model):
            layer.called = False  # so that the first step notices what replaced experts since, such as Liger's
        whole = getattr(model, "is_distributed_loading_by_transformers", False)  # a Trainer saves such on all ranks
        if args.save_strategy != "no" and not whole and any(layer.parallel for _, layer in layers(model)):
            raise ValueError(
                f"save_strategy: got {args.save_strategy.value!r}, want 'no' after expert_parallel: a Trainer saves on "
                "one rank, which would wait for the others' experts; save after training (docs/guides/transformers.md)"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        best = state.best_model_checkpoint if args.load_best_model_at_end and not args.deepspeed else None
        if best is not None and is_saved_under_other_names(model):
            restore(model, Path(best))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        if self.share_quantized_weights and args.gradient_accumulation_steps > 1:
            self._shared.enter_context(quantize_weights_once())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        raise_unserved(model, ran=True)
        check(model)

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
