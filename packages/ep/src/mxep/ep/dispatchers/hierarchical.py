"""HierarchicalDispatcher sends a token once to each other node that it needs, and from there to the node's ranks.

    across   rank l of node n <-> rank l of each node m    all-to-all of equal splits: the host reads no sizes
    within   rank l of node m <-> the node's ranks         symmetric memory: a `SymmetricDispatcher` of the node

    dispatch     across: tokens that need node m, with ids and weights; then within, which makes the plan
    redispatch   the same two steps with other bytes of the same tokens, without ids
    combine      within: one sum for each token that came across; then across: these sums return, and are summed

N nodes of L ranks, W = N * L ranks. Rank r is number l = r % L on node n = r // L. For W = 6 and L = 2, the groups
within nodes are (0 1) (2 3) (4 5), and the groups across nodes (0 2 4) (1 3 5). Node m owns the E / N experts from
m * E / N on. T tokens of this rank, T_max maximum tokens of any rank, K experts per token, E experts in all, D model
dim, S slots within the node.

The capacity gives each rank C slots for its tokens to each node. A rank sends all C slots to each node, used or not,
after a header row that names the exchange (`all_to_all.py`). So a block to one node has B = C + 1 rows. With the header
of node m's block counted as slot m * B, slot m * B + 1 + i holds the i-th token that needs node m:

    N = 2, C = 2, E = 4    token 0 [0, 3]    token 1 [2, -1]    token 2 [3, 2]
    slots                        [1, 4]            [-1, -1]           [-1, 5]    node 1 has no third slot: lost
    tokens                 [-1, 0, -1, -1, 0, 2]

If c > C tokens of a rank need a node, only C of them are sent, spread evenly over the batch. The i-th of them is sent
if i * C / c and (i + 1) * C / c round to different numbers. The plan within a node knows the blocks of B slots, so that
all W ranks share the rows that an expert has room for, as with the other dispatchers.

**Order of sums.** A token's rows on one rank are summed in the order of its expert_ids. Then the ranks' sums are summed
within each node in rank order, then the nodes' sums in node order. Each sum is computed in fp32, and rounded once to
the rows' dtype. With one node, or nodes of one rank, the other dispatchers sum in the same way. Rows of an expert are
ordered by (l, n, token) of their source.
"""

import datetime
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    PeersDisagree,
    Transport,
    batch_too_large,
    check_agreement,
    gather_rows,
    join_rows,
    narrow_ids,
    pick_values,
    plan_slots,
    read_tables,
    sum_slots,
    timeout_of,
)
from mxep.runtime.replay import replayed

