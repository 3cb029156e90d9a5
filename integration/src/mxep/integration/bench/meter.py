"""The SM clock and the board's power, read while kernels run: under full load both decide how fast they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

Read = tuple[float, float]
"""MHz, watts."""


def open_meter(device: torch.device) -> Callable[[], Read] | None:
    """What reads clock and power of `device` now, by NVML; None without a GPU, NVML's Python module or its answer."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

        def read() -> Read:
            mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            # The plain power reading is the mean of a second, in which others ran.
            power = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            return float(mhz), power.value.uiVal / 1e3

        read()
    except Exception:
        return None
    return read
