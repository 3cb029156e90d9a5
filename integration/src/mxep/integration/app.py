"""The `mxep` command: a config composed by Hydra, ranks started, results reported.

    mxep [task=train | task=compare | task=verify | task=bench] [group=choice | key=value ...] [-m]

    command line + configs/ -> `prepare` -> Config -> a task of TASKS, on ranks (run_ranks; under torchrun this process
    is one) -> report -> exit code

Exit codes: 0 done, 1 failed (one message on stderr; a failed rank's traceback is in the run folder), 130 stopped by
Ctrl-C with a checkpoint to resume from.

This module imports nothing heavy: a wrong command line is reported first, then the ranks' fork server and this process
import torch in parallel.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from . import __version__
from .checkpoint import find, new_folder, read_state, take
from .config import RESTORED, ConfigError, load_benchmark, prepare, to_json
from .launch import (
    OUT_OF_MEMORY,
    STOPPED,
    RanksFailed,
    end_fork_server,
    gpu_count,
    handle_signals,
    reports,
    run_in_place,
    run_ranks,
    start_fork_server,
    under_torchrun,
)
from .schema import Config, configs_dir, override_key

if TYPE_CHECKING:
    from .report import Report

NOTHING_TO_SAVE = "stopped before there was anything to save"


def main() -> None:
    """Run the command and end the process with its exit code. `mxep help` is `mxep --help`."""
    if "--version" in sys.argv[1:]:
        print(f"mxep {__version__}, torch {version('torch')}")
        return
    if sys.argv[1:] == ["help"]:
        sys.argv[1] = "--help"
    register()
    done: list[tuple[Path, list[str]]] = []

    def job(raw: DictConfig) -> None:
        _job(raw, done)

    run = hydra.main(config_path=str(configs_dir()), config_name="config", version_base="1.3")(job)
    try:
        with contextlib.ExitStack() as stack:
            if not reports():  # every rank of torchrun composes the config, and one run folder is enough
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="mxep-"))
                sys.argv += [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
            stack.enter_context(_hydra_raises())
            run()
    except KeyboardInterrupt:
        _say(NOTHING_TO_SAVE)
        sys.exit(STOPPED)
    except ConfigError as error:
        sys.exit(_failed(str(error)))
    finally:
        if len(done) > 1 and reports():
            from .report import show_sweep

            show_sweep(done)


def register() -> None:
    """Register with Hydra the schema of configs/config.yaml, and the resolver that names run folders. Like ``now``, it
    resolves once per config."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("new_folder", new_folder, replace=True, use_cache=True)


@contextlib.contextmanager
def _hydra_raises() -> Iterator[None]:
    """Turn Hydra's errors into a ConfigError in plain words. With HYDRA_FULL_ERROR set, Hydra prints its own."""
    if "HYDRA_FULL_ERROR" in os.environ:
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # asks Hydra to raise
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a group that is null
        said = re.sub(r"\nTo append to.*", "", str(error).partition("Config search path:")[0]).strip()
        cause = str(error.__cause__ or "").partition("\n")[0]
        raise ConfigError("\n".join(filter(None, [said, cause if cause not in said else ""]))) from error
    except OSError as error:  # the run folder's; _job reports a job's own
        raise ConfigError(f"no run folder: {error}: hydra.run.dir=FOLDER names another") from error
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def _job(raw: DictConfig, done: list[tuple[Path, list[str]]]) -> None:
    """Run one composed config; `-m` calls it once for each. done: successful jobs append their folder and overrides.

    The folder stays empty until all checks that need no rank have passed. If one fails, the folder is removed.
    """
    hydra_config = HydraConfig.get()
    folder, overrides = Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task)
    code = 1

    def end(number: int, frame: object) -> None:
        """End at once: a KeyboardInterrupt may be lost in an import, or become another error."""
        _remove_empty(folder)
        end_fork_server()
        _say(NOTHING_TO_SAVE)
        os._exit(STOPPED)

    try:
        with handle_signals(end):
            config, checkpoints = prepare(raw, overrides)
            if not under_torchrun() and config.task.name != "estimate":  # estimate has no ranks
                # Imports of transformers, such as torchao, may start CUDA. A forked rank could not use it then.
                early = config.model.transformers is not None and not gpu_count()
                start_fork_server(*["mxep.integration.transformers.model"] * early)
            checkpoints = _check(config, checkpoints)
        if reports():
            resumed = None if config.resume is None else Path(config.resume)
            take(folder, OmegaConf.to_yaml(OmegaConf.create(to_json(config))), resumed=resumed)
        code = _run(config, checkpoints, folder)
    except (ValueError, OSError) as error:  # a ConfigError, of a bad checkpoint, or of a file that cannot be read
        _failed(str(error))
    finally:
        if code:
            _remove_empty(folder)
    if code:
        sys.exit(code)
    done.append((folder, overrides))


def _remove_empty(folder: Path) -> None:
    """Remove an empty run folder, and empty folders around it (outputs/DATE)."""
    with contextlib.suppress(OSError):  # not empty: something ran
        folder.rmdir()
        here = Path.cwd()
        for parent in folder.parents:
            if here not in parent.parents:
                break
            parent.rmdir()


