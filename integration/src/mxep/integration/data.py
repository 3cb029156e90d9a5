"""Text as bytes or tokens: its files, held-out chunks, and the batch of a step. Imports torch only to read and to cut.

    files, sorted -> joined bytes -> every 16th chunk held out for validation -> (tokens) -> windows of S + 1

    data.vocabulary=N      byte-level BPE of N tokens, trained on what is not held out, on rank 0
    data.tokenizer=FILE    a tokenizer.json of the tokenizers library, as transformers models have
    neither                a token is a byte: no library is needed

A batch depends only on (seed, step), and each rank takes its part. So a run sees the same tokens after a resume or on
another number of ranks. In this file a tokenizer is the text of its tokenizer.json.

B sequences a step over all ranks, b = B / ranks on this rank, S tokens a sequence.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .schema import VOCABULARY, DataConfig

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", "Tensor", str)
CHUNK = 1 << 16
HELD_OUT = 16  # every 16th chunk of a text
NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".rs", ".json", ".yaml", ".toml", ".html", ".tex"}


def read(config: DataConfig) -> tuple[str, bytes]:
    """Return the text's source and its bytes, file after file, up to ``max_bytes``."""
    root, files = _files(config)
    payload: list[bytes] = []
    left = config.max_bytes
    for file in files:
        if left > 0:
            with file.open("rb") as stream:
                payload.append(stream.read(left))
            left -= len(payload[-1])
    return (f"the standard library in {root}" if config.path is None else str(root)), b"".join(payload)


def complaint(config: DataConfig) -> str | None:
    """Return a one-line reason why the section's files cannot be used, or None."""
    if 2 * (config.length + 1) > CHUNK:
        return f"data.length: got {config.length}, wanted at most {CHUNK // 2 - 1}, half a chunk of the text"
    if config.path is None:
        return None
    root, files = _files(config)
    if not files:
        endings = ", ".join(sorted(SUFFIXES))
        return f"data.path: no file in {root} ends in any of {endings}; data.path=FILE reads any one file"
    return None


def _files(config: DataConfig) -> tuple[Path, list[Path]]:
    """Return the folder or file, and the files to read: sorted, of a folder without tests and installed packages."""
    if config.path is not None and Path(config.path).is_file():
        return Path(config.path), [Path(config.path)]
    root = Path(sysconfig.get_path("stdlib") if config.path is None else config.path)
    found = sorted(root.rglob("*.py") if config.path is None else root.rglob("*"))
    kept = (file for file in found if not NOT_TEXT.intersection(file.relative_to(root).parts[:-1]))
    return root, [file for file in kept if file.suffix in SUFFIXES and file.is_file()]


def tokenizer_complaint(config: DataConfig) -> str | None:
    """Return a one-line reason why the section's tokenizer cannot be used, or None."""
    if config.vocabulary is None and config.tokenizer is None:
        return None
    if config.vocabulary is not None and config.tokenizer is not None:
        return "data.vocabulary and data.tokenizer: got both, wanted one: train a tokenizer, or read one"
    try:
        vocabulary_of(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"data.tokenizer: {config.tokenizer}: {reason}: wanted a tokenizer.json"
    return None


def vocabulary_of(config: DataConfig) -> int:
    """Number of token ids of the section's tokenizer."""
    if config.tokenizer is None:
        return config.vocabulary or VOCABULARY
    found: dict[str, Any] = json.loads(Path(config.tokenizer).read_text())
    model = found["model"]["vocab"]  # a list for Unigram
    ids: list[int] = [len(model) - 1] if isinstance(model, list) else list(model.values())
    return 1 + max([*ids, *(int(each["id"]) for each in found["added_tokens"])])


def make_tokenizer(config: DataConfig, texts: Sequence[str]) -> str:
    """Read the section's tokenizer, or train one on ``texts``. Raises ValueError if they give too few tokens."""
    if config.tokenizer is not None:
        return Path(config.tokenizer).read_text()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    assert config.vocabulary is not None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=config.vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if (made := tokenizer.get_vocab_size()) < config.vocabulary:
        raise ValueError(f"data.vocabulary: got {config.vocabulary}, wanted at most {made}: the text has no more pairs")
    made_json: str = tokenizer.to_str()
    return made_json


def encode(tokenizer: str, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, without special tokens at its ends."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(tokenizer)
    made.no_truncation()  # tokenizer.json may ask for both
    made.no_padding()
    return [each.ids for each in made.encode_batch(texts, add_special_tokens=False)]


@dataclass(frozen=True)
class Text:
    """A text, cut into training and held-out parts.

    name: its source. train, valid: (N,), (M,), uint8 bytes or int32 tokens. bytes_per_token: mean.
    digest: SHA-256 of all bytes; a resumed run compares it. tokenizer: tokenizer.json as text, or None for bytes.
    entropy: unigram entropy in nats per byte, the loss of a model that knows only token frequencies.
    """

    name: str
    train: Tensor
    valid: Tensor
    digest: str
    entropy: float
    tokenizer: str | None = None
    bytes_per_token: float = 1.0


def read_text(config: DataConfig) -> Text:
    """Read the text that ``config`` names. Raises ValueError if it is too short.

    With a tokenizer this is collective over the default group (if any): rank 0 makes the tokenizer.
    """
    import torch
    import torch.distributed as dist

    from .mesh import all_gather

    name, raw = read(config)
    if len(raw) < (least := 2 * (config.length + 1) * HELD_OUT):  # two sequences in each of HELD_OUT chunks
        raise ValueError(f"{name}: got {len(raw)} bytes, wanted at least {least} for data.length={config.length}")
    digest = hashlib.sha256(raw).hexdigest()
    if config.tokenizer is None and config.vocabulary is None:
        train, valid = _split(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return Text(name, torch.cat(train), torch.cat(valid), digest, _entropy(torch.cat((*train, *valid))))
    texts = _split(raw.decode(errors="replace"))
    first = not dist.is_initialized() or dist.get_rank() == 0
    tokenizer = all_gather(make_tokenizer(config, texts[0]) if first else "")[0]
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
    import torch

    share = torch.bincount(tokens.int(), minlength=VOCABULARY).double() / len(tokens)
    return float(-torch.special.xlogy(share, share).sum())


def make_batch(
    text: Tensor, *, seed: int, step: int, batch: int, length: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """A rank's part of batch ``step``: inputs and targets, int64 (b, S). Targets are inputs shifted by one token."""
    import torch

    # torch's CPU generator uses only 32 bits of a seed, so a hash mixes both numbers.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
    here = starts.view(ranks, -1)[rank]
    window = text[here[:, None] + torch.arange(length + 1, dtype=torch.int64)].long()
    return window[:, :-1], window[:, 1:]
