"""The kernels of a layer's first step are compiled side by side, before it needs them."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mxep.ep import LoRAExperts, MoE, experts, freeze_experts, rehearse
from mxep.gemm.backends import BACKENDS
from mxep.gemm.frozen import FrozenFormat
from mxep.runtime import launch, op, record

Walked = Callable[[MoE], list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that a rehearsal wants, as on a Hopper GPU."""
    names: list[str] = []
    monkeypatch.setattr(launch, "_compiled", {})  # other tests of this process may have compiled some
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(op, "runs_on", lambda *_: True)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    # Kernels of Triton are interpreted here, and those of Gluon would be compiled.
    monkeypatch.setattr(record.Rehearsal, "launch", lambda self, kernel, *_: names.append(kernel.__name__))
    monkeypatch.setattr(launch, "_compile", lambda wanted: names.extend(job[0].__name__ for job in wanted.values()))
    return names


@pytest.fixture
def walked(names: list[str], monkeypatch: pytest.MonkeyPatch) -> Walked:
    """A function that returns those of a layer's rehearsal."""

    def rehearsed(given: Any, dispatcher: Any, config: Any, needs: Any, main_grads: Any, **how: Any) -> None:
        tensors, form = rehearse.take_apart((given, main_grads))
        given, main_grads = rehearse.build(form, iter([rehearse._meta(x) for x in tensors]))
        config = dataclasses.replace(config, backend=BACKENDS["hopper"])
        stand_in = rehearse.stand_in_for(dispatcher, given.expert_ids)
        with launch.rehearsal():
            rehearse._both_passes(given, main_grads, stand_in, config, needs, how["rows_again"], how["room"])

    monkeypatch.setattr(experts, "rehearse_once", rehearsed)

    def walk(layer: MoE) -> list[str]:
        names.clear()
        layer(torch.randn(16, layer.dim, dtype=torch.bfloat16, requires_grad=torch.is_grad_enabled()))
        return list(names)

    return walk


FORWARD = ["quantize_blocks_kernel", "count_kernel", "place_kernel", "fold_kernel", "grouped_mm_kernel"]
FORWARD += ["swiglu_kernel", "sum_slots_kernel"]


@pytest.mark.parametrize(("recipe", "gemms"), [("mxfp8", 2), ("fp8", 2), ("mxfp8_e5m2", 3)])
def test_a_rehearsal_wants_the_kernels_of_both_passes(walked: Walked, recipe: str, gemms: int) -> None:
    """gemms: one for wgrad, and one for forward and dgrad, or one each if gradients have a format of their own."""
    names = walked(MoE(64, 32, 4, 2, recipe=recipe, dispatcher="local"))
    assert {*FORWARD, "shift_transpose_kernel", "max_scales_kernel", "quantize_long_columns_kernel"} <= {*names}
    assert names.count("grouped_mm_kernel") == gemms
    assert names.count("swiglu_kernel") == 2


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_block", "fp8_row"])
def test_frozen_experts_with_lora_are_rehearsed_too(walked: Walked, fmt: FrozenFormat) -> None:
    layer = MoE(64, 64, 4, 2, recipe="mxfp8", dispatcher="local")
    freeze_experts(layer, fmt)
    layer.experts = LoRAExperts(layer.experts, 8)
    names = walked(layer)
    assert {"fold_columns_kernel", "grouped_mm_kernel", "swiglu_kernel", "sum_slots_kernel"} <= {*names}
    assert names.count("swiglu_kernel") == 2
    assert {name for name in names if "lora" in name}, "the low-rank GEMMs of both passes"


def test_without_gradients_a_rehearsal_wants_forward_alone(walked: Walked) -> None:
    layer = MoE(64, 32, 4, 2, recipe="mxfp8", dispatcher="local")
    with torch.no_grad():
        names = walked(layer)
    assert {*FORWARD} <= {*names}
    assert names.count("grouped_mm_kernel") == 1
    assert "shift_transpose_kernel" not in names


def test_a_rehearsal_counts_nothing_in_the_layers_dispatcher(walked: Walked) -> None:
    layer, quiet = (MoE(64, 32, 4, 2, recipe="mxfp8", dispatcher="local") for _ in range(2))
    assert walked(layer)
    experts.rehearse_once = lambda *_, **__: None  # type: ignore[assignment]  # the fixture puts it back
    walked(quiet)
    assert layer.dispatcher._room == quiet.dispatcher._room
    assert {device.type for device in layer.dispatcher._counts} == {"cpu"}


@pytest.mark.parametrize("needs", [False, True])
def test_a_routers_rehearsal_saves_nothing_for_a_backward(needs: bool, names: list[str]) -> None:
    """A checkpoint counts what is saved, and its second forward rehearses nothing."""

    def fail(_: object) -> None:
        pytest.fail("saved a tensor")

    x, w = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(fail, fail):
        rehearse._rehearse(
            object(), lambda: rehearse._router_passes(*map(rehearse._meta, (x, w)), 2, True, True, needs)
        )
    backward = {"top_k_backward_kernel", "fp32_dgrad_kernel", "fp32_wgrad_kernel"}
    assert {*names} == {"fp32_linear_kernel", "top_k_kernel"} | (backward if needs else set())


def test_nothing_is_rehearsed_for_a_mode_that_counts_what_runs() -> None:
    ran: list[str] = []
    with FlopCounterMode(display=False):
        rehearse._rehearse("a kind", lambda: ran.append("passes"))
    assert not ran


def test_on_a_cpu_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "_rehearse", lambda *_: pytest.fail("rehearsed"))
    MoE(64, 32, 4, 2, recipe="mxfp8", dispatcher="local")(torch.randn(16, 64, dtype=torch.bfloat16))


STEP = """
import hashlib, sys, threading
import torch
from torch.utils.checkpoint import checkpoint
from triton import knobs
from mxep.ep import MoE, experts, router

where = []
knobs.compilation.listener = lambda **how: where.append(threading.current_thread().name)
if sys.argv[1] == "called":
    experts.rehearse_once = router.rehearse_router = lambda *_, **__: None
torch.manual_seed(0)
layer = MoE(256, 128, 8, 2, recipe=sys.argv[2], dispatcher=sys.argv[3], device="cuda")
x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
out = checkpoint(layer, x, use_reentrant=False)
out.backward(x.detach())
tensors = out, x.grad, *(p.grad for p in layer.parameters())
digest = hashlib.sha256(b"".join(t.detach().view(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors))
print(digest.hexdigest(), sum("mxep-compile" in name for name in where), len(where))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU")
@pytest.mark.parametrize("dispatcher", ["local", "symmetric"])
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_a_first_step_compiles_all_its_kernels_ahead_and_has_the_same_bits(
    recipe: str, dispatcher: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for how in ("called", "rehearsed"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / how))
        command = [sys.executable, "-c", STEP, how, recipe, dispatcher]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        found[how] = done.stdout.split()[-3:]
    assert found["called"][0] == found["rehearsed"][0]
    assert found["called"][1] == "0"
    ahead, compiled = map(int, found["rehearsed"][1:])
    assert ahead == compiled > 0
