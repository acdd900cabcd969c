"""docs/traces.md lists each recorded workload that something reads."""

from __future__ import annotations

from benchmarks.application.conversations import CHAT_FILE
from benchmarks.application.documents import ARTICLES_FILE
from benchmarks.application.multi_agent import TRACE_FILE
from benchmarks.mixed_prompts import LONG_FILE, SHORT_FILE
from benchmarks.placing.workloads import AGENTS_FILE, AZURE_FILE
from benchmarks.traces import checksums
from e2e.traces import METAGPT, TRACES
from plait.lab.simulation.shared_prefixes import LOOGLE_FILES, TOOLBENCH_FILES


def test_every_workload_is_listed() -> None:
    read = {CHAT_FILE, ARTICLES_FILE, TRACE_FILE, LONG_FILE, SHORT_FILE, AGENTS_FILE, AZURE_FILE}
    assert read | {str(METAGPT.relative_to(TRACES))} <= checksums().keys()
    folders = {name.partition("/")[0] for name in checksums() if "/" in name}
    assert {pattern.partition("/")[0] for pattern in (LOOGLE_FILES, TOOLBENCH_FILES)} <= folders
