"""Text as bytes or tokens: sources, held-out chunks, and the batch of a step.

    files, sorted -> one run of bytes -> every 16th chunk held out for validation -> (tokens) -> windows of S + 1

A batch is a function of (seed, step) and a rank takes its share of it, so a run that stops and resumes, or runs on
another number of ranks, sees the same tokens. Without a tokenizer a token is a byte.

B sequences a step over all ranks, b = B / ranks of them here, S tokens a sequence.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .collective import from_all_ranks
from .schema import VOCABULARY, DataConfig
from .text_files import CHUNK, HELD_OUT, encode, least_bytes, make_tokenizer, read

T = TypeVar("T", Tensor, str)


@dataclass(frozen=True)
class Text:
    """A text cut in two.

    name: where it comes from. train, valid: (N,), (M,), uint8 of bytes, int32 of tokens. digest: sha256 of all of its
    bytes, to notice that a resumed run has another text. entropy: of single tokens, in nats a byte: the loss of a model
    that knows their frequencies only. tokenizer: tokenizer.json as text; None of bytes. bytes_per_token: on average.
    """

    name: str
    train: Tensor
    valid: Tensor
    digest: str
    entropy: float
    tokenizer: str | None = None
    bytes_per_token: float = 1.0


def read_text(config: DataConfig) -> Text:
    """The text that ``config`` names. Raises ValueError if it is too short.

    Collective over the default group, if there is one and a tokenizer: all have rank 0's.
    """
    name, raw = read(config)
    if len(raw) < (least := least_bytes(config.length)):
        raise ValueError(f"{name}: got {len(raw)} bytes, wanted at least {least} for data.length={config.length}")
    digest = hashlib.sha256(raw).hexdigest()
    if config.tokenizer is None and config.vocabulary is None:
        train, valid = _split(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return Text(name, torch.cat(train), torch.cat(valid), digest, _entropy(torch.cat((*train, *valid))))
    texts = _split(raw.decode(errors="replace"))
    first = not dist.is_initialized() or dist.get_rank() == 0
    tokenizer = from_all_ranks(lambda: make_tokenizer(config, texts[0]) if first else "")[0]
    train, valid = ([torch.tensor(ids, dtype=torch.int32) for ids in encode(tokenizer, each)] for each in texts)
    tokens = torch.cat((*train, *valid))
    if (got := min(sum(map(len, train)), sum(map(len, valid)))) < (wanted := 2 * (config.length + 1)):
        raise ValueError(f"{name}: got {got} tokens held out, wanted at least {wanted} for data.length={config.length}")
    ratio = len(raw) / len(tokens)
    return Text(name, torch.cat(train), torch.cat(valid), digest, _entropy(tokens) / ratio, tokenizer, ratio)


def _split(whole: T) -> tuple[list[T], list[T]]:
    """Split bytes or letters into chunks to train on and held-out chunks."""
    size = min(CHUNK, len(whole) // HELD_OUT)
    chunks = [whole[i : i + size] for i in range(0, len(whole), size)]
    kept = [chunk for i, chunk in enumerate(chunks) if i % HELD_OUT != HELD_OUT - 1]
    return kept, chunks[HELD_OUT - 1 :: HELD_OUT]


def _entropy(tokens: Tensor) -> float:
    """Entropy of single tokens, in nats a token."""
    share = torch.bincount(tokens.int(), minlength=VOCABULARY).double() / len(tokens)
    return float(-torch.special.xlogy(share, share).sum())


def make_batch(
    text: Tensor, *, seed: int, step: int, batch: int, length: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """Rank ``rank``'s part of batch ``step``: inputs and targets, int64 (b, S), the targets one token further."""
    # torch's CPU generator takes 32 bits of a seed and drops the rest: mix both numbers into these.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
    here = starts.view(ranks, -1)[rank]
    window = text[here[:, None] + torch.arange(length + 1, dtype=torch.int64)].long()
    return window[:, :-1], window[:, 1:]
