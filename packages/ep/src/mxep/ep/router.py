"""Router picks experts and their weights for each token. Two losses keep the load balanced and the logits small.

    x (T, D) -> logits (T, E) fp32 -> scores (softmax or sigmoid)
             -> choice: scores + bias, best groups kept, top-k -> expert_ids (T, K)
             -> weights: the chosen scores, normalised, scaled  -> weights (T, K)

The bias changes the choice, but never the weights. So balancing by it needs no auxiliary loss and adds no gradient
(Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024; group-limited routing as in DeepSeek-V3). A model may add
auxiliary losses of its layers to its loss:

    load_balancing_loss = E * sum over e of f_e P_e             keeps experts equally busy (Fedus et al., "Switch
                                                                Transformers", 2021)
    router_z_loss = mean over tokens of logsumexp(logits)^2     keeps logits small (Zoph et al., "ST-MoE", 2022)

f_e: expert e's share of the routed tokens, without a gradient. P_e: expert e's mean score, with a gradient. Compute the
loss per layer and average it over layers. If f_e and P_e were summed over layers first, layers that each use a few
different experts would look balanced.

T tokens, D model dim, E experts in all, K experts per token.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import wait_tensor
from torch.nn import functional as F

from mxep.gemm import fp32_linear, top_k
from mxep.gemm.router_ops import scores_of

from .dtensors import checked_group, init_normal_
from .rehearse import rehearse_router


def recomputing() -> bool:
    """True if this thread runs a backward pass. A forward that runs now is then a checkpoint's recomputation.

    While a graph is traced, the result is meaningless.
    """
    return torch._C._current_graph_task_id() != -1


def check_sizes(least: int = 1, **sizes: Any) -> None:
    """Raise ValueError if a size is not a whole number, or less than `least`."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or size < least:
            raise ValueError(f"{name}: got {size!r}, want a whole number, at least {least}")


