"""Ranks that compile find what torch.compile imports in their fork server."""

import os

import pytest


def pytest_collectstart(collector: pytest.Collector) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from mxep.integration.launch import start_fork_server
        from ranks import PRELOAD, PRELOAD_OF_INTEGRATION  # sets TRITON_INTERPRET, which the fork server must know

        alone = all("tests/ep" in argument for argument in collector.config.args)
        start_fork_server(*PRELOAD, *(() if alone else PRELOAD_OF_INTEGRATION))
