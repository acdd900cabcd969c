"""The gateway's configuration: its sections as frozen values.

The string below a field says what the field sets, with its unit, and who needs it. `config.example.toml` is made of
these strings by `example`; `file` reads such a file.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from plait.gateway.config.placement_policy import placement_policy
from plait.gateway.config.section import Section
from plait.gateway.config.server import ServerConfig
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.config.values import (
    NEVER_TO_CLIENTS,
    NEVER_TO_ENGINES,
    RANK_NAME,
    Amount,
    HeaderName,
    NotNegative,
    Options,
    Positive,
    Price,
    Ranks,
    Rate,
    Seconds,
    SecondsOrZero,
    Share,
    Text,
    Token,
    Weight,
    base_url,
    passable,
    shown,
)
from plait.policy.placement.policies import Policy


class LogConfig(Section, frozen=True, kw_only=True):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged. "warning" where the line of each call is too much; "debug" to find a defect.
    """

    format: Literal["auto", "console", "json"] = "auto"
    """"json" (one object per line), "console" (for people) or "auto": console when stderr is a terminal, else JSON."""


class PlacementConfig(Section, frozen=True, kw_only=True):
    """How an engine is chosen for a call."""

    policy: Text = "plait"
    """"plait" (where the call delays itself and all others least), "e2" (Preble's algorithm as published),
    "round_robin", "least_outstanding", or "package.module:name" of a policy of your own, which is installed or on
    PYTHONPATH (docs/placement.md). The others are for comparisons."""

    options: Options = msgspec.field(default_factory=dict)
    """Keywords for a policy of your own."""

    window_s: Seconds = 180.0
    """Seconds of history: the load of an engine in the E2 policy (H in the paper), and the mean length of answers.
    Lower it where the kind of load changes within minutes."""

    hand_over_s: SecondsOrZero = 60.0
    """For so many seconds a draining engine may still get calls for prefixes that only it has, while the others compute
    them one by one. 0: it gets no calls at once, e.g. where engines are replaced in a hurry."""

    def __post_init__(self) -> None:
        self.new_policy()

    def new_policy(self) -> Policy:
        """Make the policy for one router. Raises ValueError if there is none of the name, or not with these options."""
        return placement_policy(self.policy, self.options)


class UpstreamConfig(Section, frozen=True, kw_only=True):
    """How long the gateway waits for engines, and when it gives one up (docs/failures.md)."""

    connect_timeout_s: Seconds = 2.0
    """Seconds to wait for a connection to an engine. Raise it where engines are behind a slow link or a busy proxy."""

    first_byte_timeout_s: Seconds = 600.0
    """Seconds from sending a call to the first byte of its answer, including queueing and prefill. Raise it where the
    engines' queues are longer, or whole answers take longer."""

    idle_timeout_s: Seconds = 600.0
    """Seconds between two pieces of a stream whose engine computes: a tool parser may hold back the arguments of a call
    for minutes. If the engine answers no trial, its streams end after some 11 to 45 seconds."""

    hang_timeout_s: Seconds = 8.0
    """A silent engine that owes answers is asked for two tokens. It hangs if it does not answer within so many seconds,
    and sends nothing else. Raise it where one step of the engine may take longer, e.g. a prefill without chunks."""

    probe_timeout_s: Seconds = 4.0
    """Seconds to wait for the answer to a probe. An engine that misses two is down. Raise it where engines are busy
    with long steps and answer nothing meanwhile."""

    probe_interval_s: Seconds = 1.0
    """Seconds between health probes of an engine, and the longest that it may hold a poll of its cache state while
    nothing changes. The interval grows to three times as much while an engine stays out. Raise it where many
    gateways ask the same engines."""

    max_attempts: Positive = 3
    """How often a call is sent in total if engines fail it before the first byte of an answer. 1: never again, e.g.
    where clients try again themselves."""

    pass_request_headers: tuple[HeaderName, ...] = ()
    """Headers that pass from clients to engines besides those that always do (docs/routes.md), such as ["baggage"]."""

    pass_response_headers: tuple[HeaderName, ...] = ()
    """Headers that pass from engines to clients, such as ["x-ratelimit-remaining-tokens"]."""

    max_open_answer_bytes: Positive = 512 * 2**20
    """Answers that are not streamed, of all calls together, in bytes: they are kept until their clients have them. A
    call whose answer finds no room gets 502. Lower it where the gateway has less memory."""

    def __post_init__(self) -> None:
        for key, never in (("pass_request_headers", NEVER_TO_ENGINES), ("pass_response_headers", NEVER_TO_CLIENTS)):
            msgspec.structs.force_setattr(self, key, passable(key, getattr(self, key), never))


