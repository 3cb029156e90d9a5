"""Dispatchers: who shares one, who is told of what was lost, and what becomes of their memory."""

import torch
import torch.distributed as dist

from mxep.comms import Capacity
from mxep.ep.dispatchers import find_dispatcher, make_dispatcher
from mxep.ep.dispatchers.base import TokenDispatcher
from ranks import Context, distributed


def symmetric(ctx: Context, **options) -> TokenDispatcher:
    return make_dispatcher("symmetric", **{"num_experts": 4, "dim": 32, "group": ctx.group} | options)


def send(dispatcher: TokenDispatcher, ctx: Context, ids: list[list[int]]) -> object:
    """One byte a token to the experts."""
    table = torch.tensor(ids, dtype=torch.int32, device=ctx.device)
    parts = (torch.zeros(len(ids), 16, dtype=torch.uint8, device=ctx.device),)
    return dispatcher.send(parts, table, torch.ones(table.shape, device=ctx.device), multiple=1)[1]


@distributed(2)
def test_layers_that_ask_for_the_same_share_a_dispatcher_which_its_key_finds(ctx: Context) -> None:
    one = symmetric(ctx, max_tokens=8)
    assert symmetric(ctx, max_tokens=8) is one
    assert find_dispatcher(one.key) is one
    others = (
        symmetric(ctx, max_tokens=9),
        symmetric(ctx, max_tokens=8, timeout=9.0),
        symmetric(ctx, max_tokens=8, dtype=torch.float32),
        symmetric(ctx, max_tokens=8, capacity=Capacity.factor(2.0)),
        symmetric(ctx, max_tokens=8, num_experts=8),
        make_dispatcher("all_to_all", 4, dim=32, group=ctx.group, max_tokens=8),
        make_dispatcher("local", 4, dim=32, max_tokens=8),
    )
    assert len({each.key for each in (one, *others)}) == 8
    send(one, ctx, [[0]])
    later = symmetric(ctx, max_tokens=8)
    assert later is not one
    assert later.key != one.key


@distributed(2, device="cpu")
def test_a_destroyed_groups_name_finds_no_dispatcher_of_the_new_group(ctx: Context) -> None:
    old = dist.new_group([0, 1])
    of_old = symmetric(ctx, group=old)
    old_name = old.group_name
    dist.destroy_process_group(old)
    new = dist.new_group([0, 1])
    new._set_group_name(old_name)
    assert symmetric(ctx, group=new) is not of_old


@distributed(2)
def test_no_group_is_the_default_group_of_when_the_layer_was_made(ctx: Context) -> None:
    assert symmetric(ctx, group=None) is symmetric(ctx, group=dist.group.WORLD)
    assert symmetric(ctx, group=None).group is dist.group.WORLD
