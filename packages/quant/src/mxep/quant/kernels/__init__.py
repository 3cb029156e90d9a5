"""Triton kernels behind the ops of mxep.quant: one subject per file, each with its launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter). `mxep.runtime.op`
makes its vectors contiguous. Its result equals the op's plain-torch reference bit for bit, as far as that is specified.
`mxep.quant.device` has the device functions that they share, also with other packages' kernels.

    tile        device functions: a tile loaded, quantized along its columns or rows, stored transposed
    rows        quantize along rows, and in square 2-D blocks
    columns     quantize along columns; rows and columns from one read
    per_row     one scale per row and one per column, from two reads
    dequantize  values of qdata, rows by an index
    requantize  qdata blocked anew
    fold        rows by an index, folded
    fold_columns    a frozen weight's scales shifted into its qdata for dgrad, transposed
    fold_e2m1       rows of MXFP4, expanded to E4M3 with one scale each
    fold_for_wgrad  both operands of a wgrad, folded and transposed
    activation  device functions: SwiGLU of an element, plain or clamped
    swiglu      SwiGLU with quantization, forward and backward
    group_sums  the sum of each group's rows, quantized or not
    gather      rows by an index: materialize, pad, unpad; scales swizzled
"""
