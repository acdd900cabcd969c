import subprocess
import sys
from array import array
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from plait.backends.errors import CallerError, UnsupportedError
from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer

SHIPPED = load_tokenizer("embedded")
BYTES = load_tokenizer("bytes")
REPOSITORY = Path(__file__).parents[3]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city, in <b>plain</b> words.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": None, "parameters": None}},
]
SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "Is it raining in Ålesund? ☔"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ålesund"}}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain, 7 °C"}
ANSWER = {"role": "assistant", "content": "Yes."}
CHATS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, CALL, RESULT],
    [SYSTEM, USER, CALL, RESULT, ANSWER],
]


def chat_text(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.decode(tokenizer.encode_chat(messages, **options))


def hf_folder(folder: Path, config: str = "{}", **changes: Any) -> Path:
    """The shipped tokenizer with a BOS, and what a fine-tune leaves behind: truncation and padding."""
    raw = RawTokenizer.from_file(str(EMBEDDED_FOLDER / "tokenizer.json"))
    raw.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    raw.enable_truncation(4)
    raw.enable_padding(length=32)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(config)
    return folder


# The shipped tokenizer, against transformers itself.


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_has_the_ids_that_transformers_gives_it(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - the loader imports it without noise

    reference = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_FOLDER)
    expected = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    assert SHIPPED.encode_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt) == expected


@given(st.text())
def test_text_survives_encoding(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text)) == text


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", " ", "\n", "a", "é", "ﬁ", "\0"])))
def test_text_with_special_tokens_survives_encoding(pieces: list[str]) -> None:
    assert SHIPPED.decode(SHIPPED.encode("".join(pieces))) == "".join(pieces)


def test_special_tokens_in_text_are_special_as_they_are_in_the_engines() -> None:
    assert len(SHIPPED.encode("<|im_start|><|im_end|><|endoftext|>")) == 3


def test_the_shipped_tokenizer_adds_no_bos() -> None:
    assert SHIPPED.encode("hello") == SHIPPED.encode("hello", add_special_tokens=False)
    assert SHIPPED.encode("") == []


def test_the_shipped_tokenizer_compresses_prose_and_stays_small() -> None:
    prose = "The members of the committee agreed that the report should be published before the end of the year."
    assert len(prose) / len(SHIPPED.encode(prose)) > 3.5
    assert sum(f.stat().st_size for f in EMBEDDED_FOLDER.iterdir()) < 700_000


# ChatML as the shipped template writes it.


