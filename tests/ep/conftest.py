"""Ranks that compile find what torch.compile imports in their fork server."""

import os

import ranks as _ranks  # noqa: F401 - sets TRITON_INTERPRET, which the fork server must know
from mxep.integration.process import start_fork_server


def pytest_collectstart() -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        start_fork_server("pytest", "torch._dynamo.testing")
