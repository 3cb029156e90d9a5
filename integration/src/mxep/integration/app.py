"""The `mxep` command: a config composed by Hydra, ranks started, results reported.

    mxep [task=train | task=compare | task=verify | task=bench] [group=choice | key=value ...] [-m]

    command line + configs/ -> Config -> ranks (run_ranks; under torchrun this process is one) -> report -> exit code

Exit codes: 0 done, 1 failed (one message on stderr; a failed rank's traceback is in the run folder), 130 stopped by
Ctrl-C with a checkpoint to resume from.

This module imports nothing heavy: a wrong command line is answered first, then the ranks' fork server and this process
import torch side by side.
"""

import atexit
import contextlib
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

from . import __version__, arguments, files, machine
from .config import ConfigError
from .names import TASKS
from .prepare import prepare
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
from .schema import configs_dir, register


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
        if complaint := arguments.complaint(sys.argv[1:], TASKS):
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
    """What Hydra would print as a traceback, or with hints that do not help here, is a ConfigError, unless
    HYDRA_FULL_ERROR asks for all of it."""
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
            for note in files.notes(config.data):
                print(f"mxep: data.path: {note}", file=sys.stderr)
        if not under_torchrun() and config.task.name != "estimate":  # which has no ranks
            # What transformers imports, torchao for one, may start CUDA, which a rank forked then could not use.
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


if __name__ == "__main__":
    main()
