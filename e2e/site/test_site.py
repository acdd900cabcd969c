"""The site that `make site` has built: every page is in it, and a browser asks no other host for anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SITE: Final = ROOT / "build" / "site"
PARTS: Final = ("use", "operate", "programs", "inside")
LOADED: Final = {"src", "srcset", "poster", "data", "action"}
"""Attributes whose address a browser loads by itself, or sends a form to. A `link` is loaded by its `href`."""
KEPT: Final = {"canonical", "next", "prev"}
"""Kinds of `link` that are not loaded."""
ELSEWHERE: Final = re.compile(r"^\s*(?:https?:)?//")
IN_STYLES: Final = re.compile(r"@import\s+(?:url\()?[\"']?([^\"');]+)|url\(\s*[\"']?([^\"')]+)")
IN_SCRIPTS: Final = re.compile(r"(?:\bfetch|\bimport|importScripts|\.src\s*=)\s*\(?\s*[\"'`]((?:https?:)?//[^\"'`]+)")


class Loads(HTMLParser):
    """The addresses that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.found += [value for name, value in values.items() if name in LOADED]
        self.found += styled(values.get("style", ""))
        if tag == "link" and values.get("rel") not in KEPT:
            self.found.append(values.get("href", ""))


def styled(text: str) -> list[str]:
    """The addresses that a style sheet makes a browser load, its fonts included."""
    return [found[0] or found[1] for found in IN_STYLES.findall(text)]


def loaded(file: Path) -> list[str]:
    """The addresses that a file of the site makes a browser load."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".css":
        return styled(text)
    if file.suffix == ".js":
        return IN_SCRIPTS.findall(text)
    page = Loads()
    page.feed(text)
    inline = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
    return [*page.found, *(address for style in inline for address in styled(style)), *IN_SCRIPTS.findall(text)]


def files() -> Iterator[Path]:
    found = [file for kind in ("html", "css", "js", "svg") for file in sorted(SITE.rglob(f"*.{kind}"))]
    assert len(found) > 60, "there is no site: run `make site`"
    yield from found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<img src="https://host/a.png">'),
        ("a.html", '<link rel="stylesheet" href="//host/a.css">'),
        ("a.html", '<script src="http://host/a.js"></script>'),
        ("a.html", "<style>@import 'https://host/a.css';</style>"),
        ("a.html", '<p style="background: url(https://host/a.png)">'),
        ("a.html", "<script>import('https://host/a.js')</script>"),
        ("a.css", "@font-face { src: url('https://host/a.woff2') }"),
        ("a.css", '@import "https://host/a.css";'),
        ("a.js", 'fetch("https://host/a")'),
    ],
)
def test_what_another_host_would_be_asked_for_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert any(ELSEWHERE.match(address) for address in loaded(tmp_path / name))


def test_no_other_host_is_asked_for_anything() -> None:
    asked = {(str(file.relative_to(SITE)), address) for file in files() for address in loaded(file)}
    assert len(asked) > 100
    assert not [pair for pair in asked if ELSEWHERE.match(pair[1])]


def test_every_page_is_there_and_in_the_navigation() -> None:
    """Each page stands in the side bar of its part; the pages of a folder stand there below their index."""
    bars = {part: (SITE / f"{part}.html").read_text(encoding="utf-8") for part in PARTS}
    for page in (ROOT / "docs").glob("*.md"):
        if page.stem != "README":
            assert (SITE / f"{page.stem}.html").is_file()
            entry = f'<li class="toctree-l1"><a class="reference internal" href="{page.stem}.html">'
            assert sum(entry in bar for bar in bars.values()) == 1, page.name
    for folder in ("design", "measurements"):
        assert len(list((SITE / folder).glob("*.html"))) == len(list((ROOT / "docs" / folder).glob("*.md")))


def test_diagrams_are_drawn() -> None:
    sources = [page.read_text(encoding="utf-8").count("```mermaid") for page in (ROOT / "docs").glob("*.md")]
    pages = [page.read_text(encoding="utf-8") for page in SITE.glob("*.html")]
    assert sum(page.count(".svg") for page in pages) >= sum(sources) > 0
    assert not [page for page in pages if "stateDiagram" in page]
