"""One completion of the embedded engine: its text, its stop strings, where and why it ends.

The text is endless, readable, plainly synthetic English, the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from plait.backends.protocol.call_annotations import UNANNOTATED, EngineAnnotations
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.clock import EngineClock
from plait.lab.embedded.engine import Engine
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

OPENING: Final = "This is emulated text."
SUBJECTS: Final = (
    "The old engine", "A small green bird", "The night train", "Every second door", "The quiet harbor", "A paper map",
    "The third teacher", "Some distant music", "The morning letter", "A round table", "The new bridge",
    "One good answer", "The winter garden", "A slow river", "The last window", "Another clock",
)  # fmt: skip
VERBS: Final = ("counts", "follows", "remembers", "opens", "carries", "describes", "waits for", "looks after")
OBJECTS: Final = (
    "the blue stones", "a long list of names", "the people in the market", "seven empty boxes", "the road to the sea",
    "a question about time", "the light under the trees", "nothing in particular",
)  # fmt: skip
# 1,024: enough that the text does not look like a loop, few enough that a server has soon encoded all of them.
SENTENCES: Final = len(SUBJECTS) * len(VERBS) * len(OBJECTS)


class EmulatedToken(NamedTuple):
    """A generated token, and the text that it adds."""

    token_id: int
    text: str


class TextSource(Iterator[EmulatedToken]):
    """The tokens of one call's output, without end.

    With a tokenizer that splits at spaces, the text of the first n tokens is encoded to the same ids again. So the next
    turn of a conversation finds the output in the cache. Text after a word (`behind_word`) begins with a space.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, behind_word: bool = False) -> None:
        self._sentences = _sentences(tokenizer)
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._rest = iter(self._sentences.behind_word if behind_word else self._sentences.opening)

    def __next__(self) -> EmulatedToken:
        for token in self._rest:
            return token
        self._rest = iter(self._sentences[int(self._random.random() * SENTENCES)])
        return next(self._rest)


class _EncodedSentences(dict[int, tuple[EmulatedToken, ...]]):
    """Sentences by number. Each is encoded at its first use (tens of microseconds) and then shared by all calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._context = tokenizer.encode(OPENING, add_special_tokens=False)
        self.opening = self._tokens([], self._context)
        self.behind_word = self._behind_opening(f" {OPENING}")

    def __missing__(self, number: int) -> tuple[EmulatedToken, ...]:
        tokens = self[number] = self._behind_opening(f" {_sentence(number)}")
        return tokens

    def _behind_opening(self, text: str) -> tuple[EmulatedToken, ...]:
        # Encoded after another sentence, because some tokenizers treat the start of a text differently.
        ids = self._tokenizer.encode(OPENING + text, add_special_tokens=False)
        length = len(self._context)
        own = ids[length:] if ids[:length] == self._context else self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokens(self._context, own)

    def _tokens(self, context: list[int], ids: list[int]) -> tuple[EmulatedToken, ...]:
        """Each id with the text that it adds to the previous id. Decoded alone, an id may lose its leading space."""
        decode = self._tokenizer.decode
        tokens: list[EmulatedToken] = []
        before = context[-1:]
        for token_id in ids:
            tokens.append(EmulatedToken(token_id, decode([*before, token_id])[len(decode(before)) :]))
            before = [token_id]
        return tuple(tokens)


@lru_cache(maxsize=8)
def _sentences(tokenizer: Tokenizer) -> _EncodedSentences:
    return _EncodedSentences(tokenizer)


def _sentence(number: int) -> str:
    number, thing = divmod(number, len(OBJECTS))
    number, verb = divmod(number, len(VERBS))
    return f"{SUBJECTS[number]} {VERBS[verb]} {OBJECTS[thing]}."


@dataclass(frozen=True, slots=True)
class Piece:
    """Text for the client. The last piece says why the completion ended (`stop` or `length`), and at which string."""

    text: str
    tokens: tuple[tuple[int, str], ...]
    finish_reason: str | None = None
    stop: str | None = None


class Generation:
    """A call in the engine, and its text. All times are emulated.

    `root` is the hash before the first block of `prompt`. The completion ends after `natural_tokens` (None: there is
    no natural end), after `limit` tokens, or at a stop string, whichever comes first.
    """

    def __init__(
        self,
        engine: Engine,
        clock: EngineClock,
        call_id: str,
        prompt: Sequence[int],
        *,
        source: Iterator[EmulatedToken],
        natural_tokens: int | None,
        limit: int,
        stop: Sequence[str],
        root: int,
        on_piece: Callable[[Piece], None],
        annotations: EngineAnnotations = UNANNOTATED,
    ) -> None:
        self._ends_by_itself = natural_tokens is not None and natural_tokens <= limit
        self._engine = engine
        self._clock = clock
        self._source = source
        self._stop = tuple(stop)
        self._held_chars = max((len(text) for text in self._stop), default=1) - 1
        self._held: list[tuple[int, str]] = []
        self._send = on_piece
        self.call = self._embedded_call(
            call_id, prompt, root, annotations, limit=limit, final_tokens=min(natural_tokens or limit, limit)
        )
        clock.add(engine, self.call, self._on_output)

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> int:
        """The next token, for the engine. Its text waits for `_on_output`."""
        token = next(self._source)
        self._held.append((token.token_id, token.text))
        return token.token_id

    def abort(self) -> None:
        """Abort, because the client has gone. No effect once the completion has ended."""
        self._clock.abort(self._engine, self.call)

    def _embedded_call(
        self,
        call_id: str,
        prompt: Sequence[int],
        root: int,
        annotations: EngineAnnotations,
        *,
        limit: int,
        final_tokens: int,
    ) -> EmbeddedCall:
        engine, now_s = self._engine, self._clock.now_s()
        chain = HashChain(engine.settings.block_tokens, root, prompt)
        same = chain.block_tokens == TREE_BLOCK_TOKENS
        return EmbeddedCall(
            call_id,
            now_s - annotations.age_s,
            len(prompt),
            slo=annotations.slo,
            objective=annotations.objective,
            priority=annotations.priority,
            is_line=annotations.is_line,
            received_s=now_s,
            chain=chain,
            tree_chain=chain if same else HashChain(TREE_BLOCK_TOKENS, root, prompt),
            max_output_tokens=limit,
            final_output_tokens=final_tokens,
            output=self,
            prompt=prompt if engine.settings.window_tokens else (),
            handle=annotations.handle,
            gateway=annotations.gateway or "",
        )

    def _on_output(self, output: Output) -> None:
        text = "".join(text for _, text in self._held)
        cut, stop = min(((at, stop) for stop in self._stop if (at := text.find(stop)) >= 0), default=(-1, None))
        if cut >= 0:
            self._clock.end(self._engine, self.call)
            self._take(text[:cut], len(self._held), "stop", stop)
        elif output.finished:
            self._take(text, len(self._held), "stop" if self._ends_by_itself else "length")
        else:
            self._take_safe(text)

    def _take_safe(self, text: str) -> None:
        """Send whole tokens, except the last characters, which may be the beginning of a stop string."""
        count, length = 0, 0
        while count < len(self._held) and length + len(self._held[count][1]) <= len(text) - self._held_chars:
            length += len(self._held[count][1])
            count += 1
        if count:
            self._take(text[:length], count, None)

    def _take(self, text: str, count: int, finish_reason: str | None, stop: str | None = None) -> None:
        tokens, self._held = tuple(self._held[:count]), self._held[count:]
        self._send(Piece(text, tokens, finish_reason, stop))
