"""Relative links of the pages lead somewhere: to a file or folder of the repository, and to a heading of a page."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "integration/README.md", "tests/README.md")),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/README.md"),
    }
)


def without_code(page: str) -> str:
    page = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "`", page, flags=re.DOTALL)


def links_of(page: str) -> list[str]:
    """Targets of `[text](target)`, `![alt](target)`, `[text]: target`, and of src and href in HTML."""
    text = without_code(page)
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    references = re.findall(r"^ {0,3}\[[^\]]+\]:\s+<?([^\s>]+)", text, re.MULTILINE)
    html = re.findall(r"<[a-z][^>]*?\s(?:src|href|srcset)=\"([^\"]+)\"", text)
    return inline + references + html


def slug(heading: str) -> str:
    """GitHub's anchor of a heading: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors_of(path: Path) -> set[str]:
    """Of headings, counted where they repeat, and of HTML's id and name."""
    found: dict[str, int] = {}
    anchors = set()
    page = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^ {0,3}#{1,6} +(.*?) *#* *$", page, re.MULTILINE):
        name = slug(heading)
        anchors.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return anchors | set(re.findall(r"<[a-z][^>]*?\s(?:id|name)=\"([^\"]+)\"", page))


def broken(page: Path, link: str, root: Path = ROOT) -> str | None:
    """Why the link of the page leads nowhere; None if it leads somewhere, or out of the repository."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE):
        return None
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not target.is_relative_to(root):
        return "outside of the repository"
    if not target.exists():
        return "no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors_of(target):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    wrong = {link: why for link in links_of(page.read_text()) if (why := broken(page, link))}
    assert not wrong


def test_broken_links_show(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One & two\n## `f(x)` of [it](x.md)\n## Again\n## Again\n```\n# no heading\n```\n")
    page.write_text(
        "[a](other.md#one--two) [b](<other.md#fx-of-it>) ![c](no.png) [d](other.md#again-1) [e](other.md#no-heading)\n"
        '[f][f] `[g](no.md)` [h](https://x.y/z) [i](#here) [j](../up.md) <img src="no.svg">\n\n'
        "```\n[k](no.md)\n```\n\n# Here\n\n[f]: gone.md\n"
    )
    wrong = {link: broken(page, link, tmp_path) for link in links_of(page.read_text())}
    assert {link: why for link, why in wrong.items() if why} == {
        "no.png": "no such file",
        "other.md#no-heading": "no such heading",
        "../up.md": "outside of the repository",
        "gone.md": "no such file",
        "no.svg": "no such file",
    }
    assert len(wrong) == 10
