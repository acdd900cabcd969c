"""What the process that renders others' templates answers to a job, without the process."""

from __future__ import annotations

import msgspec
import pytest

from plait.backends.tokenization import template_process
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.template_process import (
    OWN_TOO_MUCH,
    TOO_MUCH,
    Job,
    Rendered,
    _here,
    _in_child,
    _rendered,
)

OWN = load_tokenizer("embedded")
CHAT = [{"role": "user", "content": "hi"}]


def test_a_chat_is_rendered_by_the_models_own_template_or_the_requests() -> None:
    assert _rendered(OWN, Job(CHAT)).text == OWN.render_chat(CHAT)
    assert _rendered(OWN, Job(CHAT, "{{ messages[0].content }}!")).text == "hi!"
    assert b"hi" in _here(OWN, Job(CHAT))


def test_a_refusal_has_its_reason_and_its_status() -> None:
    refused = _rendered(OWN, Job(CHAT, "{{ raise_exception('no') }}"))
    assert (refused.text, refused.status) == (None, 400)
    assert "no" in refused.refusal
    assert _rendered(OWN, Job([])).status == 400


def test_a_probe_is_rendered_with_a_fixed_date() -> None:
    assert "hi" in str(_rendered(OWN, Job(CHAT, probe="given")).text)


def test_a_child_that_gets_no_time_is_told_from_one_that_takes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that has passed stands for a machine that gives the child no time."""
    assert b"hi" in _in_child(OWN, Job(CHAT))
    monkeypatch.setattr(template_process, "WALL_S", -1.0)
    assert msgspec.json.decode(_in_child(OWN, Job(CHAT)), type=Rendered).status == 503


@pytest.mark.parametrize(
    ("template", "param", "said"), [(None, "messages", OWN_TOO_MUCH), ("{{ 1 }}", "chat_template", TOO_MUCH)]
)
def test_what_takes_too_much_is_named(template: str | None, param: str, said: str) -> None:
    job = Job(CHAT, template)
    assert (job.param, job.too_much) == (param, said)
