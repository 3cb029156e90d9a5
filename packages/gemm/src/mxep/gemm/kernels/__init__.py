"""Triton kernels of the backends: device code and launchers.

A launcher takes CUDA tensors. Under Triton's interpreter it takes CPU tensors.
"""

HOPPER_BLOCK_K = 128
"""FP8 elements per row that one stage of Hopper's kernel multiplies. In wgrad, groups begin at multiples of it."""