class Router(nn.Module):
    """Scores tokens against experts and picks the top k.

    Args:
        dim: D.
        num_experts: E.
        top_k: K, at most the number of experts in ``top_groups`` groups.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        normalize: divide the chosen scores by their sum, so that a token's weights sum to 1.
        scale: factor for the weights, applied last.
        num_groups: number of equal groups that experts form. 1: no groups.
        top_groups: number of groups from which a token may pick experts, those with the best scores. A group's score is
            the sum of the scores of its two best experts. None: all groups.
        balance: True to keep a bias per expert that steers the choice towards idle experts, see :meth:`update_bias`.
        keep_logits: True to keep ``last_logits`` (T, E) fp32, differentiable, and ``last_expert_ids`` (T, K) int32
            after each forward, for :func:`load_balancing_loss` and :func:`router_z_loss`. See below.
        dtype: dtype of ``weight``, fp32 or bf16. It cannot change later.

    Parameter ``weight`` (E, D). With ``balance`` also the buffer ``expert_bias`` (E,) fp32, and the attribute ``load``
    (E,) int64. It counts each expert's routed tokens on this rank since the last update, over all micro-batches, but
    not in a checkpoint's recomputation.

    **Kept logits.** Padding has logits of -inf and ids of -1, so no loss counts it. A checkpoint's recomputation does
    not set logits and ids, unless the router is compiled. Logits of a reentrant checkpoint have no gradient.
    torch.compile cannot keep logits if its graph contains a checkpoint. Copies, pickles and state dicts omit them.

    **The dtypes of weight and bias never change.** ``.to(dtype)``, ``.half()`` and ``.double()`` do not cast them.
    Values loaded in another dtype are cast to theirs. Only FSDP2's ``MixedPrecisionPolicy(param_dtype=)`` casts them,
    with a warning: call ``fully_shard(router)`` by itself, without a policy.
    """

    expert_bias: Tensor | None
    load: Tensor | None
    last_logits: Tensor | None
    _rehearsed = False
    last_expert_ids: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int | None = None,
        balance: bool = False,
        keep_logits: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, num_experts=num_experts, top_k=top_k, num_groups=num_groups)
        top_groups = num_groups if top_groups is None else top_groups
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
        if num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise ValueError(
                f"num_groups must divide num_experts={num_experts} and top_groups lie in 1..num_groups, "
                f"got num_groups={num_groups}, top_groups={top_groups}"
            )
        reachable = num_experts // num_groups * top_groups
        if top_k > reachable:
            raise ValueError(f"top_k must lie in 1..{reachable} (the experts a token can reach), got {top_k}")
        self.top_k = top_k
        self.score = score
        self.normalize = normalize
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.keep_logits = keep_logits
        self.last_logits = self.last_expert_ids = None
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self._dtype = dtype
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32) if balance else None
        self.register_buffer("expert_bias", zeros)
        # load is not a buffer, because DistributedDataParallel would overwrite it with rank 0's before each forward.
        self.load = None if zeros is None else zeros.long()
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(x: Tensor) -> Tensor:
            made = fn(x)
            return made if made.dtype == x.dtype else x.to(made.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        self._keep_dtypes()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._keep_dtypes()  # load_state_dict(assign=True) keeps the loaded dtypes

    def _keep_dtypes(self) -> None:
        """Restore the dtypes of weight and bias after other tensors were assigned. Move load to the bias's device."""
        if self.weight.dtype != self._dtype:
            self.weight = nn.Parameter(self.weight.detach().to(self._dtype), requires_grad=self.weight.requires_grad)
        if self.expert_bias is not None:
            if self.expert_bias.dtype != torch.float32:
                self.expert_bias = self.expert_bias.float()
            self._move_load(self.expert_bias.device)

    def _move_load(self, device: torch.device) -> None:
        if self.load is not None and self.load.device != device:
            counted = not self.load.is_meta
            self.load = self.load.to(device) if counted else torch.zeros_like(self.load, device=device)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "last_logits": None, "last_expert_ids": None}

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    def extra_repr(self) -> str:
        """The sizes, and the settings that differ from their defaults."""
        facts: dict[str, object] = {"dim": self.weight.shape[1], "num_experts": self.num_experts, "top_k": self.top_k}
        facts |= {"score": self.score} | ({} if self.normalize else {"normalize": False})
        facts |= {} if self.scale == 1.0 else {"scale": self.scale}
        facts |= {} if self.num_groups == 1 else {"num_groups": self.num_groups, "top_groups": self.top_groups}
        facts |= {} if self.expert_bias is None else {"balance": True}
        facts |= {"keep_logits": True} if self.keep_logits else {}
        return ", ".join(f"{name}={value}" for name, value in facts.items())

    def reset_parameters(self) -> None:
        """Draw a new weight, and set bias and load to zero."""
        init_normal_(self.weight, self.weight.shape[1] ** -0.5)
        if self.expert_bias is not None and self.load is not None:
            self.expert_bias.zero_()
            self.load.zero_()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pick experts and their weights for each token.

        Args:
            x: (T, D).
            mask: (T,) bool, False for padding. Padding has ids of -1, weights and gradients of 0, and is not counted.

        Returns:
            expert_ids: (T, K) int32.
            weights: (T, K) fp32. On CUDA they are differentiable only once, and not by torch.func.
        """
        keeps = self.keep_logits and (torch.compiler.is_compiling() or not recomputing())
        if keeps:
            self.last_logits = self.last_expert_ids = None
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"x must be (T, {self.weight.shape[1]}), got {tuple(x.shape)}")
        if self.weight.dtype != self._dtype and not torch.compiler.is_compiling():
            _warn_of_cast(self.weight.dtype, self._dtype)
        padding = None
        if mask is not None:
            padding = ~checked_mask(mask, x)[:, None]
            x = x.masked_fill(padding, 0.0)
        has_choice = self.expert_bias is not None or self.top_groups < self.num_groups
        if not torch.compiler.is_compiling() and x.is_cuda and not self._rehearsed:
            self._rehearsed = True
            rehearse_router(x, self.weight, self.top_k, self.score, has_choice=has_choice)
        with torch.autocast(x.device.type, enabled=False):  # bf16 logits would choose other experts
            logits = fp32_linear(x, self.weight)
            choice = self._choice(logits.detach()) if has_choice else None
            expert_ids, weights = top_k(logits, self.top_k, self.score, choice=choice)
            if not self.normalize:
                weights = scores_of(logits, self.score).gather(1, expert_ids.long())
        if padding is not None:
            expert_ids, weights = expert_ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
            logits = logits.masked_fill(padding, float("-inf"))
        if self.load is not None and self.training:
            self._move_load(x.device)  # FSDP2 moves parameters and buffers without `_apply`
            _count_load(self.load, expert_ids)
        if keeps:
            self.last_logits, self.last_expert_ids = logits, expert_ids
        return expert_ids, weights if self.scale == 1 else weights * self.scale

    def _choice(self, logits: Tensor) -> Tensor:
        """Values (T, E) for the choice: a token gets the experts with the largest values."""
        scores = scores_of(logits, self.score)
        choice = scores if self.expert_bias is None else scores + self.expert_bias
        if self.top_groups < self.num_groups:
            in_groups = choice.view(-1, self.num_groups, self.num_experts // self.num_groups)
            group_score = in_groups.topk(min(2, in_groups.shape[2]), dim=-1).values.sum(-1)
            largest = logits.view(in_groups.shape).amax(-1)  # decides if groups have equal scores, such as 0
            best = top_k(largest, self.top_groups, choice=group_score)[0].long()
            reachable = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
            choice = in_groups.masked_fill(~reachable[:, :, None], float("-inf")).flatten(1)
        return choice

    @torch.no_grad()
    def update_bias(self, rate: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
        """Move each expert's bias by ``rate`` towards balance, and reset the load. Call it once per optimizer step.

        The load is summed over ``group``, with the router's only collective. None: the default group, or this process
        alone if there is none. Raises RuntimeError if the router was made without ``balance``.
        """
        if self.expert_bias is None or self.load is None:
            raise RuntimeError("this router keeps no bias; build it with balance=True")
        self._keep_dtypes()
        if dist.is_initialized():
            dist.all_reduce(self.load, group=checked_group(group))
        towards_balance = torch.sign(self.load.sum() - self.num_experts * self.load)  # int64
        self.expert_bias.add_(towards_balance.to(self.expert_bias.dtype), alpha=rate)
        self.load.zero_()


def checked_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of x (..., D), reshaped to (T,). Raises ValueError if dtype, shape or device does not fit."""
    fits = mask.shape == x.shape[:-1] or mask.shape == (x.shape[:-1].numel(),)  # `in` cannot compare symbolic sizes
    if mask.dtype != torch.bool or not fits or mask.device != x.device:
        got = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}"
        raise ValueError(f"mask: expected bool {tuple(x.shape[:-1])} on {x.device}, False for padding, got {got}")
    return mask.reshape(-1)


