from plait.gateway.calls.answer_headers import passed
from plait.gateway.config.values import NEVER_TO_CLIENTS, NEVER_TO_ENGINES
from plait.gateway.membership.engine_link import BY_DEFAULT, TO_CLIENTS, TO_ENGINES, PassedHeaders

JSON = (b"content-type", b"application/json")
TRACE = (b"traceparent", b"00-1-2-01")


def test_what_is_not_listed_does_not_pass() -> None:
    request = [
        JSON,
        TRACE,
        (b"origin", b"http://page"),
        (b"cookie", b"a=b"),
        (b"plait-priority", b"1"),
        (b"baggage", b""),
    ]
    assert passed(request, BY_DEFAULT.to_engines) == [JSON, TRACE]
    answer = [JSON, (b"access-control-allow-origin", b"*"), (b"x-powered-by", b"http://10.0.0.7"), (b"x-vendor", b"v")]
    assert passed(answer, BY_DEFAULT.to_clients) == [JSON]


def test_more_may_pass_in_each_direction() -> None:
    more = PassedHeaders.with_more(["baggage"], ["x-vendor"])
    both = [JSON, (b"baggage", b"b"), (b"x-vendor", b"v")]
    assert passed(both, more.to_engines) == both[:2]
    assert passed(both, more.to_clients) == [both[0], both[2]]


def test_what_the_sender_names_for_this_hop_ends_here() -> None:
    hop = [(b"connection", b"close, Traceparent"), (b"connection", b"x-other"), JSON, TRACE]
    assert passed(hop, BY_DEFAULT.to_engines) == [JSON]
    usual = [(b"connection", b"Keep-Alive"), JSON, TRACE]
    assert passed(usual, BY_DEFAULT.to_clients) == [JSON, TRACE]


def test_nothing_that_must_stay_is_listed() -> None:
    assert TO_ENGINES.isdisjoint(name.encode() for name in NEVER_TO_ENGINES)
    assert TO_CLIENTS.isdisjoint(name.encode() for name in NEVER_TO_CLIENTS)
    assert not [name for name in TO_ENGINES | TO_CLIENTS if name.startswith((b"plait-", b"access-control-"))]
