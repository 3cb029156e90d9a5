"""opcheck for ops that read qdata and scales: its schema test does arithmetic on inputs, which these dtypes lack."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_op(op: Any, *args: Any) -> None:
    """opcheck but for the schema test; instead: no input changes, no output shares memory with an input."""
    torch.library.opcheck(op, args, test_utils=WITHOUT_SCHEMA)
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    before = [arg.view(torch.uint8).clone() for arg in inputs]
    outputs = tree_leaves(op(*args))
    for arg, was in zip(inputs, before):
        assert torch.equal(arg.view(torch.uint8), was), f"{op} changed an input"
        assert arg.untyped_storage().data_ptr() not in [out.untyped_storage().data_ptr() for out in outputs]
