"""Ranks that compile find what torch.compile imports in their fork server."""

import os

from mxep.integration.launch import start_fork_server
from ranks import PRELOAD  # sets TRITON_INTERPRET, which the fork server must know


def pytest_collectstart() -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        start_fork_server(*PRELOAD)