from .all_to_all import STEPS, Headers, split_columns, widths_of
from .base import Done, Handle, Later, Payload, Routing, TokenDispatcher, check_reserved
from .groups import made_to_stay, state_of
from .symmetric import SymmetricDispatcher, most_tokens


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, and where this rank is among them.

    Attributes:
        ranks: L, the number of ranks per node.
        count: N, the number of nodes.
        node: this rank's node.
        within: process group of this node's ranks; None if this process is alone.
        across: process group of the ranks with this rank's number on each node; None if there is one node.
    """

    ranks: int = 1
    count: int = 1
    node: int = 0
    within: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class HierarchicalRouting(Routing):
    """A Routing, with the tokens' slots between nodes.

    Attributes:
        within: the Routing within this node, of the tokens that this rank received from all nodes. It has the plan.
        slots: (T, N) int32, the slot of each token for each node, -1 for none.
        tokens: (N * B,) int32, the token in each slot, -1 for unused slots and headers.
    """

    within: Routing
    slots: Tensor
    tokens: Tensor

    def stats(self) -> dict[str, Tensor]:
        """The counts of :meth:`Routing.stats`, with three differences.

        ``dropped`` and ``invalid`` cover only this node's experts. (The dispatcher's `counts()` cover all.)
        ``sent``: used rows between nodes, one per (token, node), including this node. All N * B rows travel, though.
        ``sent_within``: rows that this rank sends within its node.
        """
        return super().stats() | {"sent_within": self.within.wire_rows()}

    def wire_rows(self) -> Tensor:
        return (self.slots >= 0).sum()


class HierarchicalDispatcher(TokenDispatcher):
    """See :class:`TokenDispatcher`. Collective: it makes process groups, and :meth:`check` and `counts` use the group.

    Args:
        dim, dtype: as for :class:`SymmetricDispatcher`.
        max_tokens: T_max. If a rank brings more tokens, it raises ValueError and its peers time out.
        timeout: as for :class:`SymmetricDispatcher`. It also limits collectives between nodes.
        capacity: with ``factor(c)``, C is c times the number of slots that are needed if experts are chosen uniformly,
            but at most T_max. Otherwise C = T_max, and every token fits.
        ranks_per_node: L. None: the number of ranks on each host.
        nodes_per_token: maximum number of nodes that have a token's experts, if the router limits it. Used only with
            ``factor(c)``.

    Expert ids out of range are counted on all devices, and :meth:`check` raises for them, because other ranks would
    wait if one raised earlier. Raises ValueError on all ranks if ranks_per_node does not divide the group's size.
    """

    borrows = True

    def __init__(
        self,
        num_experts: int,
        *,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        capacity: Capacity | float | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        ranks_per_node: int | None = None,
        nodes_per_token: int | None = None,
    ) -> None:
        sizes = {"dim": dim, "dtype": dtype, "max_tokens": max_tokens, "timeout": timeout}
        named = sizes | {"ranks_per_node": ranks_per_node, "nodes_per_token": nodes_per_token}
        super().__init__(num_experts, group=group, capacity=capacity, sizes=named)
        self.nodes = nodes_of(self.group, ranks_per_node, timeout)
        if nodes_per_token is not None and not 1 <= nodes_per_token <= self.nodes.count:
            raise ValueError(f"nodes_per_token: got {nodes_per_token}, wanted 1 to {self.nodes.count}, the nodes")
        self.experts_per_node = num_experts // self.nodes.count
        self.nodes_per_token = nodes_per_token or self.nodes.count
        self.dim: int = dim
        self.row_dtype: torch.dtype = dtype
        self.max_tokens = max_tokens
        self._sizes: dict[str, Any] = sizes
        first, step = (self.rank % self.nodes.ranks, self.nodes.ranks)
        self._headers = Headers(self.rank, list(range(first, self.world_size, step)))
        self._blocks: dict[tuple[torch.device, int], Tensor] = {}
        """Results of `_block_sizes`, by (device, B)."""
        self._agreed: set[tuple[int, int, int]] = set()
        """Sizes (T_max, K, bytes of a row) on which the ranks have agreed."""
        self._most_tokens = 0
        """T_max. Used if max_tokens was not given."""
        self._within: dict[int, SymmetricDispatcher] = {}
        """Dispatchers within the node, by C."""
        self._node_counts: dict[torch.device, Tensor] = {}
        """By device, the counts that all dispatchers within the node share."""

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, nodes={self.nodes.count})"

    def slots_per_node(self, max_tokens: int, top_k: int) -> int:
        """C for this max_tokens (T_max) and top_k (K)."""
        return slots_per_node(self.capacity, max_tokens, self._share(top_k))

    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        self.claim()
        expert_ids = narrow_ids(expert_ids)
        tokens, top_k = expert_ids.shape
        max_tokens = self._max_tokens(tokens, expert_ids.device)
        within = self._within_of(max_tokens, self.slots_per_node(max_tokens, top_k))
        self._agree(max_tokens, top_k, sum(widths_of(payload)))
        counts = self._running_counts(expert_ids.device, 1)
        sizes = {"num_nodes": self.nodes.count, "num_slots": self.slots_per_node(max_tokens, top_k)}
        sizes |= {"experts_per_node": self.experts_per_node, "num_experts": self.num_experts}
        ids, slots, token_of, tables = _plan_slots(expert_ids, weights, counts, **sizes)
        number = self._headers.new(self.new_dispatch, ids.device)
        within.new_dispatch = self.new_dispatch
        outgoing = self._join(payload, token_of, number, "dispatch"), *gather_rows((tables,), token_of)
        crossing = self._cross(outgoing, number, "dispatch")

        def finish() -> tuple[Payload, Routing]:
            rows, tables = crossing.wait()
            first_expert = self.nodes.node * self.experts_per_node
            here = _read_tables(tables, first_expert=first_expert, experts_per_node=self.experts_per_node)
            arrived, routing = within.dispatch((rows,), *here, alignment=alignment).wait()
            self._room = max(self._room, (max_tokens, top_k, alignment, routing.plan.max_rows))
            between = HierarchicalRouting(routing.plan, ids, self.num_local_experts, routing, slots, token_of)
            return split_columns(arrived[0], widths_of(payload)), between

        return Later(finish)

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        assert isinstance(routing, HierarchicalRouting)
        self.claim()
        within, of_node = self._within_by(routing), routing.within
        rows = self._join(payload, routing.tokens, _number(routing), "redispatch")
        crossing = self._cross((rows,), _number(routing), "redispatch")
        return Later(lambda: split_columns(within.redispatch(crossing.wait(), of_node).wait()[0], widths_of(payload)))

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        assert isinstance(routing, HierarchicalRouting)
        self.claim()
        sums, values = self._within_by(routing).combine(rows, routing.within, row_values).wait()
        if self.nodes.across is not None:
            heads = sums.view(torch.uint8).unflatten(0, (self.nodes.count, -1))[:, 0, :4]
            heads.copy_((_number(routing) * 4 + STEPS.index("combine")).view(torch.uint8)[: heads.shape[1]])
        crossing = self._cross((sums,) if values is None else (sums, values), _number(routing), "combine")

        def finish() -> tuple[Tensor, Tensor | None]:
            rows, *values = crossing.wait()
            returned = rows, values[0] if values else None, routing.slots, routing.expert_ids
            out, of_pairs = _sum_rows(*returned, experts_per_node=self.experts_per_node)
            return out, of_pairs

        return Later(finish)

    def check(self) -> None:
        for counts in self._node_counts.values():
            counts.tolist()  # waits for all exchanges
        self._headers.check()
        for transport in self._transports():
            transport.check()  # before the next collective, which would wait for a lost rank
        try:
            super().check()
        finally:
            for counts in self._node_counts.values():
                counts.zero_()

    def reserve(self, max_tokens: int, device: torch.device | str) -> None:
        super().reserve(max_tokens, device)
        most = most_tokens(max_tokens, torch.empty(0, device=device, dtype=torch.float32).device, self.group)
        check_reserved(most, self.max_tokens)
        self._most_tokens = max(self._most_tokens, most)

    def close(self) -> None:
        super().close()
        if self.uses < 1:
            while self._within:
                self._within.popitem()[1].close()

    def _max_tokens(self, tokens: int, device: torch.device) -> int:
        """Return T_max, at least 1, for a dispatch of this number of tokens."""
        most = self.max_tokens or self._most_tokens
        if not most:
            most = self._most_tokens = most_tokens(tokens, device, self.group)
        if tokens > most and self.max_tokens is None and self.world_size == 1:
            most = self._most_tokens = tokens
        if tokens > most:
            raise ValueError(batch_too_large(tokens, most))
        return max(1, most)

    def _agree(self, max_tokens: int, top_k: int, row_bytes: int) -> None:
        """Raise ValueError on all ranks if ranks differ in these sizes. Collective if the sizes are new."""
        sizes = max_tokens, top_k, row_bytes
        if sizes in self._agreed:
            return
        named: dict[str, object] = {"max_tokens": max_tokens, "top_k": top_k, "bytes of a row": row_bytes}
        named |= {"capacity": str(self.capacity), "nodes_per_token": self.nodes_per_token}
        named |= {"num_experts": self.num_experts, "dim": self.dim}
        if self.world_size > 1:
            check_agreement("dispatcher hierarchical", named, self.group)
        self._agreed.add(sizes)

    def _within_of(self, max_tokens: int, num_slots: int) -> SymmetricDispatcher:
        self.check_usable(False)
        if num_slots not in self._within:
            here, capacity = self.nodes.count * (num_slots + 1), self.capacity
            if capacity.kind == "factor":  # relative to T_max * K rows, not to slots * K
                capacity = Capacity.factor(capacity.load * max_tokens / here, capacity.overflow)
            sizes = self._sizes | {"max_tokens": here}
            made = SymmetricDispatcher(self.experts_per_node, group=self.nodes.within, capacity=capacity, **sizes)
            made._counts = self._node_counts
            made.blocks = self.nodes.count
            self._within[num_slots] = made
        return self._within[num_slots]

    def _within_by(self, routing: HierarchicalRouting) -> SymmetricDispatcher:
        num_slots = len(routing.tokens) // self.nodes.count - 1
        if num_slots not in self._within:
            raise RuntimeError("dispatcher: got a routing from before it was closed, wanted close() after backward")
        return self._within[num_slots]

    def kept_rows(self, routing: Routing) -> int:
        assert isinstance(routing, HierarchicalRouting)
        return self._within_by(routing).kept_rows(routing)

    def _join(self, payload: Payload, tokens: Tensor, number: Tensor, step: str) -> Tensor:
        """Copy the payload (T, n_i) into slots, and write headers if there are other nodes. Returns (N * B, n)."""
        return join_rows(payload, tokens, None, None if self.nodes.across is None else number, STEPS.index(step))

    def _cross(self, outgoing: Sequence[Tensor], number: Tensor, step: str) -> Handle[Payload]:
        """Send B rows of each tensor (N * B, n_i) to each node, and receive as many. The first tensor has headers.

        number: (1,) int32, the number in the headers.
        """
        if (across := self.nodes.across) is None:
            return Done(tuple(outgoing))
        self._headers.check()
        if self._shared_state is not None:
            self._shared_state.collectives += 1
        sizes = self._block_sizes(outgoing[0])
        incoming, works = tuple(map(torch.empty_like, outgoing)), []
        for received, sent in zip(incoming, outgoing):
            parts = received.view(torch.uint8), sent.view(torch.uint8)
            works.append(dist.all_to_all_single(*parts, group=across, async_op=True))

        def arrived() -> Payload:
            try:
                for i, work in enumerate(works):
                    work.wait()
                    if i == 0:  # before the next collective, which these peers might not join
                        self._headers.compare(incoming[0].view(torch.uint8), sizes, number, step)
            except PeersDisagree:
                raise
            except RuntimeError as error:  # from gloo; NCCL's watchdog ends the process instead
                raise RuntimeError(f"{error}{self.told()}") from error
            return incoming

        return Later(arrived)

    def _block_sizes(self, rows: Tensor) -> Tensor:
        """Size B of each node's block, as (N, 1) int64."""
        nodes, device = self.nodes.count, rows.device
        key = device, len(rows) // nodes
        if key not in self._blocks:
            self._blocks[key] = made_to_stay(
                device, lambda: torch.full((nodes, 1), key[1], dtype=torch.int64, device=device)
            )
        return self._blocks[key]

    def _sent(self) -> int:
        crossed = 0 if self._shared_state is None else self._shared_state.collectives
        return crossed + sum(each._sent() for each in self._within.values())

    def _share(self, top_k: int) -> float:
        return share_of_node(self.nodes.count, self.nodes_per_token, self.experts_per_node, top_k)

    def _transports(self) -> tuple[Transport, ...]:
        return tuple({id(t): t for each in self._within.values() for t in each._transports()}.values())

    def _all_counts(self) -> list[Tensor]:
        """Counts with 2 * W owners: the rows of each rank's experts, then the slots of each sender. Collective."""
        totals, ranks = [], self.world_size
        for device, (most, lost, invalid) in self._counts.items():
            total = torch.zeros(4 * ranks + 1, dtype=torch.int64, device=device)
            needed, overflow = total[: 2 * ranks], total[2 * ranks : -1]
            needed[ranks + self.rank], overflow[ranks + self.rank], total[-1] = most, lost, invalid
            # All ranks of a node have the same counts.
            if self.rank % self.nodes.ranks == 0 and device in self._node_counts:
                rows, owners = self._node_counts[device], slice(self.rank, self.rank + self.nodes.ranks)
                needed[owners], overflow[owners] = rows[: self.nodes.ranks], rows[self.nodes.ranks : -1]
            if ranks > 1:
                dist.all_reduce(total, group=self.group)
            totals.append(total)
        return totals

    def _what_did_not_fit(self, needed: list[int], overflow: list[int]) -> str:
        ranks, (max_tokens, top_k, *_) = self.world_size, self._room
        if not any(overflow[ranks:]):
            return super()._what_did_not_fit(needed[:ranks], overflow[:ranks])
        most, num_slots = max(needed[ranks:]), self.slots_per_node(max_tokens, top_k)
        lost = ", ".join(
            f"{pairs} of rank {rank}, which had {needed[ranks + rank]} tokens for a node"
            for rank, pairs in enumerate(overflow[ranks:])
            if pairs
        )
        enough = math.ceil(100 * most / (max_tokens * self._share(top_k))) / 100
        cure = f"Capacity.factor({enough:g}) has as many, if rows of experts fit it, too"
        return f"rows did not fit {self.capacity}, {num_slots} slots for a node: {lost}; the step is not usable, {cure}"


