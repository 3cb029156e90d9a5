"""Text as bytes: where it comes from, what is held out, and which bytes make a step's batch.

    files, sorted -> one run of bytes -> every 16th chunk held out for validation -> windows of S + 1 bytes

A batch is a function of (seed, step) and a rank takes its share of it, so a run that stops and resumes, or runs on
another number of ranks, sees the same bytes.

B sequences a step over all ranks, b = B / ranks of them here, S bytes a sequence.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .schema import DataConfig

VOCABULARY = 256
CHUNK = 1 << 16
HELD_OUT = 16  # every 16th chunk
NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".rs", ".json", ".yaml", ".toml", ".html", ".tex"}


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
    name, raw = SOURCES[config.source](config)
    length = config.length
    size = min(CHUNK, len(raw) // HELD_OUT)
    if size < 2 * (length + 1):
        raise ValueError(f"{name}: got {len(raw)} bytes, wanted at least {2 * (length + 1) * HELD_OUT}")
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


def _stdlib(config: DataConfig) -> tuple[str, bytes]:
    folder = Path(sysconfig.get_path("stdlib"))
    return f"the standard library in {folder}", _read(sorted(folder.rglob("*.py")), folder, config.max_bytes)


def _files(config: DataConfig) -> tuple[str, bytes]:
    assert config.path is not None, "resolve() has checked it"
    root = Path(config.path)
    if root.is_file():
        return config.path, _read([root], root.parent, config.max_bytes)
    files = sorted(file for file in root.rglob("*") if file.suffix in SUFFIXES)
    return config.path, _read(files, root, config.max_bytes)


def _read(files: list[Path], root: Path, max_bytes: int) -> bytes:
    """The files one after the other, without tests and installed packages, up to ``max_bytes``."""
    payload: list[bytes] = []
    left = max_bytes
    for file in files:
        if left > 0 and file.is_file() and not NOT_TEXT.intersection(file.relative_to(root).parts[:-1]):
            with file.open("rb") as stream:
                payload.append(stream.read(left))
            left -= len(payload[-1])
    return b"".join(payload)


SOURCES = {"stdlib": _stdlib, "text": _files}
