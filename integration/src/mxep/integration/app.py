"""The `mxep` command: a config composed by Hydra, ranks started, results reported.

    mxep [task=train | task=compare | task=verify | task=bench] [group=choice | key=value ...] [-m]

    command line + configs/ -> Config -> ranks (run_ranks; under torchrun this process is one) -> report -> exit code

Exit codes: 0 done, 1 failed (one message on stderr; a failed rank's traceback is in the run folder), 130 stopped by
Ctrl-C with a checkpoint to resume from.

This module imports nothing heavy: a wrong command line is answered first, then the ranks' fork server and this process
import torch side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from . import __version__, machine, text_files
from .config import ConfigError, command_line_complaint, override_key, resolve, restore
from .process import (
    STOPPED,
    count_gpus,
    end_fork_server,
    end_on_signals,
    raise_on_signals,
    reports,
    start_fork_server,
    under_torchrun,
)
from .run_folder import TOKENIZER, find, read_state
from .schema import TASKS, Config, RecipeConfig, configs_dir, register, sizes_of
from .text_files import vocabulary_of


def main() -> None:
    """Run the command; ends the process with its exit code."""
    if "--version" in sys.argv[1:]:
        print(f"mxep {__version__}, torch {version('torch')}")
        return
    end_on_signals()
    register()
    done: list[tuple[Path, list[str]]] = []

    def job(raw: DictConfig) -> None:
        _job(raw, done)

    run = hydra.main(config_path=str(configs_dir()), config_name="config", version_base="1.3")(job)
    try:
        if complaint := command_line_complaint(sys.argv[1:], TASKS):
            raise ConfigError(complaint)
        with contextlib.ExitStack() as stack:
            if not reports():  # every rank of torchrun composes the config, and one run folder is enough
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="mxep-"))
                sys.argv += [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
            stack.enter_context(_hydra_raises())
            run()
    except KeyboardInterrupt:
        print("mxep: stopped before there was anything to save", file=sys.stderr)
        sys.exit(STOPPED)
    except ConfigError as error:
        if reports():
            print(f"mxep: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        raise_on_signals()
        if len(done) > 1 and reports():
            from .report import show_sweep

            show_sweep(done)


@contextlib.contextmanager
def _hydra_raises() -> Iterator[None]:
    """Turn Hydra's errors into a ConfigError in plain words. With HYDRA_FULL_ERROR set, Hydra prints its own."""
    if "HYDRA_FULL_ERROR" in os.environ:
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # asks Hydra to raise
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        said = str(error).partition("Config search path:")[0].strip()
        cause = str(error.__cause__ or "").partition("\n")[0]
        raise ConfigError("\n".join(filter(None, [said, cause if cause not in said else ""]))) from error
    except OSError as error:  # of the run folder: a job's own are told by _job
        raise ConfigError(f"no run folder: {error}: hydra.run.dir=FOLDER names another") from error
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def _job(raw: DictConfig, done: list[tuple[Path, list[str]]]) -> None:
    """One composed config; `-m` calls it once for each. done: gets the folder and overrides of those that end well."""
    hydra_config = HydraConfig.get()
    folder, overrides = Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task)
    try:
        end_on_signals(lambda: _remove_empty(folder))
        config, checkpoints = prepare(raw, overrides)
        if missing := "; ".join(machine.complaints(config)):
            raise ConfigError(missing)
        if reports() and config.task.name in ("train", "compare") and config.data.path is not None:
            for note in text_files.notes(config.data):
                print(f"mxep: data.path: {note}", file=sys.stderr)
        if not under_torchrun() and config.task.name != "estimate":  # which has no ranks
            # Imports of transformers, such as torchao, may start CUDA, and a forked rank could not use it then.
            early = config.model.transformers is not None and not count_gpus()
            server = start_fork_server(*["mxep.integration.transformers.model"] * early)
            atexit.register(end_fork_server, server)  # so that the command leaves nothing behind
        from .job import run_job

        code = run_job(config, checkpoints, folder)
    except (ValueError, OSError) as error:  # a ConfigError, of a bad checkpoint, or of a file that cannot be read
        code = 1
        if reports():
            print(f"mxep: {error}", file=sys.stderr)
    if code:
        _remove_empty(folder)
        sys.exit(code)
    done.append((folder, overrides))


def _remove_empty(folder: Path) -> None:
    """A mistake leaves no run folder behind, nor those around it here: outputs/DATE."""
    with contextlib.suppress(OSError):  # not empty: something ran
        folder.rmdir()
        here = Path.cwd()
        for parent in folder.parents:
            if here not in parent.parents:
                break
            parent.rmdir()


TASK_SECTIONS = ("bench", "compare", "estimate", "verify")
"""Sections that the task of the same name reads, and no other."""


