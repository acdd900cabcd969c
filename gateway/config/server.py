"""`[server]` of the configuration."""

from __future__ import annotations

import msgspec

from plait.gateway.config.section import Section
from plait.gateway.config.values import (
    HOST,
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
    root_url,
    shown,
)


class ServerConfig(Section, frozen=True, kw_only=True):
    """Where the gateway listens, and which clients it serves."""

    host: Text = "127.0.0.1"
    """Host name or IP address to listen on. Set "0.0.0.0" where clients are on other machines."""

    port: Port = 8000
    """TCP port; 0 takes any free one."""

    workers: Positive = 1
    """Processes that serve on the port, each a whole gateway. Raise it where one core is not enough: one for each core
    that the gateway may have. Limits of tenants and max_open_body_bytes are divided among the processes. Each process
    has the other limits, on bytes and on connections, in full."""

    max_body_bytes: Positive = 32 * 2**20
    """Largest request body, in bytes. A larger body is answered with 413. Raise it where prompts have long documents or
    images, such as to 100 MB for many pictures in base64."""

    max_multipart_bytes: Positive = 32 * 2**20
    """Largest body with files, in bytes: audio to transcribe, images to edit. The first 1 MiB stays in memory, the rest
    in a temporary file until the request ends. A larger body is answered with 413. Raise it for long recordings."""

    max_open_body_bytes: Positive = 2**30
    """Most bytes at one time of one key's request bodies, from arrival to the end of the request, and of its prompts
    with variables' values filled in. A body beyond the limit is answered with 429; a filled prompt waits for others of
    its key to end. Lower it where keys are many and memory is scarce."""

    max_waiting_prompt_bytes: Positive = 128 * 2**20
    """Most bytes of prompts that wait to be tokenized, of all keys together. Only prompts longer than 16 KiB wait.
    Above the limit, a prompt is answered with 429 unless its key's prompts have no more than an equal part of the
    limit (equal among the keys with waiting prompts). Raise it where batches of long prompts come at once and may
    wait."""

    max_connections: Positive = 10_000
    """Most connections of clients at one time. For another one, the oldest one that has had no valid key is closed, if
    clients need one, or else the one that is idle for longest, and for a second; without one, it is answered with 503.
    When 7/8 of them have open requests, further requests of the keys with
    most of these are answered with 429. The process needs twice as many file descriptors, because of the calls on
    engines, and 200 more. The process raises its limit of descriptors up to the hard limit (ulimit -Hn). If the hard
    limit is too low, clients get fewer connections; the log says how many, if that is a twentieth fewer."""

    max_headers: Positive = 128
    """Most headers and trailers of a request. A request with more is answered with 431. Raise it where proxies add
    many."""

    max_header_bytes: Positive = 64 * 2**10
    """Most bytes of a request's target, headers, trailers and chunk extensions together. A request with more is
    answered with 431. Raise it where clients send long tokens or cookies."""

    header_timeout_s: Seconds = 10.0
    """Seconds for a request's headers to arrive. A slower request is answered with 408. Lower it where the gateway is
    public."""

    body_timeout_s: Seconds = 60.0
    """Seconds for a request's body to arrive, plus 1 s for each 64 KiB of it. A slower request is answered with 408.
    Raise it for clients on slow links."""

    trust_request_chat_template: bool = False
    """Take a request's own `chat_template`, as vLLM's --trust-request-chat-template does. It is rendered in a process
    with limits on time and memory. If false, such a request is answered with 400. Set it where all
    clients are your own."""

    trust_engine_templates: bool = False
    """Render the chat templates that engines offer in the gateway itself. If false, a process with limits on time and
    memory renders them, which takes a millisecond a call. Set it where all engines are your own."""

    token_cache_bytes: NotNegative = 64 * 2**20
    """Memory, in bytes, in which the token ids of prompts' beginnings are kept, so that a shared beginning is tokenized
    once. A document of 24,000 tokens takes some 250,000 bytes. 0: no cache. Raise it where many long documents are
    shared."""

    api_keys: tuple[Token, ...] = ()
    """Keys clients may present as `Authorization: Bearer KEY`, such as ["${PLAIT_API_KEY}"]. Each is a tenant of its
    own. Without a key here or in [[tenants]] the gateway is open to all."""

    secret: Secret | None = None
    """The secret that makes the tenants' identities, which are the engines' cache salts, and their labels in /metrics,
    and that seals the thoughts which clients keep: 32 or more characters. Without it, the gateway uses the file
    `plait.secret` beside this file, and makes it at the first start with keys. Set it where several gateways use the
    same engines (one secret in all of them), or where the folder cannot be written."""

    isolate_tenants: bool = False
    """Keep the cached prefixes of each tenant apart from those of others, by a cache salt (needs keys). Set it where a
    tenant must not learn from an answer's time what another one has sent."""

    admin_key: Token | None = None
    """Key of the admin API (docs/operations.md). Without a key the admin API answers 404. Set it to add, drain and
    remove engines, and for `plait status` and `plait top`."""

    admin_port: ListenerPort | None = None
    """Serve the admin API on this port only, on the same host. Needs admin_key. Without it: on `port`. Set it where
    clients must not reach the admin API, and block the port for them with a firewall."""

    metrics_key: Token | None = None
    """Key that /metrics asks for, as a bearer token. Without it, anybody who reaches the port reads the metrics."""

    root_path: RootPath = ""
    """Path prefix of all routes, for a proxy that does not strip it: with "/llm", clients call /llm/v1/models. Requests
    without the prefix are taken too."""

    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call from a browser, "*" for any. Set it where a web page calls the gateway directly."""

    drain_delay_s: SecondsOrZero = 5.0
    """Seconds from SIGTERM until the gateway stops to listen. Meanwhile /ready answers 503, so that load balancers
    notice, and calls are still taken. Raise it where a load balancer asks /ready less often than every 5 s. Set 0 if
    there is no load balancer."""

    shutdown_grace_s: SecondsOrZero = 30.0
    """Seconds that running calls get to end, after drain_delay_s. Raise it where answers take minutes, and raise the
    grace period of systemd or Kubernetes with it."""

    slow_client_timeout_s: Seconds = 60.0
    """While an answer waits in the gateway for its client, the client has to read 64 KiB in this many seconds, or is
    disconnected. Raise it for clients that pause while they read, e.g. at a breakpoint."""

    advertise_url: Text | None = None
    """URL at which other gateways reach this one. They send requests for its sessions there. Needed with a store that
    several gateways share (`url` in [store])."""

    peer_key: Secret | None = None
    """The secret by which gateways that share a store know each other: 32 or more characters, the same in all. Needed
    with `url` in [store]."""

    def __post_init__(self) -> None:
        if self.advertise_url is not None:
            msgspec.structs.force_setattr(self, "advertise_url", root_url("advertise_url", self.advertise_url))
        if not HOST.fullmatch(self.host):
            raise ValueError(f"host = {shown(self.host)}: expected a host name or an IP address, without a port")
        if self.admin_port is not None and (self.admin_key is None or self.admin_port == self.port):
            raise ValueError(f"admin_port = {self.admin_port}: expected admin_key, and a port other than server.port")
