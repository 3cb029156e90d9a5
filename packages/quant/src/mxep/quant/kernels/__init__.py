"""Triton kernels behind the ops of mxep.quant, with their launchers.

`f` is the launcher of op `mxep::f`. It has the op's signature and takes CUDA tensors (CPU tensors under Triton's
interpreter). `mxep.runtime.op` makes 1-D arguments contiguous. Specified results equal the op's plain-torch reference,
which also has the types, bit for bit.
`mxep.quant.device` has device functions for kernels of all packages.
"""
