"""Detects a repeated forward: activation checkpointing runs it again inside backward, and nothing may count twice."""

import torch


def recomputing() -> bool:
    """True if autograd is in a backward on this thread. Ask while a forward runs, not while it is traced."""
    return torch._C._current_graph_task_id() != -1
