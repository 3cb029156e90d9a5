"""KernelExchange: exchanges by kernels that store to the peers' addresses and meet at their end."""

from mxep.comms.cuda import CudaTransport
from mxep.comms.kernels.combine import Combine
from mxep.comms.kernels.dispatch import Dispatch
from mxep.comms.kernels.signals import refuse_kernel
from mxep.comms.launch import launch, next_power_of_2
from mxep.comms.layout import Layout
from mxep.comms.transport import SymmetricBuffer


class KernelExchange:
    """Of one workspace; `plain.py` says what each method does.

    num_sms: how many multiprocessors an exchange may use at most, None: the transport's.
    """

    def __init__(self, transport: CudaTransport, layout: Layout, experts_per_rank: int, num_sms: int | None) -> None:
        self.rank, self.layout = transport.rank, layout
        of = transport, layout, experts_per_rank, min(num_sms or transport.max_sms, transport.max_sms)
        dispatch = Dispatch(*of)
        self.dispatch, self.dispatch_tables, self.combine = dispatch.rows, dispatch.tables, Combine(*of).rows

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        world_size = self.layout.world_size
        scalars = self.rank, self.layout.op_id("refused", tokens), self.layout.counters_start
        sizes = {"W": world_size, "WP": next_power_of_2(world_size)}
        launch(refuse_kernel, (1,), buffer.pointers, *scalars, **sizes, num_warps=1)
