"""mxep.integration: the `mxep` command, and mxep in other projects' models."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("mxep-integration")
except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"
