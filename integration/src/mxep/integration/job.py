"""One job: a composed config is checked, run on its ranks and reported. A task is one of the table `TASKS`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from rich.console import Console

from . import report, text_files, verify
from .choices import auto, recipes
from .config import RESTORED, ConfigError, load_benchmark, override_key, to_json
from .launch import OUT_OF_MEMORY, RanksFailed, run_in_place, run_ranks
from .process import STOPPED, raise_on_signals, reports, under_torchrun
from .results import Report, write
from .run_folder import TOKENIZER, changed, find, read_state, same_text, take
from .schema import BenchConfig, CompareConfig, Config, EstimateConfig, VerifyConfig
from .train import Outcome, train

Reported = BenchConfig | CompareConfig | EstimateConfig | VerifyConfig


def run_job(config: Config, checkpoints: dict[str, str], folder: Path) -> int:
    """Run a prepared job and return its exit code; an error ends in one message on stderr.

    Raises ValueError before anything ran, and with nothing in ``folder``, for mistakes that only torch can tell, and if
    it is another run's.
    """
    checkpoints = _check(config, checkpoints)
    raise_on_signals()  # a job has answers of its own
    with contextlib.ExitStack() as stack:
        if reports():
            resumed = None if config.resume is None else Path(config.resume)
            stack.enter_context(take(folder, OmegaConf.to_yaml(OmegaConf.create(to_json(config))), resumed=resumed))
        return _run(config, checkpoints, folder)


def _run(config: Config, checkpoints: dict[str, str], folder: Path) -> int:
    try:
        return TASKS[config.task.name](config, folder, checkpoints)
    except KeyboardInterrupt:
        if not (how := _how_to_resume(config, folder)) or not reports():
            raise
        print(f"mxep: stopped at once{how}", file=sys.stderr)
        return STOPPED
    except RanksFailed as error:
        try:
            (folder / "error.txt").write_text(f"{error}\n")
            hint = f"{OUT_OF_MEMORY}; " if OUT_OF_MEMORY in str(error) else ""
            story = f"\n({hint}the whole story: {_short(folder / 'error.txt')})"
        except OSError as file_error:  # a full disk, for one, which may be why the rank failed
            story = f"\n(no error.txt: {file_error}; the whole story:)\n{error}"
        return _failed(f"{error.first}{story}{_how_to_resume(config, folder)}")
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return _failed(message + _how_to_resume(config, folder)) if reports() else 1


def _check(config: Config, checkpoints: dict[str, str]) -> dict[str, str]:
    """The checkpoint of each run to start from, by the run's name. Raises ValueError for what does not fit."""
    names = [recipe.name for recipe in recipes(config)]
    if config.task.name == "bench":
        load_benchmark("runner").load(config.bench.name)
        if config.bench.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"bench={config.bench.name}: torch {torch.__version__} uses none of the GPUs here: it is built for "
                'CPUs or for a newer driver, `python -c "import torch; torch.cuda.init()"` says which; install another'
            )
    if config.task.name != "train" or config.resume is None:
        return {}
    if str(Path(config.resume).resolve()) in checkpoints.values():  # one run goes on, whatever it is called now
        checkpoints = dict.fromkeys(names, *checkpoints.values())
    if not checkpoints.keys() & set(names):
        raise ConfigError(
            f"resume: {config.resume} has no checkpoint of {', '.join(names)}, only of {', '.join(checkpoints)}"
        )
    if reports():
        for name in checkpoints.keys() & set(names):
            _say_what_changed(name, Path(checkpoints[name]), config)
        done = [read_state(Path(checkpoints[name])).step if name in checkpoints else 0 for name in names]
        if min(done) >= config.train.steps:
            print(f"mxep: all {min(done)} steps are done: train.steps=N asks for more", file=sys.stderr)
    return checkpoints


def _say_what_changed(name: str, folder: Path, config: Config) -> None:
    """A line if run ``name`` goes on from another recipe, one if with another text, and one if with other tokens."""
    state, begin = read_state(folder), f"mxep: {name} goes on from {_short(folder)}"
    if (folder / TOKENIZER).exists() and (reason := changed(folder, [TOKENIZER])):
        print(f"mxep: {reason}", file=sys.stderr)
    if state.run != name:
        print(f"{begin}: weights and moments of {state.run}, step {state.step}", file=sys.stderr)
    if same_text(to_json(config)["data"], state.config.get("data") or {}):
        return  # where a text that has changed under its name is refused
    source, text = text_files.read(config.data)
    if hashlib.sha256(text).hexdigest() != state.digest:
        print(f"{begin} with another text: {source}", file=sys.stderr)