def nodes_of(group: dist.ProcessGroup | None, ranks: int | None, timeout: float | None) -> Nodes:
    """Return the group's nodes. The first call with these arguments is collective.

    ranks: number of ranks per node. None: each host is a node.
    timeout: maximum seconds of a collective between nodes. None: the group's timeout. Only the first call uses it.

    Raises ValueError on all ranks if `ranks` does not divide the group's size, or differs between ranks.
    """
    if group is None:
        return Nodes()
    known: dict[int | None, Nodes] = state_of(group).nodes
    if ranks not in known:
        known[ranks] = _make_nodes(group, ranks, timeout)
    return known[ranks]


def _make_nodes(group: dist.ProcessGroup, ranks: int | None, timeout: float | None) -> Nodes:
    world_size, rank = group.size(), group.rank()
    timeout = timeout_of(group, group._device_types[0]) if timeout is None else timeout
    found: list[tuple[str, int | None]] = [("", None)] * world_size
    dist.all_gather_object(found, (platform.node(), ranks), group=group)
    hosts, given = [host for host, _ in found], {each for _, each in found}
    if len(given) > 1:
        raise ValueError(f"ranks_per_node: got {sorted(map(str, given))}, wanted the same on all ranks")
    if ranks is None:
        ranks = hosts.count(hosts[0])
        alike = all(hosts[i : i + ranks] == [hosts[i]] * ranks for i in range(0, world_size, ranks))
        if not alike or len(set(hosts)) * ranks != world_size:
            counts = ", ".join(f"{host} x {hosts.count(host)}" for host in dict.fromkeys(hosts))
            raise ValueError(f"ranks_per_node: got {counts}, wanted as many ranks on each host, side by side")
    if ranks < 1 or world_size % ranks:
        raise ValueError(f"ranks_per_node: got {ranks}, wanted a divisor of the {world_size} ranks of the group")
    node, index, count = rank // ranks, rank % ranks, world_size // ranks
    members = dist.get_process_group_ranks(group)
    within = group if count == 1 else _group(members[node * ranks : (node + 1) * ranks], timeout)
    across = None if count == 1 else group if ranks == 1 else _group(members[index::ranks], timeout)
    return Nodes(ranks, count, node, within, across)


