"""Times iterations on the device: each as one CUDA graph, with CUDA events around each replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from benchmarks.timing import attention
from benchmarks.timing.attention import Attend
from benchmarks.timing.forward_pass import ForwardPass, cached
from benchmarks.timing.work import Group, Work

CHECKED = (Group(3, 1, 200), Group(2, 48), Group(2, 48, 150), Group(1, 200), Group(1, 200, 333), Group(1, 64, 4096))
CHECKED_ERROR = 1e-2
"""Numbers in bf16 differ by less from the definition in float64."""

TUNED_LAYERS = 4
"""A kernel is chosen by its time on so many layers, so that it does not find its keys in the cache of the chip."""

TUNING_S = 0.01

REPLAYS = range(3, 31)
"""How often an iteration is timed at least, and at most."""


class Bench:
    """Times iterations of a model. Each takes about `seconds` of replays."""

    def __init__(self, model: ForwardPass, kv_tokens: int, seconds: float) -> None:
        self._model = model
        self._kv_tokens = kv_tokens
        self._seconds = seconds
        self._wrong: set[str] = set()
        self._chosen: dict[Group, str] = {}

    def check(self) -> dict[str, float]:
        """The error of each kernel at some shapes. A kernel that fails or is wrong is not used."""
        errors = {}
        for group in CHECKED:
            inputs = self._inputs(group)[0]
            expected = attention.reference(*inputs)
            for name, attend in attention.candidates(group.new).items():
                try:
                    error = attention.relative_error(attend(*inputs), expected)
                except Exception as reason:  # noqa: BLE001 - kernels raise what they like
                    print(f"{name} fails at {group}: {reason}", flush=True)
                    error = float("nan")
                errors[f"{name} {group.batch} x {group.new} behind {group.context}"] = error
                if not error < CHECKED_ERROR:  # NaN, too
                    self._wrong.add(name)
        return errors

    def difference(self, first: int, second: int) -> float:
        """By how much the logits of a prompt differ between one iteration and two: the second is behind the first.

        The KV cache is full of NaN before that: whatever is read was written.
        """
        ids = torch.randint(self._model.shape.vocabulary, (first + second,), device=self._model.device)
        parts = [Group(1, first + second), Group(1, first), Group(1, second, first)]
        tokens = [ids, ids[:first], ids[first:]]
        attends = [self._attends([group]) for group in parts]
        logits = []
        for group, chosen, own in zip(parts, attends, tokens, strict=True):
            if not group.context:
                self._model.fill(float("nan"))
            logits.append(self._model.logits(self._model.batch([group], chosen, own)))
        self._model.fill()
        return attention.relative_error(logits[2], logits[0])

    def times_s(self, work: Work) -> list[float]:
        """The seconds of some replays; none if the KV cache is too small."""
        if work.slots > self._kv_tokens:
            return []
        batch = self._model.batch(work.groups, self._attends(work.groups))
        return timed_s(partial(self._model, batch), self._seconds)

    def kernels(self, work: Work) -> list[str]:
        """For each group the name of its kernel."""
        return [self._chosen[group] for group in work.groups]

    def activation_bytes(self, group: Group) -> int:
        """The most memory that an iteration takes beside weights and KV cache."""
        batch = self._model.batch([group], self._attends([group]))
        self._model(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._model(batch)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def _attends(self, groups: Sequence[Group]) -> list[Attend]:
        """For each group the kernel that is the fastest at its shape."""
        for group in groups:
            if group not in self._chosen:
                self._chosen[group] = self._fastest(group)
        return [attention.candidates(group.new)[self._chosen[group]] for group in groups]

    def _fastest(self, group: Group) -> str:
        usable = {name: attend for name, attend in attention.candidates(group.new).items() if name not in self._wrong}
        if len(usable) == 1:
            return next(iter(usable))
        layers = self._inputs(group)
        times = {}
        for name, attend in usable.items():
            try:
                times[name] = median(timed_s(partial(each, attend, layers), TUNING_S))
            except RuntimeError as reason:
                print(f"{name} fails at {group}: {reason}", flush=True)
        return min(times, key=lambda name: times[name])

    def _inputs(self, group: Group) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Random queries, and the keys and values of some layers."""
        shape = self._model.shape
        size = (group.batch, group.new, shape.heads, shape.width)
        queries = torch.randn(size, dtype=torch.bfloat16, device=self._model.device)
        return [
            (queries, cached(keys, 0, group), cached(values, 0, group))
            for keys, values in self._model.caches[:TUNED_LAYERS]
        ]


def each(attend: Attend, layers: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Attend in one layer after the other."""
    for inputs in layers:
        attend(*inputs)


def timed_s(run: Callable[[], object], seconds: float) -> list[float]:
    """The times of replays that take about so many seconds together. The first run compiles what is not compiled."""
    run()
    if not torch.cuda.is_available():
        return [_host_s(run) for _ in range(REPLAYS.start)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    [first_s] = _replayed_s(graph.replay, 1)
    count = min(max(REPLAYS.start, int(seconds / first_s)), REPLAYS.stop - 1)
    return _replayed_s(graph.replay, count)


def _host_s(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def _replayed_s(replay: Callable[[], object], count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def ceilings() -> dict[str, float]:
    """The device's rates: bytes through its memory, and operations of a product of matrices in bf16."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copied_s = median(timed_s(lambda: torch.neg(source, out=target), 0.05))
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiplied_s = median(timed_s(lambda: left @ right, 0.05))
    return {"memory_bytes_s": 2 * source.nbytes / copied_s, "matrix_operations_s": 2 * 8192**3 / multiplied_s}
