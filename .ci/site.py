"""For mkdocs: READMEs are pages of the site, too, and the links of all pages lead to where their targets lie there.

Sources link as GitHub does, by paths in the repository. Files of the repository that are not in the site have no link.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
    "integration/README.md": "packages/integration.md",
    **{f"packages/{name}/README.md": f"packages/{name}.md" for name in ("runtime", "quant", "comms", "gemm", "ep")},
}
"""In the repository -> in the site."""
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(
    r"(?P<fence>^ *```.*?^ *```)|(?P<code>`[^`\n]+`)(?!\])"
    r"|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<link>[^)\s]+)\)"
    r"|(?P<attribute>\s(?:src|srcset|href)=\")(?P<target>[^\"]+)",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(found: re.Match[str]) -> str:
        if found["fence"] or found["code"]:
            return found[0]
        link = found["link"] or found["target"]
        path, hash_sign, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        inside = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is None or (ROOT / target).is_dir():
            return found["text"] or found[0]
        new = posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or ".") + hash_sign + anchor
        if found["attribute"]:
            return found["attribute"] + re.sub(r"\.md(?=#|$)", ".html", new)
        return f"{found['image']}[{moved_within(found['text'])}]({new})"

    def moved_within(text: str) -> str:
        return LINK.sub(moved, text)

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings write :class:`Name`, as Sphinx has it."""
    return re.sub(r":(?:class|meth|func|data):(?=<code>|<a )", "", html)
