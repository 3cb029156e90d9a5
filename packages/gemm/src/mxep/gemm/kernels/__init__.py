"""Triton kernels of the backends: one file a subject, device code first, its launchers below.

    dot_scaled  MXFP8 products over ragged groups by `tl.dot_scaled`
    hopper      row-scaled FP8 products on Hopper's tensor cores, in Gluon (not for the interpreter)
    guard       what the guard measures

A launcher takes CUDA tensors, or CPU tensors under Triton's interpreter.
"""
