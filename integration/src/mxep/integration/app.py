"""The `mxep` command: a config composed by Hydra, ranks started, results reported.

    mxep [task=train | task=compare | task=verify | task=bench] [group=choice | key=value ...] [-m]

    command line + configs/ -> Config -> ranks (run_ranks; under torchrun this process is one) -> report -> exit code

Exit qdata: 0 done, 1 failed (one message on stderr; a failed rank's traceback is in the run folder), 130 stopped by
Ctrl-C with a checkpoint to resume from.

This module imports nothing heavy: Hydra answers a wrong command line first, then the ranks' fork server and this
process import torch side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import hydra
from omegaconf import DictConfig

from .schema import configs_dir, register

STOPPED = 130
PRELOAD = ["mxep.integration.preload", "mxep.integration.train", "mxep.integration.verify"]


def main() -> None:
    """Run the command; ends the process with its exit code."""
    register()
    with _own_folder():
        try:
            hydra.main(config_path=str(configs_dir()), config_name="config", version_base="1.3")(_job)()
        except KeyboardInterrupt:
            print("mxep: stopped before there was anything to save", file=sys.stderr)
            sys.exit(STOPPED)


def under_torchrun() -> bool:
    """Whether this process is a rank that an outer torchrun started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def reports() -> bool:
    """Whether this process writes the run folder: always, but for torchrun's ranks above 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def _job(raw: DictConfig) -> None:
    """One composed config; `-m` calls it once for each."""
    if not under_torchrun():
        _start_fork_server()
    from .job import run_job

    if code := run_job(raw):
        sys.exit(code)


def _start_fork_server() -> None:
    server: Any = forkserver
    server.set_forkserver_preload(PRELOAD)
    server.ensure_running()
    # It ends by itself when this process is gone; this waits for it, so that the command leaves nothing behind.
    atexit.register(server._forkserver._stop)


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Under torchrun every rank composes the config; those above 0 leave their run folder in a scratch folder."""
    if reports():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mxep-") as scratch:
        sys.argv += [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
        yield


if __name__ == "__main__":
    main()
