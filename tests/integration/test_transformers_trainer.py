"""transformers' Trainer on two ranks, experts over both, against its Trainer in one process on the same batches."""

import contextlib
import copy
import math
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from integration.tiny_models import tiny, token_ids, whole
from mxep.gemm import QuantizedOnce, quantize_weights_once
from mxep.gemm.quantize_once import weights_are_held
from mxep.integration.transformers import MxepCallback, callback, expert_parallel, load_report
from mxep.integration.transformers.callback import restore
from mxep.integration.transformers.experts import own_expert_parallel
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


class Begin(TrainerCallback):
    """The weights that training begins with: those of which a rank has a part made whole."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step
        self.weights = {name: whole(value).clone() for name, value in model.state_dict().items()}


def equal_those_of(folder: Path, weights: dict[str, torch.Tensor]) -> bool:
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)


def trainer_of(model: Any, folder: Path, **options: Any) -> tuple[Trainer, Begin]:
    given = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True} | options
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=2, report_to=[], disable_tqdm=True, **given)
    begin = Begin()
    few = torch.utils.data.Subset(Tokens(), range(4))
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=few, callbacks=[MxepCallback(), begin]), begin


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_training_goes_on_with_the_experts_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    given, checkpoint = {"learning_rate": 1e-2}, tmp_path / "out/checkpoint-2"
    trainer_of(model := tiny(kind, "mxep_bf16"), tmp_path / "out", **given)[0].train()
    ways = "a folder elsewhere", "the folder", "the last of output_dir"
    for how in ways if kind == "qwen3_moe" else ways[:1]:
        other = tiny(kind, "mxep_bf16")
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter)
        folder = tmp_path / ("elsewhere" if how == "a folder elsewhere" else "out")
        trainer, begin = trainer_of(other, folder, **given)
        if how == "the last of output_dir":
            shutil.rmtree(folder / "checkpoint-4")
        trainer.train(resume_from_checkpoint=True if how == "the last of output_dir" else str(checkpoint))
        assert begin.step == 2
        assert equal_those_of(checkpoint, begin.weights), how
        assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values())), how


@pytest.mark.usefixtures("one_thread")
def test_the_best_models_experts_are_there_at_the_end(tmp_path: Path) -> None:
    every = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    best = {"metric_for_best_model": "eval_loss", "learning_rate": 1e-3}  # random text: the loss goes up
    trainer, _ = trainer_of(model := tiny("qwen3_moe", "mxep_bf16"), tmp_path, **every, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert equal_those_of(tmp_path / "checkpoint-2", model.state_dict())


@pytest.mark.usefixtures("one_thread")
def test_shards_of_a_checkpoint_are_read_too(tmp_path: Path) -> None:
    source = tiny("qwen3_moe")
    source.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = tiny("qwen3_moe")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.zeros_(parameter)
    assert len(restore(model, tmp_path)) == 4
    assert all(map(torch.equal, model.state_dict().values(), source.state_dict().values()))
    with pytest.raises(ValueError, match=r"got no model\.layers\.2\."):
        restore(tiny("qwen3_moe", num_hidden_layers=3), tmp_path)


@pytest.mark.usefixtures("one_thread")
def test_a_packed_batch_has_rows_of_its_tokens_alone_and_a_padded_one_of_pads_too() -> None:
    model, texts = (
        tiny("qwen3_moe", "mxep_bf16"),
        [token_ids(1, seed=i)[0, :length] for i, length in enumerate((5, 24))],
    )
    alone = [model(input_ids=text[None]).logits[0] for text in texts]
    packed = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts])
    out = model(**packed, use_cache=False)  # as a Trainer has it: with a cache transformers makes no mask of sequences
    torch.testing.assert_close(out.logits[0], torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert {each["rows"] for each in load_report(model).values()} == {2 * (5 + 24)}
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    model(input_ids=padded, attention_mask=(padded != 0).long())
    assert {each["rows"] for each in load_report(model).values()} == {2 * 2 * 24}


@distributed(2, device="cpu")
def test_ranks_go_on_with_their_parts_of_the_checkpoints_experts(ctx: Context, tmp_path: Path) -> None:
    checkpoint, only_model = tmp_path / "one/checkpoint-2", {"save_only_model": True}
    if own_expert_parallel is not None:
        from transformers.distributed import DistributedConfig

        if ctx.rank == 0:
            tiny("qwen3_moe").save_pretrained(tmp_path / "model")
        dist.barrier(ctx.group)
        config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="mxep_bf16")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", distributed_config=config)
        trainer_of(model, tmp_path / "one", **only_model)[0].train()
        for ep_size in (2, 1):
            config = DistributedConfig(fsdp_size=2, ep_size=ep_size, ep_implementation="mxep_bf16")
            again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", distributed_config=config)
            trainer, begin = trainer_of(again, tmp_path / "one", **only_model, save_strategy="no")
            trainer.train(resume_from_checkpoint=str(checkpoint))
            assert any(isinstance(value, DTensor) for value in again.state_dict().values())
            assert equal_those_of(checkpoint, begin.weights), ep_size
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    expert_parallel(model := tiny("qwen3_moe"), mesh, "mxep_bf16")
    trainer, begin = trainer_of(model, tmp_path / "one", **only_model, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert equal_those_of(checkpoint, begin.weights)


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


@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({"gradient_accumulation_steps": 1}, 0),
        ({"gradient_accumulation_steps": 4}, 8),
        ({"gradient_accumulation_steps": 1, "gradient_checkpointing": True}, 8),
    ],
)
def test_each_weight_is_quantized_once_a_step_where_it_is_used_again(
    options: dict[str, Any], quantized: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Two layers of two weights, each way."""
    opened: list[QuantizedOnce] = []

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with quantize_weights_once() as once:
            opened.append(once)
            yield

    monkeypatch.setattr(callback, "quantize_weights_once", watched)
    how: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 1, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, **how, **options)
    texts = [{"input_ids": row, "labels": row} for row in token_ids(8)]
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    Trainer(model, arguments, train_dataset=texts, callbacks=[MxepCallback()]).train()
    assert [once.quantizations for once in opened] == ([quantized] * 2 if quantized else [])


@pytest.mark.usefixtures("one_thread")
def test_a_trainer_that_raises_within_a_step_leaves_no_quantized_weights_open(tmp_path: Path) -> None:
    model, held = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16), list[bool]()

    def stop(*_: Any) -> None:
        held.append(weights_are_held())
        if len(held) > 1:
            raise OSError("stop")

    model.register_forward_hook(stop)
    how: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 1, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, use_cpu=True, disable_tqdm=True, **how)
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.add_callback(MxepCallback())
    with pytest.raises(OSError, match="stop"):
        trainer.train()
    assert held == [True, True]
    assert not weights_are_held()
    torch.optim.SGD(model.parameters(), 0.1).step()
