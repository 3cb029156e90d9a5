"""What folding frozen weights to one scale a row costs, in plain torch on a CPU: docs/lab/quant-kernels.md.

    python integration/benchmarks/folds.py

Weights of several laws, in each format, folded for forward (along K) and for dgrad (along N). "exact" is the share of
rows, or of 32-column blocks, that keep every value. SNR in dB, float64: of the format against the weights, and of GEMMs
with folded weights against GEMMs with the weights that were folded: x (M, K) @ W^T and dy (M, N) @ W, both Gaussian. Of
"dy against W" dy's column n is divided by the norm of W's row n, so that small rows count as much as large ones.

E experts, M tokens of each, N out features, K in features (gpt-oss's 2880 is no multiple of 128).
"""

import math

import torch
from torch import Tensor

from mxep.quant import (
    BlockFP8,
    MXTensor,
    fold_for_dgrad_with_stats,
    fold_with_stats,
    quantize,
    quantize_blocks,
    to_mxfp8,
)

E, M, N, K = 2, 64, 576, 2880
E8M0 = torch.float8_e8m0fnu


def weights() -> dict[str, Tensor]:
    """(E, N, K) fp32, of several laws."""
    gauss, t = torch.randn(E, N, K), torch.distributions.StudentT(3.0)

    def rows(binades: int) -> Tensor:
        return 2 ** (2 * binades * torch.rand(E, N, 1) - binades)

    def blocks(binades: int) -> Tensor:
        return (2 ** (2 * binades * torch.rand(E, 1, K // 32) - binades)).repeat_interleave(32, -1)

    return {
        "Gaussian": gauss,
        "Student's t, 3 degrees": t.sample((E, N, K)),
        "rows x 2^U(-3, 3)": gauss * rows(3),
        "rows x 2^U(-6, 6)": gauss * rows(6),
        "rows x 2^U(-10, 10)": gauss * rows(10),
        "32 columns x 2^U(-6, 6)": gauss * blocks(6),
        "32 columns x 2^U(-10, 10)": gauss * blocks(10),
    }


def formats(w: Tensor) -> dict[str, MXTensor | BlockFP8]:
    """w in each format."""
    return {
        "MXFP4": quantize(w, fmt="E2M1", mode="floor"),
        "MXFP8": quantize(w),
        "FP8 32 x 32 e8m0": quantize_blocks(w, block_size=(32, 32), scale_dtype=E8M0),
        "FP8 128 x 128 e8m0": quantize_blocks(w, scale_dtype=E8M0),
        "FP8 128 x 128 fp32": quantize_blocks(w),
    }


def snr(want: Tensor, got: Tensor) -> str:
    """In dB; "exact" if they are equal."""
    error = float((got.double() - want.double()).square().sum())
    return "exact" if error == 0 else f"{10 * math.log10(float(want.double().square().sum()) / error):.0f}"


def percent(exact: Tensor) -> str:
    """Of True; 100 stands for all alone, 0 for none."""
    share = 100 * float(exact.double().mean())
    return f"{share:.0f}" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f}"


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    x, dy = torch.randn(E, M, K, dtype=torch.float64), torch.randn(E, M, N, dtype=torch.float64)
    print("| weights | format | SNR of the format | forward: exact | SNR | dgrad: exact | SNR | dy against W |")
    print("|---|---|---|---|---|---|---|---|")
    for law, w in weights().items():
        against = dy / w.double().norm(dim=-1).unsqueeze(-2)
        for name, q in formats(w).items():
            values = q.dequantize(torch.float32).double()
            cells = [law, name, snr(w, values)]
            if isinstance(q, BlockFP8) and q.scale_exponents() is None:
                cells += ["not folded", "exact", "not folded", "exact", "exact"]
            else:
                mx = to_mxfp8(q, dtype=torch.float32)
                forward, stats = fold_with_stats(mx)
                folded = forward.dequantize().double()
                cells += [percent(stats.exact), snr(x @ values.mT, x @ folded.mT)]
                dgrad, stats = fold_for_dgrad_with_stats(mx)
                folded = dgrad.dequantize().double()
                cells += [percent(stats.exact), *(snr(d @ values, d @ folded) for d in (dy, against))]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
