"""task=train on one rank: the same model trained once per recipe, from one seed on the same bytes.

    for each recipe:   build -> (load) -> [ batch, (forward, backward) x micro-batches, check, reduce, measure, step,
                         balance ] x steps
                       -> save -> loss on held-out text

A step is taken only if loss and gradient norm are finite and no row was lost, on all ranks. A bad step changes no
weight and no checkpoint. It is skipped, or ends the run (train.skip_bad_steps), on all ranks alike.

Every rank runs this. Rank 0 also shows progress and writes metrics.jsonl and checkpoints into the run folder.

Micro-batches have equally many tokens, so their mean loss and gradients are those of one batch. All of them, and
recomputation by checkpointing, share one quantization of each weight. Routers' auxiliary losses are per micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxep.comms import CapacityExceeded
from mxep.ep import accumulate_in_place, clip_grad_norm_, make_dispatcher, parameter_groups
from mxep.gemm import Recipe, quantize_weights_once

from . import checkpoint
from .checkpoint import TOKENIZER, State, read_state, same_text, step_folder
from .config import ConfigError, to_json
from .data import Text, make_batch, read_text, vocabulary_of
from .launch import Rank
from .mesh import Mesh, all_gather, reduce_gradients
from .metrics import Speed, log, log_backend, progress
from .model import Transformer, linear_recipe, make_dispatch, recipes
from .schema import Config, OptimizerConfig

if TYPE_CHECKING:
    from .transformers.model import CausalLM


@dataclass(frozen=True)
class Run:
    """One finished or stopped training run.

    name: the recipe's. steps: steps done. metrics: a dict for each step, as in metrics.jsonl. stopped: whether a signal
    came, before the last step or during the loss on held-out text. valid_loss: nats per byte on held-out text, None if
    stopped. tflops_count: see `flops.count_name`.
    """

    name: str
    steps: int
    stopped: bool
    metrics: list[dict[str, Any]]
    valid_loss: float | None
    tflops_count: str = "Megatron's count"

    @property
    def taken(self) -> list[dict[str, Any]]:
        """Metrics of the steps that were not skipped."""
        return [row for row in self.metrics if not row.get("skipped")]

    @property
    def seconds(self) -> float:
        """Seconds spent in training steps, including those before a resume."""
        return float(sum(row["seconds"] for row in self.metrics))

    @property
    def ms_a_step(self) -> float | None:
        return 1e3 * statistics.median(row["seconds"] for row in self.metrics) if self.metrics else None


@dataclass(frozen=True)
class Outcome:
    """All runs of a job, and the name and entropy of their text."""

    runs: list[Run]
    text: str
    entropy: float

    @property
    def stopped(self) -> bool:
        return any(run.stopped for run in self.runs)


def train(rank: Rank, config: Config, folder: str, resume: Mapping[str, str]) -> Outcome:
    """Train all runs of ``config`` on this rank. Collective over the default group.

    folder: the run folder. resume: checkpoint folders by run name; a run without one starts at step 0.

    Raises ValueError for a checkpoint or a text that does not fit. For a bad step that may not be skipped, raises
    CapacityExceeded or FloatingPointError, which name the step and the last good checkpoint.
    """
    log_backend(config.backend, rank)
    text = read_text(config.data)
    if rank.rank == 0 and text.tokenizer is not None:
        Path(folder, TOKENIZER).write_text(text.tokenizer)
    mesh = Mesh.make(config.ep, rank.device)
    outcome = Outcome([], text.name, text.entropy)
    for recipe in recipes(config):
        trainer = Trainer(rank, config, recipe, mesh, text, Path(folder))
        if recipe.name in resume:
            trainer.load(Path(resume[recipe.name]))
        outcome.runs.append(trainer.run())
        del trainer
        gc.collect()  # modules and their hooks hold each other, and the next model needs the memory
        if outcome.stopped:
            break
    return outcome


class Trainer:
    """One run on this rank: model, optimizer, steps done and their metrics. Every method is collective.

    folder: the run folder. Checkpoints go to ``folder / recipe.name``.
    """

    def __init__(self, rank: Rank, config: Config, recipe: Recipe, mesh: Mesh, text: Text, folder: Path) -> None:
        self.rank, self.config, self.mesh, self.text = rank, config, mesh, text
        self.folder = Path(all_gather(str(folder.resolve()))[0])  # torchrun's other ranks have a scratch folder
        self.name = recipe.name
        torch.manual_seed(config.seed)
        self.model = make_model(config, recipe, mesh, rank.device)
        if (pretrained := config.model.pretrained) and (name := checkpoint.not_finite(self.model.state_dict())):
            raise ConfigError(f"model.pretrained: {pretrained}: {name} is not finite, wanted finite numbers")
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.speed = Speed(self.model, config, rank.device)
        self.step = 0
        self.bad_steps = 0  # in a row
        self.saved: Path | None = None  # the newest checkpoint of this run
        self.metrics: list[dict[str, Any]] = []

    def load(self, folder: Path) -> None:
        """Go on from the checkpoint ``folder``. Raises ValueError if it does not fit or the text has changed."""
        state = read_state(folder)
        same = same_text(state.config.get("data") or {}, dataclasses.asdict(self.config.data))
        if same and state.digest != self.text.digest:
            digests = f"sha256 {self.text.digest[:12]}, wanted {state.digest[:12]}"
            raise ConfigError(
                f"{self.text.name} is not the text that {folder} was trained on ({digests}): losses would not "
                "continue; name the text with data=..."
            )
        checkpoint.load(folder, model=self.model, optimizer=self.optimizer)
        self.step, self.metrics, self.saved = state.step, state.metrics, folder

    def run(self) -> Run:
        """Run the remaining steps, or until a signal, and save. Without a signal, compute the held-out loss."""
        steps, every = self.config.train.steps, self.config.train.checkpoint_every
        shown = progress(self.name, steps, self.text.entropy, shown=self.rank.rank == 0)
        written = log(self.folder, self.name, self.metrics, self.config, shown=self.rank.rank == 0)
        with deterministic(self.config, self.rank.device), shown as advance, written as write:
            if self.metrics:
                advance(self.step, self.metrics[-1])
            while self.step < steps and not self.rank.stop.agreed():
                self.train_step()
                write(self.metrics[-1])
                advance(self.step, self.metrics[-1])
                if every and self.step % every == 0:
                    self.save()
            if every is not None and self.step and self.saved != step_folder(self.folder / self.name, self.step):
                self.save()
            valid_loss = None if self.step < steps else self.validate()
            return Run(self.name, self.step, valid_loss is None, self.metrics, valid_loss, self.speed.count)

    def train_step(self) -> None:
        """Take an optimizer step, or skip a bad one. Appends a row to ``metrics``."""
        begun = time.perf_counter()
        config = self.config
        loss, rows = self._backward(*self._batch(self.text.train, config.seed, self.step))
        lost = self._lost_rows()  # before collectives, which wait without a limit for a rank that died
        self._reduce()
        norm = clip_grad_norm_(self.model.parameters(), config.optimizer.clip)
        lr = learning_rate(self.step, config.train.steps, config.optimizer)
        memory = self.speed.memory()
        measured: Any = {"overflowed": lost is not None, "memory": memory}
        row, overflowed, memory = measure(self.model, self.mesh, loss, norm, rows, **measured)
        bad = self._bad(row, lost, overflowed)
        if bad is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.bad_steps = 0
        else:
            self.bad_steps += 1
            if self.bad_steps > config.train.skip_bad_steps:
                good = f"the last good checkpoint is {self.saved}" if self.saved else "there is no checkpoint"
                raise type(bad)(f"{bad}; it was not taken, and {good}")
        self.step += 1
        for router in self.model.routers:
            router.update_bias(config.model.balance_rate if bad is None else 0.0)
        speed = self.speed.of(time.perf_counter() - begun, memory)
        if self.text.tokenizer is not None:
            row["token_loss"] = row["loss"]
        row["loss"] /= self.text.bytes_per_token  # nats per byte: comparable with runs on other tokens
        row |= {key: None for key in ("loss", "token_loss", "grad_norm") if not math.isfinite(row.get(key, 0))}
        skipped = None if bad is None else str(bad)
        self.metrics.append({"run": self.name, "step": self.step, **row, "lr": lr, "skipped": skipped, **speed})

    def _backward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run forward and backward. Returns this rank's loss, 0-d, and its row counts, as `backward` does."""
        self.optimizer.zero_grad()
        train = self.config.train
        nothing, several = contextlib.nullcontext(), train.micro_batches > 1
        again = several or train.activation_checkpointing  # else forward and backward each use a weight once
        with quantize_weights_once() if again else nothing, accumulate_in_place() if several else nothing:
            return backward(self.model, inputs, targets, train.micro_batches)

    def _reduce(self) -> None:
        """Make gradients those of the mean loss over all ranks."""
        if not self.config.parallel.fsdp:  # its backward reduces
            reduce_gradients(self.model, self.mesh)

    def _bad(self, row: dict[str, Any], lost: Exception | None, overflowed: bool) -> Exception | None:
        """Return an exception for a bad step, the same on all ranks. overflowed: whether any rank lost rows."""
        step = f"{self.name}, step {self.step + 1}"
        if overflowed:
            return CapacityExceeded(f"{step}: {_messages_of_all_ranks(lost)}")
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            return FloatingPointError(
                f"{step}: the loss is {row['loss']:.4g}, the gradient norm {row['grad_norm']:.4g}"
            )
        return None

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss on held-out text, in nats per byte, on the same batches for every run. None if a signal came."""
        self.model.eval()
        train = self.config.train
        # Seed 0 whatever config.seed is, so that runs of several seeds are comparable.
        losses = []
        for i in range(train.valid_batches):
            if any(all_gather(self.rank.stop.requested)):
                return None
            batch = self._batch(self.text.valid, 0, i)
            losses += [self.model.loss(*one) for one in cut(*batch, train.micro_batches)]
        mean = torch.stack(losses).mean()
        if lost := _messages_of_all_ranks(self._lost_rows()):
            raise CapacityExceeded(f"{self.name}, held-out text: {lost}")
        dist.all_reduce(mean)
        loss = mean.item() / self.mesh.ranks / self.text.bytes_per_token
        if not math.isfinite(loss):
            raise FloatingPointError(f"{self.name}: the loss on held-out text is {loss}")
        return loss

    def _lost_rows(self) -> CapacityExceeded | None:
        """Return the error if rows overflowed in any layer since the last call. Raises other device errors."""
        lost = None
        for moe in {moe.dispatcher: moe for moe in self.model.moes}.values():
            try:
                moe.check()
            except CapacityExceeded as error:
                lost = error
        return lost

    def _batch(self, text: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
        data, mesh, device = self.config.data, self.mesh, self.rank.device
        shape = {"batch": data.batch, "length": data.length, "rank": mesh.rank, "ranks": mesh.ranks}
        inputs, targets = make_batch(text, seed=seed, step=step, **shape)
        return inputs.to(device), targets.to(device)

    def save(self) -> None:
        """Save a checkpoint. Raises FloatingPointError, on all ranks, if a weight or moment is not finite."""
        folder = self.folder / self.name
        state = State(self.name, self.step, to_json(self.config), self.text.digest, self.metrics)
        of: Any = {"model": self.model, "optimizer": self.optimizer, "mesh": self.mesh}
        checkpoint.save(folder, state, tokenizer=self.text.tokenizer, **of)
        self.saved = step_folder(folder, self.step)


def _messages_of_all_ranks(error: Exception | None) -> str:
    """Join the error messages of all ranks that have one. Collective."""
    return "; ".join(dict.fromkeys(each for each in all_gather(error and str(error)) if each))


COUNTS = ("routed", "sent", "computed", "padding", "dropped", "invalid")
"""Keys of `Routing.stats`, in the order of row counts."""
KNOWN_TO_ALL = ("dropped", "invalid")
"""Counts that are already summed over the ranks that share experts."""


def backward(model: Any, inputs: Tensor, targets: Tensor, micro_batches: int) -> tuple[Tensor, Tensor]:
    """Forward and backward of a batch in ``micro_batches`` parts. Gradients accumulate. No host sync.

    Returns the mean loss, 0-d, and row counts (len(COUNTS),) int64.
    """
    device = inputs.device
    loss = torch.zeros((), device=device, dtype=torch.float32)
    rows = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
    for micro_batch in cut(inputs, targets, micro_batches):
        share = model.loss(*micro_batch) / micro_batches
        rows += _rows(model)
        with torch.autograd.set_multithreading_enabled(False):  # backward in another thread costs the host more
            share.backward()
        loss += share.detach()
    return loss, rows


def cut(inputs: Tensor, targets: Tensor, micro_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(b, S) each -> ``micro_batches`` pairs of (b / micro_batches, S)."""
    return zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)


