"""Triton kernels of mxep.comms: one file a subject.

A launcher of an op has the op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter). Its
result equals that of the op's plain-torch reference bit for bit.

    exchange    a workspace's launches together
    signals     device functions: signals between the programs of all ranks; the barrier
    dispatch    tokens to slots on the ranks that need them; tables
    combine     sums of rows, stored to the tokens' ranks, summed over ranks
    nvshmem     puts by PE and how ranks meet without addresses
    staged      what exchanges by puts need besides: sums staged, arrived sums
    plan        which slot feeds which row
    gather      rows by an index
"""
