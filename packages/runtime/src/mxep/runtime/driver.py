"""CUDA's driver through ctypes: structures and calls to build and launch graphs."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
ON_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE."""


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *[(f"{of}Dim{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "XYZ"],
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS. width: in elements."""

    _fields_ = [
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class CopyParams(ctypes.Structure):
    """CUDA_MEMCPY3D. A flat copy sets few of its fields."""

    _fields_ = [
        field
        for side in ("src", "dst")
        for field in (
            (f"{side}X", ctypes.c_size_t),
            (f"{side}Y", ctypes.c_size_t),
            (f"{side}Z", ctypes.c_size_t),
            (f"{side}LOD", ctypes.c_size_t),
            (f"{side}MemoryType", ctypes.c_uint),
            (f"{side}Host", ctypes.c_void_p),
            (f"{side}Device", ctypes.c_uint64),
            (f"{side}Array", ctypes.c_void_p),
            (f"{side}Reserved", ctypes.c_void_p),
            (f"{side}Pitch", ctypes.c_size_t),
            (f"{side}Height", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t)]


def call(name: str, *args: Any) -> None:
    """Call the driver. Raises RuntimeError if it does not return success."""
    if failed := getattr(driver(), name)(*args):
        raise RuntimeError(f"{name}: got error {failed} of CUDA's driver")


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread build and destroy graphs without ending another thread's capture."""
    mode = ctypes.c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def driver() -> Any:
    """The driver. Calls keep the GIL, as they are shorter than releasing it."""
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def patient_driver() -> Any:
    """The driver for calls that may wait for the device. They release the GIL."""
    return ctypes.CDLL("libcuda.so.1")