def prepare(raw: DictConfig, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The config to run, and the checkpoint folder of each run to start from.

    A resumed job takes from its checkpoint what `restore` says, except for ``overrides``. Raises ConfigError, or
    ValueError for a bad checkpoint.
    """
    given = {override_key(override) for override in overrides}
    for key in sorted(given):
        if (section := key.partition(".")[0]) in TASK_SECTIONS and section != (task := raw.task.name):
            raise ConfigError(f"{key}: task={task} does not read it, task={section} does: add that, or leave it out")
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    _fit_bench(raw, given)
    if raw.model.pretrained is not None:
        _fit_model_to_checkpoint(raw, given)
    if raw.resume is None:
        _fit_vocabulary(raw, given)
        config = resolve(raw, ranks=ranks)
        checkpoints: dict[str, str] = {}
    else:
        config, checkpoints = _resume(raw, overrides, given, ranks)
    bench = config.bench
    if config.task.name == "bench" and bench.device == "cuda" and not count_gpus():
        cure = "; bench.device=cpu tries small shapes without one" if bench.cpu_shapes else ""
        raise ConfigError(f"bench={bench.name} needs a CUDA device, and there is none here{cure}")
    return config, checkpoints


def _fit_bench(raw: DictConfig, given: set[str]) -> None:
    """A shape on the command line selects its model. On a CPU a bench has shapes and a backend
    of its own, but for those that the command line names."""
    named = {kind: shapes for kind, shapes in raw.bench.shapes.items() if f"bench.shapes.{kind}" in given}
    if raw.bench.models is not None and "bench.models" not in given:
        if "bench.shapes" in given:
            raise ConfigError(
                f"bench.shapes: which are measured? bench.models=[...] names some of {'; '.join(raw.bench.shapes)}"
            )
        raw.bench.models = list(named) or raw.bench.models
    elif raw.bench.models is not None and (left := [kind for kind in named if kind not in raw.bench.models]):
        cure = f"add {left[0]} there, or leave this out"
        raise ConfigError(f"bench.shapes.{left[0]}: got bench.models without it: {cure}")
    if raw.bench.device != "cpu":
        return
    if raw.bench.backend is not None and "bench.backend" not in given:
        raw.bench.backend = "reference"
    if raw.bench.cpu_shapes and "bench.shapes" not in given:
        raw.bench.shapes = {**raw.bench.cpu_shapes, **named}


def _fit_model_to_checkpoint(raw: DictConfig, given: set[str]) -> None:
    """The section `model` has the sizes of the model that it starts from, but for the number of layers."""
    file = Path(raw.model.pretrained) / "config.json"
    if raw.resume is not None:
        raise ConfigError("model.pretrained: the checkpoint that resume names has the weights: leave it out")
    try:
        found = json.loads(file.read_text())
        whole = int(found["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.pretrained: {file}: {reason}: wanted a folder of save_pretrained") from None
    if "model.layers" in given:
        layers = found["num_hidden_layers"] = raw.model.layers
        if layers > whole:
            raise ConfigError(f"model.layers: got {layers}, but {file} has {whole}")
        found |= {key: value[:layers] for key, value in found.items() if key.endswith("layer_types") and value}
    sizes = {"shared_experts": 0, "balance_rate": 0.0, **sizes_of(found)}
    for key in sizes:
        if f"model.{key}" not in given:
            raw.model[key] = sizes[key]
    raw.model.transformers = found


def _fit_vocabulary(raw: DictConfig, given: set[str]) -> None:
    """A new model of transformers has as many tokens as the data, unless the command line says how many."""
    data, model = raw.data, raw.model
    named = data.get("tokenizer") is not None or data.get("vocabulary") is not None
    if not named or model.transformers is None or model.pretrained is not None:
        return
    if not {"model.transformers", "model.transformers.vocab_size"} & given:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # which resolve() names
            model.transformers.vocab_size = vocabulary_of(data)


def _resume(raw: DictConfig, overrides: list[str], given: set[str], ranks: int | None) -> tuple[Config, dict[str, str]]:
    path = Path(raw.resume)
    if not path.exists():
        raise ConfigError(f"resume: no such file or folder: {path}")
    checkpoints = find(path)
    state = read_state(next(iter(checkpoints.values())))
    if named := sorted({"data.tokenizer", "data.vocabulary"} & given):
        raise ConfigError(f"{named[0]}: the checkpoint that resume names says what tokens are: leave it out")
    raw = restore(raw, state.config, overrides)
    kept = next(iter(checkpoints.values())) / TOKENIZER
    raw.data.tokenizer, raw.data.vocabulary = str(kept.resolve()) if kept.exists() else None, None
    if path in checkpoints.values():  # one run alone, no comparison
        raw.train.compare = False
        if state.run == "bf16" and not any(key.partition(".")[0] == "recipe" for key in given):
            raw.recipe = RecipeConfig("bf16")
    elif (wanted := dict(raw.recipe)) != (trained := state.config["recipe"]):
        changed = ", ".join(f"recipe.{key}={wanted[key]}" for key in wanted if wanted[key] != trained[key])
        step = checkpoints.get(trained["name"], next(reversed(checkpoints.values())))
        raise ConfigError(
            f"resume: {path} trained {trained['name']}, and {changed} is another recipe: leave it out, or go on from "
            f"the weights of one run with resume={step}"
        )
    return resolve(raw, ranks=ranks), {run: str(step.resolve()) for run, step in checkpoints.items()}


if __name__ == "__main__":
    main()
