"""Triton kernels behind the ops of mxep.quant: one file a subject, each with its launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter), vectors packed:
`mxep.runtime.op` sees to that. Its result equals that of the op's plain-torch reference bit for bit, where that
specifies it. Device functions that they share, and other packages' kernels, too, are in `mxep.quant.device`.

    tile        device functions: a tile loaded, quantized along its columns or rows, stored transposed
    rows        quantize along rows, and in square 2-D blocks
    columns     quantize along columns, both ways of one read
    per_row     one scale a row and one a column, of two reads
    requantize  qdata blocked anew
    fold        rows by an index, folded
    fold_for_wgrad  both operands of a wgrad, folded and transposed
    activation  device functions: SwiGLU of an element, plain or clamped
    swiglu      SwiGLU with quantization, forward and backward
    group_sums  the sum of each group's rows, quantized or not
    gather      rows by an index: materialize, pad, unpad; scales swizzled
"""
