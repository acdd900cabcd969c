"""`plait keys`: issues, lists and revokes the API keys of tenants."""

from __future__ import annotations

import argparse
import re
import time
from typing import Any, Final

from plait.gateway.commands import add_address, positive_number

SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(required=True, dest="what", metavar="create|list|revoke")
    create = what.add_parser("create", help="issue a key, and print it: it is not shown again")
    create.add_argument("tenant", metavar="TENANT", help="of [[tenants]]")
    create.add_argument("--name", default="", help="for people")
    create.add_argument("--expires-in", type=seconds, metavar="TIME", help="such as 90d, 12h or 30m (default: never)")
    create.add_argument("--model", action="append", default=[], help="it may call this one only; may be repeated")
    create.add_argument("--calls-per-s", type=positive_number, metavar="N")
    create.add_argument("--tokens-per-s", type=positive_number, metavar="N")
    for window in ("day", "month"):
        create.add_argument(f"--{window}", type=positive_number, metavar="AMOUNT", help=f"budget of a {window}")
        create.add_argument(f"--tokens-per-{window}", type=int, metavar="N", help=f"budget of a {window} in tokens")
    listed = what.add_parser("list", help="list the issued keys")
    listed.add_argument("--tenant", metavar="TENANT", help="those of one tenant")
    revoke = what.add_parser("revoke", help="revoke a key: it is refused within seconds")
    revoke.add_argument("id", metavar="ID", help="its id, as in the list")
    for command in (create, listed, revoke):
        add_address(command)


def seconds(text: str) -> int:
    """The argument's value in seconds: a `type` of argparse."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90d, 12h, 30m or 60s, not {text}")
    return int(found[1]) * SECONDS[found[2] or "s"]


def run(arguments: argparse.Namespace) -> None:
    """Do what was asked. Raises ValueError if the gateway refuses or does not answer."""
    from plait.gateway.commands.asked_gateway import AskedGateway  # noqa: PLC0415 - takes long to import

    gateway = AskedGateway(arguments.url, arguments.key)
    if arguments.what == "create":
        made = gateway.ask("/admin/keys", "POST", _asked(arguments))
        print(made["key"])
    elif arguments.what == "revoke":
        gateway.ask(f"/admin/keys/{arguments.id}", "DELETE")
        print(f"{arguments.id} is revoked.")
    else:
        of_tenant, after = f"&tenant={arguments.tenant}" if arguments.tenant else "", ""
        while True:
            page = gateway.ask(f"/admin/keys?limit=1000{of_tenant}{after}")
            for key in page["data"]:
                print(_line(key))
            if not page["has_more"]:
                return
            after = f"&after={page['data'][-1]['id']}"


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("day", "month", "tokens_per_day", "tokens_per_month")
    budget = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return {
        "tenant": arguments.tenant,
        "name": arguments.name,
        "expires_in_s": arguments.expires_in,
        "models": arguments.model,
        "calls_per_s": arguments.calls_per_s,
        "tokens_per_s": arguments.tokens_per_s,
        "budget": budget or None,
    }


def _line(key: dict[str, Any]) -> str:
    used = "never used" if key["last_used_at"] is None else f"used {_at(key['last_used_at'])}"
    ends = "" if key["expires_at"] is None else f", until {_at(key['expires_at'])}"
    name = f" {key['name']}" if key["name"] else ""
    return f"{key['id']}  {key['starts_with']}...  {key['status']:8} {key['tenant']}{name}: {used}{ends}"


def _at(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix_s))
