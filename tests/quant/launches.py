"""Every kernel of mxep.quant as a model would launch it, for `python tests/ahead_of_time.py tests/quant/launches.py`.

LAUNCHES: name -> a function that calls a launcher on empty tensors (of the meta device: sizes cost nothing). A line for
each variant that makes other code: another format, mode, direction. `test_launches.py` wants no spills in any.
T tokens, D model dim.
"""

import torch

from mxep.quant.kernels import columns, rows

T, D = 8192, 4096
E4M3, E5M2, MODE = torch.float8_e4m3fn, torch.float8_e5m2, "rceil"


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape or (T, D), dtype=dtype)


LAUNCHES = {
    "quantize_rows": lambda: rows.quantize_rows(x(), E4M3, MODE, 32),
    "quantize_rows fp32": lambda: rows.quantize_rows(x(dtype=torch.float32), E4M3, MODE, 32),
    "quantize_rows whole": lambda: rows.quantize_rows(x(), E4M3, MODE, D),
    "quantize_tiles": lambda: rows.quantize_tiles(x(), E4M3, MODE, 32),
    "quantize_columns": lambda: columns.quantize_columns(x(), E4M3, MODE, 32),
    "quantize_both": lambda: columns.quantize_both(x(), E4M3, MODE, 32),
}
