"""A prompt template: its inputs and outputs, and its rendering for one call."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.client.errors import TemplateError

_PLACEHOLDER = re.compile(r"\{\{\s*(?:(?P<role>input|output):\s*)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_PLACEHOLDER_CHARACTERS = 64  # the longest name that the gateway takes


@dataclass(frozen=True, slots=True)
class Place:
    """The position of an input's text, or of an output."""

    name: str
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Role:
    """The start of a chat message: the system's, the user's or the assistant's."""

    name: str


Piece = str | Place | Role


@dataclass(frozen=True, slots=True)
class Template:
    """Texts and places in order. Each `Role` begins a message; without roles it is one text."""

    pieces: tuple[Piece, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs' names, each once, in the order of the text."""
        return tuple(dict.fromkeys(place.name for place in self._places() if not place.is_output))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs' names in the order of the text."""
        return tuple(place.name for place in self._places() if place.is_output)

    def rendered(self, inputs: Mapping[str, Sequence[str]], separator: str) -> RenderedPrompt:
        """The prompt of one call. `inputs` has the ids of each input's variables.

        An input with several variables becomes several places, with `separator` between them. An input without
        variables is empty.
        """
        names = self._free_names(inputs)
        turns: list[tuple[str | None, list[str]]] = [(None, [])]
        ids: dict[str, str] = {}
        for piece in self.pieces:
            if isinstance(piece, Role):
                turns.append((piece.name, []))
            elif isinstance(piece, str):
                turns[-1][1].append(piece)
            else:
                places = names[piece.name]
                turns[-1][1].append(separator.join(f"{{{{{name}}}}}" for name in places))
                ids.update({} if piece.is_output else zip(places, inputs[piece.name], strict=True))
        said = tuple((role, "".join(text)) for role, text in turns if role is not None or len(turns) == 1)
        return RenderedPrompt(said, ids, tuple(names[name][0] for name in self.outputs))

    def _places(self) -> Iterator[Place]:
        return (piece for piece in self.pieces if isinstance(piece, Place))

    def _free_names(self, inputs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """The names under which each place is sent. No two are equal, and none is in the template's own text.

        A name is made from the place's own name. An input has a name for each of its variables.
        """
        constant = "".join(piece if isinstance(piece, str) else "\0" for piece in self.pieces)
        taken = {place.name for place in self._places()}
        names: dict[str, list[str]] = {}
        for place in self._places():
            if place.name not in names:
                count = 1 if place.is_output else len(inputs[place.name])
                taken -= {place.name} if count == 1 else set()
                wanted = [place.name] if count == 1 else [f"{place.name}_{n}" for n in range(1, count + 1)]
                names[place.name] = []
                for name in wanted:
                    names[place.name].append(_free_name(name, taken, constant))
                    taken.add(names[place.name][-1])
        return names


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as it is sent. `turns` are its texts with their roles, or one text without a role.

    `inputs` maps each input's place to its variable. `outputs` are the places of the outputs in order.
    """

    turns: tuple[tuple[str | None, str], ...]
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]


def _free_name(name: str, taken: Collection[str], constant: str) -> str:
    """A name made from `name` that is not in `taken`, and is not a placeholder in the text `constant`."""
    while name in taken or re.search(rf"\{{\{{\s*{name}\s*\}}\}}", constant):
        name += "_"
    return name


def parse_template(text: str, parameters: Collection[str], system: str | None = None) -> Template:
    """The template in a docstring: `{{name}}` is an input if there is a parameter of that name, otherwise an output.

    `{{input:name}}` and `{{output:name}}` state the kind. A `system` message has inputs only. With one, the text up to
    the first output is the user's message, and the rest is the assistant's.

    Raises `TemplateError` for a place of another kind than stated, a parameter that does not occur, a prompt without an
    output, or an output that occurs twice.
    """
    pieces = _pieces(text, parameters)
    if system is not None:
        pieces = _chat(_pieces(system, parameters), pieces)
    template = Template(tuple(pieces))
    _check(template, parameters)
    return template


def _pieces(text: str, parameters: Collection[str]) -> list[Piece]:
    pieces: list[Piece] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        pieces += [text[end : match.start()], _place(match, parameters)]
        end = match.end()
    return [piece for piece in (*pieces, text[end:]) if piece != ""]


def _chat(system: Sequence[Piece], prompt: Sequence[Piece]) -> list[Piece]:
    output = next((piece for piece in system if isinstance(piece, Place) and piece.is_output), None)
    if output is not None:
        raise TemplateError(f"{output.name} is not a parameter, and a system message cannot have outputs")
    is_output = [isinstance(piece, Place) and piece.is_output for piece in prompt]
    first = is_output.index(True) if True in is_output else len(prompt)
    return [Role("system"), *system, Role("user"), *prompt[:first], Role("assistant"), *prompt[first:]]


def _place(match: re.Match[str], parameters: Collection[str]) -> Place:
    place = Place(match["name"], is_output=match["name"] not in parameters)
    role = "output" if place.is_output else "input"
    if match["role"] not in (None, role):
        known = f"the parameters are {', '.join(parameters)}" if parameters else "there are no parameters"
        raise TemplateError(f"{match.group()} is an {role}: {known}")
    if len(place.name) > _PLACEHOLDER_CHARACTERS:
        raise TemplateError(f"{match.group()} has too long a name; at most {_PLACEHOLDER_CHARACTERS} characters")
    return place


def _check(template: Template, parameters: Collection[str]) -> None:
    outputs = template.outputs
    for name in parameters:
        if name not in template.inputs:
            instead = f" ({', '.join(outputs)} would be an output)" if outputs else ""
            raise TemplateError(f"the parameter {name} does not occur in the prompt{instead}")
    if not outputs:
        raise TemplateError(
            "the prompt has no output: write a {{name}} that is not a parameter where text is generated"
        )
    twice = next((name for name in outputs if outputs.count(name) > 1), None)
    if twice is not None:
        raise TemplateError(f"the output {twice} occurs twice in the prompt; give the second one another name")
