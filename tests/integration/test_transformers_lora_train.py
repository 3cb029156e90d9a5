"""LoRA on attention and frozen experts by a Trainer: like plain PEFT on the dequantized model, saved and resumed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

import transformers
from peft import PeftModel, get_peft_model

from integration.test_transformers_frozen import dequantized
from integration.test_transformers_lora import config, drawn, plain_peft
from integration.tiny_models import step, tiny, token_ids, worst
from mxep.integration.transformers import MxepCallback, freeze_experts, optimize

pytestmark = pytest.mark.usefixtures("one_thread")


class Texts(torch.utils.data.Dataset):
    """Each token follows from the one before: a fifth of all orders, so that there is something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(24) * (1 + i % 5) + i) % 61 + 3
        return {"input_ids": ids, "labels": ids}


def models(kind: str, fmt: str, experts: str) -> tuple[Any, Any]:
    """(frozen, with the same values in bf16 and experts of transformers), without adapters."""
    model = tiny(kind, experts, torch.bfloat16)
    frozen = tiny(kind, experts, torch.bfloat16)
    freeze_experts(frozen, fmt)
    plain = dequantized(frozen, model)
    plain.set_experts_implementation("grouped_mm")
    return frozen, plain


def adapted(model: Any, kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return get_peft_model(model, config(kind))


def trainer(model: Any, folder: Path, steps: int, **how: Any) -> transformers.Trainer:
    given: dict[str, Any] = {"save_strategy": "no", "learning_rate": 2e-2, "gradient_checkpointing": True}
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, bf16=True, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant", **given | how,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Texts(), callbacks=[MxepCallback()])


def losses(model: Any, folder: Path, steps: int) -> list[float]:
    run = trainer(model, folder, steps)
    run.train()
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def compare(kind: str, fmt: str, steps: int, folder: Path, seed: int = 0) -> tuple[list[float], list[float]]:
    """Losses of plain PEFT on the dequantized model, and of LoRA on the frozen one, whose rows are in MXFP8."""
    frozen, plain = models(kind, fmt, "mxep_mxfp8")
    got = losses(adapted(frozen, kind, seed), folder / "frozen", steps)
    with plain_peft():
        wanted = losses(adapted(plain, kind, seed), folder / "plain", steps)
    return wanted, got


@pytest.mark.parametrize(("kind", "fmt"), [("qwen3_moe", "mxfp8"), ("gpt_oss", "mxfp4")])
def test_a_trainer_loses_as_much_as_on_the_dequantized_model(kind: str, fmt: str, tmp_path: Path) -> None:
    wanted, got = compare(kind, fmt, 20, tmp_path)
    assert sum(wanted[-5:]) < 0.92 * sum(wanted[:5]), "it learns"
    assert abs(wanted[0] - got[0]) < 0.02 * wanted[0]
    for first in (0, 10):
        there, here = (sum(each[first : first + 10]) for each in (wanted, got))
        assert abs(there - here) < 0.03 * there, (wanted, got)


@pytest.mark.skipif("MXEP_LONG_TESTS" not in os.environ, reason="takes 7 minutes: MXEP_LONG_TESTS=1 runs it")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "fmt"), [("qwen3_moe", "mxfp8"), ("gpt_oss", "mxfp4")])
def test_300_steps_end_where_those_of_the_dequantized_model_end(kind: str, fmt: str, seed: int, tmp_path: Path) -> None:
    wanted, got = compare(kind, fmt, 300, tmp_path, seed)
    there, here = (sum(each[-50:]) / 50 for each in (wanted, got))
    print(f"{kind} {fmt} seed {seed}: loss of the last 50 steps {here:.4f}, dequantized {there:.4f}")
    assert abs(there - here) < 0.01 * there


def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, **how: Any) -> Any:
        model = adapted(models("qwen3_moe", "mxfp4", "mxep_mxfp8")[0], "qwen3_moe")
        trainer(model, tmp_path / name, 4, save_strategy="steps", save_steps=2).train(**how)
        return model

    whole = run("whole")
    saved = tmp_path / "whole/checkpoint-2"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in saved.iterdir()}
    assert not list(saved.glob("model*.safetensors")), "adapters alone are saved"
    resumed = run("resumed", resume_from_checkpoint=str(saved))
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    again = PeftModel.from_pretrained(models("qwen3_moe", "mxfp4", "mxep_mxfp8")[0], tmp_path / "whole/checkpoint-4")
    assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lora_trains_in_an_optimized_model(compile: bool) -> None:
    """With the loss in chunks, whose head is frozen, and checkpointing. Compiled, the second step runs as a graph."""
    model, _ = models("qwen3_moe", "mxfp4", "mxep_bf16")
    wanted = step(drawn(adapted(model, "qwen3_moe").train()))
    model, _ = models("qwen3_moe", "mxfp4", "mxep_bf16")
    optimize(model, compile=compile)
    faster = drawn(adapted(model, "qwen3_moe").train())
    faster.gradient_checkpointing_enable()
    for _ in range(2):
        faster.zero_grad()
        out = faster(input_ids=token_ids(), labels=token_ids())
        assert "logits" not in out
        out.loss.backward()
    got = {n: p.grad for n, p in faster.named_parameters() if p.grad is not None}
    lowest, name = worst({n: each for n, each in wanted.items() if n != "logits"}, got)
    assert lowest > 30, name
