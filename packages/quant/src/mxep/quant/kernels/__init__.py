"""Triton kernels behind the ops of mxep.quant, with their launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter). `mxep.runtime.op`
makes 1-D arguments contiguous. Specified results equal the op's plain-torch reference bit for bit.
`mxep.quant.device` has device functions for kernels of all packages.
"""
