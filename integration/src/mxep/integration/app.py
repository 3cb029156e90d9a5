"""The `mxep` command: a config composed by Hydra, ranks started, results reported.

    mxep [task=train | task=compare | task=verify | task=bench] [group=choice | key=value ...] [-m]

    command line + configs/ -> Config -> ranks (run_ranks; under torchrun this process is one) -> report -> exit code

Exit codes: 0 done, 1 failed (one message on stderr; a failed rank's traceback is in the run folder), 130 stopped by
Ctrl-C with a checkpoint to resume from.

This module imports nothing heavy: Hydra answers a wrong command line first, then the ranks' fork server and this
process import torch side by side.
"""

import atexit
import sys
import tempfile

import hydra
from omegaconf import DictConfig

from .process import STOPPED, reports, start_fork_server, under_torchrun
from .schema import configs_dir, register


def main() -> None:
    """Run the command; ends the process with its exit code."""
    register()
    run = hydra.main(config_path=str(configs_dir()), config_name="config", version_base="1.3")(_job)
    try:
        if reports():
            run()
        else:  # every rank of torchrun composes the config, and one run folder is enough
            with tempfile.TemporaryDirectory(prefix="mxep-") as scratch:
                sys.argv += [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
                run()
    except KeyboardInterrupt:
        print("mxep: stopped before there was anything to save", file=sys.stderr)
        sys.exit(STOPPED)


def _job(raw: DictConfig) -> None:
    """One composed config; `-m` calls it once for each."""
    if not under_torchrun():
        atexit.register(start_fork_server()._stop)  # waits for its end, so that the command leaves nothing behind
    from .job import run_job

    if code := run_job(raw):
        sys.exit(code)


if __name__ == "__main__":
    main()
