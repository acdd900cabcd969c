"""Runs a client's program, and reads what it says of each feature."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tests.waiting import WITHIN_S

KEY: Final = "the-clients-key"
LIMITED_KEY: Final = "the-limited-clients-key"
LIMITED_CALLS_PER_S: Final = 1.0
"""A burst of ten calls is let through; a refused one has to wait for a second at most."""

TIMEOUT_S: Final = 5 * WITHIN_S
QUIET: Final = {
    "AIPERF_HTTP_TRUST_ENV": "false",
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Keeps clients from asking the internet."""
HIDDEN: Final = ("OPENAI", "ANTHROPIC", "PYTHON", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""How settings begin that would reach another server than ours, or other packages than the environment's."""


@dataclass(frozen=True)
class Outcome:
    """Whether a feature works. `detail` says what is wrong."""

    feature: str
    ok: bool
    detail: str = ""
    ended_unix_s: float = 0.0


class ProgramError(AssertionError):
    """A program did not run to its end."""


def run_program(command: Sequence[str], url: str, home: Path) -> list[Outcome]:
    """The outcome of each feature at the gateway at `url`. Raises `ProgramError`."""
    done = run_tool(command, home, {"PLAIT_URL": url, "PLAIT_KEY": KEY, "PLAIT_LIMITED_KEY": LIMITED_KEY})
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    if not lines:
        raise ProgramError(f"{command[-1]} says nothing")
    return [msgspec.json.decode(line, type=Outcome) for line in lines]


def run_tool(
    command: Sequence[str], home: Path, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without settings would. Raises `ProgramError` if it fails or does not end."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(HIDDEN)}
    environment = {**kept, **QUIET, "HOME": str(home), **(more or {})}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            cwd=home,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"{command[0]} runs for more than {TIMEOUT_S:g} s:\n{error.stdout!r}") from error
    if done.returncode:
        raise ProgramError(f"status {done.returncode} of {command}:\n{done.stdout[-4_000:]}\n{done.stderr[-4_000:]}")
    return done
