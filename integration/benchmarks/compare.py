"""task=compare: does a recipe's loss differ from bf16's by more than runs differ anyway?

For each seed, bf16, the recipe, and bf16 nudged train the same model on the same batches and ranks. Losses are in nats
per byte: on held-out text, and in training, over the last LAST steps. The mean over the n seeds of (recipe - bf16) is
reported with three measures of noise:

    seeds             standard deviation of bf16's loss over seeds, which choose weights and batches
    nudges            root mean square of (bf16 nudged - bf16), divided by sqrt(n), as for a mean of n differences
    standard errors   two standard errors of the mean

Few seeds estimate each badly, so read the numbers too. A bad step of any run ends the task without results.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxep.gemm import Recipe
from mxep.integration.config import to_json
from mxep.integration.data import read_text
from mxep.integration.launch import Rank
from mxep.integration.mesh import Mesh, local, part
from mxep.integration.metrics import log_backend
from mxep.integration.model import make_recipe
from mxep.integration.report import Report, Row, Section
from mxep.integration.schema import Config
from mxep.integration.train import Run, Trainer

BASE, NUDGED = "bf16", "bf16 nudged"
NUDGE = 2.0**-9
"""Largest relative change of a weight: half the largest relative spacing of bf16 numbers."""
LAST = 100
"""The training loss is the mean over these last steps."""
LOSSES = {"held-out": "valid_loss", "training": "train_loss"}


Trials = dict[int, dict[str, Run]]
"""Seed -> its runs by name: BASE, the recipe's, and NUDGED."""


@dataclass(frozen=True)
class Outcome:
    """All trials. text: facts about it. stopped: whether a signal ended the last trial, which is left out."""

    text: dict[str, Any]
    trials: Trials
    stopped: bool = False


def report(config: Config, outcome: Outcome) -> Report:
    """The losses of each run, their statistics over seeds, and sentences with the noise as remarks."""
    settings = to_json(config)
    rows, differences = summarize(outcome.trials)
    about = {"backend": config.backend, "ranks": config.ranks, "ep": config.ep, "steps": config.train.steps}
    about |= {"train_loss over last": min(LAST, config.train.steps), "text": outcome.text}
    about |= {section: settings[section] for section in ("model", "data", "recipe", "dispatcher", "optimizer")}
    runs = {"valid_loss": ".4f", "train_loss": ".4f", "checked steps": "d", "ms a step": ".1f", "seconds": ".1f"}
    seeds = {"mean": "+.4f", "deviation": ".4f", "standard error": ".4f"}
    sections = {
        "runs": Section("runs", ("seed", "run"), runs, rows),
        "differences": Section("over seeds", ("loss", "what"), seeds, differences),
    }
    linears = "" if config.recipe.linear is None else f", linears {config.recipe.linear},"
    title = f"mxep compare: {make_recipe(config).name}{linears} beside bf16, losses in nats a byte"
    return Report(title, {}, sections, about=about, remarks=[*map(sentence, differences[::4])])


def compare(rank: Rank, config: Config, folder: str) -> Outcome:
    """Train all trials on this rank, without checkpoints. Collective; metrics.jsonl go to ``folder/seed-N/NAME``.

    Raises what `train` raises.
    """
    log_backend(config.backend, rank)
    text, mesh = read_text(config.data), Mesh.make(config.ep, rank.device)
    size = round((len(text.train) + len(text.valid)) * text.bytes_per_token)
    about = {"bytes": size, "sha256": text.digest, "unigram entropy": text.entropy}
    outcome = Outcome(about, {})
    clean_steps_only = dataclasses.replace(config.train, checkpoint_every=None, skip_bad_steps=0)
    for seed in config.compare.seeds:
        seeded = dataclasses.replace(config, seed=seed, train=clean_steps_only)
        outcome.trials[seed] = {}
        recipe, base = make_recipe(config), Recipe.bf16()
        for name, trained in {BASE: base, recipe.name: recipe, NUDGED: base}.items():
            if rank.rank == 0:
                print(f"seed {seed}, {name}", file=sys.stderr)
            where = Path(folder, f"seed-{seed}", name.replace(" ", "-"))
            where.mkdir(parents=True, exist_ok=True)
            trainer = Trainer(rank, seeded, trained, mesh, text, where)
            if name == NUDGED:
                nudge(trainer.model, seed)
            run = trainer.run()
            del trainer
            gc.collect()  # modules and their hooks hold each other, and the next model needs the memory
            if run.stopped:
                del outcome.trials[seed]
                return dataclasses.replace(outcome, stopped=True)
            outcome.trials[seed][name] = run
    return outcome


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Multiply each weight by its own random number in 1 +- NUDGE, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        relative = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float32) - 1
        local(parameter).mul_((1 + NUDGE * relative[part(parameter)]).to(parameter.device))


def summarize(trials: Trials) -> tuple[list[Row], list[Row]]:
    """Rows of runs, and of losses and differences over seeds: for each of LOSSES, first the recipe's difference."""
    (name,) = next(iter(trials.values())).keys() - {BASE, NUDGED}
    runs: list[Row] = [
        {
            "seed": seed,
            "run": what,
            "valid_loss": run.valid_loss,
            "train_loss": statistics.fmean(row["loss"] for row in run.metrics[-LAST:]),
            "checked steps": len(run.metrics),
            "ms a step": run.ms_a_step,
            "seconds": run.seconds,
        }
        for seed, trial in trials.items()
        for what, run in trial.items()
    ]
    rows: list[Row] = []
    for loss, key in LOSSES.items():
        losses = {what: [row[key] for row in runs if row["run"] == what] for what in (BASE, name, NUDGED)}
        difference, nudged = ([a - b for a, b in zip(losses[what], losses[BASE])] for what in (name, NUDGED))
        noise = {
            "seeds": statistics.stdev(losses[BASE]),
            "nudges": (statistics.fmean(d * d for d in nudged) / len(nudged)) ** 0.5,
            "standard errors": 2 * statistics.stdev(difference) / len(difference) ** 0.5,
        }
        columns = {f"{name} - {BASE}": difference, f"{NUDGED} - {BASE}": nudged, BASE: losses[BASE], name: losses[name]}
        for what, values in columns.items():
            row: Row = {"loss": loss, "what": what, "each": values, "mean": statistics.fmean(values)}
            row["deviation"] = statistics.stdev(values)
            rows.append(row | {"standard error": row["deviation"] / len(values) ** 0.5})
        rows[-4]["noise"] = noise
    return runs, rows


def sentence(row: Row) -> str:
    """The recipe's mean difference and its noise."""
    noise = ", ".join(f"{nats:.4f} by {what}" for what, nats in row["noise"].items())
    return f"{row['loss']} loss: {row['what']} is {row['mean']:+.4f} on average; noise: {noise}"
