"""torchtitan 0.2 with mxep's model converter: its own trainer on CPU processes, as the benchmark starts it.

One environment has one torchtitan, usually 0.3. To run this: `pip download torchtitan==0.2.2 --no-deps`, unzip it to
a folder, and put that in front of PYTHONPATH.
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("titan_on_cpu", reason="wants torchtitan", exc_type=ImportError)
pytest.importorskip("torchtitan.protocols.model_converter", reason="wants torchtitan 0.2", exc_type=ImportError)

from ranks import Context, distributed


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
@pytest.mark.parametrize("model", ["qwen3-debug", "deepseek-debug"])
def test_its_trainer_trains(ctx: Context, model: str, tmp_path: Path) -> None:
    """In bf16 under FSDP2 and EP, against its own experts."""
    import titan_bench as titan
    from titan_on_cpu import reduce_over_gloo

    os.environ |= {"LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
    titan.LOG_EVERY = 1
    sizes = ["--model", model, "--steps", "3", "--length", "32", "--batch", "2"]

    names = []

    def losses(*arguments: str) -> list[float]:
        from torchtitan.protocols import train_spec

        train_spec._extra_train_specs.clear()
        args = titan.parse([*sizes, *arguments])
        trainer = titan.make_trainer(args)
        reduce_over_gloo(trainer.model_parts[0])
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
    import titan_bench as titan
    from titan_on_cpu import reduce_over_gloo

    os.environ |= {"LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
    titan.LOG_EVERY = 1
    found = []
    for compiled in ([], ["--compile"]):
        from torchtitan.protocols import train_spec

        train_spec._extra_train_specs.clear()
        sizes = ["--model", "qwen3-debug", "--steps", "2", "--length", "32", "--batch", "2"]
        args = titan.parse([*sizes, "--case", "mxfp8-linear", *compiled])
        trainer = titan.make_trainer(args)
        reduce_over_gloo(trainer.model_parts[0])
        found.append(list(titan.measure(trainer, args)["losses"].values()))
        trainer.close()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=5e-3)  # bf16, rounded elsewhere
