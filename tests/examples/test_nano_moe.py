"""The layer in one file, examples/nano_moe.py, equals mxep's bit for bit on a CPU: output and every gradient.

`folded=False` is what mxep computes on a CPU by itself, `folded=True` its Hopper backend by the CPU kernels of its ops.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nano_moe
from mxep import quant
from mxep.ep import MoE
from mxep.gemm.backends import Hopper

FILE = Path(nano_moe.__file__)
Routing = tuple[Tensor, Tensor]


class Anywhere(Hopper):
    """The backend with its ops' CPU kernels, where there is no Hopper GPU."""

    def unsupported_reason(self, device: torch.device) -> None:
        return None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layers(dim: int, hidden_dim: int, experts: int, top_k: int, *, folded: bool) -> tuple[MoE, nano_moe.NanoMoE]:
    """Both with the same weights."""
    backend = Anywhere() if folded else "auto"
    moe = MoE(dim, hidden_dim, experts, top_k, recipe="mxfp8", dispatcher="local", backend=backend)
    nano = nano_moe.NanoMoE(dim, hidden_dim, experts, top_k, folded=folded)
    with torch.no_grad():
        for mine, theirs in zip(nano.parameters(), moe.parameters(), strict=True):
            mine.copy_(theirs)
    return moe, nano


def tokens(num: int, dim: int) -> Tensor:
    """Gaussian. Blocks of a row, and rows, are up to 2^16 apart, so that folding rounds and flushes."""
    spread = torch.randint(-8, 9, (num, dim // 32, 1)) + torch.randint(-8, 9, (num, 1, 1))
    return (torch.randn(num, dim // 32, 32) * torch.exp2(spread.float())).flatten(1).bfloat16()


def results(layer: torch.nn.Module, x: Tensor, d_out: Tensor, routing: Routing | None) -> dict[str, Tensor | None]:
    """The output, and gradients of x, of the parameters, and of the routing weights if they are given."""
    x = x.clone().requires_grad_()
    if routing is not None:
        routing = routing[0], routing[1].clone().requires_grad_()
    if isinstance(layer, MoE):
        ids, weights = routing or (None, None)
        out = layer(x, expert_ids=ids, weights=weights)
    else:
        out = layer(x, routing)
    out.backward(d_out)
    found = {"out": out.detach(), "x": x.grad, "weights": None if routing is None else routing[1].grad}
    return found | dict(zip(("router", "gate_up_proj", "down_proj"), (p.grad for p in layer.parameters())))


def assert_same_bits(
    moe: MoE, nano: nano_moe.NanoMoE, x: Tensor, routing: Routing | None = None, nan_at: int | None = None
) -> None:
    d_out = tokens(*x.shape)
    if nan_at is not None:
        d_out[nan_at, 3] = torch.nan
    theirs, mine = results(moe, x, d_out, routing), results(nano, x, d_out, routing)
    for name, expected in theirs.items():
        got = mine[name]
        if expected is None or got is None:
            assert got is expected, name
        else:
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
            bits = torch.int32 if got.dtype == torch.float32 else torch.int16
            same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
            assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} elements differ"


SHAPES = [  # T, D, F, E, K
    (0, 64, 96, 4, 2),
    (1, 64, 96, 4, 2),
    (37, 64, 96, 5, 3),
    (150, 128, 64, 4, 1),
    (300, 96, 160, 6, 2),
    (330, 64, 32, 2, 2),
]


@pytest.mark.parametrize("folded", [False, True], ids=["blocks", "folded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_output_and_gradients_have_mxeps_bits(shape: tuple[int, ...], folded: bool, seed: int) -> None:
    torch.manual_seed(seed)
    num, *sizes = shape
    assert_same_bits(*layers(*sizes, folded=folded), tokens(num, sizes[0]))


@pytest.mark.parametrize("folded", [False, True], ids=["blocks", "folded"])
@pytest.mark.parametrize("seed", [0, 1])
def test_routing_from_outside_with_pairs_that_are_not_routed_and_an_empty_expert(folded: bool, seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.rand(200, 5).topk(3).indices
    ids[torch.rand(ids.shape) < 0.3] = -1
    ids[ids == 1] = -1
    ids[7] = -1
    assert_same_bits(*layers(64, 96, 5, 3, folded=folded), tokens(200, 64), (ids, torch.rand(200, 3)))


@pytest.mark.parametrize("folded", [False, True], ids=["blocks", "folded"])
@pytest.mark.parametrize("num", [1, 160, 320])
def test_all_tokens_to_one_expert(folded: bool, num: int) -> None:
    """160 and 320 tokens: a CPU's GEMM splits their sum in other places than that of 256 and 384."""
    torch.manual_seed(0)
    routing = torch.full((num, 1), 2), torch.rand(num, 1)
    assert_same_bits(*layers(64, 96, 4, 1, folded=folded), tokens(num, 64), routing)


@pytest.mark.parametrize("folded", [False, True], ids=["blocks", "folded"])
def test_nan_and_inf_reach_the_same_elements(folded: bool) -> None:
    torch.manual_seed(0)
    x = tokens(60, 64)
    x[3, 40], x[11, 5] = torch.nan, torch.inf
    ids = torch.stack((torch.arange(60) % 3, torch.full((60,), 3)), 1)
    ids[[3, 11], 1] = -1  # expert 3 has finite tokens only; expert 1 gets a NaN in d_out, in one of its two blocks
    assert_same_bits(*layers(64, 96, 4, 2, folded=folded), x, (ids, torch.rand(60, 2)), nan_at=22)


def test_quantize_and_fold_have_mxeps_bytes() -> None:
    """From the smallest numbers of fp32 to the largest, with zeros, a NaN and infinities."""
    torch.manual_seed(0)
    x = torch.randn(500, 4, 32) * torch.exp2(torch.randint(-150, 128, (500, 4, 1)).float())
    x[torch.rand(500, 4) < 0.1] = 0.0
    x[7, 2, 5], x[8, 0, 1] = torch.nan, torch.inf
    x = x.flatten(1)
    expected, mx = quant.quantize(x), nano_moe.quantize(x)
    for wanted, got in ((expected, mx), (quant.fold(expected), nano_moe.fold(mx))):
        assert torch.equal(got.scale, wanted.scale.view(torch.uint8))
        nan = (got.scale == 255).repeat_interleave(128 // got.scale.shape[1], 1)
        different = got.qdata.view(torch.uint8) != wanted.qdata.view(torch.uint8)
        assert not (different & ~nan).any()
        assert got.dequantize()[nan].isnan().all()


def test_it_trains_and_prints_its_snr(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng():
        nano_moe.main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses[-1] < 0.7 * losses[0]
    table = [[float(number) for number in line.split()[-3:]] for line in lines[-5:]]
    assert all(bf16 > 40 and mxfp8 > 20 and folded > 20 for bf16, mxfp8, folded in table)


def test_it_is_300_lines_of_plain_torch() -> None:
    source = FILE.read_text()
    assert len(source.splitlines()) <= 300
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert {module.partition(".")[0] for module in modules} == {"typing", "torch"}
