"""Tokens in place of bytes: which tokenizer a config names, how many tokens it has, and training one on the text.

    data.vocabulary=N      byte-level BPE of N tokens, trained on what is not held out, on rank 0
    data.tokenizer=FILE    a tokenizer.json of the library tokenizers, such as a model of transformers has beside it
    neither                bytes: no library is needed

A tokenizer is the text of its tokenizer.json here. The library is imported where it is used: it is an extra.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .names import VOCABULARY
from .schema import DataConfig


def complaint(config: DataConfig) -> str | None:
    """What is wrong with the section's tokenizer, in one line."""
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
    """Of a tokenizer.json. version: of what ``file`` names, which may be written again."""
    found: dict[str, Any] = json.loads(Path(file).read_text())
    model = found["model"]["vocab"]  # of Unigram a list
    ids: list[int] = [len(model) - 1] if isinstance(model, list) else list(model.values())
    return 1 + max([*ids, *(int(each["id"]) for each in found["added_tokens"])])


def make(config: DataConfig, texts: Sequence[str]) -> str:
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
