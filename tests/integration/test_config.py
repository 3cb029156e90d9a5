"""Configs: every choice composes, every mistake is one clear message and a non-zero exit."""

import copy
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from composed import composed
from mxep.ep import DISPATCHERS
from mxep.gemm import Recipe
from mxep.integration import app
from mxep.integration.config import ConfigError, resolve, restore, to_json
from mxep.integration.model import auto, make_recipe, recipes
from mxep.integration.schema import Config, configs_dir, out_of_bounds
from mxep.quant import E5M2, ScaleMode


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (configs_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("group", ["task", "model", "recipe", "dispatcher", "parallel", "optimizer"])
def test_every_choice_of_a_group_is_a_valid_config(make_config: Callable[..., Config], group: str):
    assert choices(group)
    for choice in choices(group):
        config = make_config(f"{group}={choice}")
        assert config.ranks % config.ep == 0


def test_every_dispatcher_and_every_base_recipe_is_a_choice():
    assert set(DISPATCHERS) == set(choices("dispatcher"))
    assert {"bf16", "fp8", "mxfp8"} <= set(choices("recipe"))


def test_a_recipes_name_has_its_changes(make_config: Callable[..., Config]):
    assert make_recipe(make_config()) == Recipe.mxfp8()
    changed = make_config("recipe.name=mxfp8_e5m2_32x32_floor")
    assert make_recipe(changed) == Recipe.mxfp8(grad_fmt=E5M2, mode=ScaleMode.FLOOR, weight_block="32x32")


@pytest.mark.parametrize(("length", "picked"), [(512, "bf16"), (8192, "mxfp8")])
def test_recipe_auto_is_picked_by_the_rows_of_an_expert(make_config: Callable[..., Config], length: int, picked: str):
    sizes = "model=qwen3_30b_a3b", "parallel.ranks=2", "data.batch=4", "train.micro_batches=2", "task=bench"
    config = make_config("recipe=auto", f"data.length={length}", *sizes)
    assert make_recipe(config) == Recipe.named(picked)
    assert auto(config)[1] == (
        f"{picked}, as an expert gets {length // 8} rows: with D 2048 and F 768 MXFP8 pays from 604 on"
    )
    assert [recipe.name for recipe in recipes(config)] == ["bf16", "mxfp8"][: 1 + (picked == "mxfp8")]


def test_ranks_under_torchrun_are_those_that_are_there(make_config: Callable[..., Config]):
    config = make_config(ranks=4)
    assert (config.ranks, config.ep) == (4, 4)
    assert make_config("dispatcher=local", ranks=4).ep == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=nan", "seed=-1"], "or equal to 1; seed: got -1: Input should be greater"),
        (["compare.seeds=[0,-1]"], "compare.seeds.1: got -1: Input should be greater"),
        (["dispatcher.name=pigeon"], "dispatcher.name: got 'pigeon': String should match pattern '^(local|all_to_all"),
        (["dispatcher.capacity=none"], "dispatcher.capacity: got 'none': String should match pattern '^(worst_case"),
        (["dispatcher=local", "parallel.ep=2"], "parallel.ep must be 1, got 2"),
        (["task=verify", "verify.top_k=99"], "verify.top_k must lie in 1.."),
        (["parallel.ranks=3", "parallel.ep=2", "data.batch=6"], "parallel.ranks must be a multiple of 2"),
        (["parallel.ranks=3", "parallel.ep=1"], "data.batch must be a multiple of 3 (parallel.ranks), got 4"),
        (["model.experts=5"], "model.experts must be a multiple of 2"),
        (["model.top_k=9"], "model.top_k must lie in 1..4"),
        (["model.dim=40"], "recipe mxfp8 wants model.dim and model.hidden_dim in 32s"),
        (["recipe=fp8", "model.hidden_dim=40"], "recipe fp8 wants model.dim and model.hidden_dim in 16s"),
        (["task=compare", "recipe=auto"], "task=compare compares a recipe with bf16: recipe must be another one"),
        (["recipe=bf16", "recipe.linear=mxfp8", "model.dim=40"], "recipe.linear=mxfp8 wants model.dim in 32s, got 40"),
        (["verify.cases=[int3/local]"], "verify.cases: got 'int3/local', wanted some of bf16/local"),
        (["train.steps=0"], "train.steps: got 0: Input should be greater than or equal to 1"),
        (
            ["train.steps=99999999999999999999"],
            "got 99999999999999999999: Input should be less than or equal to 922337",
        ),
        (["dispatcher.nodes_per_token=0"], "dispatcher.nodes_per_token: got 0: Input should be greater"),
        (["backend=abacus"], "backend: got 'abacus': String should match pattern '^(auto|reference"),
        (["dispatcher.overflow=drop"], "nothing overflows worst_case; wanted dispatcher.capacity=factor"),
        (["dispatcher.overflow=recompute"], "overflow=recompute: nothing overflows worst_case"),
        (
            ["dispatcher.capacity=factor", "dispatcher.overflow=spill"],
            "dispatcher.overflow: got 'spill': String should",
        ),
        (["train.skip_bad_steps=-1"], "train.skip_bad_steps: got -1: Input should be greater"),
        (["train.checkpoint_every=-1"], "train.checkpoint_every: got -1: Input should be greater"),
        (["optimizer.warmup=-1"], "optimizer.warmup: got -1: Input should be greater"),
        (["task=compare", "compare.out=/no/such/file"], "compare.out: no such folder: /no/such"),
        (["verify.cases=[bf16/pigeon]"], "verify.cases: got 'bf16/pigeon'"),
        (["data.path=/no/such/file"], "data.path: no such file or folder: /no/such/file"),
        (["data.path="], "data.path: no such file or folder: ''"),  # FILE of data.path=$FILE is not set
        (["estimate.layers=0"], "estimate.layers: got 0: Input should be greater"),
        (["data.vocabulary=255"], "data.vocabulary: got 255: Input should be greater than or equal to 256"),
        (["data.vocabulary=300", "data.tokenizer=x"], "data.vocabulary and data.tokenizer: got both, wanted one"),
        (["data.tokenizer=/no/such"], "data.tokenizer: /no/such: FileNotFoundError"),
        (
            ["model=qwen3_moe_tiny", "data.vocabulary=300", "model.transformers.vocab_size=299"],
            "model.transformers.vocab_size must be at least 300, one for each token of the data, got 299",
        ),
        (
            ["data.batch=16", "train.micro_batches=3"],
            "6 (parallel.ranks times train.micro_batches), got 16: try data.batch=18",
        ),
        (["train.precision=bf16-true"], "train.precision: got bf16-true, wanted bf16-mixed: only models of"),
        (["parallel.fsdp=true"], "parallel.fsdp: got true, wanted false: only models of transformers"),
    ],
)
def test_a_value_that_does_not_fit_is_named(make_config: Callable[..., Config], overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(*overrides)


def numbers_of(hint: Any, key: str) -> Iterator[tuple[str, type]]:
    """Key and type of each number in a type: of sections, of lists and dicts."""
    if dataclasses.is_dataclass(hint):
        for name, inner in get_type_hints(hint).items():
            yield from numbers_of(inner, f"{key}.{name}" if key else name)
    elif hint in (int, float):
        yield key, hint
    else:
        for inner in get_args(hint):
            yield from numbers_of(inner, key)


NUMBERS = list(numbers_of(Config, ""))


def with_value(config: Config, key: str, value: object) -> Config:
    """A copy with another value there; of a list or dict the only one."""
    config = copy.deepcopy(config)
    *sections, name = key.split(".")
    section = functools.reduce(getattr, sections, config)
    old = getattr(section, name)
    setattr(section, name, [value] if isinstance(old, list) else {"x": [[value]]} if isinstance(old, dict) else value)
    return config


@pytest.mark.parametrize(("key", "kind"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_every_number_of_a_config_is_bounded(default: Config, key: str, kind: type):
    for value in (-1, 2**63) if kind is int else (-1.0, math.nan, math.inf, -math.inf):
        (line,) = out_of_bounds(with_value(default, key, value))
        assert re.match(rf"{re.escape(key)}\S*: got {re.escape(str(value))}: Input should be ", line)


@pytest.fixture(scope="module")
def default() -> Config:
    return resolve(composed())


@pytest.mark.parametrize(
    "overrides",
    [
        ["backend=triton", "train.compare=false"],
        ["backend=triton", "task=verify", "verify.cases=[mxfp8/local]"],
        ["backend=triton", "task=bench"],
        ["recipe.name=fp8_floor", "train.checkpoint_every=null", "optimizer.warmup=0"],
    ],
)
def test_a_value_that_fits_passes(make_config: Callable[..., Config], overrides: list[str]):
    make_config(*overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=int3"], "Could not find 'recipe/int3'"),
        (["-m", "model=tiny,null"], "override must be a string or a list. Got NoneType"),
        (["recipe.name=mxpf8"], "recipe: got 'mxpf8', want bf16, fp8, mxfp8; after fp8 and mxfp8 also _e5m2"),
        (["recipe.linear=mxpf8_e5m2"], "recipe: got 'mxpf8_e5m2', want bf16, fp8, mxfp8"),
        (["model.width=3"], "Key 'width' not in 'ModelConfig'"),
        (["train.step=3"], "Key 'step' not in 'TrainConfig'"),
        (["lr=3"], "Key 'lr' not in 'Config'"),
        (["verify"], "missing EQUAL"),
        (["bench=layer"], "bench: task=train does not read it, task=bench does: add that"),
        (["dispatcher.nodes_per_token=2"], "dispatcher 'symmetric' has no nodes_per_token"),
        (["hydra.run.dir=/dev/null/x"], "no run folder: [Errno 20] Not a directory: '/dev/null/x'"),
        (["+model.width=3"], "no such key: model.width"),
        (["+steps=3"], "no such key: steps"),
        (["model.dim=wide"], "Value 'wide' of type 'str' could not be converted to Integer"),
        (["data=text"], "no value for data.path"),
        (["resume=/no/such/run"], "resume: no such file or folder: /no/such/run"),
        (["task.name=dance"], "task.name: got 'dance': String should match pattern '^(train|compare"),
        (["+model._target_=os.system"], "no such key: model._target_"),
    ],
)
def test_a_config_error_is_one_message_and_exit_code_1(mxep, arguments: list[str], message: str):
    finished = mxep(*arguments)
    assert finished.code == 1
    assert message in finished.err
    assert not any(hint in finished.err for hint in ("Traceback", "HYDRA_FULL_ERROR", "To append", "search path"))
    assert finished.out == ""


def test_a_saved_config_comes_back_but_for_what_the_command_line_names(make_config: Callable[..., Config]):
    saved = make_config("train.steps=7", "seed=3", "recipe=fp8")
    given = ["recipe=bf16", "train.checkpoint_every=9", "dispatcher=all_to_all"]
    restored = resolve(restore(composed(*given), to_json(saved), given))
    assert (restored.train.steps, restored.seed, restored.model) == (7, 3, saved.model)
    assert (restored.recipe.name, restored.train.checkpoint_every) == ("bf16", 9)


def test_a_checkpoint_says_nothing_of_tasks_places_and_files_to_write(make_config: Callable[..., Config]):
    saved = to_json(make_config())
    here = to_json(resolve(composed()))
    saved |= {section: saved[section] | {"out": "/etc/passwd"} for section in ("bench", "compare")}
    saved |= {"task": {"name": "bench"}, "parallel": {"ranks": 10_000}, "dispatcher": {"name": "local"}, "resume": "/"}
    saved["train"]["wandb"] = True
    saved |= {"hydra": {"run": {"dir": "/etc"}}, "backend": "triton"}
    restored = to_json(resolve(restore(composed(), saved, [])))
    assert {key for key in here if restored[key] != here[key]} == {"model", "data", "optimizer", "train"}
    assert (saved["train"]["wandb"], restored["train"]["wandb"]) == (True, False)
    said = ["train.wandb=true", "train.steps=9", "parallel.ranks=1", "resume=x"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "HydraConfig", Mock(get=lambda: Mock(overrides=Mock(task=said))))
        assert app._resume_command(Path("y")) == "mxep resume=y train.wandb=true parallel.ranks=1", (
            "what it does not keep"
        )


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("model", {"width": 3}),
        ("model", {"dim": "wide"}),
        ("model", {"_target_": "os.system"}),
        ("model", {"dim": {"deep": 1}}),
        ("model", {"dim": "${model.experts}"}),
        ("data", {"path": "${oc.env:HOME}"}),
        ("data", {"path": "text-${now:%Y}"}),
        ("data", {"path": "???"}),
        ("data", {"path": ["a"]}),
    ],
)
def test_a_saved_config_is_plain_values_of_known_keys(section: str, changes: dict[str, object]):
    raw = composed()
    saved = OmegaConf.to_container(raw)
    for broken in (saved | {section: saved[section] | changes}, saved | {section: [changes]}, {}):
        with pytest.raises(ConfigError, match="the checkpoint's config does not fit"):
            restore(raw, broken, [])


def test_what_a_logger_prints_for_itself_hydra_does_not_print_again(mxep):
    mxep("train.steps=0")
    assert not logging.getLogger().handlers


def test_another_text_for_a_saved_config_has_its_batches(make_config: Callable[..., Config], text: Path):
    given = ["data=text", f"data.path={text}"]
    saved = to_json(make_config("data.batch=6")) | {"seed": 5}
    saved["data"] |= {"path": None}
    restored = resolve(restore(composed(*given), saved, given))
    assert (restored.data.path, restored.seed) == (str(text), 5)
    assert (restored.data.batch, restored.data.length) == (6, 32)