@functools.cache
def _warn_of_cast(got: torch.dtype, own: torch.dtype) -> None:
    """Warn once per process, because all layers would warn the same."""
    warnings.warn(
        f"a router's weight was cast to {got} and routes elsewhere than in {own}: FSDP2's MixedPrecisionPolicy does "
        "that; fully_shard(moe.router) first, without a policy",
        stacklevel=3,
    )


# An op, because `recomputing` must be asked when a graph runs, not when it is traced: a checkpoint reruns the graph.
@torch.library.custom_op("mxep::count_load", mutates_args=("load",))
def _count_load(load: Tensor, expert_ids: Tensor) -> None:
    if not recomputing():
        ids = expert_ids.flatten().long()
        load.scatter_add_(0, ids.clamp_min(0), (ids >= 0).long())


def load_balancing_loss(
    logits: Tensor, expert_ids: Tensor, *, score: str = "softmax", group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the load balancing loss (see the module's docstring). No host sync.

    Args:
        logits: (T, E), differentiable, such as `Router.last_logits`.
        expert_ids: (T, K) int32 or int64. Ids outside 0 .. E-1, and tokens without valid ids, are not counted.
        score: "softmax", or "sigmoid", which is divided by its sum over the E experts.
        group: if given, f_e counts the tokens of all its ranks, with one all-reduce of E counts, which all ranks must
            call. If all ranks have as many tokens, the mean of their losses is then the loss of the whole batch.

    Returns 0-d fp32: 1 at perfect balance, up to E / K if all tokens choose the same experts. Raises ValueError for
    another score, or sizes that do not fit.
    """
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
    if logits.dim() != 2 or expert_ids.dim() != 2 or logits.shape[0] != expert_ids.shape[0]:
        shapes = f"{tuple(logits.shape)} and {tuple(expert_ids.shape)}"
        raise ValueError(f"logits and expert_ids must be (T, E) and (T, K), got {shapes}")
    num_experts = logits.shape[1]
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = expert_ids.clamp(0, num_experts - 1).flatten().long()
    counts = torch.zeros(num_experts, device=logits.device, dtype=torch.float32).scatter_add_(
        0, ids, valid.flatten().float()
    )
    if (group := checked_group(group)) is not None:
        counts = wait_tensor(torch.ops._c10d_functional.all_reduce(counts, "sum", group.group_name))
    routed = valid.any(1, keepdim=True)
    logits = torch.where(routed, logits.float(), 0.0)  # logits of tokens that are not counted may be NaN
    scores = (logits if score == "softmax" else F.logsigmoid(logits)).softmax(-1)
    products = counts * torch.where(routed, scores, 0.0).sum(0)
    return products.sum() * (num_experts / (counts.sum() * routed.sum()).clamp_min(1))


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared logsumexp of logits, 0-d fp32.

    logits: (T, E), differentiable. If all logits of a token are -inf, as for padding, the token is not counted.
    """
    padding = (logits == float("-inf")).all(-1, keepdim=True)
    z = logits.float().masked_fill(padding, 0.0).logsumexp(-1).masked_fill(padding[..., 0], 0.0)
    return z.square().sum() / (~padding).sum().clamp_min(1)
