"""The installed version."""

import importlib.metadata


def installed_version() -> str:
    """Version of mxep-ep."""
    try:
        return importlib.metadata.version("mxep-ep")
    except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
        return "0+unknown"
