"""A gateway without the extra `huggingface`: what it renders by itself, and what it says of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from plait.backends.errors import UnsupportedError
from plait.backends.tokenization import chat_template, file_tokenizer
from plait.backends.tokenization.chat_template import CHATML, TEMPLATE_ERRORS, render_as_transformers
from plait.backends.tokenization.file_tokenizer import EmbeddedTokenizer
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.offered_tokenizer import BoundedTemplates
from plait.backends.tokenization.template_worker import TemplateWorker
from tests.backends.tokenization.family_templates import FAMILIES
from tests.backends.tokenization.tokenizer_folders import TEMPLATE

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello,"}]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chat_template, file_tokenizer):
        monkeypatch.setattr(module, "has_transformers", lambda: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in load_tokenizer("embedded").files().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "extra"),
    [("tokenizer.json", "huggingface"), ("tekken.json", "mistral"), ("tokenizer.model", "sentencepiece")],
)
@pytest.mark.usefixtures("without")
def test_a_folder_says_which_extra_it_needs(tmp_path: Path, file: str, extra: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ValueError, match=rf"{file} needs: pip install 'plait\[{extra}\]'$"):
        load_tokenizer(str(tmp_path))


@pytest.mark.usefixtures("without")
def test_no_process_starts_for_an_offer_that_cannot_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[TemplateWorker] = []
    monkeypatch.setattr(TemplateWorker, "start", started.append)
    with pytest.raises(ValueError, match=r"pip install 'plait\[huggingface\]'"):
        BoundedTemplates("offered", folder)
    assert not started


@pytest.mark.parametrize("own", [None, TEMPLATE])
@pytest.mark.parametrize("given", [None, TEMPLATE])
def test_chats_are_rendered_as_with_it(monkeypatch: pytest.MonkeyPatch, own: str | None, given: str | None) -> None:
    expected = EmbeddedTokenizer(own).render_chat(CHAT, chat_template=given)
    print_of = EmbeddedTokenizer(own).fingerprint
    monkeypatch.setattr(chat_template, "has_transformers", lambda: False)
    monkeypatch.setattr(chat_template, "import_transformers", pytest.fail)
    assert EmbeddedTokenizer(own).render_chat(CHAT, chat_template=given) == expected
    assert EmbeddedTokenizer(own).fingerprint == print_of


ENDS: Final[list[Any]] = [
    "Hello,",
    "  Hello, \n",
    "<think>\nhm\n</think>\n\nSo",
    "",
    "Hello, Hello,",
    [{"type": "text", "text": "One"}, {"type": "text", "text": "two "}],
    [{"type": "image"}],
    None,
]


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_an_answer_goes_on_with_the_last_message_as_with_it(
    monkeypatch: pytest.MonkeyPatch, family: str | None
) -> None:
    template = CHATML if family is None else FAMILIES[family]

    def texts() -> list[str | None]:
        return [open_chat(template, end) for end in ENDS]

    expected = texts()
    monkeypatch.setattr(chat_template, "has_transformers", lambda: False)
    assert texts() == expected
    assert any(expected)


def open_chat(template: str, end: Any) -> str | None:
    """The text behind which an answer goes on; None if there is none."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": end}]
    try:
        return render_as_transformers(
            messages, chat_template=template, continue_final_message=True, bos_token="<s>", eos_token="</s>"
        )
    except TEMPLATE_ERRORS:
        return None


@pytest.mark.usefixtures("without")
def test_an_option_that_only_transformers_has_is_refused() -> None:
    tokenizer = EmbeddedTokenizer()
    template = "{% for one in documents %}{{ one }}{% endfor %}"
    with pytest.raises(UnsupportedError, match="'documents'"):
        tokenizer.render_chat(CHAT, chat_template=template, template_kwargs={"documents": ["a"]})
