"""Two questions of accuracy, answered in plain torch on a CPU: the tables of docs/lab/quant-kernels.md and layer.md.

    python integration/benchmarks/accuracy.py

1. One power-of-two scale for all of an expert's weights, which would serve w and w^T from one read, instead of one a
   row (forward) and one a column (dgrad). Products as Hopper computes them: activations in blocks of 32, folded.
2. gate_up (R, 2F) kept in FP8 for backward, which makes d_gate_up, h and the routing weights' gradient of it; alone,
   and in a layer, beside one in fp32.

SNR in dB: of all elements, and of the worst output channel (row), which small rows of a weight show in.
E experts, M tokens of each, N out features, K in features, R rows, F hidden dim.
"""

import torch
from torch import Tensor

from mxep.ep import run_experts
from mxep.ep.dispatchers import LocalDispatcher
from mxep.gemm import Recipe
from mxep.quant import E4M3, fold, quantize, swiglu_backward_quantize, swiglu_quantize

E, M, N, K = 2, 256, 1024, 1024
R, F = 1024, 1024


def weights() -> dict[str, Tensor]:
    """(E, N, K) fp32, of several laws."""
    gauss, t = torch.randn(E, N, K), torch.distributions.StudentT(3.0)
    outliers = torch.where(torch.rand(E, N, K) < 1e-3, 30.0, 1.0)

    def spread(binades: int) -> Tensor:
        return 2 ** (2 * binades * torch.rand(E, N, 1) - binades)

    return {
        "Gaussian": gauss,
        "Student's t, 3 degrees": t.sample((E, N, K)),
        "Gaussian, 0.1% x 30": gauss * outliers,
        "Gaussian, rows x 2^U(-4, 4)": gauss * spread(4),
        "the same, 0.1% x 30": gauss * spread(4) * outliers,
        "Gaussian, rows x 2^U(-8, 8)": gauss * spread(8),
    }


def per_row(w: Tensor) -> Tensor:
    return quantize(w, block_size=None).dequantize()


def per_expert(w: Tensor) -> Tensor:
    """One scale for all of an expert, RCEIL as a row's."""
    return per_row(w.flatten(1)).view_as(w)


def snr(want: Tensor, got: Tensor, dim: int | None = None) -> float:
    """Of all elements, or the least along `dim`, in dB."""
    want, error = want.double(), (got.double() - want.double()).square()
    ratio = want.square().sum(dim) / error.sum(dim)
    return float(10 * ratio.min().log10())


def of_weights() -> list[str]:
    """Forward contracts K, dgrad N: there rows of w^T are columns of w."""
    lines = ["weights | forward, dB | channel | an expert | channel | dgrad, dB | an expert | flushed, row | an expert"]
    for name, w in weights().items():
        cells, flushed = [name], []
        for of_product in (w, w.mT):
            x = torch.randn(E, M, of_product.shape[-1])
            exact = x.double() @ of_product.double().mT
            rows = fold(quantize(x.bfloat16())).dequantize().float()
            for quantized in (per_row(of_product), per_expert(of_product)):
                got = rows @ quantized.mT
                cells.append(f"{snr(exact, got):.2f}")
                if of_product is w:
                    cells.append(f"{snr(exact, got, (0, 1)):.1f}")
                    flushed.append(f"{(quantized.eq(0) & w.ne(0)).float().mean():.1e}")
        lines.append(" | ".join([*cells, *flushed]))
    return lines


def of_gate_up() -> list[str]:
    """gate_up as a row's product leaves it, beside what quantizing the results costs anyway."""
    lines = ["kept as | d_gate_up, dB | h again, dB | d_weight, dB | bytes an element"]
    gate_up = (torch.randn(R, 2 * F) * 2 ** (2 * torch.rand(R, 1) - 1)).bfloat16()
    d_h, w = torch.randn(R, F).bfloat16(), torch.rand(R)

    def backward(gate_up: Tensor) -> list[Tensor]:
        d_gate_up, d_w, h = swiglu_backward_quantize(d_h.clone(), gate_up, w, folded=True, h_fmt=E4M3)
        assert h is not None
        return [d_gate_up.dequantize(), h.dequantize(), d_w]

    g, u = gate_up.float().chunk(2, 1)
    s, d = g.sigmoid(), d_h.float() * w[:, None]
    exact = [torch.cat([d * u * s * (1 + g * (1 - s)), d * g * s], 1), g * s * u * w[:, None]]
    exact.append((d_h.float() * g * s * u).sum(1))
    plain = backward(gate_up)
    assert torch.equal(plain[1], swiglu_quantize(gate_up, w, folded=True).dequantize()), "what forward multiplied"
    kept = {
        "bf16": (gate_up, 2.0),
        "E4M3, a scale a row": (quantize(gate_up, block_size=None).dequantize(), 1 + 0.5 / F),
    }
    kept["E4M3, blocks of 32"] = quantize(gate_up).dequantize(), 1 + 1 / 32
    for name, (x, nbytes) in kept.items():
        cells = [f"{snr(want, got):.2f}" for want, got in zip(exact, backward(x))]
        lines.append(" | ".join([name, *cells, f"{nbytes:.2f}"]))
    return lines


def of_layer() -> list[str]:
    """Gradients of x, the routing weights and both projections: T 512, D 256, F 256, 4 experts, top-2."""
    ids, dims = torch.randint(4, (512, 2)), (256, 256)
    given = [torch.randn(512, dims[0]), torch.rand(512, 2), torch.randn(4, 2 * dims[1], dims[0]) / dims[0] ** 0.5]
    given.append(torch.randn(4, *dims) / dims[1] ** 0.5)
    d_out = torch.randn(512, dims[0]).bfloat16()

    def gradients(recipe: str, dtype: torch.dtype) -> list[Tensor]:
        x, weights, proj, down = (each.bfloat16().to(dtype).requires_grad_() for each in given)
        weights = weights.detach().float().requires_grad_()
        how = {"dispatcher": LocalDispatcher(4), "recipe": Recipe.named(recipe), "backend": "reference"}
        out, _ = run_experts(x, ids, weights, proj, down, **how)
        return list(torch.autograd.grad(out, (x, weights, proj, down), d_out.to(dtype)))

    exact = gradients("bf16", torch.float32)
    lines = ["mxfp8, gate_up in | dx, dB | d_weights | d_gate_up_proj | d_down_proj"]
    for name, recipe in (("bf16", "mxfp8"), ("E4M3, a scale a row", "mxfp8_gate_up_fp8")):
        got = gradients(recipe, torch.bfloat16)
        lines.append(" | ".join([name, *(f"{snr(a, b):.2f}" for a, b in zip(exact, got))]))
    return lines


if __name__ == "__main__":
    torch.manual_seed(0)
    print(*of_weights(), "", *of_gate_up(), "", *of_layer(), sep="\n")
