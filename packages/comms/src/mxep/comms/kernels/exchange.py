"""KernelExchange: exchanges by kernels that store to the peers' addresses and meet at their end."""

from mxep.comms.kernels.combine import Combine
from mxep.comms.kernels.dispatch import Dispatch
from mxep.comms.kernels.signals import refuse_kernel
from mxep.comms.transport import SymmetricBuffer
from mxep.runtime.launch import launch


class KernelExchange(Dispatch, Combine):
    """Of one workspace; `plain.py` says what each method does."""

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        scalars = self.rank, self.layout.op_id("refused", tokens), self.layout.counters_start
        launch(refuse_kernel, (1,), buffer.pointers, *scalars, **self._ranks, num_warps=1)
        self.arena.exchanges += 1
