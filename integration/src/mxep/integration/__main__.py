"""The `mxep` command, as a console script and as `python -m mxep.integration`."""

from .launch import end_on_signals


def main() -> None:
    """Run `app.main`. A Ctrl-C has an answer before anything slow is imported."""
    end_on_signals()
    from .app import main as run

    run()


if __name__ == "__main__":
    main()
