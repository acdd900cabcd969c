"""A call as it is submitted to the gateway: the template, the model, and how each output is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

from plait.client.objectives import Figures, Objective, Slo, figures
from plait.client.sampling import Sampling, sampling_fields
from plait.client.template import RenderedPrompt, Template

Transforms = str | Sequence[str | Mapping[str, object]]
"""A chain of transforms (docs/transforms.md), as a text or as a list of steps."""


class Output:
    """The settings of one output: its transforms, and sampling fields for it alone.

    Put it into the annotation of a semantic function's result, as in `-> Annotated[SemanticVariable, Output("code",
    transforms="code_block(python)", max_tokens=400)]`.
    """

    __slots__ = ("name", "sampling", "transforms")

    def __init__(self, name: str, *, transforms: Transforms | None = None, **sampling: Unpack[Sampling]) -> None:
        self.name = name
        self.transforms = transforms
        self.sampling = sampling_fields(sampling)

    def __repr__(self) -> str:
        return f"Output({self.name!r}, transforms={self.transforms!r}, sampling={self.sampling!r})"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A semantic function without its Python signature.

    `name` appears in error messages. `outputs` has an entry for each output with settings. If an input has several
    variables, `separator` goes between them. With `chat`, the prompt goes through the model's chat template; it is one
    user message if `template` has no messages. Without `chat`, the model continues the bare text.
    """

    name: str
    template: Template
    outputs: Mapping[str, Output] = field(default_factory=dict)
    model: str | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    annotations: Mapping[str, object] = field(default_factory=dict)
    chat: bool = True
    separator: str = "\n\n"

    def body(self, model: str, inputs: Mapping[str, Sequence[str]], outputs: Sequence[str]) -> dict[str, object]:
        """A call in a program. `inputs` has each input's variables, `outputs` one variable for each output."""
        rendered = self.template.rendered(inputs, self.separator)
        places: list[dict[str, object]] = [
            {"name": name, "in_out": False, "semantic_var_id": variable} for name, variable in rendered.inputs.items()
        ]
        names = zip(self.template.outputs, rendered.outputs, outputs, strict=True)
        places += [self._output_place(name, place, variable) for name, place, variable in names]
        return {
            **self.sampling,
            "model": model,
            **_texts(rendered),
            "placeholders": places,
            "chat": self.chat,
            **({"plait": self.annotations} if self.annotations else {}),
        }

    def _output_place(self, name: str, place: str, variable: str) -> dict[str, object]:
        said = self.outputs.get(name) or Output(name)
        transforms = {} if said.transforms is None else {"transforms": said.transforms}
        params = {"params": said.sampling} if said.sampling else {}
        return {"name": place, "in_out": True, "semantic_var_id": variable, **transforms, **params}


def _texts(rendered: RenderedPrompt) -> dict[str, object]:
    (role, text), *_ = rendered.turns
    if role is None:
        return {"prompt": text}
    return {"messages": [{"role": role, "content": text} for role, text in rendered.turns]}


def call_annotations(
    objective: Objective | str | None, slo: Slo | Figures | None, priority: int | None
) -> dict[str, object]:
    """The body's `plait` object: the annotations that are given. Raises `ValueError` for an unknown objective."""
    said: dict[str, object] = {**figures(slo)}
    if objective is not None:
        said["objective"] = Objective(objective).value
    if priority is not None:
        said["priority"] = priority
    return said
