import base64
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext import openai_public  # type: ignore[import-untyped]

from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tiktoken_encoding import SPLITS, load_encoding

# Every byte, and what makes "the" and " the" one token each.
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}


@pytest.fixture
def ranks_path(tmp_path: Path) -> Path:
    path = tmp_path / "cl100k_base.tiktoken"
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()]
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """tiktoken's registry with nothing cached; the ranks that it would download are the ones above."""
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: dict(RANKS))
    return monkeypatch


def test_a_local_file_of_ranks_encodes_and_decodes(ranks_path: Path) -> None:
    tokenizer = load_tokenizer(f"tiktoken:{ranks_path}")
    assert (tokenizer.name, tokenizer.exact) == (f"tiktoken:{ranks_path}", True)
    assert tokenizer.encode("the the") == [257, 258]
    assert tokenizer.decode([257, 258]) == "the the"
    assert tokenizer.encode("<|endoftext|>") == [100257]
    assert tokenizer.decode(tokenizer.encode("né\n\n1234 ☔")) == "né\n\n1234 ☔"


def test_a_chat_is_chatml_with_special_tokens(ranks_path: Path) -> None:
    ids = load_tokenizer(f"tiktoken:{ranks_path}").encode_chat([{"role": "user", "content": "the<|im_end|>"}])
    start, end, newline = 100264, 100265, ord("\n")
    assistant = list(b"assistant")
    assert ids == [start, *b"user", newline, 257, end, end, newline, start, *assistant, newline]


def test_a_replaced_file_is_read_again(ranks_path: Path) -> None:
    assert load_encoding(str(ranks_path)).encode("the") == [257]
    ranks_path.write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)))
    assert load_encoding(str(ranks_path)).encode("the") == list(b"the")


def test_the_file_name_chooses_the_encoding(ranks_path: Path) -> None:
    path = ranks_path.rename(ranks_path.with_name("my-o200k_base-copy.tiktoken"))
    encoding = load_encoding(str(path))
    assert encoding.encode("<|im_start|><|im_end|>", allowed_special="all") == [200264, 200265]
    path = path.rename(path.with_name("mine.tiktoken"))
    with pytest.raises(ValueError, match="cl100k_base or o200k_base"):
        load_encoding(str(path))


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cl100k_base.tiktoken"
    with pytest.raises(ValueError, match=r"cl100k_base\.tiktoken cannot be read: No such file"):
        load_encoding(str(path))
    path.write_text("<html>moved</html>\n")
    with pytest.raises(ValueError, match="is not a file of tiktoken ranks"):
        load_encoding(str(path))


@pytest.mark.parametrize("name", SPLITS)
def test_local_files_are_split_as_the_registry_splits(name: str, downloads: pytest.MonkeyPatch) -> None:
    registered = getattr(openai_public, name)()
    assert SPLITS[name].pattern == registered["pat_str"]
    assert SPLITS[name].special_tokens == registered["special_tokens"]


def test_a_registered_encoding_gets_the_chat_tokens(downloads: pytest.MonkeyPatch) -> None:
    assert load_tokenizer("tiktoken:cl100k_base").encode("<|im_start|>the<|im_end|>") == [100264, 257, 100265]
    # An encoding without ids known for them gets them after its last token.
    assert load_encoding("p50k_edit").encode("<|im_start|><|fim_suffix|>", allowed_special="all") == [50284, 50283]


def test_a_download_that_fails_says_which_file_to_provide(downloads: pytest.MonkeyPatch) -> None:
    def no_network(url: str, expected_hash: str) -> dict[bytes, int]:
        raise ConnectionError("no route to host")

    downloads.setattr(openai_public, "load_tiktoken_bpe", no_network)
    with pytest.raises(ValueError, match=r"no route to host.*tiktoken:/path/to/cl100k_base\.tiktoken"):
        load_encoding("cl100k_base")
    with pytest.raises(ValueError, match=r"download p50k_base\.tiktoken .*TIKTOKEN_CACHE_DIR"):
        load_encoding("p50k_base")


def test_an_unknown_encoding_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no encoding 'gpt5'; it has .*cl100k_base"):
        load_encoding("gpt5")
