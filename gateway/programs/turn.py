"""A turn of a submitted prompt: one message of a chat, or a whole raw prompt, with its placeholders."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.backends.errors import CallerError
from plait.gateway.programs.substitution import PLACEHOLDER, filled_bytes, filled_message, message_texts

Message = Mapping[str, Any]
"""A chat message as it was sent, or a raw prompt as the content of a message without a role."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, and the placeholders in it where text is generated: `outputs` maps their positions to their names.

    Every other placeholder is replaced by its variable's value, even if the variable is an output.
    """

    message: Message
    outputs: Mapping[int, str]

    def filled(self, values: Mapping[str, str], generated: Mapping[str, str]) -> Message:
        """The whole message, filled with `values` and `generated` texts, both by placeholder name."""
        if not self.outputs:
            return filled_message(self.message, values)
        return {**self.message, "content": self.begun(None, values, generated)}

    def begun(self, end: int | None, values: Mapping[str, str], generated: Mapping[str, str]) -> str:
        """The filled text up to the output that begins at `end` (None: all of it).

        Earlier outputs are filled with the model's own text, before transforms.
        """

        def text(match: re.Match[str]) -> str:
            output = self.outputs.get(match.start())
            return values.get(match[1], match[0]) if output is None else generated[output]

        return PLACEHOLDER.sub(text, self.message["content"][:end])

    def filled_bytes(self, end: int | None, values: Mapping[str, int], generated: Mapping[str, int]) -> int:
        """The bytes of text in what `filled` (`end` is None) or `begun` makes of values and texts of these sizes."""
        if not self.outputs:
            return sum(filled_bytes(text, values) for text in message_texts(self.message))
        places = {place: generated[output] for place, output in self.outputs.items() if output in generated}
        return filled_bytes(self.message["content"][:end], values, places)


def turns(messages: Iterable[Message], outputs: Collection[str]) -> Iterator[Turn]:
    """The turns of a prompt. Each of `outputs` is generated at its first placeholder.

    Raises `CallerError` for an output outside the assistant's messages, or in one part of a message's content.
    """
    generated = set[str]()
    for index, message in enumerate(messages):
        places: dict[int, str] = {}
        for match in placeholders(message):
            if match[1] in outputs and match[1] not in generated:
                _check_place(message, index, match[0])
                generated.add(match[1])
                places[match.start()] = match[1]
        yield Turn(message, places)


def placeholders(message: Message) -> Iterator[re.Match[str]]:
    """The placeholders in a message's texts, in their order."""
    return (match for text in message_texts(message) for match in PLACEHOLDER.finditer(text))


def _check_place(message: Message, index: int, output: str) -> None:
    if message.get("role", "assistant") != "assistant":
        said = f"{output} is an output in a message with the role '{message['role']}'"
    elif not isinstance(message["content"], str):
        said = f"{output} is an output in a part of the content; the content has to be one text"
    else:
        return
    raise CallerError(f"messages[{index}]: {said}; outputs have to be in messages of the assistant.", param="messages")
