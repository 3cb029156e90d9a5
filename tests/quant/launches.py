"""Every kernel of mxep.quant as a model would launch it, for `python tests/ahead_of_time.py tests/quant/launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing). A line for
each variant that makes other code: another format, mode, direction. `test_launches.py` wants no spills in any.
T tokens, D model dim, F hidden dim of an expert.
"""

from collections.abc import Callable

import torch

from mxep.quant import SwiGLU
from mxep.quant.kernels import e2m1, fold, groups, quantize, requantize, swiglu

T, D = 8192, 4096
GPT_OSS = SwiGLU(1.702, 7.0, 1.0, interleaved=True).packed
E4M3, E5M2, MODE = torch.float8_e4m3fn, torch.float8_e5m2, "rceil"


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape or (T, D), dtype=dtype)


def mx(block: int = 32, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    return x(dtype=dtype), x(T, D // block, dtype=torch.float8_e8m0fnu)


def index() -> torch.Tensor:
    return x(T, dtype=torch.int32)


def ends(groups: int = 32) -> torch.Tensor:
    return x(groups, dtype=torch.int32)


def slots(d: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales side by side in the rows of a receive buffer, which are multiples of 16 bytes."""
    buffer = torch.empty(T, -(-(d + d // 32) // 16) * 16, dtype=torch.uint8)
    return buffer[:, :d].view(dtype), buffer[:, d : d + d // 32].view(torch.float8_e8m0fnu)


def gate_up(F: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return x(T, 2 * F, dtype=dtype), x(T, dtype=torch.float32), ends()


def swiglu_quantize(
    F: int, block: int, folded: bool, fmt: torch.dtype = E4M3, dtype: torch.dtype = torch.bfloat16, activation=None
):
    return lambda: swiglu.swiglu(*gate_up(F, dtype), fmt, MODE, block, folded, activation)


def swiglu_backward_quantize(
    F: int, block: int, folded: bool, fmt: torch.dtype = E4M3, h: bool = True, activation=None, fp8: bool = False,
    apart: bool = False,
):  # fmt: skip
    """fp8: of gate_up in qdata with one scale a row. apart: of gate_up in two tensors."""
    scale = x(T, 1, dtype=torch.uint8) if fp8 else None
    rest = (x(64, 2 * F, dtype=E4M3 if fp8 else torch.bfloat16), scale) if apart else (None, None)
    how = MODE, block, folded, E4M3 if h else None, activation, scale, *rest
    given = gate_up(F, E4M3) if fp8 else gate_up(F)
    return lambda: swiglu.swiglu_backward(x(T, F), *given, x(T, 2 * F, dtype=fmt), *how)


def swiglu_backward(F: int, h: bool):
    how = None, 0, False, torch.bfloat16 if h else None
    return lambda: swiglu.swiglu_backward(x(T, F), *gate_up(F), x(T, 2 * F), *how)


def in_groups(count: int) -> dict[str, Callable[[], object]]:
    """The kernels that hold a number for every group."""
    return {
        f"pad_index {count} groups": lambda: groups.pad_index(ends(count), T, 32),
        f"gather_swizzled {count} groups": lambda: groups.gather_swizzled(*mx(), index(), ends(count)),
        f"fold_for_wgrad {count} groups": lambda: fold.fold_for_wgrad(*mx(), None, *mx(), None, ends(count), 128),
    }


LAUNCHES = {
    "quantize_rows": lambda: quantize.quantize_rows(x(), E4M3, MODE, 32),
    "quantize_rows fp32": lambda: quantize.quantize_rows(x(dtype=torch.float32), E4M3, MODE, 32),
    "quantize_rows per row": lambda: quantize.quantize_rows(x(), E4M3, MODE, D),
    "quantize_e2m1": lambda: e2m1.quantize_e2m1(x(), MODE, 32),
    "quantize_e2m1 fp32 floor": lambda: e2m1.quantize_e2m1(x(dtype=torch.float32), "floor", 32),
    "quantize_e2m1 14336": lambda: e2m1.quantize_e2m1(x(T, 14336), MODE, 14336),
    "quantize_into_room": lambda: quantize.quantize_into_room(x(), T + 16, E4M3, MODE, 32),
    "quantize_joined_rows": lambda: quantize.quantize_joined_rows(x(T, 4096), x(T, 512), x(T, 512), E4M3, MODE),
    "quantize_joined_rows 14336": lambda: quantize.quantize_joined_rows(x(T, 7168), x(T, 7168), None, E4M3, MODE),
    "dequantize": lambda: requantize.dequantize(*mx(), 1, 32, index(), torch.bfloat16),
    "dequantize E2M1": lambda: requantize.dequantize(
        x(T, D // 2, dtype=torch.float4_e2m1fn_x2), x(T, D // 32, dtype=torch.uint8), 1, 32, None, torch.bfloat16
    ),
    "fold_columns": lambda: fold.fold_columns(*mx(), x(D // 32, dtype=torch.uint8)),
    "fold_columns of rows": lambda: fold.fold_columns(*mx(D), x(D // 32, dtype=torch.uint8)),
    "fold_columns E2M1": lambda: fold.fold_columns(
        x(T, D // 2, dtype=torch.float4_e2m1fn_x2), x(T, D // 32, dtype=torch.uint8), x(D // 32, dtype=torch.uint8)
    ),
    "quantize_2d": lambda: quantize.quantize_2d(x(), E4M3, MODE, 32),
    "quantize_columns": lambda: quantize.quantize_columns(x(), E4M3, MODE, 32),
    "quantize_columns fp32": lambda: quantize.quantize_columns(x(dtype=torch.float32), E4M3, MODE, 32),
    "quantize_columns per column": lambda: quantize.quantize_columns(x(), E4M3, MODE, T),
    **{
        f"quantize_per_row {k}": lambda k=k: quantize.quantize_per_row(x(8, T, k), None, None, E4M3, MODE)  # type: ignore[misc]
        for k in (768, 2048, 4096, 5120, 7168, 8192, 14336)
    },
    "quantize_per_row fp32 E5M2": lambda: quantize.quantize_per_row(
        x(T, 7168, dtype=torch.float32), None, None, E5M2, MODE
    ),
    "quantize_per_row fp32 2048": lambda: quantize.quantize_per_row(
        x(T, 2048, dtype=torch.float32), None, None, E4M3, MODE
    ),
    "quantize_per_row fp32 14336": lambda: quantize.quantize_per_row(
        x(T, 14336, dtype=torch.float32), None, None, E4M3, MODE
    ),
    **{
        f"quantize_per_row {k} of parts": lambda k=k: quantize.quantize_per_row(
            x(8, T, k), x(8, T, k), None, E4M3, MODE
        )  # type: ignore[misc]
        for k in (2048, 7168)
    },
    "quantize_per_column of parts": lambda: quantize.quantize_per_column(
        x(8, T, D), x(8, T, D), None, torch.zeros(8, D), E4M3, MODE
    ),
    "quantize_per_column": lambda: quantize.quantize_per_column(x(), None, None, torch.zeros(D), E4M3, MODE),
    "requantize plain": lambda: requantize.requantize(*mx(), 1, 32, None, None, E4M3, MODE),
    "requantize gathered": lambda: requantize.requantize(*mx(), 1, 32, index(), ends(), E4M3, MODE),
    **{
        f"fold {d}": lambda d=d: fold.fold(*slots(d), index(), ends())  # type: ignore[misc]
        for d in (1408, 2048, 4096, 5120, 7168, 16384)
    },
    **{
        f"fold_e2m1 {d}": lambda d=d: e2m1.fold_e2m1(  # type: ignore[misc]
            x(T, d // 2, dtype=torch.float4_e2m1fn_x2), x(T, d // 32, dtype=torch.float8_e8m0fnu)
        )
        for d in (768, 2048, 2880, 4096, 7168, 16384)
    },
    **{
        f"scale_columns {d}": lambda d=d: fold.fold(*slots(d), index(), ends(), x(32, d, dtype=torch.float32))  # type: ignore[misc]
        for d in (1536, 2880, 4096, 7168)
    },
    "scale_columns E5M2": lambda: fold.fold(*slots(7168, E5M2), index(), ends(), x(32, 7168, dtype=torch.float32)),
    "scale_columns of rows": lambda: fold.fold(*mx(D), None, ends(256), x(256, D, dtype=torch.float32)),
    "fold E5M2": lambda: fold.fold(*slots(7168, E5M2), index(), ends()),
    "fold rows of one scale": lambda: fold.fold(*mx(D), None, ends()),
    "fold odd blocks": lambda: fold.fold(*mx(4), None, None),
    "split_ends": lambda: groups.split_ends(ends(), T),
    "materialize": lambda: groups.materialize(*mx(), index()),
    "pad_rows": lambda: groups.pad_rows(x(), index()),
    "unpad_rows": lambda: groups.unpad_rows(x(), index(), T),
    "gather_swizzled": lambda: groups.gather_swizzled(*mx(), index(), ends()),
    "swizzle_scales": lambda: groups.swizzle_scales(mx()[1], None),
    "fold_for_wgrad": lambda: fold.fold_for_wgrad(*slots(7168), index(), *mx(), None, ends(), 128),
    **{name: launch for count in (1, 32, 256, 512, 1024) for name, launch in in_groups(count).items()},
    "fold_for_wgrad E5M2": lambda: fold.fold_for_wgrad(*mx(dtype=E5M2), index(), *mx(D, E5M2), None, ends(), 1),
    "group_sums": lambda: groups.group_sums(x(), None, 1, ends()),
    "group_sums 32": lambda: groups.group_sums(*mx(), 32, ends()),
    "group_sums per row": lambda: groups.group_sums(*mx(D), D, ends()),
    "swiglu 2048": lambda: swiglu.swiglu(*gate_up(2048), torch.bfloat16, None, 0, False),
    "swiglu_quantize 2048": swiglu_quantize(2048, 32, False),
    "swiglu_quantize 14336 per row": swiglu_quantize(14336, 14336, False),
    "swiglu_quantize 2048 folded fp32": swiglu_quantize(2048, 32, True, dtype=torch.float32),
    **{f"swiglu_quantize {F} folded": swiglu_quantize(F, 32, True) for F in (768, 2048, 8192, 14336)},
    "swiglu_backward 14336": swiglu_backward(14336, False),
    "swiglu_backward and h 14336": swiglu_backward(14336, True),
    **{
        f"swiglu_backward_quantize{' and h' * h} {F}{how}": swiglu_backward_quantize(F, block, "folded" in how, fmt, h)
        for h in (False, True)
        for F, how, block, fmt in (
            (2048, "", 32, E4M3),
            *((F, " per row", 2 * F, E4M3) for F in (2048, 8192, 14336)),
            *((F, " folded", 32, E4M3) for F in (768, 1536, 2048, 2560, 8192, 14336)),
            (2048, " folded E5M2", 32, E5M2),
        )
    },
    **{
        f"swiglu_backward_quantize and h {F}{how} of FP8": swiglu_backward_quantize(F, block, "folded" in how, fp8=True)
        for F, how, block in (
            *((F, " folded", 32) for F in (768, 1536, 2048, 8192, 14336)),
            *((F, " per row", 2 * F) for F in (2048, 8192, 14336)),
        )
    },
    "swiglu_backward_quantize 14336 folded of FP8": swiglu_backward_quantize(14336, 32, True, h=False, fp8=True),
    "swiglu_backward_quantize and h 2880 folded gpt-oss of FP8": swiglu_backward_quantize(
        2880, 32, True, activation=GPT_OSS, fp8=True
    ),
    **{
        f"swiglu_backward_quantize and h {F} folded{' of FP8' * fp8} apart": swiglu_backward_quantize(
            F, 32, True, fp8=fp8, apart=True
        )
        for F, fp8 in ((768, False), (2048, False), (2048, True), (14336, False))
    },
    "swiglu_quantize 2880 folded gpt-oss": swiglu_quantize(2880, 32, True, activation=GPT_OSS),
    **{
        f"swiglu_backward_quantize and h 2880{how} gpt-oss": swiglu_backward_quantize(
            2880, block, how == " folded", activation=GPT_OSS
        )
        for how, block in (("", 32), (" folded", 32), (" per row", 5760))
    },
}
