"""Names that a config may use for each bench. This module does not import torch, so mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mxep.integration.config import unknown
from mxep.integration.schema import BACKENDS, CASES, KEPT_IN_FP8, RECIPES, BenchConfig

ANY = "*"


@dataclass(frozen=True)
class Known:
    """Names of one bench.

    Attributes:
        sections: its tables. on_ranks: it runs on all ranks.
        shapes: names allowed in bench.shapes ("*": any) -> the number that each size must be a multiple of.
        sizes: names of the numbers of a shape.
        cases, backends, optimizers: names allowed in bench.cases, bench.backend and bench.optimizer. A bench without
            optimizers has no bench.activation_checkpointing either.
    """

    sections: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    sizes: str
    cases: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    on_ranks: bool = False


KERNELS = (
    *("rows", "rows_e2m1", "rows_per_row", "columns", "weights_per_row", "weights_2d", "requantize"),
    *("fold", "fold_e2m1", "fold_for_wgrad", "swiglu", "swiglu_folded", "swiglu_backward"),
    *("swiglu_backward_folded", "swiglu_backward_and_h", "gather_swizzled"),
)
LAYERS = (
    *(f"baseline {recipe}" for recipe in RECIPES),
    *(f"{case}{suffix}" for case in CASES for suffix in ("", ", kept", ", worst_case", ", exact")),
    *(f"{case}, {KEPT_IN_FP8}" for case in CASES if not case.startswith("bf16")),
)
MODELS = (
    *("baseline bf16", "no experts", "transformers bf16"),
    *(f"mxep {what}{graph}" for what in (*RECIPES, "mxfp8, linear") for graph in ("", ", graph")),
)
BENCH = {
    "quant": Known(("kernels",), {"rows": (32, 64), "weights": (1, 32, 64), "small": (32, 64)}, "sizes", KERNELS),
    "gemm": Known(
        ("products", "steps"),
        {"layers": (32, 32, 32, 1)},
        "rows, N, K, groups",
        backends=BACKENDS,
    ),
    "linear": Known(
        ("linear", "qkv", "host"),
        {"linear": (1, 32, 32), "qkv": (1, 32, 32, 32), "host": (1, 32, 32, 32)},
        "tokens, K, N (of q), N of k and v",
        backends=BACKENDS,
    ),
    "comms": Known(
        ("headline", "skew", "sweep"),
        dict.fromkeys(("headline", "skew", "sweep"), (1, 32, 1, 1)),
        "tokens, dim, experts, top-k",
        on_ranks=True,
    ),
    "layer": Known(
        ("layer", "eager", "stages", "memory", "skew", "host"),
        {ANY: (1, 32, 32, 1, 1)},
        "tokens, dim, hidden dim, experts, top-k",
        LAYERS,
        on_ranks=True,
    ),
    "model": Known(
        ("model",),
        {ANY: (2, 1, 32, 32, 1, 1)},
        "tokens, layers, dim, hidden dim, experts, top-k",
        MODELS,
        optimizers=("adamw",),
        on_ranks=True,
    ),
}


def bench_complaints(config: BenchConfig) -> Iterator[str]:
    """One message for each setting that the bench of `config` does not have."""
    known = BENCH[config.name]
    if config.device == "cpu" and not config.cpu_shapes:
        yield f"bench.device: got 'cpu', and bench={config.name} measures CUDA devices alone"
    yield from unknown("bench.sections", config.sections or (), known.sections)
    yield from unknown("bench.backend", [config.backend] if config.backend else (), known.backends)
    yield from unknown("bench.cases", config.cases or (), known.cases)
    yield from unknown("bench.optimizer", [config.optimizer] if config.optimizer else (), known.optimizers)
    if config.activation_checkpointing and not known.optimizers:
        yield f"bench.activation_checkpointing: got true, wanted false: bench={config.name} has none"
    yield from unknown("bench.models", config.models or (), config.shapes)
    if ANY not in known.shapes:
        yield from unknown("bench.shapes", config.shapes, known.shapes)
    for kind, shapes in config.shapes.items():
        units = known.shapes.get(kind) or known.shapes.get(ANY) or ()
        for shape in shapes if units else ():
            fits = len(shape) == len(units) and all(size >= 1 and not size % unit for size, unit in zip(shape, units))
            if not fits or ("top-k" in known.sizes and shape[-1] > shape[-2]):
                wanted = f"{len(units)} {known.sizes}, multiples of {list(units)}"
                yield f"bench.shapes.{kind}: got {list(shape)}, wanted {wanted}"
