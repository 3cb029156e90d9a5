"""torchtitan 0.2 with mxep's model converter: its own trainer on CPU processes, as the benchmark starts it.

One environment has one torchtitan, usually 0.3. To run this: `pip download torchtitan==0.2.2 --no-deps`, unzip it to
a folder, and put that in front of PYTHONPATH.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("titan_on_cpu", reason="wants torchtitan", exc_type=ImportError)
pytest.importorskip("torchtitan.protocols.model_converter", reason="wants torchtitan 0.2", exc_type=ImportError)

from ranks import Context, distributed


def make_trainer(ctx: Context, *arguments: str, change: Any = None) -> tuple[Any, Any]:
    """(trainer, arguments) of benchmarks.titan. change(config) is called before."""
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    from benchmarks import titan
    from titan_on_cpu import reduce_over_gloo

    os.environ |= {"LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
    titan.LOG_EVERY = 1
    train_spec._extra_train_specs.clear()
    args = titan.parse(["--length", "32", "--batch", "2", *arguments])
    config = titan.make_config(args)
    if change is not None:
        change(config)
    trainer = Trainer(config)
    reduce_over_gloo(trainer.model_parts[0])
    return trainer, args


@pytest.mark.parametrize(
    ("converters", "linear", "refused"),
    [
        (["quantize.linear.float8", "mxep"], "mxfp8", "quantize.linear.float8"),
        (["mxep", "quantize.linear.mx"], "fp8", "quantize.linear.mx"),
        (["mxep", "quantize.grouped_mm.float8"], None, "quantize.grouped_mm.float8"),
        (["quantize.linear.float8", "mxep"], None, None),
    ],
)
def test_two_converters_of_the_same_weights_are_refused(
    converters: list[str], linear: str | None, refused: str | None
) -> None:
    from types import SimpleNamespace

    from mxep.integration.torchtitan.converter import Converter, ConverterOptions

    config = SimpleNamespace(mxep=ConverterOptions(linear=linear), model=SimpleNamespace(converters=converters))
    mesh = SimpleNamespace(tp_enabled=False, get_optional_mesh=lambda name: None)
    if refused is None:
        Converter(config, mesh)
        return
    with pytest.raises(ValueError, match=f"model.converters: got {refused} beside mxep, want one to quantize"):
        Converter(config, mesh)


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
@pytest.mark.parametrize("model", ["qwen3-debug", "deepseek-debug"])
def test_its_trainer_trains(ctx: Context, model: str, tmp_path: Path) -> None:
    """In bf16 under FSDP2 and EP, against its own experts."""
    from benchmarks import titan

    names = []

    def losses(*arguments: str) -> list[float]:
        trainer, args = make_trainer(ctx, "--model", model, "--steps", "3", *arguments)
        found = titan.measure(trainer, args)["losses"]
        names.append(list(trainer.model_parts[0].state_dict()))
        trainer.close()
        return list(found.values())

    own = losses("--case", "torchtitan")
    assert own[-1] < own[0] - 0.3
    in_bf16 = losses("--case", "bf16")
    torch.testing.assert_close(in_bf16, own, rtol=0, atol=5e-3)
    assert losses("--case", "bf16", "--checkpoint", "full") == in_bf16
    in_mxfp8 = losses("--case", "mxfp8")
    torch.testing.assert_close(in_mxfp8, own, rtol=0, atol=2e-2)
    linears_too = losses("--case", "mxfp8-linear")
    assert linears_too != in_mxfp8
    torch.testing.assert_close(linears_too, own, rtol=0, atol=2e-2)
    assert names == names[:1] * len(names)


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_compiled_attention_multiplies_in_mxfp8(ctx: Context) -> None:
    """The last step's graphs call the ops of gemm's `compiled`, which eager products do not."""
    from benchmarks import titan

    losses, products = [], []
    for compiled in ([], ["--compile"]):
        how = ["--model", "qwen3-debug", "--steps", "2", "--case", "mxfp8-linear"]
        trainer, args = make_trainer(ctx, *how, *compiled)

        def profiled(*batches: Any, step: Any = trainer.train_step) -> None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                step(*batches)
            called = {event.key: event.count for event in seen.key_averages()}
            products.append([called.get(f"mxep::product_{way}", 0) for way in ("forward", "backward")])

        trainer.train_step = profiled
        losses.append(list(titan.measure(trainer, args)["losses"].values()))
        trainer.close()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=5e-3)  # bf16, rounded elsewhere
    # q, k and v in one, and attention's output, of two layers. In the first step graphs are made, of fake tensors too.
    assert [products[1], products[3]] == [[0, 0], [4, 4]]


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_micro_batches_share_quantized_weights(ctx: Context) -> None:
    from benchmarks import titan
    from mxep.gemm import quantize_weights_once_a_step

    found = []
    for once in (False, True):

        def change(config: Any, once: bool = once) -> None:
            config.training.global_batch_size = 3 * ctx.world_size * config.training.local_batch_size
            config.mxep = dataclasses.replace(config.mxep, quantize_once=once)

        trainer, args = make_trainer(ctx, "--model", "deepseek-debug", "--steps", "2", change=change)
        result = titan.measure(trainer, args)
        found.append(list(result["losses"].values()))
        trainer.close()
    assert found[0] == found[1]
    # One MoE layer of two weights, two ways, two steps.
    assert quantize_weights_once_a_step().quantizations == 2 * 2 * 2


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_rows_over_capacity_stop_the_step(ctx: Context) -> None:
    from mxep.comms import CapacityExceeded

    trainer, _ = make_trainer(ctx, "--model", "deepseek-debug", "--steps", "1", "--capacity", "0.1")
    before = [p.detach().clone() for p in trainer.model_parts[0].parameters()]
    with pytest.raises(CapacityExceeded, match="would have been enough"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model_parts[0].parameters()))
    trainer.close()
