"""The metrics of several workers as one text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from plait.gateway.guests.peers.metrics import UP, merged

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family is in one piece"
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


@given(st.dictionaries(st.sampled_from("012"), st.lists(st.tuples(st.text(max_size=5), st.floats(0, 9)), max_size=4)))
def test_each_sample_is_there_with_its_worker(workers: dict[str, list[tuple[str, float]]]) -> None:
    texts, expected = dict[str, bytes | None](), Samples()
    for worker, observed in workers.items():
        registry = CollectorRegistry()
        Counter("plain", "without labels {here}", registry=registry).inc()
        counted = Counter("calls", "by name", ["name"], registry=registry)
        times = Histogram("times", "in seconds", ["name"], buckets=(1, 5), registry=registry)
        for name, value in observed:
            counted.labels(name).inc(value)
            times.labels(name).observe(value)
        texts[worker] = text = generate_latest(registry)
        for (sample, labels), value in samples(text.decode()).items():
            expected[sample, tuple(sorted((*labels, ("worker", worker))))] = value
        expected[UP, (("worker", worker),)] = 1.0
    assert samples(merged(texts).decode()) == expected


def test_a_worker_that_does_not_answer_is_down() -> None:
    found = samples(merged({"0": b"# HELP a_total b\n# TYPE a_total counter\na_total 1.0\n", "1": None}).decode())
    assert found == {("a_total", (("worker", "0"),)): 1.0, (UP, (("worker", "0"),)): 1.0, (UP, (("worker", "1"),)): 0.0}
