"""README's and docs' blocks, pasted in order by a reader who has installed what their pages say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.demo import demo, refused
from e2e.pages.pasting import DEMO, NEEDS, PageFailedError, PastedPage, Site
from e2e.pages.told_environments import ToldEnvironments, told_by
from e2e.ports import free_ports
from e2e.server_process import eventually
from tests.pages import BLOCK, INDENTED, PAGES, Block, all_blocks, blocks_of
from tests.source_tree import ROOT

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """README's first block: what it installs, and the demo that it starts."""
    install, start = blocks_of(README)[0].text.splitlines()
    environments, told = ToldEnvironments(tmp_path_factory.mktemp("environments")), told_by(install, frozenset())
    assert start.partition("#")[0].strip() == DEMO
    port, engine_port, *_ = free_ports(5)
    folder = tmp_path_factory.mktemp("demo")
    with demo(port, engine_port, plait=environments[told].plait, folder=folder) as process:
        eventually(lambda: process.poll() is not None or not refused(port))
        yield Site(environments, told, port, engine_port, starts_servers="PLAIT_NIGHTLY" in os.environ)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_each_block_of_a_page_runs(page: Path, site: Site, tmp_path: Path) -> None:
    PastedPage(site, tmp_path).run(blocks_of(page))


@pytest.mark.parametrize(
    ("language", "needs", "text"),
    [
        ("sh", "", "curl -sf http://127.0.0.1:8000/v1/nothing\n"),
        ("sh", "a cluster", "kubectl get pods\n"),
        ("yaml", "", "engines: 2\n"),
        ("", "", "plait serve\n"),
        ("sh", "", "plait demo\nplait status\n"),
        ("sh", "", "plait demo --compares\n"),
        ("python", "", "import transformers\n"),
        ("toml", "", "[server]\nports = 8000\n"),
        ("http", "", "plait-output: code; transform=jsn\n"),
        ("text", "", "data: {'a': 1}\n"),
        ("json", "", '{"a": 1,}\n'),
        ("sh", "checkout", "make demos\n"),
    ],
)
def test_a_block_that_fails_is_found(language: str, needs: str, text: str, site: Site, tmp_path: Path) -> None:
    with pytest.raises(PageFailedError, match=r"^README.md:7: "):
        PastedPage(site, tmp_path).run([Block(README, 7, language, needs, text)])


def test_every_need_is_one_of_a_block() -> None:
    assert NEEDS.keys() == {block.needs for block in all_blocks()} - {""}


def test_code_stands_between_fences() -> None:
    assert not [page.name for page in PAGES if INDENTED.search(BLOCK.sub("", page.read_text(encoding="utf-8")))]
