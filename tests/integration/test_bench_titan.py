"""The torchtitan benchmark's --check: a replay that differs from its function is noticed. Needs no torchtitan."""

import pytest

import records_on_cpu
from benchmarks.titan import checked_passes
from ep.test_passes import EXPERTS, run
from mxep.ep import LocalDispatcher
from mxep.runtime import graph


def test_checked_passes_are_compared_with_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = records_on_cpu.replays_on_the_cpu(monkeypatch)
    dispatcher, play = LocalDispatcher(EXPERTS), graph.Player.play
    with replays, checked_passes():
        for seed in range(3):
            run(dispatcher, seed=seed)
        assert all(each.replays for each in dispatcher.passes.values())

        def spoil_once(*how):
            monkeypatch.setattr(graph.Player, "play", play)
            out, *others = play(*how)
            return [out + 1, *others]

        monkeypatch.setattr(graph.Player, "play", spoil_once)
        with pytest.raises(AssertionError, match="forward_pass"):
            run(dispatcher, seed=2)