def _rows(model: Any) -> Tensor:
    """Row counts of the last forward, over all layers."""
    stats = [moe.last_routing.stats() for moe in model.moes]
    return torch.stack([torch.stack([one[key] for one in stats]).sum() for key in COUNTS])


def measure(
    model: Any, mesh: Mesh, loss: Tensor, norm: Tensor, rows: Tensor, *, overflowed: bool, memory: int
) -> tuple[dict[str, Any], bool, int]:
    """Return a step's metrics over all ranks and layers, whether rows overflowed on any rank, and the largest `memory`.

    All ranks get the same result, by one all-reduce and one copy to the host.
    """
    counts = rows.double()
    for key in KNOWN_TO_ALL:
        counts[COUNTS.index(key)] /= dist.get_world_size(mesh.ep)
    loads = torch.stack([router.load for router in model.routers])
    means = torch.stack((loss, norm, torch.full_like(norm, overflowed))).double() / mesh.ranks
    memories = torch.zeros(mesh.ranks, dtype=torch.float64, device=loss.device)
    memories[mesh.rank] = memory
    numbers = torch.cat((means, counts, memories))
    vector = torch.cat((numbers, loads.double().flatten()))
    dist.all_reduce(vector)
    mean_loss, mean_norm, lost, *values = vector[: len(numbers)].tolist()
    load = vector[len(numbers) :].view(loads.shape)
    busiest = (load.max(1).values / load.mean(1)).tolist()  # tokens / mean, by layer
    row = {
        "loss": mean_loss,
        **{f"rows_{key}": round(value) for key, value in zip(COUNTS, values)},
        "expert_load": max(busiest),
        "expert_loads": busiest,
        "grad_norm": mean_norm,
    }
    return row, bool(lost), round(max(values[len(counts) :]))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW, without weight decay for norms, biases and the embedding."""
    constant = {p for name, p in model.named_parameters() if p.dim() <= 1 or "embed" in name}
    groups = []
    for group in parameter_groups(model):
        decaying = [p for p in group["params"] if p not in constant]
        rest = [p for p in group["params"] if p in constant]
        groups += [{"params": decaying, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then cosine decay from ``lr`` to ``lr * final``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * share)))


def make_model(config: Config, recipe: Recipe, mesh: Mesh, device: torch.device) -> Transformer | CausalLM:
    """Make the config's model on ``device``, with experts in ``recipe``, spread over ``mesh.ep``."""
    if config.model.transformers is not None:
        from .transformers.model import CausalLM

        return CausalLM(config, recipe, mesh, device)
    dispatch, experts = make_dispatch(config), config.model.experts
    dispatcher = make_dispatcher(dispatch, experts, dim=config.model.dim, group=mesh.ep)
    # Drawn on the CPU, so that one seed is one model on every device.
    how = config.backend, linear_recipe(config, recipe), vocabulary_of(config.data)
    return Transformer(config.model, dispatcher, recipe, *how).to(device)


@contextlib.contextmanager
def deterministic(config: Config, device: torch.device) -> Iterator[None]:
    """Make runs on GPUs bitwise repeatable, as on CPUs. Otherwise attention's backward adds in any order.

    Does nothing for transformers models: some of their ops may have no deterministic version.
    """
    if device.type != "cuda" or config.model.transformers is not None:
        yield
        return
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    memory.fill_uninitialized_memory = False  # filling costs a pass over each new tensor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]
