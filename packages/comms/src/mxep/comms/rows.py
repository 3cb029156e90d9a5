"""Rows of exchanges by collectives: gathered, joined, summed; ordered by destination rank, or in slots of nodes.

Letters: T tokens of this rank, K experts per token, W ranks, P = min(K, W), which is the largest number of ranks that a
token can need, N nodes. A pair is one (token, expert) choice.

The rows for each destination rank are one block, and the first row of a block is a header. A header begins with one
int32, the header word, so that ranks can tell whether they are in the same exchange:

    word = dispatch number * 4 + step       step 1 dispatch, 2 redispatch, 3 combine. A new dispatch has no number yet
                                            and sends that of `layout.new_dispatch`

Example of `plan_all_to_all`: W = 2 ranks of 2 experts each, T = 2 tokens, K = 2. "0's 3" is token 0's pair with
expert 3:

    expert_ids   token 0 [3, 0]   token 1 [-1, 2]

    row          0       1       2       3       4       5
    holds        header  0's 0   header  0's 3   1's 2   not sent
    token        -1      0       -1      0       1       -1
    position     [3, 1] [-1, 4]
    rows         token 0  [-1, 1] on rank 0, [3, -1] on rank 1     token 1  [-1, 4] on rank 1, [-1, -1]
    sums         [0, 1] [2, -1]
    sizes        rank 0  2 rows     rank 1  3 rows
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.runtime.op import ANY_GPU, op

from .layout import ALIGNMENT, NEW, round_up

ANY_NEW = NEW * 4 + 1
"""Header word of a new dispatch of a layer without a number. It matches all new dispatches, see `layout.differ`."""
AllToAllTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def gather_rows(payload: Sequence[Tensor], row_index: Tensor | None, offs: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gather rows of each part: row i of a result is row ``row_index[i]`` of the part, or zeros if that is negative.

    Args:
        payload: parts (S, n_i), of any dtype that torch can index. View fp8 as uint8.
        row_index: (R,) int32. None: copy all rows to a contiguous tensor.
        offs: (e,) int32 inclusive ends of row groups. On CUDA, rows of the results from offs[-1] on are not written,
            and their indices are not read.
    Returns:
        One tensor (R, n_i) per part.
    """
    return tuple(gather_part(part, row_index, offs) for part in payload)


def join_rows(
    payload: Sequence[Tensor],
    row_index: Tensor,
    table: Tensor | None = None,
    number: Tensor | None = None,
    step: int = 0,
) -> Tensor:
    """Concatenate bytes row by row. Row i is row ``row_index[i]`` of each part, then row i of the table, then zeros.

    Args:
        payload: one or more parts (S, n_i) uint8.
        row_index: (R,) int32. If negative, the bytes of the parts are zero.
        table: (R, m) uint8.
        number: (1,) int32. If given, rows with a negative index are headers: they begin with the int32
            number * 4 + step, or with as many of its bytes as a row has.
    Returns:
        (R, n) uint8. n is the sum of all n_i and m, rounded up to 16, so that parts can be read in wide words.
    """
    first, *others = payload
    other = torch.cat(others, 1) if len(others) > 1 else (*others, None)[0]
    joined: Tensor = join_parts(first, other, row_index, table, number, step)
    return joined


@op(
    "mxep::gather_rows",
    fake=lambda part, row_index, offs: part.new_empty(
        (part if row_index is None else row_index).shape[0], part.shape[1]
    ),
    launcher="mxep.comms.kernels.rows:gather_rows",
    capability=ANY_GPU,
)
def gather_part(part: Tensor, row_index: Tensor | None, offs: Tensor | None) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format) if row_index is None else _gather(part, row_index)


def _joined_width(*parts: Tensor | None) -> int:
    return round_up(sum(part.shape[1] for part in parts if part is not None), ALIGNMENT)


