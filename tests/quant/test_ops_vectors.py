"""Vectors (row_index, offs, row_weight ...) reach the kernels packed and of the right dtype, from every op."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_leaves

from mxep import quant
from mxep.quant import E4M3, MXTensor, ops, quantize
from mxep.runtime import op
from quant.exact import parts
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
R, D = 64, 64
HOW = E4M3.dtype, "rceil"
RUNS_ON = op.runs_on


def values(columns: int = D, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(R, columns, generator=torch.Generator().manual_seed(columns), dtype=dtype).to(DEVICE)


def mx() -> tuple[Tensor, Tensor]:
    return tuple(part.to(DEVICE) for part in ops.quantize_rows(values().cpu(), *HOW, 32))  # type: ignore[return-value]


def index() -> Tensor:
    return torch.randint(-1, R, (R,), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)


def ends() -> Tensor:
    return torch.tensor([32, 32, 64], dtype=torch.int32, device=DEVICE)


def weight() -> Tensor:
    return values(1)[:, 0].contiguous()


def rest() -> tuple[Any, ...]:
    return *HOW, 32, False


CASES: dict[str, Any] = {
    "materialize": lambda: (*mx(), index()),
    "dequantize": lambda: (*mx(), 1, 32, index(), torch.bfloat16),
    "fold": lambda: (*mx(), index(), ends()),
    "scale_columns": lambda: (*mx(), index(), ends(), values()[:3]),
    "fold_for_wgrad": lambda: (*mx(), index(), *mx(), index(), ends(), 32),
    "requantize": lambda: (*mx(), 1, 32, index(), ends(), *HOW),
    "swizzle_scales": lambda: (mx()[1], ends()),
    "gather_swizzled": lambda: (*mx(), index(), ends()),
    "quantize_per_column": lambda: (values(), None, None, values().abs().amax(0), *HOW),
    "pad_index": lambda: (torch.tensor([3, 0, 40], dtype=torch.int32, device=DEVICE), R, 32),
    "split_ends": lambda: (ends(), 32),
    "pad_rows": lambda: (values(), index()),
    "unpad_rows": lambda: (values(), torch.arange(-1, R - 1, device=DEVICE).int(), R),
    "group_sums": lambda: (*mx(), 32, ends()),
    "swiglu": lambda: (values(2 * D), weight(), ends(), *rest(), None, None),
    "swiglu_backward": lambda: (
        values(), values(2 * D), weight(), ends(), values(2 * D).to(E4M3.dtype), *rest()[1:], E4M3.dtype,
        *[None] * 4,
    ),
}  # fmt: skip
WITHOUT_VECTORS = {
    "fold_columns",
    "fold_e2m1",
    "quantize_rows",
    "quantize_into_room",
    "quantize_joined_rows",
    "quantize_2d",
    "quantize_columns",
    "quantize_per_row",
}


def launch(name: str, *args: Any) -> list[Tensor]:
    """What a CUDA tensor makes of the op `name`."""
    return results(name, OPDEFS[f"mxep::{name}"]._backend_fns["cuda"], *args)


def results(name: str, fn: Any, *args: Any) -> list[Tensor]:
    """What fn returns and what it writes."""
    written = [args[4]] if name == "swiglu_backward" else []
    return tree_leaves(fn(*args)) + written


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(op, "runs_on", lambda *_: True)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 0
    for a, b in zip(got, want):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def on_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x


def strided(x: Any) -> Any:
    """A vector with garbage between its elements; anything else as it is."""
    if not isinstance(x, Tensor) or x.ndim != 1:
        return x
    return torch.stack([x, torch.full_like(x, 5)], 1).flatten()[::2]


def test_every_op_with_a_kernel_has_a_case() -> None:
    launched = {
        name for name, op in OPDEFS.items() if "cuda" in op._backend_fns and "mxep.quant" in op._init_fn.__module__
    }
    assert launched == {f"mxep::{name}" for name in CASES.keys() | WITHOUT_VECTORS}


@pytest.mark.parametrize("name", CASES)
def test_strided_vectors_give_what_packed_ones_do(name: str) -> None:
    args = CASES[name]()
    vectors = [strided(arg) for arg in CASES[name]()]
    assert sum(x.ndim == 1 and not x.is_contiguous() for x in tree_leaves(vectors) if isinstance(x, Tensor)) >= 1
    assert_same(launch(name, *vectors), launch(name, *args))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"pad_index", "quantize_per_column"}))
def test_indices_of_64_bits_are_refused(name: str) -> None:
    args = [
        arg.long() if isinstance(arg, Tensor) and arg.ndim == 1 and arg.dtype == torch.int32 else arg
        for arg in CASES[name]()
    ]
    with pytest.raises(ValueError, match=r"(index|offs): got torch.int64, want torch.int32"):
        launch(name, *args)


def test_every_other_row_of_an_indexed_tensor() -> None:
    """The index of mx[::2] is strided."""
    x = quantize(values())
    whole = MXTensor.from_qdata_and_scales(x.qdata, x.scale, row_index=index())
    part, dense = whole[::2], whole.materialize()[::2]
    assert not part.row_index.is_contiguous()  # type: ignore[attr-defined]
    for use in (
        lambda mx: mx.materialize(),
        lambda mx: quant.fold(mx),
        lambda mx: quant.requantize(mx),
        lambda mx: quant.gather_swizzled(mx),
        lambda mx: quant.fold_for_wgrad(mx, mx, ends() // 2),
    ):
        assert_same(parts(use(part)), parts(use(dense)))


@pytest.mark.parametrize("name", ["fold", "swiglu_backward"])  # one that returns all, and one that writes
def test_a_gpu_without_e4m3_runs_the_reference_and_says_so_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op, "runs_on", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    op._log_that_it_is_slow.cache_clear()
    args, index = CASES[name](), torch.empty(0, device=DEVICE).get_device()
    with caplog.at_level("WARNING", logger="mxep.quant"):
        got = launch(name, *args)
        launch(name, *CASES[name]())
    assert [record.getMessage() for record in caplog.records] == [
        f"cuda:{index} (an A100, capability 8.0): no E4M3 conversions in Triton before 8.9, "
        "so MX ops run as plain torch"
    ]
    assert_same([x.cpu() for x in got], results(name, OPDEFS[f"mxep::{name}"], *map(on_cpu, CASES[name]())))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_reference_reads_no_row_that_is_not_there_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot know where the valid rows end; the index behind them may hold anything."""
    monkeypatch.setattr(op, "runs_on", lambda *_: False)
    wild, valid = index(), ends() // 2
    wild[int(valid[-1]) :] = 1 << 30
    for name in ("fold", "requantize", "gather_swizzled"):
        args = [wild if getattr(x, "shape", ()) == (R,) else x for x in CASES[name]()]
        launch(name, *[valid if getattr(x, "shape", ()) == (3,) else x for x in args])
    torch.cuda.synchronize()


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), False), ((8, 6), False), ((8, 9), True)])
def test_kernels_run_from_ada_on(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert RUNS_ON.__wrapped__(0, op.E4M3_CAPABILITY) is runs
