"""Fits a cost profile to what `forward_passes` measured: `python -m benchmarks forward_profile FILE.json`.

FILE is what that wrote; `benchmarks/timing/h200-llama-8b.json` is that of the shipped profile. The fit is that of
`plait profile`. Its points are iterations, not calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.timing.work import Shape
from plait.backends.profiles import Kv, ProfileSource
from plait.lab.profiling.fitted_profile import FittedProfile, written_profile
from plait.lab.profiling.profile_fit import Point, Residual, fit_cost_model

MEMORY_SHARE = 0.9
"""Of the device's memory, for weights, activations and KV cache: the default of vLLM."""


class Device(msgspec.Struct, frozen=True):
    """What was measured on, and when."""

    name: str
    memory_bytes: int
    torch: str
    date: str


class Memory(msgspec.Struct, frozen=True):
    """What a model takes beside its KV cache."""

    weight_bytes: int
    activation_bytes: int


class Timed(msgspec.Struct, frozen=True):
    """An iteration, as groups of calls (batch, new, context), and its time in each round."""

    kind: str
    groups: list[tuple[int, int, int]]
    held_out: bool
    rounds_s: list[float]
    seconds: float

    def point(self) -> Point:
        """The same as the fit takes it."""
        calls = tuple((new, context) for batch, new, context in self.groups for _ in range(batch))
        return Point(self.kind, (calls,), self.seconds, held_out=self.held_out)

    @property
    def spread(self) -> float:
        """By how much the longest round differs from the shortest."""
        return max(self.rounds_s) / min(self.rounds_s) - 1


class Measurements(msgspec.Struct, frozen=True):
    """A file of `forward_passes`."""

    device: Device
    shape: Shape
    memory: Memory
    points: list[Timed]

    @property
    def kv_tokens(self) -> int:
        """The tokens that the KV cache has room for."""
        spare = self.device.memory_bytes * MEMORY_SHARE - self.memory.weight_bytes - self.memory.activation_bytes
        return int(spare / self.shape.kv_token_bytes)


def fitted(measurements: Measurements) -> FittedProfile:
    """The profile, with its provenance."""
    points = [timed.point() for timed in measurements.points]
    model = fit_cost_model(points)
    source = _source(measurements, [model.residual(point) for point in points])
    return written_profile(model, points, source, Kv(measurements.kv_tokens))


def read(path: Path) -> Measurements:
    """The file's measurements."""
    return msgspec.json.decode(path.read_bytes(), type=Measurements)


def main() -> None:
    """Fit, print the errors, and write the profile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks forward_profile")
    parser.add_argument("measurements", type=Path, help="what forward_passes wrote")
    parser.add_argument("--out", type=Path, help="write the profile there, as TOML")
    arguments = parser.parse_args()
    measurements = read(arguments.measurements)
    found = fitted(measurements)
    for residual in found.residuals:
        point = residual.point
        calls = " + ".join(f"{batch} x {new} behind {context}" for batch, new, context in _groups(point))
        print(f"{calls:<44}{point.seconds * 1e3:>10.3f} ms{residual.relative_error:>+8.1%}")
    for kind in dict.fromkeys(timed.kind for timed in measurements.points):
        print(f"{kind}: {_errors(residual for residual in found.residuals if residual.point.kind == kind)}")
    spreads = [timed.spread for timed in measurements.points]
    print(f"rounds differ by {fmean(spreads):.1%} in the mean, {max(spreads):.1%} at most")
    if arguments.out is not None:
        arguments.out.write_text(found.profile.toml(), encoding="utf-8")


def _groups(point: Point) -> list[tuple[int, int, int]]:
    [calls] = point.iterations
    return [(calls.count(call), *call) for call in dict.fromkeys(calls)]


def _source(measurements: Measurements, residuals: list[Residual]) -> ProfileSource:
    device, points = measurements.device, measurements.points
    fits = [residual for residual in residuals if not residual.point.held_out]
    checks = [residual for residual in residuals if residual.point.held_out]
    groups = [group for timed in points for group in timed.groups]
    contexts = [context for _, _, context in groups]
    return ProfileSource(
        engine=f"none: forward passes in PyTorch {device.torch}",
        model=f"{measurements.shape.name}'s shape, random weights in bf16",
        accelerator=device.name,
        provenance=(
            f"python -m benchmarks forward_passes on {device.date}: {len(points)} iterations in "
            f"{max(len(timed.rounds_s) for timed in points)} rounds, each the median of replays of a CUDA graph; "
            f"attention by the fastest of PyTorch's kernels over a contiguous KV cache. "
            f"Fitted to {len(fits)} of them (prefill, decode, prefill behind context): {_errors(fits)}. "
            f"Held out (chunks with decodes, several prompts, uneven sizes): {_errors(checks)}."
        ),
        extrapolated=(
            "No engine was measured: what it does beside the forward pass (scheduling, sampling other than greedy, "
            "detokenization, paging of the KV cache) is not in it, and its kernels may differ. "
            "Engines that run prompts without CUDA graphs take 29 ms at least for an iteration with one. "
            f"Iterations of more than {max(batch * new for batch, new, _ in groups)} new tokens, contexts of more than "
            f"{max(contexts)}. "
            f"KV capacity: {MEMORY_SHARE:.0%} of {device.memory_bytes / 1e9:.1f} GB less "
            f"{measurements.memory.weight_bytes / 1e9:.1f} GB of weights and "
            f"{measurements.memory.activation_bytes / 1e9:.1f} GB of activations, "
            f"{measurements.shape.kv_token_bytes:,} bytes a token."
        ),
    )


def _errors(residuals: Iterable[Residual]) -> str:
    errors = [abs(residual.relative_error) for residual in residuals]
    return f"relative error {fmean(errors):.1%} in the mean, {max(errors):.1%} at most"


if __name__ == "__main__":
    main()
