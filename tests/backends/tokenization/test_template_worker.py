"""Templates of clients, rendered in a process that can be ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from plait.backends.errors import CallerError, TemplateTimeoutError, UnsupportedError
from plait.backends.tokenization import template_worker
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.template_process import TOO_MUCH, Job
from plait.backends.tokenization.template_worker import TemplateWorker

MESSAGES = [{"role": "user", "content": "Is it raining in Ålesund? ☔"}]
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% if style %}!{% endif %}\n{% endfor %}"
HOSTILE = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'a' * 300000000 }}",
    "more memory": "{% set ns = namespace(t='a') %}{% for a in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "output": "{% for a in range(40) %}{{ 'a' * 1000000 }}{% endfor %}",
    "number": "{{ 9 ** 99999999 }}",
    "nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker("embedded")
    worker.start()
    worker.render(Job(MESSAGES, PLAIN))
    yield worker
    worker.close()


@pytest.mark.parametrize("options", [{}, {"style": "loud"}])
def test_a_chat_is_the_same_as_in_process(worker: TemplateWorker, options: dict[str, str]) -> None:
    expected = load_tokenizer("embedded").render_chat(MESSAGES, chat_template=PLAIN, template_kwargs=options)
    assert worker.render(Job(MESSAGES, PLAIN, template_kwargs=options)) == expected


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_more_than_its_share_is_ended(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(CallerError) as caught:
        worker.render(Job(MESSAGES, template))
    assert (caught.value.status, caught.value.param) == (400, "chat_template")
    assert worker.render(Job(MESSAGES, PLAIN))


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages.x.y }}", "{{ ''.__class__.__mro__ }}"]
)
def test_a_template_that_fails_is_refused_with_its_reason(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(CallerError, match="template refused") as caught:
        worker.render(Job(MESSAGES, template))
    assert caught.value.message != TOO_MUCH


def test_content_that_is_not_text_is_not_supported(worker: TemplateWorker) -> None:
    with pytest.raises(UnsupportedError):
        worker.render(Job([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], PLAIN))


def test_a_machine_without_time_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process stands for one that gets no CPU time."""
    monkeypatch.setattr(template_worker, "WALL_S", 0.05)
    monkeypatch.setattr(template_worker, "MARGIN_S", 0.05)
    worker = TemplateWorker("bytes")
    worker.render(Job(MESSAGES, PLAIN))
    assert worker._process is not None
    worker._process.send_signal(signal.SIGSTOP)
    with pytest.raises(TemplateTimeoutError) as caught:
        worker.render(Job(MESSAGES, PLAIN))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    monkeypatch.undo()
    assert "raining" in worker.render(Job(MESSAGES, PLAIN)), "another process goes on"
    worker.close()


def test_a_process_that_was_ended_is_replaced() -> None:
    worker = TemplateWorker("bytes")
    worker.start()
    worker.close()
    assert "raining" in worker.render(Job(MESSAGES, PLAIN))
    worker.close()
