"""`[server]` and `[log]`, and what all sections of the configuration are."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.gateway.config_values import (
    HOST,
    SECRET_KEYS,
    ListenerPort,
    NotNegative,
    Origin,
    Port,
    Positive,
    RootPath,
    Seconds,
    SecondsOrZero,
    Secret,
    Text,
    Token,
    shown,
)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file. Its `repr` hides API keys, so that a logged configuration does not reveal them."""

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={'(hidden)' if name in SECRET_KEYS and value else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(shown)})"


class ServerConfig(Section, frozen=True, kw_only=True):
    """`[server]`: where the gateway listens, and which clients it serves.

    host: name or address to listen on (default 127.0.0.1). port: TCP port, 0 for any free one (default 8000).
    max_body_bytes: largest request body (default 32 MiB). max_open_body_bytes: of one key's bodies at one time, until
    their requests end (default 1 GiB). max_waiting_prompt_bytes: of all keys' long prompts that wait to be tokenized; a
    key with less than its share of it is served all the same (default 128 MiB). max_connections: clients' connections
    at one time (default 10000). max_headers: headers of a request (default 128). max_header_bytes: its target and
    headers together (default 64 KiB).
    header_timeout_s: seconds for them to come (default 10). body_timeout_s: seconds for the body to come, plus 1 s for
    each 64 KiB of it (default 60). trust_request_chat_template: take a request's own `chat_template`, as vLLM's
    --trust-request-chat-template does; it is rendered in a process with limits (default false). trust_engine_templates:
    render the chat templates that engines offer in the gateway itself, which is faster (default false: as those of
    requests). token_cache_bytes: memory for the ids of prompts' beginnings and words, 0 for none (default 64 MiB).
    api_keys: keys clients may present, each a tenant of its own (default none). secret: makes the tenants' identities
    and labels; several gateways need the same (default: the one in `plait.secret` beside the file, which is made if
    needed). isolate_tenants: give each tenant's prompts cached prefixes of their own (by a cache salt, needs keys,
    default false). shutdown_grace_s: seconds that running calls get to end at shutdown (default 30). admin_key: key of
    the admin API; without one it answers 404 (default). admin_port: serve the admin API on this port only, on the same
    host (default: on `port`). metrics_key: key that /metrics asks for (default none). root_path: path before all
    others, for a proxy that passes it on (default none). cors_origins: origins whose pages may call from a browser, "*"
    for any (default none). drain_delay_s: seconds from SIGTERM, while `/ready` answers 503 and calls are still taken
    (default 5). slow_client_timeout_s: a client that does not read 64 KiB of its waiting answer in this time is
    disconnected (default 60).
    """

    host: Text = "127.0.0.1"
    port: Port = 8000
    max_body_bytes: Positive = 32 * 2**20
    max_open_body_bytes: Positive = 2**30
    max_waiting_prompt_bytes: Positive = 128 * 2**20
    max_connections: Positive = 10_000
    max_headers: Positive = 128
    max_header_bytes: Positive = 64 * 2**10
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 60.0
    trust_request_chat_template: bool = False
    trust_engine_templates: bool = False
    token_cache_bytes: NotNegative = 64 * 2**20
    api_keys: tuple[Token, ...] = ()
    secret: Secret | None = None
    isolate_tenants: bool = False
    admin_key: Token | None = None
    admin_port: ListenerPort | None = None
    metrics_key: Token | None = None
    root_path: RootPath = ""
    cors_origins: tuple[Origin, ...] = ()
    drain_delay_s: SecondsOrZero = 5.0
    shutdown_grace_s: SecondsOrZero = 30.0
    slow_client_timeout_s: Seconds = 60.0

    def __post_init__(self) -> None:
        if not HOST.fullmatch(self.host):
            raise ValueError(f"host = {shown(self.host)}: expected a host name or an IP address, without a port")
        if self.admin_port is not None and (self.admin_key is None or self.admin_port == self.port):
            raise ValueError(f"admin_port = {self.admin_port}: expected admin_key, and a port other than server.port")


class LogConfig(Section, frozen=True, kw_only=True):
    """`[log]`: what is logged and how.

    level: least severe level that is logged (default info). format: json (one object per line), console (for people) or
    auto: console when stderr is a terminal, else json (default auto).
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
