"""The `mxep` command, as a console script and as `python -m mxep.integration`."""

import sys


def main() -> None:
    try:
        from .app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("hydra", "omegaconf", "pydantic", "rich"):
            raise
        sys.exit(f"mxep: {error.name} is missing: pip install 'mxep-integration[command]'")
    run()


if __name__ == "__main__":
    main()
