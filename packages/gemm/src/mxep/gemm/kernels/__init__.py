"""Triton kernels of the backends: device code and launchers.

    dot_scaled      MXFP8 GEMMs over ragged groups by `tl.dot_scaled`
    hopper_device   row-scaled FP8 and bf16 GEMMs on Hopper's tensor cores, in Gluon (not for the interpreter)
    hopper          its launchers

A launcher takes CUDA tensors, or CPU tensors under Triton's interpreter.
"""

HOPPER_BLOCK_K = 128
"""Elements of a contraction that Hopper's kernel multiplies at once. Along tokens, groups begin at multiples of it."""
