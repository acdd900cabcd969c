"""What was tried where a claim does not hold, with links from docs/results.md."""

from __future__ import annotations

from typing import Final

DATA_PATH: Final = "[data path](measurements/data-path.md)"
PLACEMENT: Final = "[placement](measurements/placement.md)"
GRAPH: Final = "[programs](measurements/request-graph.md)"
SCHEDULER: Final = "[local scheduler](measurements/local-scheduler.md)"
PROMISES: Final = "[admission](measurements/admission.md)"
SESSIONS: Final = "[sessions](measurements/sessions.md)"

TRIED: Final = (
    ("ablation", "", f"E2's adjustments on the load as E2 counts it: {PLACEMENT}"),
    ("applications", "background calls", f"nothing is left but the network and longer iterations: {GRAPH}"),
    ("applications", "chain summaries at once", f"by calls left 82.4 s instead of 83.9, by calls had 112.9: {GRAPH}"),
    ("applications", "multi-agent", "decoding is 237 of 242 s with either; the paper's gain is its attention kernel"),
    ("applications", "client-side chaining", f"nothing is left but the network and the iteration in flight: {GRAPH}"),
    ("applications", "assistants", "four prompts fit into every cache; 2.4 of 12 is the paper's kernel; a step: .841"),
    ("applications", "the chain that gains least", f"with no TPOT all gain, and the mean is 94.8 s: {GRAPH}"),
    ("applications", "latency_mix", f"leaders, and groups placed as a whole: {SCHEDULER}, {PLACEMENT}"),
    ("local_scheduler", "per iteration", "nothing: every baseline keeps .96 of them and more, so no gain is left"),
    ("local_scheduler", "", f"other orders, chunks and late decodes: {SCHEDULER}"),
    ("policies", "", f"other terms, constants, candidates and moves: {PLACEMENT}"),
    ("preble_published", "long documents", f"copies that repay nothing: 1.00 of our mean E2E: {PLACEMENT}"),
    ("preble_published", "", f"other terms, constants, candidates and moves: {PLACEMENT}"),
    ("preble", "", f"the paper's mechanisms one by one, and other terms: {PLACEMENT}"),
    ("agent_sessions", "", f"four orders of sessions, room from idle ones: {SESSIONS}"),
    ("curves", "", f"other terms and constants: {PLACEMENT}"),
    ("dataplane", "", f"a client and sinks of our own, RE2, mypyc, a profile-guided build: {DATA_PATH}"),
    ("held", "", f"other terms, constants, candidates and moves: {PLACEMENT}"),
    ("tiers", "", "nothing: no claim has failed so far"),
    ("full_fleet", "", f"other bounds on the line: {PROMISES}"),
    ("mission", "agents: ", f"four orders of sessions: {SESSIONS}"),
    ("mission", "promises: ", f"other bounds on the line: {PROMISES}"),
    ("mission", "tenants: ", f"other bounds on the line: {PROMISES}"),
    ("mission", "programs: ", f"orders among applications: {GRAPH}"),
    ("mission", "scheduler: ", f"other orders, chunks and late decodes: {SCHEDULER}"),
    ("mission", "", f"other terms and constants: {PLACEMENT}"),
)  # fmt: skip
"""Report, what the claim's name contains, and what was tried. The first that fits counts."""


def tried(report: str, claim: str) -> str:
    """What was tried for a claim. Raises LookupError where nothing is said."""
    for where, contains, text in TRIED:
        if where == report and contains in claim:
            return text
    raise LookupError(f"{report}: {claim}: say in benchmarks/reporting/tried.py what was tried")
