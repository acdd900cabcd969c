"""The alert rules: each alert has its cases and its part of the page, and asks for metrics that there are.

`promtool` runs the cases (`make e2e-monitoring`). `python -m tests.test_alert_rules` writes the rules for Kubernetes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.live.problems import THRESHOLDS
from tests.source_tree import ROOT

RULES = ROOT / "deploy" / "monitoring" / "rules.yml"
CASES = RULES.with_name("rules.test.yml")
KUBERNETES = ROOT / "deploy" / "kubernetes" / "rules.yaml"
FROM_OTHERS = {"plait_worker_up", "plait_peer_up"}
"""Metrics of several workers or gateways, which one alone does not have."""

HEAD = """\
# For the Prometheus operator, from deploy/monitoring/rules.yml: `python -m tests.test_alert_rules` writes it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: plait
spec:
"""


def loaded(text: str) -> Any:
    return yaml.safe_load(text)


def alerts() -> Iterator[dict[str, Any]]:
    for group in loaded(RULES.read_text(encoding="utf-8"))["groups"]:
        yield from (rule for rule in group["rules"] if "alert" in rule)


def for_kubernetes() -> str:
    lines = RULES.read_text(encoding="utf-8").splitlines()
    begins = lines.index("groups:")
    return HEAD + "\n".join(f"  {line}".rstrip() for line in lines[begins:]) + "\n"


def test_each_alert_fires_in_one_case_and_is_silent_in_the_two_others() -> None:
    fires: dict[str, int] = {}
    silent: dict[str, int] = {}
    for case in loaded(CASES.read_text(encoding="utf-8"))["tests"]:
        for one in case["alert_rule_test"]:
            counted = fires if one["exp_alerts"] else silent
            counted[one["alertname"]] = counted.get(one["alertname"], 0) + 1
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    assert fires == dict.fromkeys(names, 1)
    assert silent == dict.fromkeys(names, 2)


def test_each_alert_leads_to_a_part_of_the_page() -> None:
    page = (ROOT / "docs" / "oncall.md").read_text(encoding="utf-8")
    headings = {
        f"docs/oncall.md#{line[3:].lower().replace(' ', '-')}" for line in page.splitlines() if line[:3] == "## "
    }
    for alert in alerts():
        assert alert["annotations"]["runbook"] in headings
        assert alert["labels"]["severity"] in {"page", "ticket"}


def test_each_problem_is_an_alert_without_a_threshold_of_its_own() -> None:
    asked = {}
    for alert in alerts():
        found = re.fullmatch(r'max by \(about\) \(plait_problem\{code="(\w+)"\}\) > 0', alert["expr"])
        if found is not None:
            asked[found[1]] = alert["annotations"]["runbook"].partition("#")[2]
            assert alert["for"]
    assert asked == {code: threshold.part for code, threshold in THRESHOLDS.items()}


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    config = {"engines": [{"name": "a", "url": "http://127.0.0.1:1"}]}
    families = {family.name for family in Gateway(parse_config(config, "test"))._registry.collect()}
    known = families | {f"{name}_total" for name in families} | FROM_OTHERS
    asked = set(re.findall(r"\bplait_\w+", RULES.read_text(encoding="utf-8")))
    assert asked <= known, asked - known


def test_the_rules_of_kubernetes_are_these() -> None:
    assert KUBERNETES.read_text(encoding="utf-8") == for_kubernetes(), "python -m tests.test_alert_rules writes them"
    assert loaded(KUBERNETES.read_text(encoding="utf-8"))["spec"] == loaded(RULES.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(KUBERNETES.write_text(for_kubernetes(), encoding="utf-8") == 0)