def _group(ranks: list[int], timeout: float | None) -> dist.ProcessGroup:
    """Make a group of these ranks. Only they call this. They must be in ascending order, because torch sorts them."""
    if ranks != sorted(ranks):
        raise ValueError(f"dispatcher hierarchical: got a group of ranks {ranks}, wanted them in ascending order")
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    world: Any = dist.group.WORLD
    # If a device were bound, torch would split the default communicator, and NCCL would wait for all ranks of the job.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    return made


def share_of_node(nodes: int, nodes_per_token: int, experts_per_node: int, top_k: int) -> float:
    """Fraction of tokens that need a node, if each token chooses nodes, and then experts on these, uniformly."""
    reached = nodes_per_token * experts_per_node
    others = math.comb(reached - experts_per_node, top_k) / max(1, math.comb(reached, top_k))
    return nodes_per_token / nodes * (1 - others)


def slots_per_node(capacity: Capacity, max_tokens: int, share: float) -> int:
    """C for this max_tokens (T_max), if a fraction `share` of tokens needs each node."""
    if capacity.kind != "factor" or capacity.overflow == "recompute":
        return max_tokens
    return min(max_tokens, max(1, math.ceil(capacity.load * max_tokens * share)))


def _number(routing: HierarchicalRouting) -> Tensor:
    assert routing.plan.dispatch is not None
    return routing.plan.dispatch


@replayed
def _plan_slots(
    ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    *,
    num_nodes: int,
    num_slots: int,
    experts_per_node: int,
    num_experts: int,
) -> tuple[Tensor, ...]:
    """Call `plan_slots`, which adds to `counts`."""
    return (*plan_slots(ids, weights, counts, num_nodes, num_slots, experts_per_node, num_experts),)


@replayed
def _read_tables(tables: Tensor, *, first_expert: int, experts_per_node: int) -> tuple[Tensor, ...]:
    """Read tables (N * B, 8 * K) uint8. Returns (ids among the node's experts int32, weights fp32), (N * B, K) each."""
    return (*read_tables(tables, first_expert, experts_per_node),)


@replayed
def _sum_rows(
    rows: Tensor, values: Tensor | None, slots: Tensor, ids: Tensor, *, experts_per_node: int
) -> tuple[Tensor, Tensor | None]:
    """Sum the nodes' rows (N * B, D) for each token, and gather the nodes' values (N * B, K) or None for each pair.

    Returns the sums (T, D), and the values (T, K) or None.
    """
    return sum_slots(rows, slots), None if values is None else pick_values(values, slots, ids, experts_per_node)
