"""Dispatch: one object says how tokens travel, every entrance takes it or its fields, and all refuse alike."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from mxep.comms import Capacity
from mxep.ep import Dispatch, ExpertParallel, LocalDispatcher, MoE, combine, dispatch, make_dispatcher
from mxep.gemm import Recipe
from ranks import Context, distributed


def moe(**options: Any) -> MoE:
    return MoE(64, 32, 8, 2, device="meta", **options)


ENTRANCES: dict[str, Callable[..., Any]] = {
    "Dispatch": Dispatch,
    "MoE": moe,
    "ExpertParallel": ExpertParallel,
    "make_dispatcher": lambda **fields: make_dispatcher(fields.pop("dispatcher", "symmetric"), 8, dim=64, **fields),
    "MoE(dispatch=)": lambda **fields: moe(dispatch=Dispatch(**fields)),
}
NAN, INF = float("nan"), float("inf")
REFUSED = [
    (
        {"dispatcher": "carrier pigeon"},
        "one of local, all_to_all, symmetric, hierarchical, nvshmem, or a TokenDispatch",
    ),
    ({"dispatcher": None}, "got None"),
    ({"capacity": NAN}, "capacity: expected a Capacity, or a factor such as 1.25, got nan"),
    ({"capacity": "exact"}, "got 'exact'"),
    ({"capacity": True}, "got True"),
    ({"capacity": 0.0}, "Capacity.factor: got 0.0, wanted a positive number"),
    ({"capacity": -1}, "got -1.0, wanted a positive"),
    ({"capacity": INF}, "got inf, wanted a positive"),
    ({"max_tokens": 0}, "max_tokens: expected a whole number, at least 1, got 0"),
    ({"max_tokens": 64.0}, "got 64.0"),
    ({"max_tokens": True}, "got True"),
    ({"max_tokens": NAN}, "max_tokens: expected a whole number, at least 1, got nan"),
    ({"timeout": NAN}, "timeout: expected seconds, more than 0, got nan"),
    ({"timeout": 0}, "timeout: expected seconds, more than 0, got 0"),
    ({"timeout": -1.0}, "got -1.0"),
    ({"timeout": INF}, "got inf"),
    ({"dispatcher": "hierarchical", "ranks_per_node": 0}, "ranks_per_node: expected a whole number, at least 1, got 0"),
    ({"dispatcher": "hierarchical", "nodes_per_token": -2}, "nodes_per_token: expected a whole number, at least 1"),
    (
        {"ranks_per_node": 2},
        "'symmetric' has no ranks_per_node: got ranks_per_node=2, expected none; hierarchical would",
    ),
    ({"dispatcher": "local", "nodes_per_token": 1}, "'local' has no nodes_per_token"),
    ({"dispatcher": "nvshmem", "ranks_per_node": 1, "nodes_per_token": 1}, "has no ranks_per_node, nodes_per_token"),
    (
        {"dispatcher": "all_to_all", "timeout": 5},
        "'all_to_all' has no timeout: got timeout=5, expected none; local, symmetric, hierarchical, nvshmem would",
    ),
    ({"dispatcher": LocalDispatcher(8), "timeout": 5}, "has its own limits: expected none beside it, got timeout=5"),
]


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_every_entrance_refuses_the_same_values_in_the_same_words(entrance: str, fields: dict, message: str) -> None:
    texts = []
    for way in (Dispatch, ENTRANCES[entrance]):
        with pytest.raises(ValueError, match=re.escape(message)) as refusal:
            way(**fields)
        texts.append(str(refusal.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("capacity", [1.25, 2, torch.tensor(1.5).item()])
def test_a_capacity_may_be_a_number(capacity: float) -> None:
    assert Dispatch(capacity=capacity) == Dispatch(capacity=Capacity.factor(capacity))
    layer = MoE(64, 32, 8, 2, dispatcher="local", capacity=capacity)
    assert layer.dispatcher.capacity == LocalDispatcher(8, capacity=capacity).capacity == Capacity.factor(capacity)
    layer(torch.randn(4, 64, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("num_experts", [0, -8, 8.0])
def test_a_dispatcher_serves_a_whole_number_of_experts(num_experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts must be a multiple .* at least 1, got {num_experts}"):
        LocalDispatcher(num_experts)


@pytest.mark.parametrize("rows", [0, 3])
def test_combine_takes_the_rows_of_its_routing(rows: int) -> None:
    how: dict[str, Any] = {"dispatcher": LocalDispatcher(8), "recipe": Recipe.bf16()}
    ids = torch.arange(4, dtype=torch.int32)[:, None]
    y, _, routing = dispatch(torch.randn(4, 64, dtype=torch.bfloat16), ids, torch.ones(4, 1), **how)
    assert torch.equal(combine(y, routing, **how), y)
    with pytest.raises(
        ValueError, match=rf"combine: expected y \(4, D\), the rows of this routing, got \({rows}, 64\)"
    ):
        combine(y[:rows], routing, **how)


def test_an_object_or_its_fields_make_the_same_layer() -> None:
    fields = {"dispatcher": "local", "capacity": 1.5, "max_tokens": 64}
    by_field, by_object = moe(**fields), moe(dispatch=Dispatch(**fields))
    assert by_field.dispatcher is by_object.dispatcher
    assert by_field.max_tokens == by_object.max_tokens == 64
    assert moe(dispatch=Dispatch("local"), capacity=None).dispatcher is moe(dispatcher="local").dispatcher


def test_both_or_neither_and_unknown_keywords_are_refused() -> None:
    for entrance in (moe, ExpertParallel):
        with pytest.raises(ValueError, match="expected it or its fields, got both: set max_tokens in it"):
            entrance(dispatch=Dispatch(), max_tokens=3)
        with pytest.raises(ValueError, match="expected a Dispatch, got 'local': the keyword for that is dispatcher"):
            entrance(dispatch="local")
        with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
            entrance(max_token=3)


def test_a_dispatcher_to_share_has_one_user_more() -> None:
    shared = LocalDispatcher(8)
    assert moe(dispatch=Dispatch(shared)).dispatcher is moe(dispatcher=shared).dispatcher is shared
    assert shared.uses == 3
    with pytest.raises(ValueError, match="serves 8 experts, the layer has 4"):
        MoE(64, 32, 4, 2, dispatcher=shared, device="meta")


@distributed(2)
def test_a_plan_takes_nodes_and_refuses_a_dispatcher_of_other_ranks(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)

    def spread(**fields: Any) -> MoE:
        layer = nn.ModuleDict({"moe": MoE(64, 32, 8, 2, dispatcher="local", device=ctx.device)})
        return parallelize_module(layer, mesh, {"moe": ExpertParallel(**fields)})["moe"]

    layer = spread(dispatcher="hierarchical", ranks_per_node=1, nodes_per_token=1, capacity=1.5, max_tokens=4)
    assert (layer.dispatcher.nodes.count, layer.dispatcher.nodes_per_token) == (2, 1)
    assert layer.dispatcher.capacity == Capacity.factor(1.5)
    with pytest.raises(ValueError, match="serves 1 ranks, the mesh has 2"):
        spread(dispatcher="local")
