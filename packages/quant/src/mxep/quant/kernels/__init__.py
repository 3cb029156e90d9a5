"""Triton kernels behind the ops of mxep.quant, with their launchers.

Function `f` of a module here is the launcher of op `mxep::f`. It has the op's signature; the annotations are those of
the op's plain-torch reference. It takes CUDA tensors, or CPU tensors under Triton's interpreter. `mxep.runtime.op`
makes 1-D arguments contiguous before the call. Except for values that the op leaves unspecified, results equal those of
the reference bit for bit.

`mxep.quant.device` has device functions for kernels of all packages.
"""
