"""No ceremony in test files: without a CUDA device, Triton kernels are interpreted with the GPU's numbers."""

import triton_interpreter

triton_interpreter.on_import()
