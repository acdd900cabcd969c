"""`plait sglang -- <launch_server arguments>`: starts SGLang's server with Plait's plugin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from plait.backends.adapter.launch_arguments import OPTIONS, LaunchError, launched, split_arguments, taken_options
from plait.backends.adapter.scheduler_settings import VARIABLE

PLUGIN: Final = "plait"
"""The name of the plugin's entry point."""
ALLOW_LIST: Final = "SGLANG_PLUGINS"
"""SGLang's variable with the plugins to load. If it is not set, SGLang loads all plugins."""

ADDED: Final = ("--enable-cache-report", "--enable-mixed-chunk")
"""These make responses report cached tokens, and let decodes run in the same batches as prompts."""

USAGE = f"""usage: plait sglang [--scheduler NAME] [--profile PROFILE] [--name NAME] [--require TIER]
                    -- <launch_server arguments>

Starts SGLang's server with Plait's local scheduler and its cache-state route.
{OPTIONS}"""


def main(arguments: Sequence[str]) -> None:
    """Replace this process by SGLang's server. `arguments` are those after `plait sglang`.

    If the plugin does not support this SGLang, the start fails here with the missing names. SGLang itself would start
    without the plugin.
    """
    added = launched(arguments, "sglang", "SGLang", USAGE, lambda own: serve_environment(own, os.environ))
    if added is None:
        return
    from plait.backends.sglang.plugin import check  # noqa: PLC0415 - help needs no SGLang

    os.environ.update(added)
    try:
        check()
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"plait sglang: {error}") from error
    command = serve_command(arguments)
    os.execve(command[0], command, os.environ)  # noqa: S606 - no shell is involved


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The server's command, run by this Python, whose environment has SGLang. Raises LaunchError."""
    _, served = split_arguments(arguments, "SGLang")
    taken = taken_options(served)
    added = [option for option in ADDED if option not in taken]
    return [sys.executable, "-m", "sglang.launch_server", *served, *added]


def serve_environment(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the server's environment needs beside `environment`. Raises LaunchError.

    `VARIABLE` gets the settings that it has in `environment`, with our settings added. The allow list, if it is set,
    gets our plugin.
    """
    settings, _ = split_arguments(arguments, "SGLang")
    try:
        given = json.loads(environment.get(VARIABLE) or "{}")
    except ValueError as error:
        raise LaunchError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise LaunchError(f"{VARIABLE} is not a JSON object")
    changed = {VARIABLE: json.dumps({**given, **settings})}
    allowed = [name.strip() for name in environment.get(ALLOW_LIST, "").split(",") if name.strip()]
    if allowed and PLUGIN not in allowed:
        changed[ALLOW_LIST] = ",".join([*allowed, PLUGIN])
    return changed
