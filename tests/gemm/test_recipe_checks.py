"""What grouped_mm refuses, and that it says got, wanted and the way out."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import problem
from mxep.gemm import BACKENDS, grouped_mm
from mxep.gemm.backends import select
from mxep.quant import quantize

CPU = torch.device("cpu")


def refuse(match: str, **changes: Any) -> None:
    p = problem()
    given = {"a": p.a, "w": p.w, "offs": p.offs, "recipe": "mxfp8"} | changes
    with pytest.raises(ValueError, match=match):
        grouped_mm(**given)


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_shapes() -> None:
    refuse(r"got a \(128,\), w \(4, 96, 128\), want a \(M, K\) and w \(G, N, K\)", a=problem().a[0])
    refuse(r"got a \(320, 64\), w \(4, 96, 128\)", a=problem().a[:, :64])
    refuse(r"w: got shape \(0, 96, 128\), want .*at least one group", w=problem().w[:0], offs=ends())
    refuse(r"bias: got torch.float32 \(96,\), want floating point \(G, N\) = \(4, 96\)", bias=torch.zeros(96))


def test_dtypes() -> None:
    p = problem()
    refuse(r"a: got torch.float8_e4m3fn, .*from_qdata_and_scales", a=quantize(p.a).qdata)
    mx = quantize(p.a)
    refuse(r"a: got a tuple, want a tensor: MXTensor.from_qdata_and_scales\(qdata, scales\)", a=(mx.qdata, mx.scale))
    refuse(r"w: got a tuple, want a tensor", w=(p.w, p.w))
    refuse(r"a: got torch.float64, want one of", a=p.a.double())
    refuse(r"a: got torch.float16, want one of", a=p.a.half(), recipe="bf16")
    refuse(r"w: got torch.int8, .*unquantized", w=p.w.to(torch.int8))
    refuse(r"w: got MXTensor.*the recipe quantizes it", w=quantize(p.w))
    refuse(r"out_dtype: got torch.float16, want one of", out_dtype=torch.float16)
    refuse(r"bias: got torch.int64", bias=torch.zeros(4, 96, dtype=torch.long))
    refuse(r"offs: got torch.int64 \(4,\), want torch.int32.*cumsum", offs=p.offs.long())


def test_blocks_that_do_not_fit_the_recipe() -> None:
    a = problem().a
    refuse(r"a: got MXTensor.*axis=-2.*want axis -1.*each 32 elements along K.*dequantize", a=quantize(a, axis=-2))
    refuse(r"a: got MXTensor.*block_size=128.*want axis -1", a=quantize(a, block_size=None))
    refuse(r"a: got MXTensor.*one scale for each row for recipe fp8", a=quantize(a), recipe="fp8")
    refuse(r"a: got MXTensor.*want a plain tensor for recipe bf16: call .dequantize", a=quantize(a), recipe="bf16")


def test_alignment() -> None:
    p = problem()
    refuse(r"K: got 100, want a multiple of 32 for recipe mxfp8", a=p.a[:, :100], w=p.w[..., :100])
    refuse(r"N: got 90, want a multiple of 32 for recipe mxfp8", w=p.w[:, :90])
    refuse(r"N: got 90, want a multiple of 16 for recipe fp8", w=p.w[:, :90], recipe="fp8")
    refuse(r"M: got 310 rows, want a multiple of 32 for recipe mxfp8: pad the groups", a=p.a[:310])
    refuse(r"dequant.*N=90, K=128, want multiples of 8", w=p.w[:, :90], recipe="bf16", backend="dequant")
    grouped_mm(p.a[:310, :101], p.w[:, :90, :101], p.offs, recipe="bf16", backend="reference")


def test_group_ends() -> None:
    refuse(r"offs: got torch.int32 \(3,\), want torch.int32 \(G,\) = \(4,\)", offs=ends(32, 64, 96))
    refuse(r"offs: got \[64, 32, 96, 128\], want ascending", offs=ends(64, 32, 96, 128))
    refuse(r"offs: got \[-32, 32, 96, 128\], want ascending ends from 0", offs=ends(-32, 32, 96, 128))
    refuse(r"offs: got \[32, 64, 96, 352\], past the 320 rows", offs=ends(32, 64, 96, 352))
    refuse(r"got \[32, 48, 96, 128\], want multiples of 32 .*pad_groups", offs=ends(32, 48, 96, 128))
    refuse(r"got \[8, 48, 96, 128\], want multiples of 16", offs=ends(8, 48, 96, 128), recipe="fp8")


def test_devices() -> None:
    p = problem()
    refuse("w: got device meta, want cpu, where a is", w=p.w.to("meta"))
    refuse("offs: got device meta", offs=p.offs.to("meta"))
    refuse("bias: got device meta", bias=torch.zeros(4, 96, device="meta"))


def test_names() -> None:
    refuse("recipe: got 'mxfp4', want bf16, fp8, mxfp8", recipe="mxfp4")
    refuse("backend: got 'hoper', want auto, reference, dequant", backend="hoper")


def test_a_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"'dequant' cannot run on meta: .* cpu and cuda.*use backend 'reference'"):
        select("dequant", torch.device("meta"))


def test_auto_says_once_what_it_picked(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("_best", "_log_choice"):
        select.__globals__[name].cache_clear()
    with caplog.at_level("INFO", logger="mxep.gemm"):
        assert select("auto", CPU).name == "reference"
        select("auto", CPU)
    assert [record.getMessage() for record in caplog.records] == ["backend auto: reference on cpu"]


@pytest.mark.parametrize(
    ("capability", "hip", "wanted", "said"),
    [
        ((9, 0), None, "hopper", "backend auto: hopper on cuda"),
        ((9, 0), "6.4", "dequant", "not hopper: got an AMD GPU"),
        ((10, 0), None, "dequant", r"not hopper: got compute capability (10, 0)"),
        ((8, 9), None, "dequant", r"not hopper: got compute capability (8, 9)"),
        ((8, 0), None, "dequant", r"not hopper: got compute capability (8, 0)"),
        ((7, 0), None, "reference", "slow: it waits for the host; not hopper: .*; not dequant: .* 8.0 or newer"),
    ],
)
def test_auto_always_ends_at_a_backend_that_runs_and_says_why(
    capability: tuple[int, int],
    hip: str | None,
    wanted: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    for name in ("_best", "_log_choice"):
        select.__globals__[name].cache_clear()
    device = torch.device("cuda")
    with caplog.at_level("INFO", logger="mxep.gemm"):
        assert select("auto", device).unsupported_reason(device) is None
        assert select("auto", device).name == wanted
    select.__globals__["_best"].cache_clear()
    (record,) = caplog.records
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), record.getMessage())
    assert (record.levelname == "WARNING") == (wanted == "reference")


def test_no_error_of_a_backend_names_one_that_cannot_run_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    device = torch.device("cuda")
    for backend in BACKENDS.values():
        if (reason := backend.unsupported_reason(device)) is not None:
            for cure in re.findall(r"'(\w+)'", reason.split("use backend")[1]):
                assert select(cure, device).unsupported_reason(device) is None, reason
