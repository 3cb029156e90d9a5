"""A call of static shapes as one CUDA graph, where nothing on the way waits for the host."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .config import sizes_on_host
from .schema import Config

CAPTURED = "deepseek_v3", "mixtral", "qwen3_moe"
"""Models of transformers with steps captured on a GPU, without attention windows. Others may read from it."""

WARM_UP = 2
"""Calls that the host launches: buffers are made, kernels loaded, communicators connected."""


@contextlib.contextmanager
def capturing(**options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """`torch.cuda.graph` of a new graph, but what raises is the error itself. options: its."""
    graph = torch.cuda.CUDAGraph()
    raised: BaseException | None = None
    try:
        with torch.cuda.graph(graph, **options):
            try:
                yield graph
            except BaseException as error:
                raised = error
                raise
    except Exception:
        if raised is None:
            raise
    if raised is not None:  # the end of a failed capture raises, too, without the reason
        raise raised


class Graphed:
    """Call fn(*inputs) directly WARM_UP times, then replay a CUDA graph of it in one launch.

    Inputs have the same shapes at each call. Results are the graph's memory, and so is all that fn
    keeps on the device: the next call overwrites both. RuntimeError if fn waits for the device. Collective if fn is.
    """

    def __init__(self, fn: Callable[..., tuple[Tensor, ...]]) -> None:
        self._fn = fn
        self._calls = 0
        # Autograd runs a leaf's node on the stream of its first use: warm-up and capture must have one stream.
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._results: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._calls += 1
        if self._calls <= WARM_UP:
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                results = self._fn(*inputs)
            here.wait_stream(self._stream)
            return results
        if self._graph is None:
            self._inputs = tuple(each.clone() for each in inputs)
            self._graph = self._captured()
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._results

    def close(self) -> None:
        """Let go of the graph: a communicator that it calls waits, when it ends, until it is gone."""
        self._graph, self._inputs, self._results = None, (), ()

    def _captured(self) -> torch.cuda.CUDAGraph:
        gc.collect()  # or garbage may be freed within the capture, by calls that wait for the device
        # Other threads, NCCL's among them, may go on asking for events.
        try:
            with capturing(stream=self._stream, capture_error_mode="thread_local") as graph:
                self._results = self._fn(*self._inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise RuntimeError(
                f"train.graph: a step was not captured ({why}): if its code waits for the device, train.graph=false"
            ) from error
        return graph


def is_causal_alone(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model of transformers is one of CAPTURED, and a token attends to all before it in every layer."""
    kinds = set(hf_config.get("layer_types") or ["full_attention"])
    return hf_config["model_type"] in CAPTURED and not hf_config.get("sliding_window") and kinds == {"full_attention"}


def in_graph(config: Config, device: torch.device) -> bool:
    """Whether the calls of a step are graphs: as train.graph says, or where nothing waits for the host."""
    if device.type != "cuda":
        return False
    if config.train.graph is not None:
        return config.train.graph
    hf_config = config.model.transformers
    if hf_config is not None and (config.parallel.fsdp or not is_causal_alone(hf_config)):
        return False
    # Elsewhere torch's grouped product, which bf16 and dequant use, is a loop over sizes that the host reads.
    return not sizes_on_host(config) and torch.cuda.get_device_capability(device)[0] in (9, 10)


@contextlib.contextmanager
def deterministic(config: Config, device: torch.device) -> Iterator[None]:
    """Makes GPUs repeat a run to the last bit, as CPUs do; the backward of attention would add in any order.

    Models of transformers are left as they are: their code may have no deterministic version.
    """
    if device.type != "cuda" or config.model.transformers is not None:
        yield
        return
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    memory.fill_uninitialized_memory = False  # a pass over each new tensor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]
