"""Imports of the fork server, so that each rank starts with them in memory.

A module that fails to import is skipped here: the rank that needs it imports it again and reports the error with its
own traceback. An error in the fork server would only show as a broken pipe.
"""

import contextlib
import gc
import importlib
import os
import signal

from .process import PRELOAD, SIGNALS

# A scheduler's SIGTERM and a terminal's Ctrl-C reach the whole process group. The caller asks the ranks to stop after
# their step; they need the fork server until then, and it ends with the caller in any case.
for _number in SIGNALS:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

# Imported objects stay: garbage collections would only scan them again and again, for a fifth of the time.
gc.disable()
for _name in (
    "torch._dynamo",  # every custom op imports it at its first call, for seconds
    "mxep.integration.launch",
    "mxep.integration.train",
    "mxep.integration.verify",
    *os.environ.get(PRELOAD, "").split(),
):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
gc.freeze()
gc.enable()
