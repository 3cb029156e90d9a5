"""Text as bytes: where it comes from, what is held out, and which bytes make a step's batch.

    files, sorted -> one run of bytes -> every 16th chunk held out for validation -> windows of S + 1 bytes

A batch is a function of (seed, step) and a rank takes its share of it, so a run that stops and resumes, or runs on
another number of ranks, sees the same bytes.

B sequences a step over all ranks, b = B / ranks of them here, S bytes a sequence.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .files import CHUNK, HELD_OUT, least_bytes, read
from .schema import DataConfig

VOCABULARY = 256


@dataclass(frozen=True)
class Text:
    """A text cut in two.

    name: where it comes from. train, valid: uint8 (N,), (M,). digest: sha256 of all of it, to notice that a resumed run
    has another text. entropy: of single bytes, in nats a byte: the loss of a model that knows byte frequencies only.
    """

    name: str
    train: Tensor
    valid: Tensor
    digest: str
    entropy: float


def read_text(config: DataConfig) -> Text:
    """The text that ``config`` names. Raises ValueError if it is too short."""
    name, raw = read(config)
    if len(raw) < (least := least_bytes(config.length)):
        raise ValueError(f"{name}: got {len(raw)} bytes, wanted at least {least} for data.length={config.length}")
    size = min(CHUNK, len(raw) // HELD_OUT)
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    chunks = text.split(size)
    held_out = chunks[HELD_OUT - 1 :: HELD_OUT]
    kept = [chunk for i, chunk in enumerate(chunks) if i % HELD_OUT != HELD_OUT - 1]
    share = torch.bincount(text.int(), minlength=VOCABULARY).double() / len(text)
    entropy = -torch.special.xlogy(share, share).sum().item()
    return Text(name, torch.cat(kept), torch.cat(held_out), hashlib.sha256(raw).hexdigest(), entropy)


def make_batch(
    text: Tensor, *, seed: int, step: int, batch: int, length: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """Rank ``rank``'s part of batch ``step``: inputs and targets, int64 (b, S), the targets one byte further."""
    # torch's CPU generator takes 32 bits of a seed and drops the rest: mix both numbers into these.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
    here = starts.view(ranks, -1)[rank]
    window = text[here[:, None] + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]
