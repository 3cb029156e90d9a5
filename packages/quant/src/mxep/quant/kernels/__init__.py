"""Triton kernels behind the ops of mxep.quant, with their launchers.

Function `f` of a module here is the launcher of op `mxep::f`, with the signature and the bits of the op's plain-torch
reference. It takes CUDA tensors, or CPU tensors under Triton's interpreter.
"""
