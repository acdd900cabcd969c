"""`plait vllm -- <vllm serve arguments>`: vLLM's own server, with Plait's scheduler and cache-state route in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from plait.backends.adapter.launch_arguments import OPTIONS, LaunchError, split_arguments, taken_options

SCHEDULER = "plait.backends.vllm.scheduler.create_scheduler"
MIDDLEWARE = "plait.backends.vllm.middleware.CacheStateMiddleware"

USAGE = f"""usage: plait vllm [--scheduler NAME] [--profile PROFILE] [--name NAME] -- <vllm serve arguments>

Starts vLLM's server with Plait's local scheduler and its cache-state route.
{OPTIONS}"""


def main(arguments: Sequence[str]) -> None:
    """Replace this process by vLLM's server; `arguments` are those after `plait vllm`."""
    if "-h" in arguments[:1] or "--help" in arguments[:1]:
        sys.stdout.write(USAGE)
        return
    try:
        command = serve_command(arguments)
    except LaunchError as error:
        raise SystemExit(f"plait vllm: {error}\n\n{USAGE}") from error
    os.execv(command[0], command)  # noqa: S606 - it is what the command is for, and no shell is involved


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command that serves, run by this Python, in whose environment vLLM is; raises LaunchError."""
    settings, served = split_arguments(arguments, "vLLM")
    served = served[1:] if served[:1] == ["serve"] else served
    taken = taken_options(served)
    if "--scheduler-cls" in taken:
        raise LaunchError("--scheduler-cls is set by Plait; leave it out")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *_with_settings(served, settings)]
    command += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    if "--enable-prompt-tokens-details" not in taken:
        command.append("--enable-prompt-tokens-details")  # without it, no answer says how much was cached
    return command


def _with_settings(served: list[str], settings: dict[str, str]) -> list[str]:
    """The arguments for vLLM, our settings merged into its --additional-config."""
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
            raise LaunchError("--additional-config is not an object")
    given["plait"] = {**given.get("plait", {}), **settings}
    return [*kept, "--additional-config", json.dumps(given)]
