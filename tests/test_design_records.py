"""docs/design: every record has the form that its index gives, and every link into it leads somewhere."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.source_tree import ROOT

FOLDER = ROOT / "docs" / "design"
RECORDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
MEASUREMENTS = ROOT / "docs" / "measurements"
MEASURED = sorted(path for path in MEASUREMENTS.glob("*.md") if path.name != "README.md")
PARTS = ["Context", "Decision", "What follows", "Sources"]
LINK = re.compile(r"\]\(([^)#]+\.(?:md|py|toml))(?:#[^)]*)?\)")
CITED = re.compile(r"docs/design/[\w-]+\.md")


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_parts(record: object) -> None:
    assert isinstance(record, type(FOLDER))
    assert re.findall(r"^## (.+)$", record.read_text(encoding="utf-8"), re.MULTILINE) == PARTS


def links_to(text: str, folder: str) -> set[str]:
    """The names of the pages in a folder beside its own to which a page links."""
    return set(re.findall(rf"\]\(\.\./{folder}/([\w-]+\.md)", text))


def test_records_and_their_measurements_link_to_each_other() -> None:
    cited = {record.name: links_to(record.read_text(encoding="utf-8"), "measurements") for record in RECORDS}
    of_results = set(
        re.findall(r"\]\(measurements/([\w-]+\.md)", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    )
    for page in MEASURED:
        records, text = {name for name, pages in cited.items() if page.name in pages}, page.read_text(encoding="utf-8")
        if records:
            assert records == links_to(text, "design")
        else:
            assert page.name in of_results
            assert "](../results.md" in text


def test_the_index_lists_every_record() -> None:
    listed = LINK.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted({name for name in listed if "/" not in name}) == [record.name for record in RECORDS]


def test_the_index_of_the_docs_lists_every_page() -> None:
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert not set(pages) - listed


def test_every_link_between_pages_resolves() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).is_file()
    ]
    assert not broken


def test_every_file_that_a_page_names_is_there() -> None:
    """A path is a name in backticks below one of our folders."""
    path = re.compile(r"`((?:policy|gateway|backends|client|tests|e2e|benchmarks|docs|src)/[\w./-]+)`")
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
        for name in path.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not missing


def tracked(*patterns: str) -> dict[str, str]:
    """The texts of the tracked files of these patterns, by path."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *patterns], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in listing if (ROOT / name).is_file()}


def test_every_record_that_code_cites_is_there() -> None:
    cited = {found for text in tracked("*.py", "*.toml").values() for found in CITED.findall(text)}
    assert len(cited) > 5
    assert all((ROOT / found).is_file() for found in cited)


def test_nothing_cites_a_design_that_is_not_here() -> None:
    assert not [name for name, text in tracked("*.py", "*.toml", "*.md").items() if re.search(r"\bDESIGN [0-9]", text)]
