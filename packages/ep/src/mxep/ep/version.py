"""The version that is installed."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("mxep-ep")
except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"
