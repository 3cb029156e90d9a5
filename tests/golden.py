"""Digests of what layers and GEMMs compute: sha256 over the fp32 bits of results and all gradients.

    python tests/golden.py > before.json              # on the commit before a change; --device cuda on a GPU
    python tests/golden.py --against before.json      # after it: names each case whose bits differ, exit status 1

A change that only deletes or moves code leaves every digest as it is. Digests depend on the machine and on torch's
version, so no file of them is committed. A case that is gone, or new, is named and is no failure.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.comms import Capacity
from mxep.ep import MoE
from mxep.gemm import fp32_linear, grouped_mm, linear, linear_together, quantize_input, quantize_weights_once, top_k
from mxep.integration.launch import Rank, run_ranks
from mxep.quant import SwiGLU

D, F, E, K = 64, 96, 8, 3
TOKENS = 37, 64
"""Of rank 0 and 1: no multiple of 32, and one."""

BASES = "bf16", "fp8", "mxfp8"
RECIPES = (
    *BASES,
    *("mxfp8_32x32", "mxfp8_e5m2", "mxfp8_wgrad_bf16", "mxfp8_gate_up_fp8", "mxfp8_floor"),
    *("fp8_e5m2", "fp8_wgrad_bf16", "fp8_gate_up_fp8", "mxfp8_e5m2_32x32_wgrad_bf16_gate_up_fp8"),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "drop": {"capacity": Capacity.factor(0.5, overflow="drop")},
    "score_before_experts": {"score_before_experts": True},
    "shared": {"num_shared_experts": 2, "shared_expert_gate": True},
    "interleaved": {"activation": SwiGLU(alpha=1.702, limit=0.8, shift=1.0, interleaved=True)},
    "sum": {"gradient_reduction": "sum"},
    "max_tokens": {"max_tokens": 64},
    "main_grad": {},
    "mask": {},
    "fp32": {"dtype": torch.float32},
    "weights_once": {},
}
OPTIONS["several"] = OPTIONS["bias"] | OPTIONS["score_before_experts"] | OPTIONS["max_tokens"] | OPTIONS["shared"]


def digest(*tensors: Tensor | None) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        found.update(b"next")
    return found.hexdigest()[:16]


class Draw:
    """Gaussian tensors, the same on every device."""

    def __init__(self, seed: int, device: str | torch.device) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, dtype)

    def leaf(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self(*shape, scale=scale, dtype=dtype).requires_grad_()


def layer(rank: int, device: str | torch.device, seed: int, option: str = "", **given: Any) -> str:
    """Two steps of one layer on this rank's tokens, so that gradients add up, and all that they leave."""
    draw = Draw(seed, device)
    moe = MoE(D, F, E, K, device=device, **{**OPTIONS.get(option, {}), **given})
    world, dtype = moe.dispatcher.world_size, moe.experts.down_proj.dtype
    with torch.no_grad():
        for parameter in moe.parameters():
            drawn = draw(*parameter.shape, scale=0.3, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(drawn.chunk(world)[rank])
            else:
                parameter.copy_(drawn)
            if option == "main_grad":
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                parameter.main_grad = torch.zeros(local.shape, dtype=torch.float32, device=device)
    xs = [[draw.leaf(tokens, D, dtype=dtype) for tokens in TOKENS][rank] for _ in range(2)]
    d_outs = [[draw(tokens, D, dtype=dtype) for tokens in TOKENS][rank] for _ in range(2)]
    mask = torch.arange(TOKENS[rank], device=device) % 5 > 0 if option == "mask" else None
    outs = []
    with quantize_weights_once() if option == "weights_once" else torch.enable_grad():
        for x, d_out in zip(xs, d_outs):
            outs.append(moe(x, mask=mask))
            outs[-1].backward(d_out)
    if option != "drop":
        moe.check()
    grads = [grad for p in moe.parameters() for grad in (p.grad, getattr(p, "main_grad", None))]
    assert moe.last_routing is not None
    found = digest(*outs, *(x.grad for x in xs), *grads, moe.last_routing.plan.offs, moe.last_routing.expert_ids)
    moe.close()
    return found


def layers(rank: int, device: str | torch.device, dispatchers: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for dispatcher in dispatchers:
        how: dict[str, Any] = {"dispatcher": dispatcher}
        for recipe in RECIPES:
            for seed in range(2):
                yield f"layer {dispatcher} {recipe} seed {seed}", layer(rank, device, seed, recipe=recipe, **how)
        for option, recipe in ((option, recipe) for option in OPTIONS for recipe in BASES):
            if option == "drop" and dispatcher == "all_to_all":  # has no capacity
                continue
            yield f"layer {dispatcher} {recipe} {option}", layer(rank, device, 2, option, recipe=recipe, **how)


def gemms(device: str) -> Iterator[tuple[str, str]]:
    """grouped_mm, linear and linear_together on both backends that any device has, and the router's two ops."""
    offs = torch.tensor([32, 32, 96], dtype=torch.int32, device=device)

    def run(f: Callable[..., Any], seed: int, *leaves: Tensor, rest: tuple[Any, ...] = (), **options: Any) -> str:
        outs = f(*leaves, *rest, **options)
        outs = outs if isinstance(outs, tuple) else (outs,)
        draw = Draw(100 + seed, device)
        torch.autograd.backward(outs, [draw(*out.shape, dtype=out.dtype) for out in outs])
        return digest(*outs, *(leaf.grad for leaf in leaves))

    for backend, recipe in ((backend, recipe) for backend in ("reference", "dequant") for recipe in RECIPES):
        how = {"recipe": recipe, "backend": backend}
        name = f"{backend} {recipe}"
        for seed in range(2):
            draw = Draw(seed, device)
            a, w, main_grad = draw.leaf(96, D), draw.leaf(3, F, D), torch.zeros(3, F, D, device=device)
            yield f"grouped_mm {name} seed {seed}", run(grouped_mm, seed, a, w, rest=(offs,), **how)
            found = run(grouped_mm, seed, a, w, rest=(offs,), main_grad=main_grad, wgrad_scale=0.5, **how)
            yield f"grouped_mm main_grad {name} seed {seed}", found + digest(main_grad)
        draw = Draw(3, device)
        x, bias = draw.leaf(5, 7, D), draw.leaf(F)
        ws = draw.leaf(F, D), draw.leaf(D, D)
        yield f"linear {name}", run(linear, 3, x, ws[0], bias, **how)
        yield f"linear of one input {name}", run(linears, 3, x, *ws, **how)
        yield f"linear_together {name}", run(lambda x, *ws, **how: linear_together(x, ws, **how), 3, x, *ws, **how)
    draw = Draw(4, device)
    yield "fp32_linear", run(fp32_linear, 4, draw.leaf(37, D), draw.leaf(E, D, dtype=torch.float32))
    scores = draw(37, E, dtype=torch.float32).softmax(-1)
    yield "top_k", digest(*top_k(scores, K))


def linears(x: Tensor, *ws: Tensor, **how: Any) -> tuple[Tensor, ...]:
    once = quantize_input(x, **how)
    return tuple(linear(once, w, **how) for w in ws)


def ranks_layers(rank: Rank) -> dict[str, str]:
    torch.set_num_threads(1)  # sums of a CPU depend on how many
    found = dict(layers(rank.rank, rank.device, ("all_to_all", "symmetric", "hierarchical")))
    return found | {"world size": str(dist.get_world_size())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a JSON of before")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = dict(gemms(options.device)) | dict(layers(0, options.device, ("local",)))
    enough = options.device == "cpu" or torch.cuda.device_count() > 1
    ranks = run_ranks(ranks_layers, world_size=2, device=options.device, timeout=300, steps=False) if enough else []
    found |= {f"rank {rank}: {name}": each for rank, cases in enumerate(ranks) for name, each in cases.items()}
    print(f"{len(found)} digests in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if options.against is None:
        print(json.dumps(found, indent=1, sort_keys=True))
        return 0
    before = json.loads(options.against.read_text())
    differ = sorted(name for name in before.keys() & found.keys() if before[name] != found[name])
    for what, names in (
        ("differs", differ),
        ("gone", before.keys() - found.keys()),
        ("new", found.keys() - before.keys()),
    ):
        for name in sorted(names):
            print(f"{what}: {name}")
    print(f"{len(before.keys() & found.keys()) - len(differ)} of {len(before)} digests are the same")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
