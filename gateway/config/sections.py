"""The gateway's configuration: its sections as frozen values, with their defaults.

`config.example.toml` shows every key; `file` reads such a file.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from plait.gateway.config.placement_policy import placement_policy
from plait.gateway.config.section import Section
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.config.values import (
    HOST,
    NEVER_TO_CLIENTS,
    NEVER_TO_ENGINES,
    HeaderName,
    ListenerPort,
    Moment,
    NotNegative,
    Options,
    Origin,
    Port,
    Positive,
    Rate,
    RootPath,
    Seconds,
    SecondsOrZero,
    Secret,
    Text,
    Token,
    Weight,
    base_url,
    passable,
    root_url,
    shown,
)
from plait.policy.placement.policies import Policy


class ServerConfig(Section, frozen=True, kw_only=True):
    """`[server]`: where the gateway listens, and which clients it serves.

    host: name or address to listen on (default 127.0.0.1). port: TCP port, 0 for any free one (default 8000).
    workers: processes that serve on the port, each a whole gateway; the limits of tenants and max_open_body_bytes are
    divided among them, other limits on bytes and those on connections are of each (default 1).
    max_body_bytes: largest request body (default 32 MiB). max_multipart_bytes: largest one with files, as of audio, of
    which what is beyond 1 MiB is on disk (default 32 MiB). max_open_body_bytes: of one key's bodies at one time, until
    their requests end (default 1 GiB). max_waiting_prompt_bytes: of all keys' long prompts that wait to be tokenized; a
    key with less than its share of it is served all the same (default 128 MiB). max_connections: clients' connections
    at one time (default 10000). max_headers: headers of a request (default 128). max_header_bytes: its target and
    headers together (default 64 KiB).
    header_timeout_s: seconds for them to come (default 10). body_timeout_s: seconds for the body to come, plus 1 s for
    each 64 KiB of it (default 60). trust_request_chat_template: take a request's own `chat_template`, as vLLM's
    --trust-request-chat-template does; it is rendered in a process with limits (default false). trust_engine_templates:
    render the chat templates that engines offer in the gateway itself, which is faster (default false: as those of
    requests). token_cache_bytes: memory for the ids of prompts' beginnings, 0 for none (default 64 MiB).
    api_keys: keys clients may present, each a tenant of its own (default none). secret: makes the tenants' identities
    and labels; several gateways need the same (default: the one in `plait.secret` beside the file, which is made if
    needed). isolate_tenants: give each tenant's prompts cached prefixes of their own (by a cache salt, needs keys,
    default false). shutdown_grace_s: seconds that running calls get to end at shutdown (default 30). admin_key: key of
    the admin API; without one it answers 404 (default). admin_port: serve the admin API on this port only, on the same
    host (default: on `port`). metrics_key: key that /metrics asks for (default none). root_path: path before all
    others, for a proxy that passes it on (default none). cors_origins: origins whose pages may call from a browser, "*"
    for any (default none). drain_delay_s: seconds from SIGTERM, while `/ready` answers 503 and calls are still taken
    (default 5). slow_client_timeout_s: a client that does not read 64 KiB of its waiting answer in this time is
    disconnected (default 60). advertise_url: where the other gateways that share the store reach this one; peer_key: a
    secret by which they know each other (both needed with `url` of `[store]`, default none). unsigned_peers_until: a
    time with its zone; until then gateways of the release before, which sign nothing with the peer_key, are taken for
    gateways, too (default: they are not).
    """

    host: Text = "127.0.0.1"
    port: Port = 8000
    workers: Positive = 1
    max_body_bytes: Positive = 32 * 2**20
    max_multipart_bytes: Positive = 32 * 2**20
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
    advertise_url: Text | None = None
    peer_key: Secret | None = None
    unsigned_peers_until: Moment | None = None

    def __post_init__(self) -> None:
        if self.advertise_url is not None:
            msgspec.structs.force_setattr(self, "advertise_url", root_url("advertise_url", self.advertise_url))
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


class PlacementConfig(Section, frozen=True, kw_only=True):
    """`[placement]`: how an engine is chosen for a call.

    policy: plait (least delay, default), e2, round_robin, least_outstanding, or `package.module:name` of a policy of
    one's own. options: keywords for one's own policy (default: none). window_s: seconds of history that count as an
    engine's load, H in the paper (default 180). prior_output_tokens: output length expected of a call before any has
    been observed (default 128). hand_over_s: for so long a draining engine may still get calls for prefixes that only
    it has, while the others compute them one by one (default 60; 0: it gets no calls at once).
    """

    policy: Text = "plait"
    options: Options = msgspec.field(default_factory=dict)
    window_s: Seconds = 180.0
    prior_output_tokens: Positive = 128
    hand_over_s: SecondsOrZero = 60.0

    def __post_init__(self) -> None:
        self.new_policy()

    def new_policy(self) -> Policy:
        """Make the policy for one router. Raises ValueError if there is none of the name, or not with these options."""
        return placement_policy(self.policy, self.options)


class UpstreamConfig(Section, frozen=True, kw_only=True):
    """`[upstream]`: how long the gateway waits for engines, and when it gives one up.

    connect_timeout_s: for a connection (default 2). first_byte_timeout_s: from the request to the answer's first byte,
    which includes queueing and prefill (default 600). idle_timeout_s: between two pieces of a stream whose engine
    computes (default 600). hang_timeout_s: how long a silent engine that owes answers may leave a trial without one
    until it counts as hung (default 8).
    report_wait_ms: milliseconds an engine may hold a `/cache_state` poll while nothing changes (default 1000).
    probe_timeout_s: for the answer to a probe; an engine that misses two is down (default 4). probe_interval_s: between
    health probes of an engine (default 1). probe_max_interval_s: the interval doubles up to this while an engine is
    out (default 3). max_attempts: how often a call is sent in total if engines fail it before the first byte of an
    answer (default 3). max_open_answer_bytes: answers that are not streamed, of all calls together (default 512 MiB).
    pass_request_headers, pass_response_headers: names of headers that pass to engines and to clients besides those that
    always do (default none).
    """

    connect_timeout_s: Seconds = 2.0
    first_byte_timeout_s: Seconds = 600.0
    idle_timeout_s: Seconds = 600.0
    hang_timeout_s: Seconds = 8.0
    report_wait_ms: NotNegative = 1000
    probe_timeout_s: Seconds = 4.0
    probe_interval_s: Seconds = 1.0
    probe_max_interval_s: Seconds = 3.0
    max_attempts: Positive = 3
    pass_request_headers: tuple[HeaderName, ...] = ()
    pass_response_headers: tuple[HeaderName, ...] = ()
    max_open_answer_bytes: Positive = 512 * 2**20

    def __post_init__(self) -> None:
        for key, never in (("pass_request_headers", NEVER_TO_ENGINES), ("pass_response_headers", NEVER_TO_CLIENTS)):
            msgspec.structs.force_setattr(self, key, passable(key, getattr(self, key), never))
        if self.probe_max_interval_s < self.probe_interval_s:
            raise ValueError(
                f"probe_max_interval_s = {self.probe_max_interval_s}: "
                f"expected at least probe_interval_s, {self.probe_interval_s}"
            )


class AdmissionConfig(Section, frozen=True, kw_only=True):
    """`[admission]`: what waits in the gateway, and what each tenant may use.

    ahead_s: predicted seconds of prompts that an engine is sent behind the one that it computes; further calls wait for
    it in the gateway, where tenants take turns (default 4). max_wait_s: predicted seconds of work that may wait for a
    model; more is refused with 429 (default 120). hold_s: how long a call that is not streamed is kept waiting for an
    engine; then 429, with its place kept until it is sent again (default 60). sessions: hold sessions whose contexts do
    not fit into the engines' KV caches, where that saves time (default true). chat_tokens: a shorter prompt that
    extends none is of no session, and never held (default 4000). The limits of each tenant that has none of its own in
    `[[tenants]]`, 0 for none: calls_per_s and tokens_per_s (prompt and expected output), with bursts of ten seconds;
    max_running: calls on engines at once; max_waiting: calls that wait here at once (all default 0).
    """

    ahead_s: Seconds = 4.0
    max_wait_s: Seconds = 120.0
    hold_s: Seconds = 60.0
    sessions: bool = True
    chat_tokens: NotNegative = 4000
    calls_per_s: Rate = 0.0
    tokens_per_s: Rate = 0.0
    max_running: NotNegative = 0
    max_waiting: NotNegative = 0


class TenantConfig(Section, frozen=True, kw_only=True):
    """`[[tenants]]`: one tenant, which may have several keys.

    name: as logs and metrics call it (required). api_keys: its keys (required). weight: its share of the engines while
    calls wait, relative to those of others (default 1). calls_per_s, tokens_per_s, max_running, max_waiting: its own
    limits, 0 for none (default: those of `[admission]`).
    """

    name: Token
    api_keys: tuple[Token, ...]
    weight: Weight = 1.0
    calls_per_s: Rate | None = None
    tokens_per_s: Rate | None = None
    max_running: NotNegative | None = None
    max_waiting: NotNegative | None = None

    def __post_init__(self) -> None:
        if not self.api_keys:
            raise ValueError("api_keys = []: expected at least one key")


class StoreConfig(Section, frozen=True, kw_only=True):
    """`[store]`: where sessions, programs and stored responses are kept, so that they outlive the gateway.

    path: a file of this machine's disk (default: none, all is in memory only). Prompts, values and answers are written
    to it, readable for this user alone; its folder needs mode 0700. synchronous: what an acknowledgement outlives,
    normal (the process, default) or full (a power cut too; each commit waits for the disk). url: a PostgreSQL database
    instead, which several gateways share, as postgresql://USER@HOST:PORT/DATABASE; PGPASSWORD in the environment has
    the password (default none).
    """

    path: Text | None = None
    synchronous: Literal["normal", "full"] = "normal"
    url: Text | None = None

    def __post_init__(self) -> None:
        if self.url is not None and not self.url.startswith(("postgresql://", "postgres://")):
            raise ValueError("url: expected postgresql://USER@HOST:PORT/DATABASE")  # not shown: it may have a password
        if self.url is not None and self.path is not None:
            raise ValueError("url: expected no path beside it; sessions are in one of the two")


class ReceiptsConfig(Section, frozen=True, kw_only=True):
    """`[receipts]`: what is kept in memory of each call, to say why it went where it went (docs/explain.md).

    max_bytes: of memory, in each worker (default 16 MiB, some 25,000 calls; 0: none are kept). compare: of one call in
    so many the three best engines are found, where that takes a longer search: with more than four engines (default 16;
    0: of none but those that ask for it).
    """

    max_bytes: NotNegative = 16 * 2**20
    compare: NotNegative = 16


DEFAULT_PROFILE: Final = "a6000-mistral-7b"
"""Its costs are better than none, but the size of its KV cache says nothing of an engine."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """`[[models]]`: how the gateway counts a model's tokens and predicts its costs.

    name: the name that clients and engines use (required). tokenizer: `auto` (default: the engines' own where they have
    Plait's adapter, else what the Hugging Face hub has under the model's name, else an estimate), a folder with the
    model's tokenizer, a name on the hub such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`, `tiktoken:NAME`,
    `tiktoken:/path`, `embedded` (the embedded engine's), `estimated` (four bytes a token) or `bytes` (one a byte).
    chat_template: path to a Jinja template (default: the tokenizer's). profile: name of a cost profile or path to a
    `.toml` (default a6000-mistral-7b). max_context_tokens: prompt and output together, if that is less than
    an engine lists (default: what each engine lists). aliases: further names that clients may use (default none).
    fallbacks: models that answer while no engine takes calls for this one, the first that can (default none).
    """

    name: Text
    tokenizer: Text = "auto"
    chat_template: Text | None = None
    profile: Text = DEFAULT_PROFILE
    max_context_tokens: Positive | None = None
    aliases: tuple[Text, ...] = ()
    fallbacks: tuple[Text, ...] = ()


class EngineConfig(Section, frozen=True, kw_only=True):
    """`[[engines]]`: one serving process.

    url: http or https, without `/v1` (required; kept without a trailing slash). name: as logs, metrics and the
    `plait-engine` header call it (default: host:port of the url). models: the models it serves (default: what its
    `/v1/models` lists). api_key: sent to the engine (default: none). kv_tokens: its KV cache in tokens, for an engine
    that does not report it (default: what it says in its metrics or of its sizes, else that of the model's `profile`
    if this is not the default one, else not known). host_kv_tokens: what it keeps in host memory below it, in tokens,
    for an engine that does not report it (default: nothing).
    """

    url: Text
    name: Token = ""
    models: tuple[Text, ...] = ()
    api_key: Token | None = None
    kv_tokens: Positive | None = None
    host_kv_tokens: Positive | None = None

    def __post_init__(self) -> None:
        url, authority = base_url(self.url)
        msgspec.structs.force_setattr(self, "url", url)
        msgspec.structs.force_setattr(self, "name", self.name or authority)


class ServiceConfig(EngineConfig, frozen=True, kw_only=True):
    """`[[services]]`: an engine for each address that a DNS name has. The keys of `[[engines]]`, and one more.

    url: http only; its host is looked up (required). name: the engines are called NAME-ADDRESS. interval_s: seconds
    between lookups (default 5).
    """

    interval_s: Seconds = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith("http:"):
            raise ValueError(f"url = {shown(self.url)}: expected http, since a certificate is for a name")


class Config(Section, frozen=True, kw_only=True):
    """The whole file. A missing section has its defaults."""

    server: ServerConfig = ServerConfig()
    log: LogConfig = LogConfig()
    placement: PlacementConfig = PlacementConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    admission: AdmissionConfig = AdmissionConfig()
    tenants: tuple[TenantConfig, ...] = ()
    sessions: SessionsConfig = SessionsConfig()
    store: StoreConfig = StoreConfig()
    receipts: ReceiptsConfig = ReceiptsConfig()
    models: tuple[ModelConfig, ...] = ()
    engines: tuple[EngineConfig, ...] = ()
    services: tuple[ServiceConfig, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether clients need no key."""
        return not self.server.api_keys and not self.tenants

    def model(self, name: str) -> ModelConfig:
        """The model's configuration; the defaults if the file has none for that name."""
        return next((model for model in self.models if model.name == name), None) or ModelConfig(name=name)
