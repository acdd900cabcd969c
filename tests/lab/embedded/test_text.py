import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.plain_tokenizers import ByteTokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.lab.embedded.generation import OPENING, TextSource

SHIPPED = load_tokenizer("embedded")
BYTES = load_tokenizer("bytes")


def output(seed: int, tokens: int, tokenizer: Tokenizer = SHIPPED) -> tuple[list[int], str]:
    taken = list(itertools.islice(TextSource(tokenizer, seed), tokens))
    return [token.token_id for token in taken], "".join(token.text for token in taken)


def test_the_text_says_first_that_it_is_emulated() -> None:
    ids, text = output(seed=7, tokens=2000)
    assert text.startswith(f"{OPENING} ")
    assert len(ids) == 2000


def test_behind_a_word_it_begins_with_a_space() -> None:
    tokens = list(itertools.islice(TextSource(SHIPPED, 7, behind_word=True), 30))
    text = "".join(token.text for token in tokens)
    assert text.startswith(f" {OPENING} ")
    assert SHIPPED.encode("Code:" + text) == [*SHIPPED.encode("Code:"), *(token.token_id for token in tokens)]


def test_the_text_is_english_sentences() -> None:
    _, text = output(seed=7, tokens=2000)
    sentences = text.split(". ")
    assert len(sentences) > 100
    assert all(sentence[0].isupper() and len(sentence.split()) >= 4 for sentence in sentences[:-1])
    assert text.isascii()


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    assert output(seed=1, tokens=300) == output(seed=1, tokens=300)
    assert output(seed=1, tokens=300) != output(seed=2, tokens=300)


@given(seed=st.integers(0, 2**64 - 1), tokens=st.integers(0, 400))
def test_encoding_the_text_gives_the_same_ids_wherever_it_is_cut(seed: int, tokens: int) -> None:
    ids, text = output(seed, tokens)
    assert SHIPPED.encode(text) == ids
    assert SHIPPED.decode(ids) == text


def test_an_output_is_a_prefix_of_the_next_turns_prompt() -> None:
    question = {"role": "user", "content": "Why?"}
    ids, text = output(seed=3, tokens=50)
    prompt = SHIPPED.encode_chat([question])
    answer = {"role": "assistant", "content": text}
    assert SHIPPED.encode_chat([question, answer, question])[: len(prompt) + 50] == prompt + ids


def test_sources_take_turns_without_touching_each_other() -> None:
    first, second = TextSource(SHIPPED, 1), TextSource(SHIPPED, 2)
    pairs = [(next(first), next(second)) for _ in range(100)]
    assert [one.token_id for one, _ in pairs] == output(seed=1, tokens=100)[0]
    assert [two.token_id for _, two in pairs] == output(seed=2, tokens=100)[0]


def test_any_tokenizer_gives_the_same_text() -> None:
    ids, text = output(seed=1, tokens=500, tokenizer=BYTES)
    assert bytes(ids).decode() == text
    assert output(seed=1, tokens=500)[1].startswith(text)


class WordTokenizer(ByteTokenizer):
    """Splits as SentencePiece does: a space is the start of a word, and decoding drops the first one."""

    def __init__(self) -> None:
        super().__init__(None)
        self.words: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        words = [f" {word}" for word in text.split()]
        self.words.extend(word for word in words if word not in self.words)
        return [self.words.index(word) for word in words]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.words[token_id] for token_id in token_ids).removeprefix(" ")


def test_spaces_survive_a_tokenizer_that_drops_them_at_the_start() -> None:
    words = WordTokenizer()
    ids, text = output(seed=1, tokens=60, tokenizer=words)
    assert output(seed=1, tokens=600)[1].startswith(text)
    assert words.encode(text) == ids
