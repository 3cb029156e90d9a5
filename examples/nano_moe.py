"""The layer in one file: a mixture of experts in MXFP8, forward and backward, in plain torch.

mxep is this layer made fast: kernels instead of loops, experts spread over GPUs, no device-to-host sync. The arithmetic
is the same: output and gradients equal those of `mxep.ep.MoE` on a CPU bit for bit (tests/examples/test_nano_moe.py).
Read it first. `python examples/nano_moe.py` trains a toy problem and prints SNRs, in a few seconds on a CPU.

Why MX blocks. FP8 tensor cores are twice as fast as bf16 ones, and FP8 halves the bytes on the wire and in memory. But
E4M3 has 3 mantissa bits and spans only 2^-9 to 448, so elements need scales. With one scale a tensor, one outlier
pushes everything else towards zero. MXFP8 gives every 32 elements of a row a scale of their own: a power of two, so
that dividing by it loses nothing. All error is the rounding to E4M3.

Along which axis. A GEMM sums over one axis, and block scales have to lie along that axis:

    forward   y  = x w^T     sums over K        x is blocked along its rows, w along K
    dgrad     dx = dy w      sums over N        dy is blocked along its rows, w along N
    wgrad     dw = dy^T x    sums over tokens   both should be blocked along tokens

Tokens are quantized once, along their rows, before they travel. Weights are quantized twice. wgrad is the problem.

Why folding. Blackwell's tensor cores multiply MX blocks. Hopper's do not: there, an FP8 GEMM has one scale a row,
applied after the sum. Folding gives all blocks of a row the row's largest scale and shifts the elements instead: if a
block's scale is 2^d smaller, its elements are multiplied by 2^-d, so d comes off their exponents. The shift is exact
for elements within 2^13 of their row's largest. Smaller ones are rounded.
Folding also solves wgrad. There, token m has the scale s_dy(m) * s_x(m) inside the sum. The largest such scale moves in
front of the sum. Each token shifts the difference into its elements, half into dy, half into x. No token is quantized a
second time. `folded=True` computes this, as mxep does on Hopper. `folded=False` multiplies MX blocks as they are and
quantizes both operands of wgrad again, along tokens, as mxep does on a CPU.

    forward                                          backward
    x (T, D) bf16                                    d_out (T, D) bf16
      quantize     to MXFP8                            quantize     to MXFP8
      dispatch     tokens to their experts' rows       dispatch     by the same plan
    rows (R, D) MXFP8                                d_y (R, D) MXFP8
      grouped_mm   with gate_up_proj                   dgrad        with down_proj; wgrad -> d_down_proj
    gate_up (R, 2F) bf16                             d_h (R, F) bf16
      SwiGLU       times routing weight, quantize      SwiGLU'      quantize; sums of rows -> d_weights
    h (R, F) MXFP8                                   d_gate_up (R, 2F) MXFP8
      grouped_mm   with down_proj                      dgrad        with gate_up_proj; wgrad -> d_gate_up_proj
    y (R, D) bf16                                    d_rows (R, D) bf16
      combine      sum each token's rows               combine      sum each token's rows
    out (T, D) bf16                                  dx (T, D) bf16

The backward of combine is a dispatch, that of dispatch a combine. The routing weight multiplies inside SwiGLU, because
the down-projection is linear. So combine is a plain sum, and its backward sends one unscaled copy.
On the wire: nothing here, as one process has all experts. Between GPUs, dispatch sends a token once to each rank that
has experts for it, in 33/32 D bytes. Combine returns one bf16 sum from each of these ranks. Backward does the same.
Saved for backward: tokens in MXFP8, gate_up in bf16, routing, weights. Dispatch and SwiGLU make rows and h again.
Left out: several ranks, capacities, other recipes, fp32 tokens, biases, clamped SwiGLU, shared experts, load balancing.

T tokens, K experts a token, D model dim, F hidden dim, E experts, R rows: copies of tokens, sorted by expert, padded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 32  # elements that share a scale. Each expert's rows are padded to a multiple: wgrad has blocks along them.
STEP = 128  # tokens that Hopper's wgrad kernel multiplies at a time


# ---- MXFP8: quantize, dequantize, fold -------------------------------------------------------------------------------
class MX(NamedTuple):
    """qdata: (..., D) float8_e4m3fn. scale: (..., D / block) uint8: byte b means 2^(b - 127), and 255 means NaN."""

    qdata: Tensor
    scale: Tensor

    def rows(self, index: Tensor) -> "MX":
        return MX(pick(self.qdata.view(torch.uint8), index).view(torch.float8_e4m3fn), pick(self.scale, index))

    def times(self, scale: Tensor) -> Tensor:
        """qdata * 2^(scale - 127) in fp32, exactly, for any scale of this tensor's blocks."""
        num_blocks = scale.shape[-1]
        blocks = self.qdata.float().unflatten(-1, (num_blocks, self.qdata.shape[-1] // num_blocks))
        return (blocks * scale.view(torch.float8_e8m0fnu).float()[..., None]).flatten(-2)

    def dequantize(self) -> Tensor:
        return self.times(self.scale)

    def shift(self, d: Tensor) -> Tensor:
        """qdata * 2^-d, rounded to nearest even. From d = 19 on, every element becomes 0."""
        return self.times(127 - d.clamp(max=19).to(torch.uint8)).to(torch.float8_e4m3fn)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x. Index -1 gives a row of zeros."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[index]


def quantize(x: Tensor, block: int = BLOCK) -> MX:
    """x (..., D) bf16 or fp32. The scale is the smallest power of two that keeps all elements within 448 (RCEIL, as
    Blackwell does). Its byte is the exponent field of amax / 448, rounded up: fp32 has the same exponent bias."""
    blocks = x.float().unflatten(-1, (x.shape[-1] // block, block))
    amax = blocks.abs().amax(-1)
    bits = (amax * (1 / 448)).view(torch.int32)
    scale = torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)  # 0x400000 is 2^-127, the smallest scale
    scale = torch.where(amax.isfinite(), scale, 255).to(torch.uint8)
    qdata = blocks * (254 - scale).view(torch.float8_e8m0fnu).float()[..., None]  # 254 - 255 is 255: NaN stays NaN
    return MX(qdata.to(torch.float8_e4m3fn).flatten(-2), scale)


def fold(mx: MX) -> MX:
    """`mx` with one scale a row. Example: blocks with scales 2^-3 and 2^0 get 2^0, and d is 3 and 0."""
    row_scale = mx.scale.amax(-1, keepdim=True)  # a block of zeros has scale byte 0 and does not count
    return MX(mx.shift(row_scale - mx.scale), row_scale)


def fold_for_wgrad(dy: MX, x: MX) -> tuple[Tensor, Tensor, int]:
    """dy (m, N), x (m, K): m tokens of one expert -> dy_t (N, m'), x_t (K, m') and e, where dw = 2^e * dy_t @ x_t^T.
    m' is m rounded up to STEP: zero tokens add nothing, but they decide how a CPU's GEMM splits its sum."""
    dy_scale, x_scale = (mx.scale.amax(-1, keepdim=True).int() for mx in (dy, x))
    token_scale = dy_scale + x_scale
    d = token_scale.max() - token_scale
    dy_q = dy.shift(d - d // 2 + dy_scale - dy.scale).float().masked_fill(dy_scale == 255, torch.nan)
    x_q = x.shift(d // 2 + x_scale - x.scale).float().masked_fill(x_scale == 255, torch.nan)
    dy_t, x_t = (F.pad(q.mT, (0, -len(q) % STEP)) for q in (dy_q, x_q))
    return dy_t, x_t, int(token_scale.max()) - 2 * 127


# ---- Grouped GEMMs by reference: expert by expert, exact products, sums in fp32 --------------------------------------
def grouped_mm(a: MX, w: Tensor, groups: tuple[Tensor, ...], folded: bool) -> Tensor:
    """a (R, K), w (E, N, K) -> (R, N) bf16: a[rows] @ w[e]^T. This is the forward, and dgrad with w transposed."""
    a_values = (fold(a) if folded else a).dequantize()
    w_values = quantize(w, w.shape[-1] if folded else BLOCK).dequantize()  # folded: one scale a row, rounded once
    return torch.cat([a_values[rows] @ w_values[e].mT for e, rows in enumerate(groups)]).bfloat16()


def grouped_wgrad(dy: MX, x: MX, groups: tuple[Tensor, ...], folded: bool) -> Tensor:
    """dy (R, N), x (R, K) -> (E, N, K) bf16: dy[rows]^T @ x[rows], zeros for an expert without rows."""
    dw = torch.zeros(len(groups), dy.qdata.shape[1], x.qdata.shape[1], dtype=torch.float32, device=dy.scale.device)
    for e, rows in enumerate(groups):
        if folded and len(rows):
            dy_t, x_t, exponent = fold_for_wgrad(dy.rows(rows), x.rows(rows))  # 2^exponent may lie outside of fp32
            dw[e] = dy_t @ x_t.mT * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
        elif len(rows):
            dy_t, x_t = (quantize(mx.rows(rows).dequantize().mT).dequantize() for mx in (dy, x))
            dw[e] = dy_t @ x_t.mT
    return dw.bfloat16()


# ---- SwiGLU with the routing weight inside: h = silu(gate) * up * weight, in fp32 ------------------------------------
def sigmoid_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x), sigmoid(-x)). exp(-x) is 2^n * p / q, with n an integer and p / q a rational approximation. Every
    device rounds these operations alike. torch.sigmoid differs in last bits, and one can change a quantized byte."""
    t = x.clamp(-86.0, 86.0) * (-0.25 / 0.6931471805599453)  # -log2(e) / 4 * x
    u = t + 1.5 * 2.0**21  # t rounded to quarters: the last bits of u are n
    f = t - (u - 1.5 * 2.0**21)
    even, odd = f * f + 1.5649444, f * 2.1694605
    p, q = even + odd, even - odd
    p = (p.view(torch.int32) + (u.view(torch.int32) << 23)).view(torch.float32)
    r = (0x7EF32000 - (p + q).view(torch.int32)).view(torch.float32)  # 1 / (p + q) within 5%
    t = (p + q) * r
    r = r * (3.0 - t * (3.0 - t))  # two steps of Newton's method
    r = r * (2.0 - (p + q) * r)
    return q * r, p * r


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last axis in a fixed order. torch.sum's order depends on the device."""
    x = F.pad(x, (0, max(8, 1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))  # to a power of two
    for _ in range(3):  # sums of 8 neighbors
        x = x[..., 0::2] + x[..., 1::2]
    while (half := x.shape[-1] // 2) > 0:  # then the second half onto the first
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def swiglu(gate_up: Tensor, row_weight: Tensor) -> Tensor:
    """gate_up (R, 2F) bf16, row_weight (R,) fp32 -> h (R, F) fp32. It is quantized with no bf16 in between."""
    gate, up = gate_up.float().chunk(2, -1)
    return gate.clamp(min=-86.0) * sigmoid_pair(gate)[0] * up * row_weight[:, None]


def swiglu_backward(d_h: Tensor, gate_up: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor]:
    """d_h (R, F) bf16 -> d_gate_up (R, 2F), d_row_weight (R,), both fp32."""
    d_h, (gate, up) = d_h.float(), gate_up.float().chunk(2, -1)
    s, one_minus_s = sigmoid_pair(gate)
    silu = gate.clamp(min=-86.0) * s
    slope = (gate.clamp(-86.0, 86.0) * one_minus_s + 1.0) * s
    d = d_h * row_weight[:, None]
    return torch.cat((d * up * slope, d * silu), -1), tree_sum(d_h * (silu * up))


# ---- Routing: rows and their tokens ----------------------------------------------------------------------------------
class Plan(NamedTuple):
    """A pair is an entry of (T, K). row_pair, row_token: (R,) each row's pair and token, -1 for padding.
    pair_row: (T, K) each pair's row, -1 if not routed. groups: each expert's rows, in token order."""

    row_pair: Tensor
    row_token: Tensor
    pair_row: Tensor
    groups: tuple[Tensor, ...]


def make_plan(expert_ids: Tensor, num_experts: int) -> Plan:
    """expert_ids: (T, K), -1 for "not routed". mxep plans on the GPU, without a device-to-host sync."""
    pairs = [torch.where(expert_ids.flatten() == e)[0] for e in range(num_experts)]
    pairs = [F.pad(pair, (0, -len(pair) % BLOCK), value=-1) for pair in pairs]
    row_pair = torch.cat(pairs)
    rows = torch.arange(len(row_pair), device=row_pair.device)
    pair_row = row_pair.new_full((expert_ids.numel() + 1,), -1)
    pair_row[row_pair] = rows  # padding writes to the last entry
    row_token, groups = row_pair // expert_ids.shape[1], rows.split([*map(len, pairs)])
    return Plan(row_pair, row_token, pair_row[:-1].view_as(expert_ids), groups)


def combine(rows: Tensor, plan: Plan) -> Tensor:
    """rows (R, D) bf16 -> (T, D) bf16: each token's rows, summed in fp32 in the order of its experts, rounded once."""
    return sum(pick(rows, row).float() for row in plan.pair_row.unbind(1)).bfloat16()


# ---- The layer: the figure above, line by line -----------------------------------------------------------------------
class Experts(torch.autograd.Function):
    """w13: gate_up_proj (E, 2F, D), gate first. w2: down_proj (E, D, F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, folded: bool) -> Tensor:
        plan = make_plan(ids, len(w2))
        tokens = quantize(x)
        rows = tokens.rows(plan.row_token)  # dispatch
        gate_up = grouped_mm(rows, w13, plan.groups, folded)
        h = quantize(swiglu(gate_up, pick(weights.flatten(), plan.row_pair)))
        y = grouped_mm(h, w2, plan.groups, folded)
        ctx.save_for_backward(*tokens, gate_up, weights, w13, w2)
        ctx.plan, ctx.folded = plan, folded
        return combine(y, plan)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *tokens, gate_up, weights, w13, w2 = ctx.saved_tensors
        plan, folded = ctx.plan, ctx.folded
        row_weight = pick(weights.flatten(), plan.row_pair)
        d_y = quantize(d_out).rows(plan.row_token)  # dispatch
        d_h = grouped_mm(d_y, w2.mT, plan.groups, folded)
        d_gate_up_fp32, d_row_weight = swiglu_backward(d_h, gate_up, row_weight)
        h, d_gate_up = quantize(swiglu(gate_up, row_weight)), quantize(d_gate_up_fp32)
        if folded:  # wgrad shifts them once more. mxep's SwiGLU kernels also fold first
            h, d_gate_up = fold(h), fold(d_gate_up)
        d_w2 = grouped_wgrad(d_y, h, plan.groups, folded)
        d_rows = grouped_mm(d_gate_up, w13.mT, plan.groups, folded)
        d_w13 = grouped_wgrad(d_gate_up, MX(*tokens).rows(plan.row_token), plan.groups, folded)
        return combine(d_rows, plan), pick(d_row_weight, plan.pair_row), d_w13, d_w2, None, None


class NanoMoE(nn.Module):
    """x (T, D) bf16 -> (T, D) bf16. D and F are multiples of 32. Each token goes to the K experts it scores highest."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int, *, folded: bool = True) -> None:
        super().__init__()
        self.top_k, self.folded = top_k, folded
        self.router = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)
        self.gate_up_proj = nn.Parameter((torch.randn(num_experts, 2 * hidden_dim, dim) * dim**-0.5).bfloat16())
        self.down_proj = nn.Parameter((torch.randn(num_experts, dim, hidden_dim) * hidden_dim**-0.5).bfloat16())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """expert_ids (T, K), and weights (T, K) fp32 that sum to 1. In fp32; autograd makes its backward."""
        logits = x.float() @ self.router.t()
        expert_ids = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        return expert_ids, logits.gather(1, expert_ids).softmax(-1)

    def forward(self, x: Tensor, routing: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """routing: expert_ids (T, K), -1 for "not routed", and weights (T, K) fp32, instead of the router's."""
        expert_ids, weights = self.route(x) if routing is None else routing
        return Experts.apply(x, weights, self.gate_up_proj, self.down_proj, expert_ids, self.folded)


# ---- A toy problem, and how exact the layer is -----------------------------------------------------------------------
def dense(moe: NanoMoE, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The layer without quantization: all experts see all tokens, most with weight 0. Autograd makes its backward."""
    weights = x.new_zeros(len(x), len(moe.router), dtype=torch.float32).scatter(1, *moe.route(x))
    gate, up = torch.einsum("td,efd->etf", x.to(dtype), moe.gate_up_proj.to(dtype)).chunk(2, -1)
    return torch.einsum("etf,edf->td", F.silu(gate) * up * weights.t()[..., None].to(dtype), moe.down_proj.to(dtype))


def main() -> None:
    torch.manual_seed(0)
    moe = NanoMoE(dim=64, hidden_dim=64, num_experts=8, top_k=2)
    for step in range(31):
        x = torch.randn(256, 64).bfloat16()
        loss = (moe(x) - x.roll(1, -1)).float().square().mean()
        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")
        for weight, grad in zip(moe.parameters(), torch.autograd.grad(loss, [*moe.parameters()])):
            weight.data -= 0.01 * grad.sign()  # Adam without memory

    inputs, d_out = {"x": x.requires_grad_(), **dict(moe.named_parameters())}, torch.randn(x.shape)
    outs = {"fp32": dense(moe, x, torch.float32), "bf16": dense(moe, x, torch.bfloat16)}
    for name, moe.folded in (("MXFP8", False), ("folded", True)):
        outs[name] = moe(x)
    found = [(out, *torch.autograd.grad(out, [*inputs.values()], d_out.to(out))) for out in outs.values()]
    print("\nSNR against fp32, in dB".ljust(31), *(f"{name:>8s}" for name in [*outs][1:]))
    for name, exact, *others in zip(("output", *(f"gradient of {name}" for name in inputs)), *found):
        snr = [20 * (exact.float().norm() / (exact.float() - other.float()).norm()).log10() for other in others]
        print(name.ljust(30), *(f"{each:8.1f}" for each in snr))


if __name__ == "__main__":
    main()
