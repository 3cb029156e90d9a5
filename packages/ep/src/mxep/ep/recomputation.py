"""Whether a forward repeats one: activation checkpointing runs it again inside backward, and nothing counts twice."""

import torch


def recomputing() -> bool:
    """Whether autograd is in a backward on this thread. Asked of a forward that runs, not of one that is traced."""
    return torch._C._current_graph_task_id() != -1
