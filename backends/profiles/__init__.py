"""Cost profiles: the coefficients of the cost model for one engine, model and accelerator, as TOML files."""

from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.tier_link import BYTES_PER_TOKEN, TierLink

# The upper bounds exclude infinity.
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
SignedMilliseconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Tokens = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1e9)]


class ProfileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, where the figures come from, and which parts are extrapolated."""

    engine: str
    model: str
    accelerator: str
    provenance: str
    extrapolated: str = ""


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A forward pass's time by its new tokens: straight lines between `knots` (tokens, ms), then `slope_ms` a token."""

    knots: list[tuple[Tokens, Milliseconds]]
    slope_ms: Milliseconds

    def __post_init__(self) -> None:
        self.in_seconds()

    def in_seconds(self) -> PiecewiseLinear:
        """The curve in seconds. Raises ValueError if more tokens would take less time."""
        return PiecewiseLinear(tuple((tokens, ms / 1e3) for tokens, ms in self.knots), self.slope_ms / 1e3)


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention's time by the batch's total sequence length in tokens, at least `floor_ms`."""

    context_ms: Milliseconds
    constant_ms: SignedMilliseconds = 0.0
    floor_ms: Milliseconds = 0.0


class LongPrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time that a prefill adds if new tokens x sequence tokens exceed `threshold`."""

    threshold: Tokens = 0
    new_ms: Milliseconds = 0.0
    sequence_ms: Milliseconds = 0.0
    product_ms: Milliseconds = 0.0


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The link from a lower tier to the accelerator: a load takes `latency_ms`, and its bytes over the bandwidth."""

    tier: str
    gbytes_per_s: Annotated[float, Meta(gt=0, le=1e9)]
    latency_ms: Milliseconds = 0.0


class Kv(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache's size, the bytes of a token in it, and the links to its lower tiers."""

    tokens: Annotated[int, Meta(gt=0)]
    bytes_per_token: Annotated[int, Meta(gt=0)] = BYTES_PER_TOKEN
    links: list[Link] = []


class Pivot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pivot forward size (`CostModel.pivot`): an iteration's new tokens, and its time."""

    tokens: Annotated[int, Meta(gt=0)]
    time_ms: Milliseconds


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The profile's errors at the fitted and the held-out points, as shares of the measured time."""

    points: Tokens
    mean_relative_error: Share
    max_relative_error: Share


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One profile file. The kernels' times are divided by `efficiency`, the share of an iteration that they explain.

    Profiles that `plait profile` has written have `pivot` and `fit`.
    """

    source: ProfileSource
    forward: Forward
    attention: Attention
    kv: Kv
    with_prompts: Forward | None = None
    """The time of a forward pass with prompts; `forward` is then that of decodes alone. None: `forward` is of both."""
    long_prefill: LongPrefill = LongPrefill()
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 1.0
    ahead: Annotated[int, Meta(ge=0, le=1)] | None = None
    """1: the engine plans an iteration while it computes the one before; 0: after that; None: not known."""
    pivot: Pivot | None = None
    fit: Fit | None = None

    def cost_model(self) -> CostModel:
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
            with_prompts=None if self.with_prompts is None else self.with_prompts.in_seconds(),
            links=tuple(
                TierLink.of(link.tier, self.kv.bytes_per_token, link.gbytes_per_s, link.latency_ms / 1e3)
                for link in self.kv.links
            ),
        )

    def toml(self) -> str:
        """The text of a file that `load_profile` reads as this profile."""
        sections = msgspec.to_builtins(self)
        told = {name: value for name, value in sections.items() if value is not None}
        lines = [f"{name} = {told.pop(name)}" for name in ("efficiency", "ahead") if name in told]
        for name, section in told.items():
            lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in section.items())]
        return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    """TOML writes numbers, strings and arrays as JSON does, except that it escapes DEL."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def shipped_profiles() -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml") for entry in files(__name__).iterdir() if entry.name.endswith(".toml")
    )


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or any profile by the path of its .toml file. Raises ValueError with the fault."""
    if name.endswith(".toml"):
        file: Path | Traversable = Path(name)
    elif name in shipped_profiles():
        file = files(__name__).joinpath(f"{name}.toml")
    else:
        raise ValueError(
            f'no cost profile "{name}"; give one of {", ".join(shipped_profiles())}, or the path of a .toml file'
        )
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Profile)
    except (OSError, ValueError) as error:  # missing, not UTF-8, not TOML, or not a profile
        raise ValueError(f"cost profile {name}: {error}") from error
