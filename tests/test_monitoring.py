"""The alert rules and the dashboard: they ask for metrics that there are, and each alert has its cases and its part of
the page.

`make e2e-monitoring` runs the cases with `promtool`, and the dashboard's queries on a real Prometheus.
`python -m tests.test_monitoring` writes the rules for Kubernetes.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any, Final

import yaml

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.guests.live.problems import THRESHOLDS
from tests.source_tree import ROOT

RULES = ROOT / "deploy" / "monitoring" / "rules.yml"
CASES = RULES.with_name("rules.test.yml")
KUBERNETES = ROOT / "deploy" / "kubernetes" / "rules.yaml"
DASHBOARD = RULES.with_name("dashboard.json")
PROCESS: Final = {"instance", "worker"}
"""Labels of each metric: the scrape's for the gateway, and the worker of a gateway of several."""
FROM_OTHERS: Final = {"up": {"instance"}, "plait_worker_up": PROCESS, "plait_peer_up": {*PROCESS, "peer"}}
"""Metrics of Prometheus, and of several workers or gateways, which one alone does not have, with their labels."""
VARIABLES: Final = {
    "instance": "gateway",
    "worker": "worker",
    "model": "model",
    "engine": "engine",
    "tenant": "tenant",
}
"""The dashboard's variable that filters by a label."""
ZERO: Final = (
    ' or on (instance, worker) 0 * max by (instance, worker) (plait_build_info{instance=~"$gateway",worker=~"$worker"})'
)
"""What a panel draws of a process that has counted nothing yet, where that is 0."""
APART: Final = {*PROCESS, "model"}
"""Labels over which no panel sums."""
SELECTOR: Final = re.compile(r"\b((?:plait|process)_\w+|up)\b(?:\{([^}]*)\})?")
AGGREGATION: Final = re.compile(r"\b(?:sum|count|max|min|avg)\b(?: by \(([^)]*)\))?")

HEAD = """\
# For the Prometheus operator, from deploy/monitoring/rules.yml: `python -m tests.test_monitoring` writes it.
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
    fires: dict[str, set[str]] = {}
    silent: dict[str, set[str]] = {}
    for case in loaded(CASES.read_text(encoding="utf-8"))["tests"]:
        for one in case["alert_rule_test"]:
            counted = fires if one["exp_alerts"] else silent
            counted.setdefault(one["alertname"], set()).add(case["name"])
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    assert {name: len(cases) for name, cases in fires.items()} == dict.fromkeys(names, 1)
    assert {name: len(cases) for name, cases in silent.items()} == dict.fromkeys(names, 2)


def pages() -> str:
    """Where the pages are on the web: a link of an alert or a dashboard is followed from elsewhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Documentation"]).removesuffix("README.md")


def test_each_alert_leads_to_a_part_of_the_page() -> None:
    page = (ROOT / "docs" / "oncall.md").read_text(encoding="utf-8")
    headings = {
        f"{pages()}oncall.md#{line[3:].lower().replace(' ', '-')}" for line in page.splitlines() if line[:3] == "## "
    }
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] in headings
        assert alert["labels"]["severity"] in {"page", "ticket"}


def test_each_page_that_the_dashboard_names_is_a_link() -> None:
    for panel in dashboard()["panels"]:
        told = panel.get("description", "")
        linked = re.findall(r"\[docs/(\w+)\.md\]\(([^)]*)\)", told)
        assert len(linked) == told.count("[docs/") == len(re.findall(r"(?<![/\w])docs/", told)), told
        for name, url in linked:
            assert url.partition("#")[0] == f"{pages()}{name}.md"
            assert (ROOT / "docs" / f"{name}.md").exists()


def test_each_problem_is_an_alert_without_a_threshold_of_its_own() -> None:
    asked = {}
    for alert in alerts():
        found = re.fullmatch(r'max by \(about\) \(plait_problem\{code="(\w+)"\}\) > 0', alert["expr"])
        if found is not None:
            asked[found[1]] = alert["annotations"]["runbook_url"].partition("#")[2]
            assert alert["for"]
    assert asked == {code: threshold.part for code, threshold in THRESHOLDS.items()}


def labels_of_metrics() -> dict[str, set[str]]:
    """The labels of each metric, by its name in Prometheus."""
    found = dict(FROM_OTHERS)
    config = {"engines": [{"name": "a", "url": "http://127.0.0.1:1"}]}
    for collector in Gateway(parse_config(config, "test")).kernel.registry._collector_to_names:
        for family in collector.collect():
            own = vars(collector).get("_labelnames", vars(family).get("_labelnames"))
            assert own is not None, family.name
            for end in ("", "_total", "_bucket", "_info"):
                found[family.name + end] = {*PROCESS, *own}
    return found


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def targets() -> list[dict[str, Any]]:
    """Each query of the dashboard, with its legend, without its `ZERO`."""
    return [
        {**target, "expr": target["expr"].removesuffix(ZERO)}
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def filters(labels: set[str]) -> set[str]:
    """The matchers of the variables by which a metric with these labels can be filtered."""
    return {f'{label}=~"${variable}"' for label, variable in VARIABLES.items() if label in labels}


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    asked = set(re.findall(r"\bplait_\w+", RULES.read_text(encoding="utf-8")))
    assert asked <= labels_of_metrics().keys(), asked - labels_of_metrics().keys()


def test_each_query_of_the_dashboard_is_filtered_by_all_variables_that_it_can() -> None:
    labels = labels_of_metrics()
    for expression in (target["expr"] for target in targets()):
        asked = SELECTOR.findall(expression)
        assert asked, expression
        for metric, matchers in asked:
            assert metric in labels, expression
            assert filters(labels[metric]) <= set(matchers.split(",")), expression


def test_each_panel_tells_gateways_workers_and_models_apart() -> None:
    labels = labels_of_metrics()
    for target in targets():
        for metric, _ in SELECTOR.findall(target["expr"]):
            apart = labels[metric] & APART
            for kept in AGGREGATION.findall(target["expr"]):
                assert apart <= set(kept.split(", ")), target["expr"]
            assert apart <= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])), target["legendFormat"]


def test_each_variable_offers_what_its_label_has_and_all() -> None:
    source, *variables = dashboard()["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [variable["name"] for variable in variables] == list(VARIABLES.values())
    labels = labels_of_metrics()
    for variable, label in zip(variables, VARIABLES, strict=True):
        found = re.fullmatch(rf"label_values\((\w+)(?:\{{(.*)\}})?, {label}\)", variable["query"])
        assert found is not None, variable["query"]
        assert label in labels[found[1]]
        assert variable["multi"], label
        assert (variable["includeAll"], variable["allValue"]) == (True, ".*"), "also metrics without the label"


def test_the_rules_of_kubernetes_are_these() -> None:
    assert KUBERNETES.read_text(encoding="utf-8") == for_kubernetes(), "python -m tests.test_monitoring writes them"
    assert loaded(KUBERNETES.read_text(encoding="utf-8"))["spec"] == loaded(RULES.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(KUBERNETES.write_text(for_kubernetes(), encoding="utf-8") == 0)
