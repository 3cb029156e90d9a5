"""Triton kernels of mxep.comms.

Function `f` of a module here is the launcher of op `mxep::f`. It has the op's signature and takes CUDA tensors, or CPU
tensors under Triton's interpreter. Its result equals that of the op's plain-torch reference bit for bit.

    exchange      the launches of a workspace; the kernels of dispatch
    signals       device functions for signals between the programs of all ranks; the barrier
    plan          make_plan: received tokens to rows in expert order
    rows          gather rows by an index, sum the rows of each slot; the kernel of combine
    all_to_all    order (token, expert) pairs by destination rank; slots of nodes
"""
