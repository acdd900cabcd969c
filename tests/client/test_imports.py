"""What a program loads that uses the client and nothing else."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    *("plait.backends", "plait.gateway", "plait.policy"),
    *("starlette", "uvicorn", "tokenizers", "transformers", "tiktoken", "jinja2", "re2", "prometheus_client"),
    *("structlog", "openai", "pydantic", "langchain_core", "numpy"),
}


def test_the_client_loads_nothing_of_the_server() -> None:
    program = "import sys, plait.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "plait.client.session" in loaded
    assert HEAVY.isdisjoint(loaded)