class AdmissionConfig(Section, frozen=True, kw_only=True):
    """What waits in the gateway, and what each tenant may use."""

    ahead_s: Seconds = 0.5
    """Predicted seconds of prompts that an engine is sent behind the one that it computes. Further calls wait for it in
    the gateway, where tenants take turns by tokens. With less, engines idle at times; with more, calls wait where
    nothing can change their order. While several tenants are active it is at most a quarter of a second. Raise it where
    engines are far away."""

    max_wait_s: Seconds = 120.0
    """Predicted seconds of work that may wait for a model. More is refused with 429 and a Retry-After. Raise it for
    batches that nobody waits for; lower it where a late answer is worth nothing."""

    hold_s: Seconds = 60.0
    """Seconds that a call waits for an engine if it is not streamed. Then it gets 429 with the code `waiting`, and
    keeps its place until it is sent again. Streams are told that they wait instead. Lower it where a client or proxy
    closes a connection that is silent for less than a minute."""

    sessions: bool = True
    """Hold sessions, such as coding agents', whose contexts do not fit into the engines' KV caches beside the others',
    where computing them again would take longer (docs/sessions.md). Needs the placement `plait`, and engines that
    report how large their caches are, or have `kv_tokens`."""

    chat_tokens: NotNegative = 4000
    """A shorter prompt, in tokens, that extends no earlier one is of no session, as is any whose client names none
    until another one goes on with it. It is never held. Raise it where one-off prompts are longer, e.g. of RAG."""

    calls_per_s: Rate = 0.0
    """This and the next three are limits of each tenant that has none of its own in [[tenants]]. Set them where one
    client could take the fleet from the others. 0: no limit. Calls a second; bursts of ten seconds are allowed."""

    tokens_per_s: Rate = 0.0
    """Tokens of prompts and expected outputs a second; bursts of ten seconds are allowed."""

    max_running: NotNegative = 0
    """Calls on engines at one time."""

    max_waiting: NotNegative = 0
    """Calls that wait here at one time."""


class BudgetConfig(Section, frozen=True, kw_only=True):
    """What may be used in a day or a month, which begin at 0:00 UTC. What is left out has no budget."""

    day: Amount | None = None
    """In the currency of [usage], of which the models' prices are."""

    month: Amount | None = None
    tokens_per_day: Positive | None = None
    """Tokens of prompts and answers."""

    tokens_per_month: Positive | None = None

    @property
    def is_of_money(self) -> bool:
        return self.day is not None or self.month is not None


class TenantConfig(Section, frozen=True, kw_only=True):
    """One [[tenants]] for each tenant that has a name, several keys, a weight, or limits of its own."""

    name: Token
    """The name in logs and metrics. Required, unique."""

    api_keys: tuple[Token, ...] = ()
    """Its keys. Each key stands in one place of this file only. A tenant may be without where a [store] has keys that
    were made by `plait keys create` (docs/accounts.md)."""

    weight: Weight = 1.0
    """Its share of the engines while calls wait: one of weight 2 gets twice as many tokens as one of weight 1."""

    calls_per_s: Rate | None = None
    """This and the next three are limits of this tenant, instead of those of [admission]. 0: no limit."""

    tokens_per_s: Rate | None = None
    max_running: NotNegative | None = None
    max_waiting: NotNegative | None = None

    budget: BudgetConfig | None = None
    """What it may use in a day or a month (docs/accounts.md): {day = 5.0, month = 100.0} in the currency, or
    {tokens_per_day = 1000000, tokens_per_month = 20000000}."""


class StoreConfig(Section, frozen=True, kw_only=True):
    """Where sessions, programs and stored responses are kept, so that they outlive the gateway (docs/durability.md)."""

    path: Text | None = None
    """A file on a disk of this machine. Prompts, values and answers are written to it. It is made with mode 0600, in a
    folder of mode 0700. Without it, all is in memory."""

    synchronous: Literal["normal", "full"] = "normal"
    """What an acknowledgement outlives: "normal", the process; "full", a power cut, too, as each commit waits for the
    disk."""

    url: Text | None = None
    """A PostgreSQL database instead of a file, for several gateways that share all sessions (docs/scaling.md). The
    password is in the environment: PGPASSWORD. Needs pip install "plait[postgresql]"."""

    def __post_init__(self) -> None:
        if self.url is not None and not self.url.startswith(("postgresql://", "postgres://")):
            raise ValueError("url: expected postgresql://USER@HOST:PORT/DATABASE")  # not shown: it may have a password
        if self.url is not None and self.path is not None:
            raise ValueError("url: expected no path beside it; sessions are in one of the two")


class ReceiptsConfig(Section, frozen=True, kw_only=True):
    """What is kept in memory of each call, to say why it went where it went (docs/explain.md)."""

    max_bytes: NotNegative = 16 * 2**20
    """Bytes of memory, in each worker: 16 MiB have some 25,000 calls. 0: none are kept. Raise it where operators ask
    for calls of hours ago."""


class UsageConfig(Section, frozen=True, kw_only=True):
    """How the use of tenants and keys is counted (docs/accounts.md)."""

    currency: Token = "USD"
    """Of the models' prices and of budgets."""


