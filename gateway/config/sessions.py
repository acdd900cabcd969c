"""`[sessions]` of the configuration, which the executor's core imports without the other sections."""

from __future__ import annotations

from plait.gateway.config.section import Section
from plait.gateway.config.values import NotNegative, Positive, Seconds, SecondsOrZero


class SessionsConfig(Section, frozen=True, kw_only=True):
    """Semantic variables (docs/semantic_variables.md). Each limit is for one tenant at one time."""

    ttl_s: Seconds = 3600.0
    """Time to live of a session in seconds: it ends after that long without activity. A session may set its own. Raise
    it where people come back to a conversation after hours."""

    keep_alive_s: Seconds = 5.0
    """Seconds between comments in a stream that waits for a call's inputs or for a variable. The comments keep clients
    and proxies from closing the connection. Lower it below the shortest idle timeout of your proxies."""

    gather_ms: NotNegative = 10
    """Milliseconds that a call waits for later calls of its program if it could run at once, produces a variable and
    has no objective. It runs as soon as an objective is deduced from them, and all that they need has a producer. The
    wait begins anew with each call of the session, for 100 ms in all. 0: it does not wait. Raise it where clients on
    slow links send a program call by call."""

    hold_timeout_s: Seconds = 300.0
    """Seconds that a call or a get waits for a variable that no call produces and no client has set, and that a native
    step waits for its client. Raise it where people or slow tools set variables."""

    gone_grace_s: SecondsOrZero = 10.0
    """Seconds that calls with outputs go on after their client has gone, if nobody else waits for them. A client that
    sends its request again meanwhile gets the answer. Raise it where clients lose their connections for longer."""

    max_attempts: Positive = 3
    """How often a call is started in total if its answer breaks off. It is started again only while no client has seen
    a part of its answer."""

    max_sessions: Positive = 10_000
    """Sessions at one time. Before a call is refused for this or a later limit, idle sessions are evicted. Raise this
    and the next limits for a tenant with more users than that."""

    max_variables: Positive = 200_000
    """Variables in all sessions together."""

    max_waiting_calls: Positive = 20_000
    """Calls that wait for inputs."""

    max_program_calls: Positive = 1024
    """Calls and native steps of one program (POST /v1/programs)."""

    max_value_bytes: Positive = 2**20
    """Longest value of a variable, and longest text that it is made from, in bytes. Raise it where steps pass whole
    documents on."""

    max_held_bytes: Positive = 256 * 2**20
    """Total of values, texts that are being generated, bodies and filled prompts of calls that have not ended, and
    answers, in bytes. Lower it where tenants are many and memory is scarce."""

    max_response_bytes: NotNegative = 64 * 2**20
    """Responses (/v1/responses) that later requests can continue by previous_response_id, the latest used ones, in
    bytes. They stay for ttl_s after their last use. 0: none are stored."""
