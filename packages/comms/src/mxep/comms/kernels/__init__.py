"""Triton kernels of mxep.comms, one subject per file.

`f` is the launcher of op `mxep::f`. It has the op's signature and takes CUDA tensors (CPU tensors under Triton's
interpreter). Its result equals the op's plain-torch reference bit for bit.

    exchange      all launches of a workspace; dispatch of tokens and of tables
    combine       sums of rows, stored to the tokens' ranks and summed there over ranks
    signals       device functions: signals between the programs of all ranks; the barrier
    plan          slots to expert-major rows
    rows          rows by an index, sums of rows
    all_to_all    (token, expert) pairs by destination rank, slots of nodes
"""
