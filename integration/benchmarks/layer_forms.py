"""What two ideas of the MoE layer buy: SwiGLU that folds what it gives, and one autograd function for the whole layer.

    python integration/benchmarks/layer_forms.py --out layer-forms.json
    torchrun --nproc-per-node 2 integration/benchmarks/layer_forms.py

Forward and backward in MXFP8, a CUDA graph of each form; on one GPU with the dispatcher local, else symmetric. "as it
is", and "again", whose bits and time have to be the same; "without folded": SwiGLU forward and backward give blocks of
32, which products fold; "composed": dispatch, expert_mlp and combine as autograd functions of their own; "dx beside",
between ranks: dx is combined while the gradient of gate_up_proj computes, not before it.
Other bits: of each result that has any, the share of its elements. Blocks of 32 are rounded once less for weight
gradients, where elements are subnormal; nothing else may differ.
GiB: the most that a step called as functions holds above what was there.

A GPU at its limit of power is as fast as it is hot, and stretches of one form after another meet other clocks. So forms
take turns step by step, in an order shuffled anew each round, and what counts is the ratio to "as it is" of the same
round.
"""

import argparse
import functools
import json
import os
import random
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import mxep.ep.experts
import mxep.ep.layer
from mxep.ep import MoE, make_dispatcher
from mxep.ep.dispatchers import symmetric
from mxep.ep.dtensors import local_tensor
from mxep.ep.formats import LayerConfig
from mxep.gemm.backends import select
from mxep.integration.train import capturing
from mxep.runtime.replay import no_replays

SHAPES = {  # tokens a rank, dim, hidden dim, experts of a rank, top-k
    "qwen3_30b": (8192, 2048, 768, 64, 8),
    "deepseek_v3": (4096, 7168, 2048, 32, 8),
}
FORMS = ("as it is", "again", "without folded", "composed", "dx beside")
RESULTS = "out", "dx", "router", "gate_up_proj", "down_proj"
WARM_ROUNDS, ROUNDS = 40, 200


class Captured(NamedTuple):
    """A form. inputs: x and d_out, which its graph reads where they lie and does not hold. results: RESULTS, where a
    replay writes them."""

    replay: Callable[[], None]
    moe: MoE
    inputs: tuple[Tensor, Tensor]
    results: list[Tensor]
    gib: float


def patches(form: str) -> ExitStack:
    stack, layer, experts = ExitStack(), mxep.ep.layer, mxep.ep.experts
    if form == "without folded":
        for name in ("swiglu_forward", "swiglu_backward"):
            plain = functools.partial(_plain, getattr(layer, name))
            stack.enter_context(mock.patch.object(layer, name, plain))
    if form == "composed":
        stack.enter_context(mock.patch.object(experts, "run_experts", _composed))
    if form == "dx beside":
        stack.enter_context(mock.patch.object(symmetric, "combine", functools.partial(_beside, symmetric.combine)))
    return stack


def _composed(*tensors: Any, dispatcher, recipe, backend, activation, wgrad_scale, **none: Any) -> Any:
    """`run_experts` of the functions that it would compose for a recipe with wgrad "bf16"."""
    config = LayerConfig(recipe, select(backend, tensors[0].device), activation)
    how = {"dispatcher": dispatcher, "config": config, "main_grads": (None, None), "wgrad_scale": wgrad_scale}
    out, _, routing = mxep.ep.experts._compose(*tensors, **how, gate_up_bias=None, drops=False)
    return out, routing


def _plain(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options | {"folded": False})


def _beside(combine: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return combine(*args, **options | {"async_op": True})


def capture(form: str, shape: tuple[int, ...], ranks: int, device: torch.device) -> Captured:
    tokens, dim, hidden_dim, num_experts, top_k = shape
    generator = torch.Generator(device).manual_seed(dist.get_rank() if ranks > 1 else 0)
    num_experts *= ranks
    dispatcher = make_dispatcher("symmetric" if ranks > 1 else "local", num_experts, dim=dim, max_tokens=tokens)
    with device:
        moe = MoE(dim, hidden_dim=hidden_dim, num_experts=num_experts, top_k=top_k, dispatcher=dispatcher)
    moe.to(torch.bfloat16)
    for weight in moe.parameters():
        weight.data.normal_(std=dim**-0.5, generator=generator)
    if ranks > 1:
        dist.broadcast(moe.router.weight.data, 0)
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, device=device, generator=generator).requires_grad_()
    d_out = torch.randn(tokens, dim, dtype=torch.bfloat16, device=device, generator=generator)

    def run() -> list[Tensor]:
        out = moe(x)
        gradients = torch.autograd.grad(out, [x, *moe.parameters()], d_out)
        return [local_tensor(each.detach()) for each in (out, *gradients)]

    torch.cuda.synchronize()  # the warm-up has another stream
    with patches(form):
        with torch.cuda.stream(torch.cuda.Stream()), no_replays():
            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        with capturing(capture_error_mode="thread_local") as graph:  # NCCL polls its own
            results = run()
    return Captured(graph.replay, moe, (x, d_out), results, peak)


def take_turns(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """ms of each step in each round, of the slowest rank."""
    order, times = random.Random(0), dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]()
    for _ in range(WARM_ROUNDS + ROUNDS):
        for form in order.sample(list(steps), len(steps)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            steps[form]()
            end.record()
            times.setdefault(form, []).append((start, end))
    torch.cuda.synchronize()
    ms = torch.tensor([[a.elapsed_time(b) for a, b in times[form][WARM_ROUNDS:]] for form in steps], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(ms, dist.ReduceOp.MAX)
    return dict(zip(steps, ms.tolist()))


def other_bits(results: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    shares = {what: int((a != b).sum()) / a.numel() for what, a, b in zip(RESULTS, results, wanted, strict=True)}
    return {what: share for what, share in shares.items() if share}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    out, ranks, rows = parser.parse_args().out, int(os.environ.get("WORLD_SIZE", 1)), []
    if ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    for name, shape in SHAPES.items():
        forms = FORMS if ranks > 1 else FORMS[:-1]
        device = torch.device("cuda", torch.cuda.current_device())
        captured = {form: capture(form, shape, ranks, device) for form in forms}
        times = take_turns({form: each.replay for form, each in captured.items()})
        for form, each in captured.items():
            each.moe.check()
            ratios = [ms / base for ms, base in zip(times[form], times[FORMS[0]])]
            low, _, middle, _, high = statistics.quantiles(ratios, n=6)
            other = other_bits(each.results, captured[FORMS[0]].results)
            rows.append({
                "model": name, "shape": shape, "ranks": ranks, "what": form, "ms": statistics.median(times[form]),
                "ratio": middle, "two thirds of ratios": [low, high], "other bits": other,
                "GiB": each.gib,
            })  # fmt: skip
            if not ranks > 1 or dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
        del captured, each
    if out and (ranks == 1 or dist.get_rank() == 0):
        with open(out, "w") as file:
            found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            json.dump(found, file, indent=1)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