@op(
    "mxep::join_rows",
    fake=lambda first, other, row_index, table, number, step: first.new_empty(
        row_index.shape[0], _joined_width(first, other, table)
    ),
    launcher="mxep.comms.kernels.rows:join_rows",
    capability=ANY_GPU,
)
def join_parts(
    first: Tensor, other: Tensor | None, row_index: Tensor, table: Tensor | None, number: Tensor | None, step: int
) -> Tensor:
    parts = [_gather(part, row_index) for part in (first, other) if part is not None]
    parts += [] if table is None else [table]
    behind = _joined_width(*parts) - sum(part.shape[1] for part in parts)
    joined = torch.cat((*parts, first.new_zeros(len(row_index), behind)), 1)
    if number is not None:
        word = (number * 4 + step).view(torch.uint8)[: joined.shape[1]]
        joined[:, : len(word)] = torch.where(row_index[:, None] < 0, word, joined[:, : len(word)])
    return joined


@op(
    "mxep::sum_slots",
    fake=lambda rows, slot_rows: rows.new_empty(slot_rows.shape[0], rows.shape[1]),
    launcher="mxep.comms.kernels.rows:sum_slots",
    capability=ANY_GPU,
)
def sum_slots(rows: Tensor, slot_rows: Tensor) -> Tensor:
    """Sum the rows of each slot in fp32, in the order of slot_rows, and round once.

    rows: (R_max, D) bf16 or fp32. slot_rows: (S, K) int32 rows of each slot; negative entries are skipped.
    Returns (S, D) in the dtype of rows. A slot without rows is zero.
    """
    total = torch.zeros(slot_rows.shape[0], rows.shape[1], device=rows.device, dtype=torch.float32)
    for row_index in slot_rows.unbind(1):
        total += _gather(rows, row_index).float()
    return total.to(rows.dtype)


def _gather(part: Tensor, row_index: Tensor) -> Tensor:
    if part.shape[0] == 0:
        return part.new_zeros(row_index.shape[0], part.shape[1])
    words = _as_words(part)
    # Zeros are filled in, not multiplied in, because row 0 may hold NaN.
    rows = words.index_select(0, row_index.clamp_min(0)).masked_fill_(row_index[:, None] < 0, 0)
    return rows.view(part.dtype)


def _as_words(part: Tensor) -> Tensor:
    """View rows as 8-byte words if sizes and strides allow. A CPU copies words 4 times as fast as bytes."""
    size = part.element_size()
    if any(count * size % 8 for count in (part.shape[1], part.stride(0), part.storage_offset())) or part.stride(1) != 1:
        return part
    return part.view(torch.int64)


# ── ordered by destination rank, with headers ──


def _fake_plan(
    expert_ids: Tensor, weights: Tensor, experts_per_rank: int, num_ranks: int, width: int
) -> AllToAllTensors:
    (tokens, top_k), most = expert_ids.shape, min(expert_ids.shape[1], num_ranks)
    all_rows = num_ranks + tokens * top_k
    return (
        expert_ids.new_empty(num_ranks, 3, dtype=torch.int64),
        torch.empty_like(expert_ids, memory_format=torch.contiguous_format),
        expert_ids.new_empty(all_rows),
        expert_ids.new_empty(all_rows, 8, dtype=torch.uint8),
        torch.empty_like(expert_ids, memory_format=torch.contiguous_format),
        expert_ids.new_empty(tokens * most, top_k),
        expert_ids.new_empty(tokens, most),
    )