def test_a_chat_is_rendered_as_chatml() -> None:
    assert chat_text(SHIPPED, [SYSTEM, {"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_and_results_are_rendered_in_tags() -> None:
    assert chat_text(SHIPPED, [CALL, RESULT], add_generation_prompt=False) == (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\nrain, 7 °C\n</tool_response><|im_end|>\n"
    )


def test_calls_with_the_same_tools_share_a_prefix_whatever_their_system_prompts() -> None:
    first = SHIPPED.encode_chat([SYSTEM, USER], tools=TOOLS)
    second = SHIPPED.encode_chat([{"role": "system", "content": "Be kind."}, ANSWER], tools=TOOLS)
    without_system = SHIPPED.encode_chat([USER], tools=TOOLS)
    for other in (second, without_system):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False))
        shared = SHIPPED.decode([one for one, _ in same])
        assert shared.startswith("<|im_start|>system\n# Tools")
        assert '"name": "now"' in shared


def test_the_system_message_follows_the_tools_in_the_same_turn() -> None:
    text = chat_text(SHIPPED, [SYSTEM, USER], tools=TOOLS)
    assert text.count("<|im_start|>system") == 1
    assert text.index("</tools>") < text.index("You are terse.") < text.index("<|im_end|>")


def test_the_last_message_can_be_continued() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat_text(SHIPPED, [USER, ANSWER], **options).endswith("<|im_start|>assistant\nYes.")


def test_a_continued_chat_starts_with_the_ids_of_its_beginning() -> None:
    turn = SHIPPED.encode_chat([SYSTEM, USER])
    assert SHIPPED.encode_chat([SYSTEM, USER, ANSWER, USER])[: len(turn)] == turn


# What templates are given.


def test_arguments_given_as_json_text_are_rendered_as_an_object() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Ålesund"}'}}]
    from_text = SHIPPED.encode_chat([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert from_text == SHIPPED.encode_chat([CALL | {"tool_calls": CALL["tool_calls"][:1]}])


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "Is it"}, {"type": "text", "text": "raining?"}]
    assert SHIPPED.encode_chat([{"role": "user", "content": parts}]) == SHIPPED.encode_chat(
        [{"role": "user", "content": "Is it\nraining?"}]
    )


def test_template_options_reach_the_template_and_others_are_dropped() -> None:
    template = "{{ 'thinking' if enable_thinking else 'not thinking' }}"
    options: dict[str, Any] = {"enable_thinking": True, "padding": "max_length", "add_generation_prompt": False}
    assert chat_text(SHIPPED, [USER], chat_template=template, template_kwargs=options) == "thinking"
    assert chat_text(SHIPPED, [USER], chat_template=template) == "not thinking"


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    for spec in ("embedded", "bytes"):
        assert chat_text(load_tokenizer(spec, chat_template=str(path)), [SYSTEM, ANSWER]) == "[You are terse.][Yes.]"


# What callers do wrong.


@pytest.mark.parametrize("tokenizer", [SHIPPED, load_tokenizer("bytes")])
def test_a_role_that_the_template_refuses_is_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(CallerError, match='Unknown role "robot"') as caught:
        tokenizer.encode_chat([{"role": "robot", "content": "beep"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "template", ["{{ 1 + messages[0].content }}", "{{ messages[9].x.y }}", "{% if %}", "{{ 1 // 0 }}", "{{ [][3].x }}"]
)
def test_whatever_a_template_raises_is_the_callers_error(template: str) -> None:
    with pytest.raises(CallerError, match="chat template refused"):
        SHIPPED.encode_chat([USER], chat_template=template)


def test_a_generation_prompt_and_a_continued_message_exclude_each_other() -> None:
    with pytest.raises(CallerError, match="continue_final_message"):
        SHIPPED.encode_chat([USER, ANSWER], continue_final_message=True)


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(CallerError, match="at least one message"):
        SHIPPED.encode_chat([])


def test_images_are_unsupported_rather_than_left_out() -> None:
    with pytest.raises(UnsupportedError, match="image_url"):
        SHIPPED.encode_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])


@pytest.mark.parametrize("tokenizer", [SHIPPED, load_tokenizer("bytes")])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(CallerError, match="not valid Unicode"):
        tokenizer.encode("\ud800")
    with pytest.raises(CallerError, match="not valid Unicode"):
        tokenizer.encode_array("\ud800")
    with pytest.raises(CallerError, match="not valid Unicode"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])


# Folders of Hugging Face files.


def test_a_bos_is_added_to_plain_prompts_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hf_folder(tmp_path)))
    prompt = "one two three four five six"
    assert tokenizer.encode(prompt) == [0, *SHIPPED.encode(prompt)]
    assert tokenizer.encode(prompt, add_special_tokens=False) == SHIPPED.encode(prompt)
    template = "{{ messages[0].content }}"
    assert tokenizer.encode_chat([USER], chat_template=template) == SHIPPED.encode(str(USER["content"]))


def test_a_chat_without_a_chat_template_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="no chat template"):
        load_tokenizer(str(hf_folder(tmp_path))).encode_chat([USER])


def test_special_tokens_are_text_where_the_configuration_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hf_folder(tmp_path, '{"split_special_tokens": true}')))
    assert len(tokenizer.encode("<|im_start|>", add_special_tokens=False)) > 1


