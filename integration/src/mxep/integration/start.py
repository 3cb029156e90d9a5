"""The console script. It imports nothing heavy before a Ctrl-C has an answer."""

from .process import end_on_signals


def main() -> None:
    """Run `app.main`."""
    end_on_signals()
    from .app import main as run

    run()
