"""`plait vllm -- <vllm serve arguments>`: starts vLLM's server with Plait's scheduler and cache-state route."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from plait.backends.adapter.launch_arguments import OPTIONS, LaunchError, launched, split_arguments, taken_options

SCHEDULER = "plait.backends.vllm.scheduler.create_scheduler"
MIDDLEWARE = "plait.backends.vllm.middleware.CacheStateMiddleware"

USAGE = f"""usage: plait vllm [--scheduler NAME] [--profile PROFILE] [--name NAME] [--require TIER]
                  -- <vllm serve arguments>

Starts vLLM's server with Plait's local scheduler and its cache-state route.
{OPTIONS}"""


def main(arguments: Sequence[str]) -> None:
    """Replace this process by vLLM's server. `arguments` are those after `plait vllm`."""
    command = launched(arguments, "vllm", "vLLM", USAGE, serve_command)
    if command is not None:
        os.execv(command[0], command)  # noqa: S606 - no shell is involved


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The server's command, run by this Python, whose environment has vLLM. Raises LaunchError."""
    settings, served = split_arguments(arguments, "vLLM")
    served = served[1:] if served[:1] == ["serve"] else served
    taken = taken_options(served)
    if "--scheduler-cls" in taken:
        raise LaunchError("Plait sets --scheduler-cls; leave it out")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *_with_settings(served, settings)]
    command += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    if "--enable-prompt-tokens-details" not in taken:
        command.append("--enable-prompt-tokens-details")  # without it, responses do not report cached tokens
    return command


def _with_settings(served: list[str], settings: dict[str, str]) -> list[str]:
    """The arguments for vLLM, with our settings merged into --additional-config."""
    if not settings:
        return served
    kept, given = [], {}
    rest = list(served)
    while rest:
        argument, *rest = rest
        option, _, value = argument.partition("=")
        if option.replace("_", "-") != "--additional-config":
            kept.append(argument)
            continue
        if not value:
            if not rest:
                raise LaunchError("--additional-config needs a value")
            value, *rest = rest
        try:
            given = json.loads(value)
        except ValueError as error:
            raise LaunchError(f"--additional-config is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise LaunchError("--additional-config is not a JSON object")
        if not isinstance(given.get("plait", {}), dict):
            raise LaunchError("--additional-config: plait is not a JSON object")
    given["plait"] = {**given.get("plait", {}), **settings}
    return [*kept, "--additional-config", json.dumps(given)]