def test_the_spec_is_the_name() -> None:
    assert (SHIPPED.name, SHIPPED.exact) == ("embedded", True)
    tokenizer = load_tokenizer(str(EMBEDDED_FOLDER))
    assert (tokenizer.name, tokenizer.exact) == (str(EMBEDDED_FOLDER), True)
    assert tokenizer.encode_chat([USER], tools=TOOLS) == SHIPPED.encode_chat([USER], tools=TOOLS)


# The byte-level fallback.


def test_bytes_are_tokens_in_the_fallback_which_warns() -> None:
    with capture_logs() as logs:
        tokenizer = load_tokenizer("bytes")
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "wrong for real engines" in logs[0]["event"]
    assert (tokenizer.name, tokenizer.exact) == ("bytes", False)
    assert tokenizer.encode("né") == [0x6E, 0xC3, 0xA9]
    assert tokenizer.decode([0x6E, 0xC3]) == "n\N{REPLACEMENT CHARACTER}"
    assert chat_text(tokenizer, [SYSTEM, USER], tools=TOOLS) == chat_text(SHIPPED, [SYSTEM, USER], tools=TOOLS)


# What cannot be loaded.


@pytest.mark.parametrize("spec", ["/no/such/folder", "gpt2", "tiktoken:", "Bytes", ""])
def test_an_unknown_spec_names_the_accepted_forms(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json|'bytes'"):
        load_tokenizer(spec)


def test_a_folder_without_tokenizer_json_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_the_path_of_its_file_names_a_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    assert load_tokenizer(str(folder / "tokenizer.json")).encode("hello") == load_tokenizer(str(folder)).encode("hello")


def test_a_file_of_sentencepiece_names_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"pip install 'plait\[sentencepiece\]'"):
        load_tokenizer(str(tmp_path / "tokenizer.model"))


def test_a_template_file_is_checked_when_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_tokenizer("embedded", chat_template=str(tmp_path / "none.jinja"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("fine\n{% for x in %}")
    with pytest.raises(ValueError, match=r"broken\.jinja, line 2"):
        load_tokenizer("embedded", chat_template=str(broken))


def test_loading_and_encoding_print_nothing() -> None:
    code = (
        "from plait.backends.tokenization.loading import load_tokenizer; t = load_tokenizer('embedded');"
        "t.encode_chat([{'role': 'user', 'content': 'hi'}]); t.decode(t.encode('x' * 200_000))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("", "")


@cache
def by_transformers() -> Tokenizer:
    """The embedded tokenizer as an engine would load it."""
    return load_tokenizer(str(EMBEDDED_FOLDER))


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
ODD_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": "\u00e9<>&'"}}}]


@given(
    st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20)}), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([None, ODD_TOOLS]),
)
def test_the_embedded_tokenizer_is_the_one_of_its_files(messages: Any, prompts: bool, tools: Any) -> None:
    options = {"add_generation_prompt": prompts, "tools": tools}
    loaded = by_transformers()
    assert SHIPPED.encode_chat(messages, **options) == loaded.encode_chat(messages, **options)
    assert (SHIPPED.special_ids, SHIPPED.longest_token_bytes, SHIPPED.ids_around) == (
        loaded.special_ids,
        loaded.longest_token_bytes,
        loaded.ids_around,
    )


def test_an_embedded_fleet_starts_without_transformers() -> None:
    code = (
        "import sys; from plait.backends.tokenization.loading import load_tokenizer; t = load_tokenizer('embedded');"
        "from plait.backends.protocol.tokenizer_fingerprint import fingerprint; fingerprint(t);"
        "t.encode_chat([{'role': 'user', 'content': 'hi'}]); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


@given(st.text())
def test_an_array_has_the_same_ids(text: str) -> None:
    for tokenizer in (BYTES, SHIPPED):
        assert tokenizer.encode_array(text) == array("I", tokenizer.encode(text))
