"""mxep.comms: exchange rows between ranks over symmetric memory. Rows are bytes here, whatever their number format.

Transport   how ranks reach each other's memory: SharedMemoryTransport (CPU), SymmetricMemoryTransport (NVLink),
            NvshmemTransport (several hosts, which it never ran on)
Workspace   two buffers on a transport, used in turn
dispatch    sends tokens to the ranks that own their experts
combine     sends rows back to their tokens' ranks and sums them
make_plan   assigns received tokens to rows in expert order, from the senders' routing tables
"""

import importlib.metadata

from .layout import NEW, describe_dispatch, new_dispatch
from .nvshmem import NvshmemTransport
from .plan import DROPPED, Capacity, CapacityExceeded, RoutingPlan, check_ids, make_plan, narrow_ids
from .rows import (
    compare_headers,
    gather_rows,
    join_rows,
    pick_values,
    plan_all_to_all,
    plan_slots,
    read_tables,
    sum_slots,
)
from .shared_memory import SharedMemoryTransport
from .symmetric_memory import SymmetricMemoryTransport
from .transport import (
    PeersDisagree,
    PeerTimeout,
    SymmetricBuffer,
    Transport,
    batch_too_large,
    check_agreement,
    tell_failure,
    timeout_of,
    told_failures,
)
from .workspace import Handle, Workspace, combine, dispatch

try:
    __version__ = importlib.metadata.version("mxep-comms")
except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "DROPPED",
    "NEW",
    "Capacity",
    "CapacityExceeded",
    "Handle",
    "NvshmemTransport",
    "PeerTimeout",
    "PeersDisagree",
    "RoutingPlan",
    "SharedMemoryTransport",
    "SymmetricBuffer",
    "SymmetricMemoryTransport",
    "Transport",
    "Workspace",
    "batch_too_large",
    "check_agreement",
    "check_ids",
    "combine",
    "compare_headers",
    "describe_dispatch",
    "dispatch",
    "gather_rows",
    "join_rows",
    "make_plan",
    "narrow_ids",
    "new_dispatch",
    "pick_values",
    "plan_all_to_all",
    "plan_slots",
    "read_tables",
    "sum_slots",
    "tell_failure",
    "timeout_of",
    "told_failures",
]