class TracingConfig(Section, frozen=True, kw_only=True):
    """Traces of calls and programs, for an OpenTelemetry collector (docs/monitoring.md). Needs the extra `otel`."""

    endpoint: Text | None = None
    """The collector's address for traces. Without it, traces are sent where OTEL_EXPORTER_OTLP_ENDPOINT says, if it is
    set."""

    sample: Share = 0.01
    """The share of calls without a client's traceparent that is traced. A traceparent says whether its call is."""

    max_calls_per_s: Positive = 50
    """The most calls a second that are traced, in each worker. Agents that trace every call are the reason."""


DEFAULT_PROFILE: Final = "a6000-mistral-7b"
"""Its costs are better than none, but the size of its KV cache says nothing of an engine."""


class PriceConfig(Section, frozen=True, kw_only=True):
    """The price of a model, for a million tokens."""

    input: Price
    cached: Price | None = None
    """Of tokens of the prompt that the engine had in its cache. Without it: as `input`."""

    output: Price


class ModelConfig(Section, frozen=True, kw_only=True):
    """One [[models]] for each model for which the defaults are wrong. A model that is not listed has the defaults."""

    name: Text
    """The name that clients and engines use. Required, unique."""

    tokenizer: Text = "auto"
    """The tokenizer. It must be the engines' own; otherwise they get no token ids and their caches are only estimated.
    "auto" (the default): what the model's engines offer, if they run Plait's adapter; else what the Hugging Face hub
    has under the model's name, from its cache or by download; else "estimated". All of these are Hugging Face files,
    which need pip install 'plait[huggingface]'; so do a folder with the model's tokenizer, the path of a
    tokenizer.json, and a name on the hub ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@REVISION"). The path of Mistral's
    tekken.json needs 'plait[mistral]', of SentencePiece's tokenizer.model 'plait[sentencepiece]'. Without an extra:
    "tiktoken:NAME", "tiktoken:/path", "embedded" (the embedded engine's), "estimated" (four bytes a token) or "bytes"
    (one a byte)."""

    chat_template: Text | None = None
    """Path to a Jinja chat template that replaces the tokenizer's own. For engines with --chat-template that do not
    run Plait's adapter."""

    profile: Text = DEFAULT_PROFILE
    """What prefill and decode cost: the name of a cost profile, or a path that ends with .toml, such as `plait profile`
    writes. Set it where the engines' GPUs and model are others than these."""

    max_context_tokens: Positive | None = None
    """Prompt and output together, in tokens, if that is less than an engine says. Set it where long calls cost too
    much."""

    aliases: tuple[Text, ...] = ()
    """Further names that clients may use, such as those that are written into their programs."""

    fallbacks: tuple[Text, ...] = ()
    """Models that answer while no engine takes calls for this one: the first that can."""

    price: PriceConfig | None = None
    """What its tokens cost, for a million of them, in the currency of [usage]: {input = 0.5, cached = 0.05,
    output = 1.5}. A change holds for calls that end later. Without it, its calls have no cost."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """One [[engines]] for each serving process. At least one is needed."""

    url: Text
    """Root of the engine's OpenAI API, http or https, without /v1. Required, unique."""

    name: Token = ""
    """The name in logs, metrics and the `plait-engine` header; unique. Without it: host:port of the url."""

    models: tuple[Text, ...] = ()
    """Models that the engine serves. Without it: those that its /v1/models lists, which is right for most engines."""

    api_key: Token | None = None
    """Key sent to the engine, for one that was started with --api-key."""

    kv_tokens: Positive | None = None
    """The engine's KV cache, in tokens; only for an engine that does not report it. Without it: what the engine says in
    its metrics or of its sizes, else that of a profile other than the default one, else not known."""

    host_kv_tokens: Positive | None = None
    """What the engine keeps in host memory below its KV cache, in tokens; only for an engine that does not report it.
    Without it: nothing."""

    ranks: Ranks | None = None
    """Data-parallel ranks behind the url (--data-parallel-size, --dp-size). Each has a KV cache of its own, and is an
    engine NAME@RANK, to which kv_tokens and host_kv_tokens apply. Without it: what vLLM and SGLang say. 1: the server
    chooses the rank of each call, and is one engine."""

    def __post_init__(self) -> None:
        url, authority = base_url(self.url)
        msgspec.structs.force_setattr(self, "url", url)
        msgspec.structs.force_setattr(self, "name", self.name or authority)
        if RANK_NAME.search(self.name):
            raise ValueError(f"name = {shown(self.name)}: a name with @ and a number at its end is that of a rank")


class ServiceConfig(EngineConfig, frozen=True, kw_only=True):
    """One [[services]] for each DNS name that has an address for each engine, such as a headless service of Kubernetes.
    The name is looked up again and again: new addresses become engines, and the engines of addresses that are gone
    leave. Where it has IPv4 and IPv6 addresses, those of IPv4 are used. The other keys are those of [[engines]].
    """

    url: Text
    """Root of the engines' API, http only. Its host is looked up. Required."""

    name: Token = ""
    """The engines are called NAME-ADDRESS. Without it: host:port of the url."""

    interval_s: Seconds = 5.0
    """Seconds between lookups. Lower it where engines come and go within seconds."""

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
    tracing: TracingConfig = TracingConfig()
    usage: UsageConfig = UsageConfig()
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