def _check(config: Config, checkpoints: dict[str, str]) -> dict[str, str]:
    """The checkpoint that each run starts from, by run name. Raises ValueError for an unknown recipe, and for
    limits that a dispatcher does not have."""
    import torch

    from .model import linear_recipe, make_dispatch, make_recipe, recipes

    linear_recipe(config, make_recipe(config))
    if config.task.name in ("train", "compare"):
        make_dispatch(config)
    names = [recipe.name for recipe in recipes(config)]
    if config.task.name == "bench" and config.bench.device == "cuda" and not torch.cuda.is_available():
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
        done = [read_state(Path(checkpoints[name])).step if name in checkpoints else 0 for name in names]
        if min(done) >= config.train.steps:
            _say(f"all {min(done)} steps are done: train.steps=N asks for more")
    return checkpoints


# Tasks


def _run(config: Config, checkpoints: dict[str, str], folder: Path) -> int:
    """Run a prepared task and return its exit code; an error ends in one message on stderr."""
    try:
        return RUN[config.task.name](config, folder, checkpoints)
    except KeyboardInterrupt:
        if not (how := _how_to_resume(config, folder)) or not reports():
            raise
        _say(f"stopped at once{how}")
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
        return _failed(message + _how_to_resume(config, folder))


def _train(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    from . import report
    from .model import auto
    from .train import Outcome, train

    if config.recipe.name == "auto":
        _say(f"recipe=auto is {auto(config)[1]}")
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
        _say(f"stopped ({where}); {how}")
    else:
        report.show(summary, Console())
        print(f"report: {_short(folder / 'report.html')}\nrun folder: {_short(folder)}")
    return code


def _compare(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    compare = load_benchmark("compare")
    outcome = _on_ranks(compare.compare, (config, str(folder)), config)
    if outcome.stopped:
        print("mxep: stopped before all seeds were done: no results", file=sys.stderr)
        return STOPPED
    return _finish(compare.report(config, outcome), config, folder)


def _verify(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    from . import verify

    return _finish(verify.report(config, _on_ranks(verify.verify, (config,), config)), config, folder)


def _bench(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    file = folder / "bench.json"
    files = [file, *([Path(config.bench.out)] if config.bench.out else [])]
    script = load_benchmark("script")
    args = (config, files, _command())
    try:
        if config.bench.name in script.ON_RANKS:
            results = _on_ranks(script.run_bench, args, config, device=config.bench.device)
        else:
            results = script.run_bench(None, *(args if reports() else args[:1]), quiet=not reports())
    except KeyboardInterrupt:
        if reports() and file.exists():
            _say(f"stopped; the rows so far: {', '.join(map(_short, files))}")
            return STOPPED
        raise
    return _finish(results, config, folder)


def _estimate(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    return _finish(load_benchmark("estimate").estimate(config), config, folder)


RUN: dict[str, Callable[[Config, Path, dict[str, str]], int]] = {
    "train": _train,
    "compare": _compare,
    "verify": _verify,
    "bench": _bench,
    "estimate": _estimate,
}


def _on_ranks(fn: Callable[..., Any], args: Sequence[Any], config: Config, *, device: str | None = None) -> Any:
    """Result of ``fn(Rank, *args)`` on rank 0; under torchrun on this rank. device: None: parallel.device."""
    how: Any = {"device": device or config.parallel.device, "steps": config.task.name in ("train", "compare")}
    if under_torchrun():
        return run_in_place(fn, args, **how)
    _say(f"starting {config.ranks} rank{'s' * (config.ranks > 1)}")  # seconds go by before the first has a line
    return run_ranks(fn, args, world_size=config.ranks, timeout=config.parallel.timeout, **how)[0]


def _finish(results: Report, config: Config, folder: Path) -> int:
    """Write and show a task's results on the process that reports. Returns the exit code: 1 if any row failed."""
    if reports():
        from .report import write_json

        section, written = getattr(config, config.task.name), [folder / f"{config.task.name}.json"]
        if out := getattr(section, "out", None):
            written.append(Path(out))
        write_json(results.to_json(_command(), getattr(section, "commit", None)), written)
        results.show(Console())
        print(f"results: {', '.join(map(_short, written))}")
        if results.failed:
            _say(f"{results.failed} of {len(results.lines)} lines failed")
    return 1 if results.failed else 0


def _command() -> str:
    return shlex.join(["mxep", *sys.argv[1:]])


def _resume_command(folder: Path) -> str:
    """The command that resumes this run. It repeats the arguments that a checkpoint does not keep."""

    def kept(key: str) -> bool:
        return key.split(".")[0] in (*RESTORED, "resume") and key != "train.wandb"

    repeated = [each for each in HydraConfig.get().overrides.task if not kept(override_key(each))]
    return shlex.join(["mxep", f"resume={_short(folder)}", *repeated])


def _how_to_resume(config: Config, folder: Path) -> str:
    """A line on how to resume the failed run; "" if it left no checkpoint."""
    if config.task.name != "train" or not (step := _newest(folder)):
        return ""
    return f"\ngo on from {_short(step)} with: {_resume_command(folder)}"


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint of the last run in ``folder`` that has one."""
    with contextlib.suppress(ValueError):
        return list(find(folder).values())[-1]
    return None


def _say(message: str) -> None:
    """Print a line to stderr, on the process that reports."""
    if reports():
        print(f"mxep: {message}", file=sys.stderr)


def _failed(message: str) -> int:
    _say(message)
    return 1


def _short(path: Path) -> str:
    """``path``, relative to the working directory if it lies there."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


if __name__ == "__main__":
    main()
