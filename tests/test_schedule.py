"""The schedule itself: what it finds in small kernels, and that a seed says all."""

import pytest
import torch
import triton
import triton.language as tl

from schedule import Deadlock, Race, Schedule, mutate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels are not interpreted")
SEEDS = range(6)


@triton.jit
def _relay_kernel(x_ptr, flag_ptr, out_ptr):
    """Program 0 brings a number, all others wait for it."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(x_ptr, 7)
        tl.atomic_xchg(flag_ptr, 1, sem="release", scope="gpu")
    else:
        while tl.load(flag_ptr, volatile=True) == 0:
            pass
        tl.atomic_add(flag_ptr, 0, sem="acquire", scope="gpu")
        tl.store(out_ptr + program, tl.load(x_ptr))


@triton.jit
def _count_kernel(counter_ptr, order_ptr):
    ticket = tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
    tl.store(order_ptr + ticket, tl.program_id(0))


@triton.jit
def _send_kernel(x_ptr, flag_ptr):
    tl.store(x_ptr, 7)
    tl.atomic_xchg(flag_ptr, 1, sem="release", scope="sys")


@triton.jit
def _receive_kernel(x_ptr, flag_ptr, out_ptr):
    while tl.load(flag_ptr, volatile=True) == 0:
        pass
    tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    tl.store(out_ptr, tl.load(x_ptr))


def relay(seed: int, **options) -> list[int]:
    schedule = Schedule(seed, **options)
    x, flag, out = torch.zeros(3, 4, dtype=torch.int32)
    for name, memory in {"x": x, "flag": flag, "out": out}.items():
        schedule.watch(memory, name)
    schedule.run(lambda: _relay_kernel[(4,)](x, flag, out))
    return out.tolist()


def send(seed: int) -> int:
    """From rank 0 to rank 1."""
    schedule = Schedule(seed)
    x, flag, out = torch.zeros(3, 1, dtype=torch.int32)
    for name, memory in {"x": x, "flag": flag}.items():
        schedule.watch(memory, name)
    schedule.run(lambda: _send_kernel[(1,)](x, flag), lambda: _receive_kernel[(1,)](x, flag, out))
    return int(out)


def order(seed: int) -> list[int]:
    schedule = Schedule(seed)
    counter, places = torch.zeros(2, 6, dtype=torch.int32)
    schedule.watch(counter, "counter")
    schedule.run(lambda: _count_kernel[(6,)](counter, places))
    return places.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_wait_for_others_and_for_other_ranks(seed):
    assert relay(seed) == [0, 7, 7, 7]
    assert send(seed) == 7


def test_a_seed_says_all_and_seeds_differ():
    orders = [order(seed) for seed in SEEDS]
    assert orders == [order(seed) for seed in SEEDS]
    assert all(sorted(one) == list(range(6)) for one in orders)
    assert len({tuple(one) for one in orders}) > 3


def test_a_race_says_who_reads_what_of_whom(monkeypatch):
    mutate(monkeypatch, _send_kernel, 'scope="sys"', 'scope="gpu"')
    reads = r"rank 1, program 0 reads x \+ 0 at test_schedule.py:\d+ _receive_kernel"
    for seed in SEEDS:
        with pytest.raises(Race, match=reads + r", rank 0, program 0 stores it at test_schedule.py:\d+ _send_kernel"):
            send(seed)


def test_a_deadlock_says_who_waits_for_what(monkeypatch):
    mutate(monkeypatch, _send_kernel, "flag_ptr, 1", "flag_ptr, 0")
    with pytest.raises(
        Deadlock, match=r"rank 1, program 0: for flag \+ 0, at test_schedule.py:\d+ _receive_kernel, which holds 0x0"
    ):
        send(0)


def test_a_program_that_waits_for_one_that_finds_no_room_shows():
    outcomes = set()
    for seed in SEEDS:
        try:
            outcomes.add(tuple(relay(seed, resident=1)))
        except Deadlock as error:
            outcomes.add("for room, as 1 run at once" in str(error))
    assert outcomes == {(0, 7, 7, 7), True}


def test_an_error_in_a_body_ends_all(monkeypatch):
    def fail():
        raise ValueError("wrong")

    schedule, flag = Schedule(0), torch.zeros(1, dtype=torch.int32)
    schedule.watch(flag, "flag")
    with pytest.raises(ValueError, match="wrong"):
        schedule.run(lambda: _receive_kernel[(1,)](flag, flag, flag), fail)


def test_who_reads_on_the_host_before_it_is_told_races():
    schedule = Schedule(0)
    x, flag = torch.zeros(2, 1, dtype=torch.int32)
    schedule.watch(x, "x")
    schedule.watch(flag, "flag")
    with pytest.raises(Race, match=r"x \+ 0 at "):
        schedule.run(lambda: _send_kernel[(1,)](x, flag), lambda: schedule.read(x))


def test_who_polls_again_what_is_there_already_goes_on(monkeypatch):
    again = "    while tl.load(flag_ptr, volatile=True) == 0:\n        pass\n"
    mutate(monkeypatch, _receive_kernel, again, again + again)
    assert [send(seed) for seed in SEEDS] == [7] * len(SEEDS)