def _train(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    if reports() and config.recipe.name == "auto":
        print(f"mxep: recipe=auto is {auto(config)[1]}", file=sys.stderr)
    outcome: Outcome = _on_ranks(train, (config, str(folder), checkpoints), config)
    code = STOPPED if outcome.stopped else 0
    if not reports():
        return code
    summary = report.write(outcome, folder, config, _command())
    if outcome.stopped:
        run = outcome.runs[-1]
        where = f"{run.name}, step {run.steps} of {config.train.steps}"
        start = folder if _newest(folder) else config.resume and Path(config.resume)
        how = f"go on with: {_resume_command(start)}" if start else "there is no checkpoint to go on from"
        print(f"mxep: stopped ({where}); {how}", file=sys.stderr)
    else:
        report.show(summary, Console())
        print(f"run folder: {_short(folder)}")
    return code


def _compare(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    compare = load_benchmark("compare")
    outcome = _on_ranks(compare.compare, (config, str(folder)), config)
    if outcome.stopped:
        print("mxep: stopped before all seeds were done: no results", file=sys.stderr)
        return STOPPED
    made = compare.report(config, outcome)
    code = _finish(made, config.compare, folder / "compare.json")
    if reports():
        compare.write_report(folder, config, outcome, made, _command())
        print(f"report: {_short(folder / 'report.html')}")
    return code


def _verify(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    results = verify.report(config, _on_ranks(verify.verify, (config,), config))
    return _finish(results, config.verify, folder / "verify.json")


def _bench(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    file = folder / "bench.json"
    files = [file, *([Path(config.bench.out)] if config.bench.out else [])]
    runner = load_benchmark("runner")
    args = (config.bench, config.seed, files, _command(), config.dispatcher.ranks_per_node)
    try:
        if load_benchmark("names").BENCH[config.bench.name].on_ranks:
            results = _on_ranks(runner.run, args, config, device=config.bench.device)
        else:
            results = runner.run(None, *(args if reports() else args[:2]), quiet=not reports())
    except KeyboardInterrupt:
        if reports() and file.exists():
            print(f"mxep: stopped; the rows so far: {', '.join(map(_short, files))}", file=sys.stderr)
            return STOPPED
        raise
    return _finish(results, config.bench, file)


def _estimate(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    return _finish(load_benchmark("estimate").estimate(config), config.estimate, folder / "estimate.json")


TASKS: dict[str, Callable[[Config, Path, dict[str, str]], int]] = {
    "train": _train,
    "compare": _compare,
    "verify": _verify,
    "bench": _bench,
    "estimate": _estimate,
}


def _on_ranks(fn: Callable[..., Any], args: Sequence[Any], config: Config, *, device: str | None = None) -> Any:
    """Result of ``fn(Rank, *args)`` on rank 0; under torchrun on this rank. device: None is parallel.device."""
    how: Any = {"device": device or config.parallel.device, "steps": config.task.name in ("train", "compare")}
    if under_torchrun():
        return run_in_place(fn, args, **how)
    return run_ranks(fn, args, world_size=config.ranks, timeout=config.parallel.timeout, **how)[0]


def _finish(results: Report, section: Reported, file: Path) -> int:
    """Write and show `results` on the process that reports. Returns the exit code: 1 if some of them failed."""
    if reports():
        written = [file, *([Path(section.out)] if section.out else [])]
        write(results.to_json(_command(), section.commit), written)
        results.show(Console())
        if isinstance(section, BenchConfig | EstimateConfig) and section.picture:
            written.append(Path(section.picture))
            module = "plot" if isinstance(section, BenchConfig) else "estimate"
            load_benchmark(module).draw(json.loads(file.read_text()), written[-1])
        print(f"results: {', '.join(map(_short, written))}")
        if results.failed:
            print(f"mxep: {results.failed} of {len(results.lines)} lines failed", file=sys.stderr)
    return 1 if results.failed else 0


def _command() -> str:
    return shlex.join(["mxep", *sys.argv[1:]])


def _resume_command(folder: Path) -> str:
    """The command that resumes this run as it ran: it repeats the arguments that a checkpoint does not keep."""
    overrides = HydraConfig.get().overrides.task
    keys = {one: override_key(one) for one in overrides}
    repeated = [
        one for one, key in keys.items() if key == "train.wandb" or key.split(".")[0] not in (*RESTORED, "resume")
    ]
    return shlex.join(["mxep", f"resume={_short(folder)}", *repeated])


def _how_to_resume(config: Config, folder: Path) -> str:
    """A line, if the run that failed left a checkpoint."""
    if config.task.name != "train" or not (step := _newest(folder)):
        return ""
    return f"\ngo on from {_short(step)} with: {_resume_command(folder)}"


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint of the last run in ``folder`` that has one."""
    with contextlib.suppress(ValueError):
        return list(find(folder).values())[-1]
    return None


def _failed(message: str) -> int:
    print(f"mxep: {message}", file=sys.stderr)
    return 1


def _short(path: Path) -> str:
    """Relative to the working directory if it lies there."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
