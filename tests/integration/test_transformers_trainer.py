"""transformers' Trainer on two ranks, experts over both, against its Trainer in one process on the same batches."""

import copy
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from integration.tiny_models import tiny, token_ids
from mxep.integration.transformers import MxepCallback, expert_parallel
from mxep.integration.transformers.versions import own_expert_parallel
from ranks import Context, distributed

STEPS = 3


class Tokens(torch.utils.data.Dataset):
    """Sequences of which different parts count for the loss, so that a mean of the ranks' means is another one."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = token_ids(1, seed=i)[0]
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) > 3 + i % 20, -100)}


def train(model: Any, folder: Path, batch: int, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    """A Trainer after steps of two micro-batches, and what it logged of each. AdamW would forget gradients' scale."""
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=batch, gradient_accumulation_steps=2, use_cpu=True,
        logging_steps=1, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
        **{"save_strategy": "no"} | options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[MxepCallback()])
    trainer.train()
    return trainer, [each for each in trainer.state.log_history if "loss" in each]


@pytest.fixture
def one_process(tmp_path: Path, one_thread: None) -> Path:
    """A folder: of the model, and what a Trainer makes of it with batches of two ranks."""
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    before = copy.deepcopy(model.state_dict())
    _, logs = train(model, tmp_path, 4)
    torch.save((before, model.state_dict(), logs), tmp_path / "wanted.pt")
    return tmp_path


@distributed(2, device="cpu")
def test_a_trainer_on_two_ranks_equals_one_process(ctx: Context, one_process: Path) -> None:
    before, wanted, wanted_logs = torch.load(one_process / "wanted.pt")
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    models = {"expert_parallel": AutoModelForCausalLM.from_pretrained(one_process / "model")}
    expert_parallel(models["expert_parallel"], mesh, "mxep_bf16")
    if own_expert_parallel is not None:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="mxep_bf16")
        models["own"] = AutoModelForCausalLM.from_pretrained(one_process / "model", distributed_config=config)
    for way, model in models.items():
        trainer, logs = train(model, one_process, 2)
        assert len(logs) == STEPS
        for got, want in zip(logs, wanted_logs, strict=True):
            # Means of some 100 numbers, summed in fp32 in another order.
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-6), way
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-6), way
            assert 1 <= got["mxep/busiest"] <= 4, way
        if way == "own":
            trainer.save_model(one_process / way)
        else:
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if ctx.rank == 0:
                model.save_pretrained(one_process / way, state_dict=state)
        dist.barrier(ctx.group)
        after = AutoModelForCausalLM.from_pretrained(one_process / way).state_dict()
        for name, weight in wanted.items():
            # Gradients over several ranks are at 112 dB (test_transformers_parallel), which add up over the steps.
            # Each step rounds a weight by up to 2^-24 of it, in either run.
            gradients = 10 ** (-112 / 20) * math.sqrt(STEPS) * float((weight - before[name]).norm())
            rounding = math.sqrt(2 * STEPS) * 2**-24 * float(weight.norm())
            assert float((after[name] - weight).norm()) <= gradients + rounding, (way, name)
    expert_parallel(model := tiny("qwen3_moe"), mesh, "mxep_bf16")
    if find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
        _, logs = train(adapted, one_process, 2)
        assert all(each["grad_norm"] > 0 for each in logs)
    with pytest.raises(ValueError, match=r"save_strategy: got 'steps', want 'no' after expert_parallel"):
        train(model, one_process, 2, save_strategy="steps")
