"""Triton kernels of the backends: device code and launchers.

    dot_scaled      MXFP8 GEMMs over ragged groups by `tl.dot_scaled`
    hopper_device   row-scaled FP8 and bf16 GEMMs on Hopper's tensor cores, in Gluon (cannot be interpreted)
    hopper          launchers of hopper_device
    router_ops      a router's GEMMs in fp32 accuracy, and top-k
    lora            LoRA's GEMMs for groups of rows

A launcher takes CUDA tensors. Under Triton's interpreter it takes CPU tensors.
"""

HOPPER_BLOCK_K = 128
"""FP8 elements per row that one stage of Hopper's kernel multiplies. In wgrad, groups begin at multiples of it."""
