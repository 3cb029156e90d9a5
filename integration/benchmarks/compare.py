"""task=compare: does a recipe's loss differ from bf16's by more than runs differ anyway?

    for each seed:   bf16   the recipe   bf16 nudged           the same model and batches, on the same ranks
    first seed:      bf16 again                                is a run bitwise repeatable?

Losses are in nats per byte: on held-out text, and in training, over the last LAST steps. The mean over the n seeds of
(recipe - bf16) is reported with three measures of noise:

    seeds             standard deviation of bf16's loss over seeds, which choose weights and batches
    nudges            root mean square of (bf16 nudged - bf16), divided by sqrt(n), as for a mean of n differences
    standard errors   two standard errors of the mean

"within": the mean is no further from zero than that noise. Few seeds estimate both badly, so read the numbers too.
A bad step of any run ends the task without results.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
from collections.abc import Iterator
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
from mxep.integration.report import Report, Section
from mxep.integration.schema import Config
from mxep.integration.train import Run, Trainer

BASE, NUDGED, AGAIN = "bf16", "bf16 nudged", "bf16 again"
NUDGE = 2.0**-9
"""Largest relative change of a weight: half the largest relative spacing of bf16 numbers."""
LAST = 100
"""The training loss is the mean over these last steps."""
LOSSES = {"held-out": "valid_loss", "training": "train_loss"}


Trials = dict[int, dict[str, Run]]
"""Seed -> its runs by name: BASE, the recipe's, NUDGED, and AGAIN of the first seed."""


@dataclass(frozen=True)
class Outcome:
    """All trials. text: facts about it. stopped: whether a signal ended the last trial, which is left out."""

    text: dict[str, Any]
    trials: Trials
    stopped: bool = False


def report(config: Config, outcome: Outcome) -> Report:
    """The losses of each run, their statistics over seeds, and the verdicts as remarks."""
    found, settings = summarize(outcome.trials), to_json(config)
    about = {"backend": config.backend, "ranks": config.ranks, "ep": config.ep, "steps": config.train.steps}
    about |= {"train_loss over last": min(LAST, config.train.steps), "text": outcome.text, AGAIN: found[AGAIN]}
    about |= {section: settings[section] for section in ("model", "data", "recipe", "dispatcher", "optimizer")}
    runs = {"valid_loss": ".4f", "train_loss": ".4f", "checked steps": "d", "ms a step": ".1f", "seconds": ".1f"}
    seeds = {"mean": "+.4f", "deviation": ".4f", "standard error": ".4f"}
    sections = {
        "runs": Section("runs", ("seed", "run"), runs, found["runs"]),
        "differences": Section("over seeds", ("loss", "what"), seeds, found["differences"]),
    }
    title = f"mxep compare: {_recipe_names(config)} beside bf16, losses in nats a byte"
    return Report(title, {}, sections, about=about, remarks=list(sentences(found)))


def _recipe_names(config: Config) -> str:
    """Names of the recipe and of its linears' recipe."""
    linears = "" if config.recipe.linear is None else f", linears {config.recipe.linear},"
    return make_recipe(config).name + linears


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
        runs = {BASE: base, recipe.name: recipe, NUDGED: base, **({AGAIN: base} if len(outcome.trials) == 1 else {})}
        for name, trained in runs.items():
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


def summarize(trials: Trials) -> dict[str, Any]:
    """Runs, differences with their noise, and whether a run repeats (module docstring)."""
    first = next(iter(trials))
    (name,) = trials[first].keys() - {BASE, NUDGED, AGAIN}
    runs = [
        {"seed": seed, "run": run, **_summarize(made)} for seed, trial in trials.items() for run, made in trial.items()
    ]
    differences = []
    for loss, key in LOSSES.items():
        losses = {run: [row[key] for row in runs if row["run"] == run] for run in (BASE, name, NUDGED)}
        difference, nudged = ([a - b for a, b in zip(losses[run], losses[BASE])] for run in (name, NUDGED))
        spread = _spread(difference)
        noise = {
            "seeds": statistics.stdev(losses[BASE]),
            "nudges": (statistics.fmean(d * d for d in nudged) / len(nudged)) ** 0.5,
            "standard errors": 2 * spread["standard error"],
        }
        verdicts = {key: {"nats": nats, "within": abs(spread["mean"]) <= nats} for key, nats in noise.items()}
        differences += [
            {"loss": loss, "what": f"{name} - {BASE}", **spread, "noise": verdicts},
            {"loss": loss, "what": f"{NUDGED} - {BASE}", **_spread(nudged)},
            {"loss": loss, "what": BASE, **_spread(losses[BASE])},
            {"loss": loss, "what": name, **_spread(losses[name])},
        ]
    repeat = {"seed": first, "differs from step": differs(trials[first][BASE], trials[first][AGAIN])}
    return {"differences": differences, AGAIN: repeat, "runs": runs}


def differs(one: Run, two: Run) -> int | None:
    """The first step at which loss or gradient norm differ in any bit; the last step if only the held-out loss does.

    None if nothing differs.
    """
    for a, b in zip(one.metrics, two.metrics, strict=True):
        if (a["loss"], a["grad_norm"]) != (b["loss"], b["grad_norm"]):
            return int(a["step"])
    return None if one.valid_loss == two.valid_loss else one.steps


def sentences(report: dict[str, Any]) -> Iterator[str]:
    """Each verdict with its numbers, and whether a run repeats."""
    for row in report["differences"]:
        for noise, verdict in row.get("noise", {}).items():
            inside = "within" if verdict["within"] else "not within"
            measure = f"{verdict['nats']:.4f}, the noise of {noise}"
            yield f"{row['loss']} loss: {row['what']} is {row['mean']:+.4f} on average, {inside} {measure}"
    step, seed = report[AGAIN]["differs from step"], report[AGAIN]["seed"]
    yield f"{AGAIN}, seed {seed}: " + ("the same to the last bit" if step is None else f"differs from step {step} on")


def _summarize(run: Run) -> dict[str, Any]:
    return {
        "valid_loss": run.valid_loss,
        "train_loss": statistics.fmean(row["loss"] for row in run.metrics[-LAST:]),
        "checked steps": len(run.metrics),
        "ms a step": run.ms_a_step,
        "seconds": run.seconds,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values)
    error = deviation / len(values) ** 0.5
    return {"each": values, "mean": statistics.fmean(values), "deviation": deviation, "standard error": error}
