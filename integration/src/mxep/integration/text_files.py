"""The text that a config names: its files, whether they look like text, and its tokens. Imports nothing heavy.

    data.vocabulary=N      byte-level BPE of N tokens, trained on what is not held out, on rank 0
    data.tokenizer=FILE    a tokenizer.json of the library tokenizers, such as a model of transformers has beside it
    neither                bytes: no library is needed

A tokenizer is the text of its tokenizer.json here. The library is imported where it is used: it is an extra.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .schema import VOCABULARY, DataConfig

CHUNK = 1 << 16
HELD_OUT = 16  # every 16th chunk of a text
NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".rs", ".json", ".yaml", ".toml", ".html", ".tex"}
HEAD = 1 << 16  # bytes at a file's start that are checked to be text


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


def least_bytes(length: int) -> int:
    """Least size of a text: two sequences in each of HELD_OUT chunks."""
    return 2 * (length + 1) * HELD_OUT


def complaint(config: DataConfig) -> str | None:
    """Return a line on files that cannot be used, or None."""
    least = least_bytes(config.length)
    if 2 * (config.length + 1) > CHUNK:
        return f"data.length: got {config.length}, wanted at most {CHUNK // 2 - 1}, half a chunk of the text"
    if config.max_bytes < least:
        return f"data.max_bytes: got {config.max_bytes}, wanted at least {least} for data.length={config.length}"
    if config.path is None:
        return None
    root, files = _files(config)
    if not files:
        endings = ", ".join(sorted(SUFFIXES))
        return f"data.path: no file in {root} ends in any of {endings}; data.path=FILE reads any one file"
    if (size := sum(file.stat().st_size for file in files)) < least:
        what = f"got {size} bytes in {len(files)} files of {root}" if root.is_dir() else f"got {size} bytes in {root}"
        return f"data.path: {what}, wanted at least {least} for data.length={config.length}"
    return None


def notes(config: DataConfig) -> Iterator[str]:
    """Yield lines on the files that are read and those that are not."""
    root, files = _files(config)
    if root.is_dir():
        size = sum(file.stat().st_size for file in files)
        cut = f", the first {config.max_bytes:,} of them (data.max_bytes)" if size > config.max_bytes else ""
        yield f"reads {len(files)} files of {root}, {size:,} bytes{cut}"
        others = Counter(file.suffix or "none" for file in _within(root) if file.suffix not in SUFFIXES)
        if others:
            kinds = ", ".join(f"{ending} ({count})" for ending, count in others.most_common(5))
            yield f"left out {others.total()} files with other endings: {kinds}; data.path=FILE reads any one"
    binary = [file for file in files if not _is_text(file)]
    if binary:
        which = f"{len(binary)} of {len(files)} files are" if len(files) > 1 else f"{binary[0]} is"
        example = f", such as {binary[0]}" if len(files) > 1 else ""
        yield f"{which} not UTF-8 text{example}: the model learns bytes, whatever they mean"


def _files(config: DataConfig) -> tuple[Path, list[Path]]:
    """Return the folder or file, and the files to read."""
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return root, _within(root, "*.py")
    root = Path(config.path)
    return root, [root] if root.is_file() else [file for file in _within(root) if file.suffix in SUFFIXES]


def _within(root: Path, pattern: str = "*") -> list[Path]:
    """The files of a folder, sorted, without tests and installed packages."""
    found = (
        file for file in sorted(root.rglob(pattern)) if not NOT_TEXT.intersection(file.relative_to(root).parts[:-1])
    )
    return [file for file in found if file.is_file()]


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    try:
        head[: HEAD - 4].decode()
    except UnicodeDecodeError as error:
        return error.end >= len(head[: HEAD - 4]) and b"\0" not in head  # cut within a character
    return b"\0" not in head


def tokenizer_complaint(config: DataConfig) -> str | None:
    """Return a line on a tokenizer that cannot be used, or None."""
    if config.vocabulary is None and config.tokenizer is None:
        return None
    if config.vocabulary is not None and config.tokenizer is not None:
        return "data.vocabulary and data.tokenizer: got both, wanted one: train a tokenizer, or read one"
    if importlib.util.find_spec("tokenizers") is None:
        return "data.vocabulary and data.tokenizer want tokenizers: pip install 'mxep-integration[tokenizers]'"
    try:
        vocabulary_of(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"data.tokenizer: {config.tokenizer}: {reason}: wanted a tokenizer.json"
    return None


def vocabulary_of(config: DataConfig) -> int:
    """How many token ids there may be."""
    if config.tokenizer is None:
        return config.vocabulary or VOCABULARY
    about = Path(config.tokenizer).stat()
    return _tokens_of(config.tokenizer, (about.st_ino, about.st_mtime_ns, about.st_size))


@functools.cache
def _tokens_of(file: str, version: tuple[int, ...]) -> int:
    """Number of token ids in a tokenizer.json. version: the file's, as it may be written again."""
    found: dict[str, Any] = json.loads(Path(file).read_text())
    model = found["model"]["vocab"]  # of Unigram a list
    ids: list[int] = [len(model) - 1] if isinstance(model, list) else list(model.values())
    return 1 + max([*ids, *(int(each["id"]) for each in found["added_tokens"])])


def make_tokenizer(config: DataConfig, texts: Sequence[str]) -> str:
    """The tokenizer that the section names; where it trains one, on ``texts``. ValueError if they are too few."""
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
    made.no_truncation()  # a file may have been saved with them
    made.no_padding()
    return [each.ids for each in made.encode_batch(texts, add_special_tokens=False)]
