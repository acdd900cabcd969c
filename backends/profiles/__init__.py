"""Cost profiles: the coefficients of `plait.policy.cost_model` for one engine, model and accelerator, as TOML files."""

from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear

# The upper bound keeps infinity out.
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
SignedMilliseconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Tokens = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1e9)]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, by whom, and which parts are extrapolated."""

    engine: str
    model: str
    accelerator: str
    provenance: str
    extrapolated: str = ""


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of one forward pass against its new tokens: `knots` joined by lines, then `slope_ms` a token."""

    knots: list[tuple[Tokens, Milliseconds]]
    slope_ms: Milliseconds

    def __post_init__(self) -> None:
        self.in_seconds()

    def in_seconds(self) -> PiecewiseLinear:
        """The same in seconds; ValueError where more tokens would take less time."""
        return PiecewiseLinear(tuple((tokens, ms / 1e3) for tokens, ms in self.knots), self.slope_ms / 1e3)


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of attention at the batch's total sequence length, `floor_ms` at least."""

    context_ms: Milliseconds
    constant_ms: SignedMilliseconds = 0.0
    floor_ms: Milliseconds = 0.0


class LongPrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds that a prefill adds once new x sequence tokens exceed `threshold`."""

    threshold: Tokens = 0
    new_ms: Milliseconds = 0.0
    sequence_ms: Milliseconds = 0.0
    product_ms: Milliseconds = 0.0


class Kv(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache's size."""

    tokens: Annotated[int, Meta(gt=0)]


class Pivot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pivot forward size (`CostModel.pivot`): new tokens of an iteration, and the time that it takes."""

    tokens: Annotated[int, Meta(gt=0)]
    time_ms: Milliseconds


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The profile's errors at the points that it was fitted to and checked with, as shares of the measured time."""

    points: Tokens
    mean_relative_error: Share
    max_relative_error: Share


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One profile file. `efficiency` divides the whole time: the share of it that the measured kernels explain.

    `pivot` and `fit` stand in profiles that `plait profile` has written.
    """

    source: Source
    forward: Forward
    attention: Attention
    kv: Kv
    long_prefill: LongPrefill = LongPrefill()
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 1.0
    pivot: Pivot | None = None
    fit: Fit | None = None

    def cost_model(self) -> CostModel:
        """The same in seconds."""
        return CostModel(
            forward=self.forward.in_seconds(),
            context_constant_s=self.attention.constant_ms / 1e3,
            context_s=self.attention.context_ms / 1e3,
            context_floor_s=self.attention.floor_ms / 1e3,
            long_attention=LongAttention(
                self.long_prefill.threshold,
                self.long_prefill.new_ms / 1e3,
                self.long_prefill.sequence_ms / 1e3,
                self.long_prefill.product_ms / 1e3,
            ),
            efficiency=self.efficiency,
        )

    def toml(self) -> str:
        """The file that `load_profile` reads as this profile."""
        sections = msgspec.to_builtins(self)
        lines = [f"efficiency = {sections.pop('efficiency')}"]
        for name, section in sections.items():
            if section is not None:
                lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in section.items())]
        return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    """Numbers, strings and arrays are written in TOML as in JSON, but for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with Plait."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in files(__name__).iterdir() if entry.name.endswith(".toml")
    )


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one's own by the path of its .toml file; ValueError says what is wrong with it."""
    if name.endswith(".toml"):
        file: Path | Traversable = Path(name)
    elif name in shipped_profiles():
        file = files(__name__).joinpath(f"{name}.toml")
    else:
        raise ValueError(f'no cost profile "{name}"; shipped: {", ".join(shipped_profiles())}, or a path to a .toml')
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Profile)
    except (OSError, ValueError) as error:  # not there; not UTF-8, not TOML, not a profile
        raise ValueError(f"cost profile {name}: {error}") from error
