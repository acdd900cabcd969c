"""Tools that load a server and measure it: each sends a few calls, and has to report all of them as good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from e2e.clients.client import pinned
from e2e.clients.environment import BENCHMARKS
from e2e.clients.matrix import Matrix
from e2e.clients.program_run import KEY, Outcome, run_tool
from e2e.servers import Fleet
from e2e.vllm.environment import ENVIRONMENT as VLLM_ENVIRONMENT
from e2e.vllm.environment import VLLM

CALLS: Final = 6
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 16
STREAMED: Final = (Outcome("stream", ok=True), Outcome("usage", ok=True))


def installed(name: str) -> str:
    path = BENCHMARKS.environment.python.with_name(name)
    assert path.exists(), "its environment is not there: run `make nightly`"
    return str(path)


def measured(command: Sequence[str], home: Path, report: Path) -> dict[str, Any]:
    """The report that a tool writes."""
    run_tool(command, home)
    found: dict[str, Any] = msgspec.json.decode(report.read_bytes())
    return found


@pytest.mark.nightly
def test_aiperf(fleets: dict[str, Fleet], matrix: Matrix, tokenizer: Path, tmp_path: Path) -> None:
    options = {
        "--model": "demo",
        "--url": fleets["forwarding"].gateway.url,
        "--api-key": KEY,
        "--endpoint-type": "chat",
        "--tokenizer": str(tokenizer),
        "--request-count": str(CALLS),
        "--concurrency": "2",
        "--synthetic-input-tokens-mean": str(PROMPT_TOKENS),
        "--output-tokens-mean": str(OUTPUT_TOKENS),
        "--artifact-dir": str(tmp_path),
        "--ui": "none",
    }
    command = [installed("aiperf"), "profile", "--streaming", *(part for option in options.items() for part in option)]
    report = measured(command, tmp_path, tmp_path / "profile_export_aiperf.json")
    assert report["request_count"]["avg"] == CALLS
    assert report["time_to_first_token"]["avg"] > 0
    assert report["usage_completion_tokens"]["avg"] > 0
    matrix.enter(f"aiperf {pinned(BENCHMARKS, 'aiperf')}", STREAMED)


@pytest.mark.nightly
def test_guidellm(fleets: dict[str, Fleet], matrix: Matrix, tokenizer: Path, tmp_path: Path) -> None:
    report_path = tmp_path / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={fleets['forwarding'].gateway.url},model=demo,api_key={KEY}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={CALLS}",
        "--tokenizer": f"kind=hf_auto,model={tokenizer}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output": f"kind=json,path={report_path}",
    }
    flat = [part for option in options.items() for part in option]
    command = [installed("guidellm"), "run", *flat, "--disable-console-interactive"]
    report = measured(command, tmp_path, report_path)
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (CALLS, 0)
    matrix.enter(f"guidellm {pinned(BENCHMARKS, 'guidellm')}", STREAMED)


def test_vllm_bench_serve(fleets: dict[str, Fleet], matrix: Matrix, tokenizer: Path, tmp_path: Path) -> None:
    command = VLLM_ENVIRONMENT.python.with_name("vllm")
    if not command.exists():
        why = "its environment comes with `make e2e-vllm`"
        matrix.skip(f"vllm bench serve {VLLM}", why)
        pytest.skip(why)
    options = {
        "--backend": "openai-chat",
        "--base-url": fleets["forwarding"].gateway.url,
        "--endpoint": "/v1/chat/completions",
        "--model": "demo",
        "--tokenizer": str(tokenizer),
        "--header": f"Authorization=Bearer {KEY}",
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(OUTPUT_TOKENS),
        "--num-prompts": str(CALLS),
        "--result-filename": str(tmp_path / "vllm.json"),
    }
    flat = [part for option in options.items() for part in option]
    report = measured([str(command), "bench", "serve", *flat, "--save-result"], tmp_path, tmp_path / "vllm.json")
    assert report["completed"] == CALLS
    matrix.enter(f"vllm bench serve {VLLM}", STREAMED)
