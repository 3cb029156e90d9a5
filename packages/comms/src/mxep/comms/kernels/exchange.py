"""KernelExchange: exchanges by kernels that store to the peers' addresses and end with a barrier."""

from mxep.comms.kernels.combine import Combine
from mxep.comms.kernels.dispatch import Dispatch
from mxep.comms.kernels.signals import refuse_kernel
from mxep.comms.transport import SymmetricBuffer
from mxep.runtime.launch import launch


class KernelExchange(Dispatch, Combine):
    """Exchanges of one workspace. `plain.py` specifies each method."""

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        scalars = self.rank, self.layout.op_id("refused", tokens), self.layout.counters_start
        launch(refuse_kernel, (1,), buffer.pointers, *scalars, **self._ranks, num_warps=1)
        self.arena.exchanges += 1
