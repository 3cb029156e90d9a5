"""The bytes that a config names, and what they are: which files, how many, whether they look like text.

Imports nothing heavy: what is wrong with a text is reported before anything starts.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .schema import DataConfig

CHUNK = 1 << 16
HELD_OUT = 16  # every 16th chunk of a text
NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".rs", ".json", ".yaml", ".toml", ".html", ".tex"}
HEAD = 1 << 16  # bytes of a file that tell what it is


def read(config: DataConfig) -> tuple[str, bytes]:
    """Where the bytes come from, and the files one after the other, up to ``max_bytes``."""
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
    """That a text needs: two sequences in each of HELD_OUT chunks."""
    return 2 * (length + 1) * HELD_OUT


def complaint(config: DataConfig) -> str | None:
    """What is wrong with the files, in one line."""
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
    """What of a text of one's own is read, and what not, a line each."""
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
    """The folder or file, and what is read of it."""
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
