"""`[sessions]` of the configuration, which the executor's core imports without the other sections."""

from __future__ import annotations

from plait.gateway.config.section import Section
from plait.gateway.config.values import NotNegative, Positive, Seconds, SecondsOrZero


class SessionsConfig(Section, frozen=True, kw_only=True):
    """`[sessions]`: semantic variables. Each limit is for one tenant at one time.

    ttl_s: time to live of a session without activity, in seconds; a session may set its own (default 3600).
    keep_alive_s: seconds between comments in a stream that waits for a call's inputs or a variable (default 5).
    gather_ms: milliseconds since its session's latest call, 100 at most in all, that a call waits for others of its
    program if it could run at once, produces a variable and has no objective (default 10, 0: it does not wait).
    hold_timeout_s: how long a call or a get waits for a variable that nobody produces, and a native step for its
    client (default 300). gone_grace_s: how long calls with outputs go on after their client has gone, if nobody else
    waits for them (default 10). max_attempts: how often a call is started in total if engines break its answer off
    (default 3). max_sessions (default 10000), max_variables (default 200000), max_waiting_calls: calls that wait for
    inputs (default 20000). max_program_calls: calls and native steps of one program (default 1024). max_value_bytes:
    longest value of a variable, and of the text that it is made from (default 1 MiB). max_held_bytes: total of values,
    texts that are being generated, bodies of calls that have not ended, and answers (default 256 MiB).
    max_response_bytes: responses that later requests can continue, the latest used; 0: none (default 64 MiB).
    Idle sessions are evicted before a call is refused for max_sessions, max_variables or max_held_bytes.
    """

    ttl_s: Seconds = 3600.0
    keep_alive_s: Seconds = 5.0
    gather_ms: NotNegative = 10
    hold_timeout_s: Seconds = 300.0
    gone_grace_s: SecondsOrZero = 10.0
    max_attempts: Positive = 3
    max_sessions: Positive = 10_000
    max_variables: Positive = 200_000
    max_waiting_calls: Positive = 20_000
    max_program_calls: Positive = 1024
    max_value_bytes: Positive = 2**20
    max_held_bytes: Positive = 256 * 2**20
    max_response_bytes: NotNegative = 64 * 2**20
