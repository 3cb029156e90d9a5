"""From MoE.forward to the stores it is as far as docs/architecture.md says, and no further."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

from mxep.comms.shared_memory import PlainExchange
from mxep.ep import MoE, SymmetricDispatcher

ROOT = Path(__file__).resolve().parents[2]
MOST_FRAMES, MOST_FILES = 10, 8


def table() -> list[tuple[str, str]]:
    """(frame, file) of each row."""
    page = (ROOT / "docs/architecture.md").read_text().partition("## From MoE.forward")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \| `([\w./]+)` \|", page, re.M)


def test_the_way_to_the_dispatch_kernel_is_the_pages_and_grows_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def dispatch(*args: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            where = frame.f_code.co_filename.partition("/src/")[2]
            if where.startswith("mxep/"):
                seen.append((frame.f_code.co_qualname, where))
            frame = frame.f_back
        plain(*args)

    plain = PlainExchange.dispatch
    monkeypatch.setattr(PlainExchange, "dispatch", dispatch)
    moe = MoE(64, 32, 4, 2, dispatcher=SymmetricDispatcher(4, dim=64))
    moe(torch.randn(5, 64).bfloat16())
    moe.close()
    pages = table()
    # On a CPU the exchange is another, whose stores are torch's.
    beyond = [frame for frame, _ in pages[len(seen) :]]
    assert (pages[: len(seen)], beyond) == (seen[::-1], ["KernelExchange.dispatch", "launch", "dispatch_kernel"])
    assert len(pages) <= MOST_FRAMES
    assert len({file for _, file in pages}) <= MOST_FILES