@op(
    "mxep::plan_all_to_all",
    fake=_fake_plan,
    launcher="mxep.comms.kernels.all_to_all:plan_all_to_all",
    capability=ANY_GPU,
)
def plan_all_to_all(
    expert_ids: Tensor, weights: Tensor, experts_per_rank: int, num_ranks: int, width: int
) -> AllToAllTensors:
    """Order (token, expert) pairs by destination rank. Pairs with the same destination keep their order.

    Args:
        expert_ids: (T, K) int32, -1 is not routed.
        weights: (T, K) fp32.
        width: a number to be copied into sizes.
    Returns:
        sizes: (W, 3) int64. For each rank: rows sent to it with the header, invalid ids of all tokens, width.
        ids: (T, K) int32, the expert ids. Invalid ones are -1.
        token: (W + T * K,) int32 token of each row. -1 for headers, and for unsent pairs. Their rows come last.
        tables: (W + T * K, 8) uint8, the int32 expert id and fp32 weight of each row; -1 and 0 for headers.
        position: (T, K) int32 row of each pair, -1 if it is not sent.
        rows: (T * P, K) int32. Each token has P consecutive lists of K entries, one per rank that it needs, ranks
            ascending. Entry k is `position` of the token's pair k. It is -1 if the expert is on another rank.
        sums: (T, P) int32 indices in `rows` of each token's lists, then -1 if the token needs fewer than P ranks.
    """
    top_k = expert_ids.shape[1]
    wrong = (expert_ids < -1) | (expert_ids >= experts_per_rank * num_ranks)
    ids = torch.where(wrong, -1, expert_ids)
    rank = torch.where(ids >= 0, ids.div(experts_per_rank, rounding_mode="floor"), num_ranks)
    headers = torch.arange(num_ranks, dtype=rank.dtype, device=rank.device)
    ordered, order = torch.cat((headers, rank.flatten())).sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(num_ranks + 1, dtype=rank.dtype, device=rank.device))
    counts = first.diff()
    sizes = torch.stack((counts, wrong.sum().expand_as(counts), torch.full_like(counts, width)), 1)
    tables = torch.stack((ids.flatten(), weights.flatten().view(torch.int32)), 1)
    no_pairs = tables.new_zeros(num_ranks, 2)
    no_pairs[:, 0].fill_(-1)
    tables = torch.cat((no_pairs, tables)).index_select(0, order)
    pairs = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    position = torch.empty_like(pairs).scatter_(0, order, pairs)[num_ranks:].view(ids.shape)
    position = torch.where(ids >= 0, position, -1)
    # The ranks that each token needs, ascending, then num_ranks as padding.
    again = (rank[:, :, None] == rank[:, None]).tril(-1).any(2)
    of_token = rank.masked_fill(again, num_ranks).sort(1).values[:, : min(top_k, num_ranks)]
    rows = torch.where(of_token[:, :, None] == rank[:, None], position[:, None], -1).view(-1, top_k)
    sums = torch.arange(of_token.numel(), dtype=torch.int32, device=ids.device).view_as(of_token)
    sums = torch.where(of_token < num_ranks, sums, -1)
    sent = (order >= num_ranks) & (ordered < num_ranks)
    token = torch.where(sent, (order - num_ranks).div(top_k, rounding_mode="floor"), -1).int()
    return sizes, ids, token, tables.view(torch.uint8), position, rows, sums


@op(
    "mxep::compare_headers",
    fake=lambda rows, sizes, number, found, step: None,
    launcher="mxep.comms.kernels.all_to_all:compare_headers",
    mutates_args=("found",),
    capability=ANY_GPU,
)
def compare_headers(rows: Tensor, sizes: Tensor, number: Tensor, found: Tensor, step: int) -> None:
    """Compare the received header words with this rank's header word: of rows with n < 4 bytes, its first n bytes.

    rows: (R, n) uint8, with contiguous rows. number: (1,) int32 dispatch number.
    sizes: (W, any) int64, with the number of rows of each rank's block in the first column.
    found: (1 + W,) int32, zeros before. The first call that finds a different word writes 1, then the words of all W
        blocks. Later calls do not overwrite it.
    """
    size = min(4, rows.shape[1])
    seen, own = torch.zeros(2, len(sizes), 4, dtype=torch.uint8, device=rows.device).unbind()
    seen[:, :size] = rows[:, :size].index_select(0, sizes[:, 0].cumsum(0) - sizes[:, 0])
    own[:, :size] = (number * 4 + step).view(torch.uint8)[:size]
    seen, own = seen.view(torch.int32)[:, 0], own.view(torch.int32)[:, 0]
    differ = ((seen != own) & (torch.maximum(seen, own) != ANY_NEW)).any()
    words = torch.cat((torch.ones_like(number), seen))
    found.copy_(torch.where(differ & (found[0] == 0), words, found))


# ── slots of nodes ──


