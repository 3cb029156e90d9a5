"""The console script. It imports nothing heavy before a Ctrl-C has an answer."""

import sys

from .process import end_on_signals


def main() -> None:
    """Run `app.main`. `mxep help` is `mxep --help`."""
    end_on_signals()
    if sys.argv[1:] == ["help"]:
        sys.argv[1] = "--help"
    from .app import main as run

    run()
