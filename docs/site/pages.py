"""The pages as the site's generator reads them: `staged` has the text of each, by its path in the site.

Files of the repository keep their text. Links to files that are no pages go to the repository, diagrams are drawn, and
each part of `docs/README.md` becomes a page with a table of contents.
"""

from __future__ import annotations

import os.path
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Final

import mmdr

ROOT: Final = Path(__file__).parents[2]
INDEX: Final = "docs/README.md"
"""Its parts, `## Use` and so on, are the site's navigation."""
SETTINGS: Final = "config.example.toml"
AT_THE_TOP: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "vulnerabilities.md",
    SETTINGS: "settings.md",
    INDEX: "index.md",
}
IN_THE_REPOSITORY: Final = (
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"] + "/blob/main/"
)
LINK: Final = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<target>[^)\s#]+)?(?P<anchor>#[^)\s]*)?\)")
CODE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
DIAGRAM: Final = re.compile(r"^```mermaid\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE)
BADGES: Final = re.compile(r"^\[!\[.*\n+", re.MULTILINE)
"""Images of other hosts."""
PART: Final = re.compile(r"^## (?P<title>.+)\n(?P<text>(?:(?!## ).*\n)*)", re.MULTILINE)
SECTION: Final = re.compile(r"^### (?P<title>.+)\n(?P<text>(?:(?!### ).*\n)*)", re.MULTILINE)
TABLE: Final = re.compile(r"^(?:# )?(\[\[?\w+\]\]?)$", re.MULTILINE)
LISTED: Final = re.compile(r"^\| \[(?P<title>[^\]]*)\]\((?P<page>[^)#]+)\)", re.MULTILINE)


def page_of(file: str) -> str | None:
    """The site's page of a file of the repository; None if it is not in the site."""
    if file in AT_THE_TOP:
        return AT_THE_TOP[file]
    if file.startswith("docs/") and file.endswith(".md"):
        return re.sub(r"README\.md$", "index.md", file.removeprefix("docs/"))
    return file.removeprefix("docs/") if file.startswith("docs/images/") else None


def linked(text: str, file: str, page: str) -> str:
    """The text with its links as they are from the page. What is not in the site is linked in the repository."""

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if target is None or "://" in target or target.startswith("mailto:"):
            return match[0]
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        if (known := page_of(aim)) is not None:
            return f"{match['before']}{os.path.relpath(known, posixpath.dirname(page) or '.')}{anchor})"
        if not (ROOT / aim).exists():
            raise FileNotFoundError(f"{file} links to {aim}")
        return f"{match['before']}{IN_THE_REPOSITORY}{aim}{anchor})"

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(replaced, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(replaced, text[end:])])


def drawn(text: str, page: str) -> tuple[str, dict[str, str]]:
    """The text with its diagrams as images, and these by their paths in the site."""
    images: dict[str, str] = {}

    def replaced(match: re.Match[str]) -> str:
        path = f"diagrams/{page.removesuffix('.md').replace('/', '-')}-{len(images) + 1}.svg"
        images[path] = mmdr.render(match["source"]).svg()
        return f"![A diagram of what the text says](/{path})"

    return DIAGRAM.sub(replaced, text), images


def settings(text: str) -> str:
    """A page of the configuration file, with a heading for each of its sections, also for those that are commented."""
    lines = ["# Every setting", "", f"This is `{SETTINGS}`, with each default."]
    for paragraph in text.strip().split("\n\n"):
        if found := TABLE.search(paragraph):
            lines += ["", f"## {found[1]}"]
        lines += ["", "```toml", paragraph, "```"]
    return "\n".join(lines) + "\n"


def contents(caption: str, pages: list[str]) -> str:
    """A table of contents that only the navigation shows."""
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def part(title: str, text: str) -> str:
    """The page of a part of the index, with a table of contents for each of its sections."""
    lists = []
    for section in SECTION.finditer(text):
        pages = [f"{found['title']} <{found['page']}>" for found in LISTED.finditer(section["text"])]
        lists.append(contents(section["title"], pages))
    return f"# {title}\n{text.replace('### ', '## ')}\n" + "\n".join(lists)


def staged() -> dict[str, str]:
    """Each text file of the site's source, by its path there. Raises FileNotFoundError for a link to no file."""
    files = [*AT_THE_TOP, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    found: dict[str, str] = {}
    for file in dict.fromkeys(files):
        page, text = page_of(file), (ROOT / file).read_text(encoding="utf-8")
        assert page is not None
        if file == SETTINGS:
            text = settings(text)
        text, images = drawn(linked(BADGES.sub("", text), file, page), page)
        found |= images
        if file == INDEX:
            parts = {match["title"].lower(): part(match["title"], match["text"]) for match in PART.finditer(text)}
            found |= {f"{name}.md": page for name, page in parts.items()}
            found["index.md"] += "\n" + contents("Parts", list(parts))
        elif posixpath.basename(page) == "index.md" and posixpath.dirname(page):
            beside = sorted(path.name for path in (ROOT / file).parent.glob("*.md") if path != ROOT / file)
            found[page] = f"{text}\n{contents('Pages', beside)}"
        else:
            found[page] = text
    return found