@op(
    "mxep::plan_slots",
    fake=lambda expert_ids, weights, counts, num_nodes, num_slots, experts_per_node, num_experts: (
        expert_ids.new_empty(expert_ids.shape),
        expert_ids.new_empty(expert_ids.shape[0], num_nodes),
        expert_ids.new_empty(num_nodes * (num_slots + 1)),
        expert_ids.new_empty(expert_ids.shape[0], 8 * expert_ids.shape[1], dtype=torch.uint8),
    ),
    launcher="mxep.comms.kernels.all_to_all:plan_slots",
    mutates_args=("counts",),
    capability=ANY_GPU,
)
def plan_slots(
    expert_ids: Tensor, weights: Tensor, counts: Tensor, num_nodes: int, num_slots: int, experts_per_node: int,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Give each token a slot on each node that it needs.

    A node has B = C + 1 slots, and the first one is a header. If more than C tokens need a node, C of them get a slot.
    They are evenly spread over the tokens that need the node.

    Args:
        expert_ids: (T, K) int32, -1 is not routed.
        weights: (T, K) fp32.
        counts: (3,) int64, updated. [0] is the maximum of the number of tokens that need one node. [1] is the sum of
            pairs without a slot. [2] is the sum of invalid ids.
        num_slots: C, at least 1.
    Returns:
        ids: (T, K) int32, the expert ids with -1 in place of invalid ones.
        slots: (T, N) int32 slot of each token on each node, -1 if it has none.
        tokens: (N * B,) int32 token of each slot, -1 for headers and unused slots.
        tables: (T, 8 * K) uint8: K int32 numbers, id + 1 or 0 for none, then K fp32 weights.
    """
    wrong = (expert_ids < -1) | (expert_ids >= num_experts)
    ids = torch.where(wrong, -1, expert_ids)
    of_node = torch.arange(num_nodes, device=ids.device, dtype=torch.int64)
    here = ids.div(experts_per_node, rounding_mode="floor")[:, :, None] == of_node  # (T, K, N)
    needed = here.any(1)
    before, total = needed.cumsum(0) - needed.long(), needed.sum(0).clamp_min(num_slots)
    place = (before * num_slots + total // 2) // total
    fits = needed & (place < ((before + 1) * num_slots + total // 2) // total)
    slots = torch.where(fits, of_node * (num_slots + 1) + 1 + place, -1)  # after the header
    # Tokens without a slot write into an extra slot, which is cut off.
    all_slots = num_nodes * (num_slots + 1)
    token = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None].expand(slots.shape)
    tokens = token.new_full((all_slots + 1,), -1)
    tokens.scatter_(0, torch.where(fits, slots, all_slots).flatten(), token.flatten())
    lost = (here & (needed & ~fits)[:, None]).sum()
    counts[0] = torch.maximum(counts[0], needed.sum(0).max())
    counts[1:] += torch.stack((lost, wrong.sum()))
    tables = torch.cat((ids + 1, weights.detach().view(torch.int32)), 1).view(torch.uint8)
    return ids, slots.int(), tokens[:-1].clone(), tables


@op(
    "mxep::read_tables",
    fake=lambda tables, first_expert, num_experts: (
        tables.new_empty(tables.shape[0], tables.shape[1] // 8, dtype=torch.int32),
        tables.new_empty(tables.shape[0], tables.shape[1] // 8, dtype=torch.float32),
    ),
    launcher="mxep.comms.kernels.all_to_all:read_tables",
    capability=ANY_GPU,
)
def read_tables(tables: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Split tables (R, 8 * K) uint8 of :func:`plan_slots` into ids and weights.

    Returns:
        ids: (R, K) int32, counted from first_expert. Ids outside [0, num_experts) become -1.
        weights: (R, K) fp32.
    """
    ids, weights = tables.view(torch.int32).chunk(2, 1)
    ids = ids - (1 + first_expert)
    valid = (ids >= 0) & (ids < num_experts)
    return torch.where(valid, ids, -1), weights.clone(memory_format=torch.contiguous_format).view(torch.float32)


@op(
    "mxep::pick_values",
    fake=lambda values, slots, ids, experts_per_node: values.new_empty(ids.shape),
    launcher="mxep.comms.kernels.all_to_all:pick_values",
    capability=ANY_GPU,
)
def pick_values(values: Tensor, slots: Tensor, ids: Tensor, experts_per_node: int) -> Tensor:
    """Pick the value of each pair from the token's slot on the node of the pair's expert.

    values: (N * B, K) fp32 values of each slot. slots: (T, N) int32. ids: (T, K) int32.
    Returns (T, K) fp32, 0 for pairs without a slot.
    """
    node = ids.div(experts_per_node, rounding_mode="floor").clamp_min(0)
    slot = slots.gather(1, node.long())
    of_pairs = values.gather(0, slot.clamp_min(0).long())
    return torch.where((ids >= 0) & (slot >= 0), of_pairs, 0.0)
