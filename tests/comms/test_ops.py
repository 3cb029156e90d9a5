"""All ops of the package by themselves: opcheck, no reads from the device, one launch or two."""

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from comms.cases import content
from mxep.comms import plan, rows

IDS = torch.tensor([[0, 3], [-1, 1], [2, 2]], dtype=torch.int32)
SLOT_ROWS = torch.tensor([[0, 3], [-1, 1], [2, -2], [-2, -2], [-1, -1], [4, 5]], dtype=torch.int32)


def calls():
    tables = IDS[None].repeat(2, 1, 1), torch.rand(2, 3, 2), torch.tensor([3, 1], dtype=torch.int32)
    number, found = torch.tensor([4], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    wide, sizes = content(0, 5, 16), torch.tensor([[2, 0, 0], [3, 0, 0]])
    index, beside = torch.tensor([2, -1, 0], dtype=torch.int32), content(1, 3, 8)
    slots = torch.tensor([[1, -1], [2, 4], [-1, 5]], dtype=torch.int32)
    return {
        "make_plan": (plan.plan_rows, (*tables, 2, 2, 4, 16, 4, 1, 3, 16, torch.zeros(5, dtype=torch.int64))),
        "gather_rows": (rows.gather_part, (content(0, 3, 20), torch.tensor([2, -1, 0, 0], dtype=torch.int32), None)),
        "sum_slots": (rows.sum_slots, (torch.randn(8, 5).bfloat16(), SLOT_ROWS)),
        "join_rows": (rows.join_parts, (wide, content(2, 5, 3), index, beside, number, 1)),
        "join_rows of one part": (rows.join_parts, (wide, None, index, None, None, 0)),
        "plan_all_to_all": (rows.plan_all_to_all, (IDS, torch.rand(3, 2), 2, 2, 24)),
        "compare_headers": (rows.compare_headers, (wide, sizes, number, found, 1)),
        "plan_slots": (rows.plan_slots, (IDS, torch.rand(3, 2), torch.zeros(3, dtype=torch.int64), 2, 2, 2, 4)),
        "read_tables": (rows.read_tables, (wide, 1, 2)),
        "pick_values": (rows.pick_values, (torch.rand(6, 2), slots, IDS, 2)),
    }


@pytest.mark.parametrize("name", calls())
def test_opcheck(name):
    op, args = calls()[name]
    opcheck(op.opdef, args)


def test_on_cuda_what_an_op_would_write_may_be_none(monkeypatch):
    """No GPU: the launcher is what the op would call there."""
    op, args = calls()["make_plan"]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(op, "_launch", lambda *args: args[-1])
    version = args[-1]._version
    assert op(*args) is args[-1]
    assert args[-1]._version == version + 1, "autograd is told of what was written"
    assert op(*args[:-1], None) is None


@pytest.mark.parametrize("name", calls())
def test_a_reference_never_reads_from_the_device(name):
    op, args = calls()[name]
    mode = FakeTensorMode()

    def fake(value):
        if isinstance(value, list):
            return [fake(one) for one in value]
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    with mode:  # raises on .item(), boolean masks and anything else whose shape or value depends on data
        op.reference(*[fake(arg) for arg in args])


class TorchOps(TorchDispatchMode):
    """Those that a GPU would run something for: no views, and nothing that only allocates."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if "empty" not in str(op) and not (op.is_view or op is torch.ops.aten.detach.default):
            self.seen.append(str(op))
        return out


@pytest.mark.parametrize("name", calls())
def test_a_launcher_launches_once_or_twice_and_calls_no_op_of_torch(name, monkeypatch):
    """A replayed function calls each op of torch anew, while its launches are a graph."""
    op, args = calls()[name]
    module, function = op._name.split(":")
    module, launched = importlib.import_module(module), []
    monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel))
    with TorchOps() as ops:
        getattr(module, function)(*args)
    assert not ops.seen
    assert len(launched) == (2 if "plan" in name else 1)
