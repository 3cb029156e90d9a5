"""mxep.runtime: custom ops, kernel launches, recorded functions. See README.md."""

import importlib.metadata

from .replay import no_replays

try:
    __version__ = importlib.metadata.version("mxep-runtime")
except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"

__all__ = ["__version__", "no_replays"]
