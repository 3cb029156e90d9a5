"""The names of transformers that mxep uses, or an ImportError with the cure."""

from __future__ import annotations

from typing import Any

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers is missing: pip install 'mxep-integration[transformers]'") from error

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import _default_apply_gate as default_apply_gate
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has no registry of experts that mxep knows, want 5.17 or newer: "
        "pip install -U 'mxep-integration[transformers]'"
    ) from error

try:
    from transformers.distributed import expert_parallel as own_expert_parallel
except ImportError:
    own_expert_parallel: Any = None  # type: ignore[no-redef]

try:
    from transformers.distributed import tensor_parallel as own_tensor_parallel
except ImportError:
    own_tensor_parallel: Any = None  # type: ignore[no-redef]

__all__ = [
    "ALL_EXPERTS_FUNCTIONS",
    "TrainerCallback",
    "default_apply_gate",
    "own_expert_parallel",
    "own_tensor_parallel",
]
