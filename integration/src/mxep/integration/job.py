"""One job: a composed config is checked, run on its ranks and reported. A task is one of the table below."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from . import checkpoint, report
from .app import PRELOAD, STOPPED, reports, under_torchrun
from .config import RESTORED, ConfigError, override_key, resolve, restore, to_json
from .launch import RanksFailed, run_in_place, run_ranks
from .schema import Config, RecipeConfig
from .train import Outcome, train
from .verify import Result, to_report, verify
from .verify import show as show_results


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
        return _failed(f"{first_failure(str(error))}\n(the whole story: {_shown(folder / 'error.txt')})")
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        return _failed(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")


def prepare(raw: DictConfig, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The config to run, and the checkpoint folder of each run to start from.

    A resumed job takes from its checkpoint what `restore` says, but for ``overrides``. Raises ConfigError, or
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
                raw.recipe = RecipeConfig("bf16", mode=None, weight_block=None, wgrad=None)
    config = resolve(raw, ranks=int(os.environ["WORLD_SIZE"]) if under_torchrun() else None)
    if config.task.name not in TASKS:
        raise ConfigError(f"task.name: got {config.task.name!r}, wanted one of {', '.join(TASKS)}")
    return config, {run: str(step.resolve()) for run, step in checkpoints.items()}


def first_failure(text: str) -> str:
    """Of a RanksFailed message, which rank failed first and its error without the traceback."""
    first = re.split(r"\n(?=rank \d+ (?:raised|was|exited)|\(rank )", text)[0]
    head, _, traceback = first.partition("\n")
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    error = "\n".join(lines[frames[-1] + 1 :] if frames else lines)
    without_module = re.sub(r"^(?:[A-Za-z_]\w*\.)+", "", error)
    return f"{head} {without_module}".rstrip()


def _train(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    outcome: Outcome = _on_ranks(train, (config, str(folder), checkpoints), config)[0]
    code = STOPPED if outcome.stopped else 0
    if not reports():
        return code
    summary = report.write(outcome, folder)
    if outcome.stopped:
        run = outcome.runs[-1]
        where = f"{run.name}, step {run.steps} of {config.train.steps}"
        print(f"mxep: stopped ({where}); go on with: {_go_on(folder)}", file=sys.stderr)
    else:
        report.show(summary, Console())
        print(f"run folder: {_shown(folder)}")
    return code


def _compare(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    from . import compare  # imports Triton, for which the other tasks need not wait

    compare.check(config)
    outcome: compare.Outcome = _on_ranks(compare.compare, (config, str(folder)), config)[0]
    if outcome.stopped:
        print("mxep: stopped before all seeds were done: no results", file=sys.stderr)
        return STOPPED
    if reports():
        results = compare.to_report(outcome, config, _command())
        files = [folder / "compare.json", *([Path(config.compare.out)] if config.compare.out else [])]
        _write(results, files)
        compare.show(results, Console())
        print(f"results: {', '.join(map(_shown, files))}")
    return 0


def _verify(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    results: list[Result] = _on_ranks(verify, (config,), config)[0]
    failed = sum(not result.passed for result in results)
    if reports():
        files = [folder / "verify.json", *([Path(config.verify.out)] if config.verify.out else [])]
        _write(to_report(results, config, _command()), files)
        show_results(results, Console())
        print(f"results: {', '.join(map(_shown, files))}")
        if failed:
            print(f"mxep: {failed} of {len(results)} cases failed", file=sys.stderr)
    return 1 if failed else 0


def _bench(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    from .bench import ON_RANKS, PICTURES, run  # imports Triton, too

    if config.bench.name in ON_RANKS:
        run.check(config.bench)
        args = config.bench, config.seed
        result = _on_ranks(run.run_on_rank, args, config, device=config.bench.device)[0]
    else:
        result = run.run(config.bench, config.seed, Console(stderr=True, quiet=not reports()))
    if reports():
        files = [folder / "bench.json", *([Path(config.bench.out)] if config.bench.out else [])]
        _write(result.to_json(_command(), config.bench.commit), files)
        result.show(Console())
        if config.bench.picture:
            picture = importlib.import_module(PICTURES[config.bench.name])
            picture.draw(json.loads(files[0].read_text()), Path(config.bench.picture))
            files.append(Path(config.bench.picture))
        print(f"results: {', '.join(map(_shown, files))}")
        if result.failed:
            print(f"mxep: {result.failed} of {len(result.lines)} lines failed", file=sys.stderr)
    return 1 if result.failed else 0


TASKS: dict[str, Callable[[Config, Path, dict[str, str]], int]] = {
    "train": _train,
    "compare": _compare,
    "verify": _verify,
    "bench": _bench,
}


def _on_ranks(fn: Callable[..., Any], args: Sequence[Any], config: Config, *, device: str | None = None) -> list[Any]:
    """What ``fn(Rank, *args)`` returns on each rank; under torchrun on this one alone. device: null is parallel's."""
    parallel = config.parallel
    device = device or parallel.device
    if under_torchrun():
        return [run_in_place(fn, args, device=device)]
    return run_ranks(fn, args, world_size=config.ranks, timeout=parallel.timeout, device=device, preload=PRELOAD[1:])


def _command() -> str:
    return shlex.join(["mxep", *sys.argv[1:]])


def _write(report: dict[str, Any], files: list[Path]) -> None:
    for file in files:
        file.write_text(json.dumps(report, indent=1) + "\n")


def _go_on(folder: Path) -> str:
    """The command that resumes this run as it ran: what its checkpoint does not say is said again."""
    overrides = HydraConfig.get().overrides.task
    again = [one for one in overrides if override_key(one).split(".")[0] not in (*RESTORED, "resume")]
    return shlex.join(["mxep", f"resume={_shown(folder)}", *again])


def _failed(message: str) -> int:
    print(f"mxep: {message}", file=sys.stderr)
    return 1


def _shown(path: Path) -> str:
    """As short as it can be typed here."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
