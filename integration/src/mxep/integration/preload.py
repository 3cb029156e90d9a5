"""What the fork server imports once, so that each rank starts with it in memory.

A module that fails to import is skipped here: the rank that needs it imports it again and reports the error with its
own traceback, where an error in the fork server would only show as a broken pipe.
"""

import contextlib
import importlib

_NAMES = (
    "torch._dynamo",  # every custom op imports it at its first call, for seconds
    "torch.distributed",
    "mxep.comms",
    "mxep.quant",
    "mxep.gemm",
    "mxep.ep",
    "mxep.integration.launch",
)
for _name in _NAMES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
