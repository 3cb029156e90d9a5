"""What two ideas of the MoE layer buy: SwiGLU that folds what it gives, and one autograd function for the whole layer.

    python tests/ep/layer_forms.py --out layer-forms.json

Forward and backward on one GPU, dispatcher local, MXFP8. "as it is"; "without folded": SwiGLU forward and backward give
blocks of 32, which products fold; "composed": dispatch, expert_mlp and combine as autograd functions of their own.
Launched by the host, and as a CUDA graph.
"""

import argparse
import functools
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mxep.ep.experts
import mxep.ep.steps
from mxep.ep import MoE, make_dispatcher
from mxep.ep.passes import LayerConfig
from mxep.gemm.backends import select
from mxep.integration.timer import Alternative, Timer

SHAPES = {
    "qwen3_30b": (8192, 2048, 768, 64, 8),
    "deepseek_v3": (4096, 7168, 2048, 32, 8),
}
FORMS = ("as it is", "without folded", "composed")


def patches(form: str) -> ExitStack:
    stack, steps, experts = ExitStack(), mxep.ep.steps, mxep.ep.experts
    if form == "without folded":
        for name in ("swiglu_forward", "swiglu_backward"):
            plain = functools.partial(_plain, getattr(steps, name))
            stack.enter_context(mock.patch.object(steps, name, plain))
    if form == "composed":
        stack.enter_context(mock.patch.object(experts, "run_experts", _composed))
    return stack


def _composed(*tensors: Any, dispatcher, recipe, backend, activation, wgrad_scale, **none: Any) -> Any:
    """`run_experts` of the functions that it would compose for a recipe with wgrad "bf16"."""
    how = dispatcher, recipe, select(backend, tensors[0].device), activation
    config = LayerConfig(*how, wgrad_scale=wgrad_scale)
    return mxep.ep.experts._compose(*tensors, config=config, gate_up_bias=None)


def _plain(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options | {"folded": False})


def step(form: str, shape: tuple[int, ...], device: torch.device) -> tuple[Callable[[], Tensor], MoE]:
    tokens, dim, hidden_dim, num_experts, top_k = shape
    generator = torch.Generator(device).manual_seed(0)
    dispatcher = make_dispatcher("local", num_experts, dim=dim)
    with device:
        moe = MoE(dim, hidden_dim=hidden_dim, num_experts=num_experts, top_k=top_k, dispatcher=dispatcher)
    moe.to(torch.bfloat16)
    for weight in moe.parameters():
        weight.data.normal_(std=dim**-0.5, generator=generator)
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, device=device, generator=generator).requires_grad_()
    d_out = torch.randn(tokens, dim, dtype=torch.bfloat16, device=device, generator=generator)

    def run() -> Tensor:
        with patches(form):
            out = moe(x)
            gradients = torch.autograd.grad(out, [x, *moe.parameters()], d_out)
        return torch.cat([out.detach().flatten()[:1024], *(g.flatten()[:1024] for g in gradients)])

    return run, moe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--cpu", action="store_true", help="a trial of this script on small shapes")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    shapes = {"small": (64, 64, 64, 4, 2)} if options.cpu else SHAPES
    rows = []
    for name, shape in shapes.items():
        got: dict[str, Tensor] = {}
        made = {form: step(form, shape, device) for form in FORMS}
        timer = Timer(device, seconds=0.6, rounds=4, graph_calls=1)
        alternatives = {}
        for graph in ("never", "must"):
            for form, (run, moe) in made.items():
                keep = functools.partial(got.__setitem__, form)
                alternatives[form, graph] = Alternative(
                    lambda run=run: [run], graph, check=moe.check, inspect=lambda result, keep=keep: keep(result)
                )
        times = timer.compare({f"{form}, {graph}": a for (form, graph), a in alternatives.items()})
        for (form, graph), row in zip(alternatives, times.values()):
            row = {"model": name, "shape": shape, "what": form, "graph": graph == "must"} | row
            row["same bits"] = bool(torch.equal(got[form], got[FORMS[0]])) if form in got else None
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        name = "CPU" if options.cpu else torch.cuda.get_device_name()
        with open(options.out, "w") as file:
            json.dump({"device": name, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
