"""The code of docs/guides/fine-tune-one-gpu.md runs as it stands, on a tiny model and a CPU."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, training_args

from integration.tiny_models import tiny

PAGE = Path(__file__).parents[2] / "docs/guides/fine-tune-one-gpu.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
SFT = [block for block in BLOCKS if block.startswith("# trl")]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page says that a reader has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)  # CPUs have bf16, too
    tiny("qwen3_moe", dtype=torch.bfloat16).save_pretrained("tiny")
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained("tiny")
    texts = ["the quick brown fox jumps over a lazy dog", "the fox jumps", "a lazy dog jumps over the fox"] * 4
    return {"MODEL": "tiny", "DEVICE": "cpu", "STEPS": 10, "TEXTS": texts}


@pytest.mark.usefixtures("one_thread")
def test_the_page_runs(names: dict[str, Any]) -> None:
    for block in BLOCKS:
        if block not in SFT:
            exec(compile(block, str(PAGE), "exec"), names)
    lines = [line for line in BLOCKS[0].splitlines() if line]
    assert len(lines) <= 20, "as its title says"
    assert Path("adapter/adapter_model.safetensors").exists()
    assert Path("merged/model.safetensors").exists()
    assert "loss" in names["trainer"].state.log_history[0]


@pytest.mark.skipif(not (find_spec("trl") and find_spec("datasets")), reason="trl is not installed")
@pytest.mark.usefixtures("one_thread")
def test_the_pages_sft_trainer_runs(names: dict[str, Any]) -> None:
    from datasets import Dataset

    for block in (BLOCKS[0], *SFT):
        exec(compile(block, str(PAGE), "exec"), names | {"Dataset": Dataset} if block in SFT else names)
