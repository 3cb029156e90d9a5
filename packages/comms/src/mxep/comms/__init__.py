"""mxep.comms: rows between ranks over symmetric memory. Moves bytes, knows no number format.

Transport   how ranks reach each other's memory     SharedMemoryTransport (CPU), SymmetricMemoryTransport (NVLink),
                                                    NvshmemTransport (hosts; unproven there)
Workspace   two rotating buffers on a transport
send_rows   tokens to the ranks of their experts    return_rows   rows home, summed
make_plan   which slot feeds which expert-major row, from the tables that came along
"""

from .capacity import Capacity, CapacityExceeded
from .direct import GroupedRows, send_rows_to_groups
from .exchange import Returning, Sending, Slots, return_rows, send_rows, start_return_rows, start_send_rows
from .nvshmem import NvshmemTransport
from .plan import DROPPED, RoutingPlan, make_plan
from .rows import gather_rows, sum_slots
from .shared_memory import SharedMemoryTransport
from .symmetric_memory import SymmetricMemoryTransport
from .transport import PeersDisagree, PeerTimeout, SymmetricBuffer, Transport
from .workspace import Workspace

__all__ = [
    "DROPPED",
    "Capacity",
    "CapacityExceeded",
    "GroupedRows",
    "NvshmemTransport",
    "PeerTimeout",
    "PeersDisagree",
    "Returning",
    "RoutingPlan",
    "Sending",
    "SharedMemoryTransport",
    "Slots",
    "SymmetricBuffer",
    "SymmetricMemoryTransport",
    "Transport",
    "Workspace",
    "gather_rows",
    "make_plan",
    "return_rows",
    "send_rows",
    "send_rows_to_groups",
    "start_return_rows",
    "start_send_rows",
    "sum_slots",
]
