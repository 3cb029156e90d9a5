"""Triton kernels behind the ops of mxep.quant, with their launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter). `mxep.runtime.op`
makes its vectors contiguous. Its result equals the op's plain-torch reference bit for bit, as far as that is specified.
`mxep.quant.device` has the device functions that kernels share, in this package and others.
"""
