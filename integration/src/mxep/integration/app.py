"""The `mxep` command: a config composed by Hydra, ranks started, results reported.

    mxep [task=train | task=verify] [group=choice | key=value ...] [-m]

    command line + configs/ -> Config -> ranks (run_ranks; under torchrun this process is one) -> report -> exit code

Exit codes: 0 done, 1 failed (one message on stderr; a failed rank's traceback is in the run folder), 130 stopped by
Ctrl-C with a checkpoint to resume from. The tables below are all that a config can choose from.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from . import checkpoint, report
from .config import Config, ConfigError, RecipeConfig, configs_dir, register, resolve, restore, to_json
from .launch import RanksFailed, run_in_place, run_ranks
from .train import Outcome, train
from .verify import Result, verify
from .verify import show as show_results
from .verify import write as write_results

STOPPED = 130


def main() -> None:
    """Run the command; ends the process with its exit code."""
    register()
    with _quiet_beside_rank_0():
        try:
            hydra.main(config_path=str(configs_dir()), config_name="config", version_base="1.3")(_job)()
        except KeyboardInterrupt:
            _fail("stopped before there was anything to save", code=STOPPED)


def _job(raw: DictConfig) -> None:
    """One composed config; `-m` calls it once for each."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    try:
        config, checkpoints = _prepare(raw, list(hydra_config.overrides.task))
        if not _others():
            OmegaConf.save(OmegaConf.create(to_json(config)), folder / "config.yaml")
        code = TASKS[config.task.name](config, folder, checkpoints)
    except RanksFailed as error:
        (folder / "error.txt").write_text(f"{error}\n")
        _fail(f"{first_failure(str(error))}\n(the whole story: {_shown(folder / 'error.txt')})")
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        _fail(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    if code:
        sys.exit(code)


def _prepare(raw: DictConfig, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The config to run and the checkpoints to start from. A resumed run keeps its own config but for ``overrides``."""
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
    ranks = int(os.environ["WORLD_SIZE"]) if _under_torchrun() else None
    config = resolve(raw, ranks=ranks)
    if config.task.name not in TASKS:
        raise ConfigError(f"task.name: got {config.task.name!r}, wanted one of {', '.join(TASKS)}")
    return config, {run: str(step.resolve()) for run, step in checkpoints.items()}


def _train(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    outcome: Outcome = _on_ranks(train, (config, str(folder), checkpoints), config)[0]
    if _others():
        return STOPPED if outcome.stopped else 0
    summary = report.write(outcome, folder)
    if outcome.stopped:
        run = outcome.runs[-1]
        where = f"{run.name}, step {run.steps} of {config.train.steps}"
        print(f"mxep: stopped ({where}); go on with: mxep resume={_shown(folder)}", file=sys.stderr)
        return STOPPED
    report.show(summary, Console())
    print(f"run folder: {_shown(folder)}")
    return 0


def _verify(config: Config, folder: Path, checkpoints: dict[str, str]) -> int:
    per_rank: list[list[Result]] = _on_ranks(verify, (config,), config)
    if _others():
        return 0 if all(result.passed for result in per_rank[0]) else 1
    results = per_rank[0]
    write_results(results, folder / "verify.json")
    show_results(results, Console())
    failed = [result for result in results if not result.passed]
    if failed:
        print(f"mxep: {len(failed)} of {len(results)} cases failed", file=sys.stderr)
    return 1 if failed else 0


TASKS: dict[str, Callable[[Config, Path, dict[str, str]], int]] = {"train": _train, "verify": _verify}


def _on_ranks(fn: Callable[..., Any], args: Sequence[Any], config: Config) -> list[Any]:
    """What ``fn(Rank, *args)`` returns on each rank; under torchrun on this one alone."""
    parallel = config.parallel
    if _under_torchrun():
        return [run_in_place(fn, args, device=parallel.device)]
    return run_ranks(
        fn,
        args,
        world_size=config.ranks,
        timeout=parallel.timeout,
        device=parallel.device,
        preload=["mxep.integration.train", "mxep.integration.verify"],
    )


def first_failure(text: str) -> str:
    """Of a RanksFailed message, which rank failed first and its error without the traceback."""
    first = re.split(r"\n(?=rank \d+ (?:raised|was|exited)|\(rank )", text)[0]
    head, _, traceback = first.partition("\n")
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    error = "\n".join(lines[frames[-1] + 1 :] if frames else lines)
    without_module = re.sub(r"^(?:[A-Za-z_]\w*\.)+", "", error)
    return f"{head} {without_module}".rstrip()


def _under_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def _others() -> bool:
    """Whether this process is a torchrun rank above 0, which reports nothing."""
    return _under_torchrun() and os.environ["RANK"] != "0"


@contextlib.contextmanager
def _quiet_beside_rank_0() -> Iterator[None]:
    """Under torchrun every rank composes the config; those above 0 leave their run folder in a scratch folder."""
    if not _others():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mxep-") as scratch:
        sys.argv += [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
        yield


def _fail(message: str, *, code: int = 1) -> None:
    if not (_others() and code == 1 and isinstance(sys.exc_info()[1], ConfigError)):
        print(f"mxep: {message}", file=sys.stderr)
    sys.exit(code)


def _shown(path: Path) -> str:
    """As short as it can be typed here."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
