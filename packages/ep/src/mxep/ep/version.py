"""The version that is installed."""

import importlib.metadata


def installed_version() -> str:
    """Of mxep-ep."""
    try:
        return importlib.metadata.version("mxep-ep")
    except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
        return "0+unknown"
