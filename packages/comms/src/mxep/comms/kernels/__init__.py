"""Triton kernels of mxep.comms, one subject per file.

The launcher of an op has the op's signature and takes CUDA tensors (CPU tensors under Triton's interpreter). Its
result equals the op's plain-torch reference bit for bit.

    exchange    all launches of a workspace
    signals     device functions: signals between the programs of all ranks; the barrier
    dispatch    tokens to slots on the ranks that need them; tables
    combine     sums of rows, stored to the tokens' ranks, summed over ranks
    nvshmem     puts by PE, and a barrier that needs no addresses
    staged      for exchanges by puts: sums into staging, sums of arrived slots
    plan        slots to expert-major rows
    gather      rows by an index
"""
