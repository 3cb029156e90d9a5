"""What people do with a layer beside training it as the README shows: each was broken once."""

import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from mxep.ep import MoE, clip_grad_norm_, run_experts


def made(**options: object) -> MoE:
    torch.manual_seed(0)
    return MoE(64, 32, 8, 2, **options)  # type: ignore[arg-type]


def test_a_pickled_layer_that_has_run_computes_what_it_did() -> None:
    moe = made()
    moe(torch.randn(24, 64).bfloat16())
    copied, x = pickle.loads(pickle.dumps(moe)), torch.randn(24, 64).bfloat16()
    assert torch.equal(copied(x), moe(x))


def test_two_kinds_of_gradients_of_a_parameter_are_not_clipped() -> None:
    moe = made()
    moe(torch.randn(24, 64).bfloat16()).float().sum().backward()
    weight = moe.experts.down_proj
    weight.main_grad = weight.grad  # type: ignore[attr-defined]
    clip_grad_norm_(moe.parameters(), 1.0)
    weight.main_grad = weight.grad.float()  # type: ignore[attr-defined, union-attr]
    with pytest.raises(ValueError, match="has main_grad and grad: clip before one is copied"):
        clip_grad_norm_(moe.parameters(), 1.0)


def test_sizes_of_a_batch_do_not_compile_a_graph_each() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    moe = made()
    compiled = torch.compile(moe, backend=counter, dynamic=True)
    for tokens in (32, 48, 7, 100):
        x = torch.randn(tokens, 64).bfloat16()
        assert torch.equal(compiled(x), moe(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("graded", [True, False])
def test_forward_mode_ad_is_refused_and_loses_no_tangent(graded: bool) -> None:
    """Where no gradient is wanted there is no node of autograd, at which torch refuses by itself."""
    moe, x = made(dispatcher="local"), torch.randn(24, 64).bfloat16()
    weights = moe.experts.gate_up_proj, moe.experts.down_proj
    with forward_ad.dual_level(), torch.set_grad_enabled(graded):
        moe(x)  # of plain tensors
        for wanted in (True, False):
            moe.requires_grad_(wanted)
            with pytest.raises(NotImplementedError, match="want a plain one"):
                moe(forward_ad.make_dual(x, x))
        ids, scores = torch.zeros(24, 2, dtype=torch.int32), torch.ones(24, 2)
        for place in (0, 1):
            given = [*weights]
            given[place] = forward_ad.make_dual(given[place].detach(), torch.ones_like(given[place]))
            with pytest.raises(NotImplementedError, match="want a plain one"):
                run_experts(x, ids, scores, *given, dispatcher=moe.dispatcher, recipe=moe.recipe, backend="auto")
    moe(x)
