"""A real Prometheus: `python -m e2e.monitoring.prometheus` fetches its package where there is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from e2e.debian_package import ROOT, DebianPackage
from e2e.ports import free_port
from e2e.server_process import NO_TLS, eventually
from tests.waiting import WITHIN_S

PACKAGE: Final = DebianPackage("prometheus")
SHIPPED: Final = ROOT / "deploy" / "monitoring"
FOUND: Final = re.compile(r"    dns_sd_configs:\n.*\n")
"""How the shipped configuration finds gateways: by the names that Docker gives them."""
SCRAPE_INTERVAL: Final = "scrape_interval: 5s"


class Prometheus:
    """A running server, which is asked through its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        """Whether it takes queries."""
        return httpx.get(f"{self._url}/-/ready", trust_env=False, verify=NO_TLS, timeout=WITHIN_S).status_code == 200

    def query(self, expression: str, since_s: float, step_s: float = 0.5) -> list[dict[str, Any]]:
        """The series of an expression since a time."""
        fields = {"query": expression, "start": f"{since_s}", "end": f"{time.time()}", "step": f"{step_s}"}
        answer = httpx.post(
            f"{self._url}/api/v1/query_range", data=fields, trust_env=False, verify=NO_TLS, timeout=WITHIN_S
        )
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        series: list[dict[str, Any]] = answer.json()["data"]["result"]
        return series

    def label_values(self, label: str, selector: str) -> set[str]:
        """The values of a label in the series of a selector."""
        path, fields = f"/api/v1/label/{label}/values", {"match[]": selector}
        answer = httpx.get(self._url + path, params=fields, trust_env=False, verify=NO_TLS, timeout=WITHIN_S)
        assert answer.status_code == 200, f"{selector}: {answer.text}"
        return set(answer.json()["data"])


@contextmanager
def prometheus(binary: Path, folder: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration, on other targets and twice a second."""
    shipped = (SHIPPED / "prometheus.yml").read_text()
    assert len(FOUND.findall(shipped)) == shipped.count(SCRAPE_INTERVAL) == 1
    shipped = FOUND.sub(f"    static_configs: [{{targets: {json.dumps(list(targets))}}}]\n", shipped)
    config, log, port = folder / "prometheus.yml", folder / "prometheus.log", free_port()
    (folder / "rules.yml").write_bytes((SHIPPED / "rules.yml").read_bytes())
    config.write_text(shipped.replace(SCRAPE_INTERVAL, "scrape_interval: 500ms"))
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command = [str(binary), *options, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        eventually(lambda: process.poll() is not None or server.is_ready())
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.terminate()
        process.wait(WITHIN_S)


if __name__ == "__main__":
    started_s = time.monotonic()
    PACKAGE.fetch()
    sys.stderr.write(f"Prometheus: {time.monotonic() - started_s:.0f} s\n")
