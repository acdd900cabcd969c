"""Cost profiles: the coefficients of `policy.cost_model` for one engine, model and accelerator, as TOML files."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec

from policy.cost_model import CostModel, LongAttention, PiecewiseLinear


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, by whom, and what of it is extrapolated."""

    engine: str
    model: str
    accelerator: str
    provenance: str
    extrapolated: str = ""


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of one forward pass against its new tokens: `knots` joined by lines, then `slope_ms` a token."""

    knots: list[tuple[int, float]]
    slope_ms: float


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of attention at the batch's total sequence length, `floor_ms` at least."""

    context_ms: float
    constant_ms: float = 0.0
    floor_ms: float = 0.0


class LongPrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds that a prefill adds once new x sequence tokens exceed `threshold`."""

    threshold: int = 0
    new_ms: float = 0.0
    sequence_ms: float = 0.0
    product_ms: float = 0.0


class Kv(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache's size."""

    tokens: int


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One profile file. `efficiency` divides the whole time: the share of it that the measured kernels explain."""

    source: Source
    forward: Forward
    attention: Attention
    kv: Kv
    long_prefill: LongPrefill = LongPrefill()
    efficiency: float = 1.0

    def cost_model(self) -> CostModel:
        """The same in seconds."""
        return CostModel(
            forward=PiecewiseLinear(
                tuple((tokens, ms / 1e3) for tokens, ms in self.forward.knots), self.forward.slope_ms / 1e3
            ),
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


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with Plait."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in files(__name__).iterdir() if entry.name.endswith(".toml")
    )


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one's own by the path of its .toml file; ValueError says what is wrong with it."""
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text(encoding="utf-8")
        elif name in shipped_profiles():
            text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
        else:
            raise ValueError(
                f'no cost profile "{name}"; shipped: {", ".join(shipped_profiles())}, or a path to a .toml'
            )
        profile = msgspec.convert(tomllib.loads(text), Profile)
        profile.cost_model()
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"cost profile {name}: {error}") from error
    return profile
