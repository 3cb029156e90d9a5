"""Names of what needs torch, known without it. A test compares them with the tables that import torch."""

import re

BACKENDS = ("reference", "dequant", "hopper", "triton", "blackwell")
DISPATCHERS = ("local", "all_to_all", "symmetric", "hierarchical", "nvshmem")
RECIPES = ("bf16", "fp8", "mxfp8")
ALIGNMENT = {"bf16": 1, "fp8": 16, "mxfp8": 32}  # of sizes that a recipe multiplies
CHANGES = ("e5m2", "32x32", "wgrad_bf16", "gate_up_fp8", "floor", "ceil", "even")
"""Of the last two recipes, in this order, as in mxfp8_e5m2."""
MODES = CHANGES[-3:]
"""Of which a recipe has one at most."""
KEPT_IN_FP8 = "gate_up_fp8"
"""A change that bench=layer and task=estimate know, too."""
CASES = tuple(f"{recipe}/{dispatcher}" for dispatcher in DISPATCHERS[:4] for recipe in RECIPES)
LINEAR_CASES = tuple(f"{recipe}/linear" for recipe in RECIPES)
BENCHES = ("quant", "gemm", "linear", "comms", "layer", "model")
VOCABULARY = 256
"""Tokens of a text without a tokenizer: bytes."""
TASKS = ("train", "compare", "verify", "bench", "estimate")
ESTIMATES = ("layouts", "stages", "memory", "time_errors", "memory_errors")


def is_recipe(name: str) -> bool:
    """Whether `mxep.gemm.Recipe.named` knows ``name``, or it is "auto"."""
    if name in ("auto", "bf16"):
        return True
    changes = "".join(f"(?:_{change})?" for change in CHANGES if change not in MODES)
    found = re.fullmatch(rf"(fp8|mxfp8){changes}(?:_(?:{'|'.join(MODES)}))?", name)
    return found is not None and not (found[1] == "fp8" and "32x32" in name)
