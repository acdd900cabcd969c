"""The placement policy that a configuration names: one of the gateway's own, or `package.module:name` of one's own."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from typing import Any

from plait.gateway.config.values import shown
from plait.policy.placement.policies import POLICIES, Policy


def placement_policy(
    name: str, options: Mapping[str, Any] | None = None, known: Mapping[str, Policy] = POLICIES
) -> Policy:
    """Return the policy of this name, which is one of `known` or `package.module:name`.

    The latter is a `Policy`, or is called with the `options` as keywords and returns one. So each router can have a
    policy with a state of its own. Raises ValueError, whose message starts with the key.
    """
    if name in known:
        if options:
            raise ValueError(f"options = {shown(options)}: expected none, because policy = {shown(name)} takes none")
        return known[name]
    if ":" not in name:
        names = ", ".join(map(json.dumps, known))
        raise ValueError(f"policy = {shown(name)}: expected one of {names}, or package.module:name of your own")
    made = _loaded(name, options or {})
    if not isinstance(made, Policy):
        what = f"expected a Policy or what returns one, not {type(made).__name__}"
        raise ValueError(f"policy = {shown(name)}: {what}")  # noqa: TRY004 - the configuration is wrong
    return made


def _loaded(name: str, options: Mapping[str, Any]) -> object:
    """What `package.module:name` is, or what it makes of the options."""
    try:
        found = pkgutil.resolve_name(name)
        return found if isinstance(found, Policy) and not options else found(**options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"policy = {shown(name)}: cannot be loaded: {type(error).__name__}: {reason}") from error
