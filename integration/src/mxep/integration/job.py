"""One job: a composed config is checked, run on its ranks and reported. A task is one of the table `TASKS`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from . import checkpoint, compare, report
from .bench import ON_RANKS, PICTURES, run
from .config import RESTORED, ConfigError, override_key, resolve, restore, to_json
from .launch import RanksFailed, run_in_place, run_ranks
from .process import STOPPED, reports, under_torchrun
from .results import write
from .schema import BenchConfig, CompareConfig, Config, RecipeConfig, VerifyConfig
from .train import Outcome, train
from .verify import Verification, verify


def run_job(raw: DictConfig) -> int:
    """Run what Hydra composed and return the exit code; anything wrong ends in one message on stderr."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    try:
        config, checkpoints = prepare(raw, list(hydra_config.overrides.task))
        if reports():
            OmegaConf.save(OmegaConf.create(to_json(config)), folder / "config.yaml")
        return TASKS[config.task.name](config, folder, checkpoints)
    except ConfigError as error:
        return _failed(str(error)) if reports() else 1
    except RanksFailed as error:
        (folder / "error.txt").write_text(f"{error}\n")
        return _failed(f"{error.first}\n(the whole story: {_short(folder / 'error.txt')})")
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        return _failed(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")


def prepare(raw: DictConfig, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The config to run, and the checkpoint folder of each run to start from.

    A resumed job takes from its checkpoint what `restore` says, except for ``overrides``. Raises ConfigError, or
    ValueError for a bad checkpoint.
    """
    checkpoints: dict[str, Path] = {}
    if raw.resume is not None:
        path = Path(raw.resume)
        if not path.exists():
            raise ConfigError(f"resume: no such file or folder: {path}")
        checkpoints = checkpoint.find(path)
        state = checkpoint.read_state(next(iter(checkpoints.values())))
        raw = restore(raw, state.config, overrides)
        if path in checkpoints.values():  # one run alone, no comparison
            raw.train.compare = False
            if state.run == "bf16":
                raw.recipe = RecipeConfig("bf16", mode=None, weight_block=None, wgrad=None, linear=None)
    config = resolve(raw, ranks=int(os.environ["WORLD_SIZE"]) if under_torchrun() else None)
    if config.task.name not in TASKS:
        raise ConfigError(f"task.name: got {config.task.name!r}, wanted one of {', '.join(TASKS)}")
    return config, {run: str(step.resolve()) for run, step in checkpoints.items()}


def _train(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    outcome: Outcome = _on_ranks(train, (config, str(folder), checkpoints), config)
    code = STOPPED if outcome.stopped else 0
    if not reports():
        return code
    summary = report.write(outcome, folder)
    if outcome.stopped:
        run = outcome.runs[-1]
        where = f"{run.name}, step {run.steps} of {config.train.steps}"
        print(f"mxep: stopped ({where}); go on with: {_resume_command(folder)}", file=sys.stderr)
    else:
        report.show(summary, Console())
        print(f"run folder: {_short(folder)}")
    return code


def _compare(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    outcome: compare.Outcome = _on_ranks(compare.compare, (config, str(folder)), config)
    if outcome.stopped:
        print("mxep: stopped before all seeds were done: no results", file=sys.stderr)
        return STOPPED
    return _finish(outcome, config.compare, folder / "compare.json")


def _verify(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    results = Verification(_on_ranks(verify, (config,), config), config)
    return _finish(results, config.verify, folder / "verify.json", things="cases")


def _bench(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    if config.bench.name in ON_RANKS:
        run.check(config.bench)
        results = _on_ranks(run.run_on_rank, (config.bench, config.seed), config, device=config.bench.device)
    else:
        results = run.run(config.bench, config.seed, Console(stderr=True, quiet=not reports()))
    return _finish(results, config.bench, folder / "bench.json")


TASKS: dict[str, Callable[[Config, Path, dict[str, str]], int]] = {
    "train": _train,
    "compare": _compare,
    "verify": _verify,
    "bench": _bench,
}


def _on_ranks(fn: Callable[..., Any], args: Sequence[Any], config: Config, *, device: str | None = None) -> Any:
    """What ``fn(Rank, *args)`` returns on rank 0; under torchrun on this rank. device: None is parallel.device."""
    device = device or config.parallel.device
    if under_torchrun():
        return run_in_place(fn, args, device=device)
    return run_ranks(fn, args, world_size=config.ranks, timeout=config.parallel.timeout, device=device)[0]


def _finish(
    results: Any,
    section: BenchConfig | CompareConfig | VerifyConfig,
    file: Path,
    things: str = "lines",
) -> int:
    """Write and show `results`, such as a `Report`, on the process that reports.

    Returns the exit code: 1 if some of them failed.
    """
    if reports():
        files = [file, *([Path(section.out)] if section.out else [])]
        write(results.to_json(shlex.join(["mxep", *sys.argv[1:]]), section.commit), files)
        results.show(Console())
        if isinstance(section, BenchConfig) and section.picture:
            files.append(Path(section.picture))
            importlib.import_module(PICTURES[section.name]).draw(json.loads(file.read_text()), files[-1])
        print(f"results: {', '.join(map(_short, files))}")
        if results.failed:
            print(f"mxep: {results.failed} of {len(results.lines)} {things} failed", file=sys.stderr)
    return 1 if results.failed else 0


def _resume_command(folder: Path) -> str:
    """The command that resumes this run as it ran: it repeats the arguments that a checkpoint does not keep."""
    overrides = HydraConfig.get().overrides.task
    repeated = [one for one in overrides if override_key(one).split(".")[0] not in (*RESTORED, "resume")]
    return shlex.join(["mxep", f"resume={_short(folder)}", *repeated])


def _failed(message: str) -> int:
    print(f"mxep: {message}", file=sys.stderr)
    return 1


def _short(path: Path) -> str:
    """Relative to the working directory if it lies there."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
