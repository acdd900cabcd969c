"""docs/failures.md: each cause says what is seen and what to do. Metrics and codes that pages name are there."""

from __future__ import annotations

import re

import pytest

from plait.backends.error_codes import CODES
from tests.pages import PAGES
from tests.source_tree import ROOT, sources
from tests.test_monitoring import labels_of_metrics

PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
CAUSE = re.compile(r"^### (?P<title>[^\n]+)\n\n(?P<text>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
PART = re.compile(r"^- \*\*(\w+):\*\* ", re.MULTILINE)
METRIC = re.compile(r"`(plait_\w+)(?:\{[^`]*\})?`")
REFUSAL = re.compile(r"\b[45]\d\d `(\w+)`")
OPERATED = {"batches", "durability", "failures", "oncall", "operations", "scaling", "security", "sessions", "tiers"}
CAUSES = {match["title"]: match["text"] for match in CAUSE.finditer(PAGE)}


@pytest.mark.parametrize("title", CAUSES)
def test_a_cause_says_what_is_seen_and_what_to_do(title: str) -> None:
    assert PART.findall(CAUSES[title]) in (["Seen", "Gateway", "Do"], ["Seen", "Do"])


def test_each_metric_that_is_named_to_operators_is_there() -> None:
    """Metrics of a store and of other gateways are there only with these, so they are looked for in the source."""
    source = "".join(file.read_text(encoding="utf-8") for file in sources("gateway"))
    known = labels_of_metrics()
    pages = [page for page in PAGES if page.stem in OPERATED]
    named = {name for page in pages for name in METRIC.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 50
    for name in named:
        short = re.sub(r"_(?:count|sum)$", "", name)
        assert short in known or f'"{short.removesuffix("_total")}' in source, name


def test_each_code_of_the_page_is_an_error_of_ours() -> None:
    named = set(REFUSAL.findall(PAGE))
    assert len(named) > 10
    assert not named - CODES.keys()
