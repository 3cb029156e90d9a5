"""Ranks stay from one test of a file to the next, and a test cannot tell."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from mxep.integration.launch import Rank, RanksFailed
from ranks import run_again

HOW: dict[str, Any] = {"world_size": 2, "device": "cpu", "timeout": 60}


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def leave_much(rank: Rank) -> tuple[Any, ...]:
    """What this call finds; it leaves another default dtype, a group, something compiled and a request to stop."""
    compiled = len(_debug_get_cache_entry_list(add_one.__code__))
    defaults = rank.stop.requested, str(torch.get_default_dtype()), torch.is_grad_enabled(), compiled
    torch.compile(add_one, backend="eager")(torch.ones(2))
    assert _debug_get_cache_entry_list(add_one.__code__)
    group = dist.new_group([0, 1])
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    rank.stop.requested = True
    return os.getpid(), os.environ["MXEP_TEST"], *defaults, group.group_name


def raise_on_one(rank: Rank) -> int:
    if rank.rank == 1:
        raise KeyError("the token got lost")
    return os.getpid()


def hang(rank: Rank) -> None:
    time.sleep(60)


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="torchrun has processes of its own")
def test_ranks_stay_and_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for value in ("first", "second"):
        monkeypatch.setenv("MXEP_TEST", value)
        calls.append(run_again(leave_much, **HOW))
    for (pid, said, *found), (other, again, *same) in zip(*calls):
        assert (pid, said, again) == (other, "first", "second")
        assert found == same
    monkeypatch.setenv("MXEP_TEST", "fresh")
    assert not {pid for pid, *_ in calls[0]} & {pid for pid, *_ in run_again(leave_much, **HOW, fresh=True)}


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="torchrun has processes of its own")
def test_a_call_that_fails_or_hangs_says_where_and_the_next_has_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_TEST", "value")
    before = {pid for pid, *_ in run_again(leave_much, **HOW)}
    with pytest.raises(RanksFailed, match=r"rank 1 raised:(.|\n)*in raise_on_one(.|\n)*the token got lost"):
        run_again(raise_on_one, **HOW)
    after = {pid for pid, *_ in run_again(leave_much, **HOW)}
    assert not before & after
    with pytest.raises(RanksFailed) as error:
        run_again(hang, **HOW | {"timeout": 0.5})
    assert "in hang" in "\n".join(error.value.__notes__)
    assert not after & {pid for pid, *_ in run_again(leave_much, **HOW)}
