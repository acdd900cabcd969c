"""The live screen of a terminal: engines, prefixes and calls, drawn twice a second from a gateway's `/admin/live`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

AGAIN_S: Final = 1.0
"""Before a stream that has ended is begun again."""

REFUSALS: Final = {
    401: "does not take this admin key",
    404: "has no admin API there",
    429: "has as many watchers as it takes",
}

SILENCE_S: Final = 15.0
"""Events come twice a second. A stream that is silent for so long has ended."""

MOST_CALLS: Final = 100
"""Calls that are remembered: as many as a tall terminal shows."""

MOST_RUNNING: Final = 4
MOST_ENGINES: Final = 8
MOST_PREFIXES: Final = 8
BAR_CELLS: Final = 24
COLOURS: Final = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_yellow")
BLOCKS: Final = " ▏▎▍▌▋▊▉█"
Json = dict[str, Any]


def events(url: str, key: str, is_over: threading.Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a gateway, and `lost` when a stream has ended. It is begun again.

    Raises ValueError if the gateway refuses.
    """
    headers, path = {"authorization": f"Bearer {key}"}, f"{url.rstrip('/')}/admin/live"
    with httpx.Client(timeout=SILENCE_S, trust_env=False) as client:
        while not is_over.is_set():
            try:
                with client.stream("GET", path, headers=headers) as answer:
                    if answer.status_code in REFUSALS:
                        raise ValueError(f"{url} {REFUSALS[answer.status_code]}")
                    if answer.status_code == 200:
                        yield from _parsed(answer.iter_lines())
            except httpx.UnsupportedProtocol as error:
                raise ValueError(f"{url} is no address of a gateway: it begins with http:// or https://") from error
            except httpx.HTTPError:
                pass  # it is not there, or stops
            yield "lost", {}
            is_over.wait(AGAIN_S)


def _parsed(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, msgspec.json.decode(value)


def seconds(value: float | None) -> str:
    """A time for people."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def percent(value: float | None) -> str:
    """A share for people."""
    return "-" if value is None else f"{100 * value:.1f}%"


def cached_share(call: dict[str, Any]) -> float | None:
    """The part of a call's prompt that was cached."""
    cached = call.get("cached_tokens")
    return None if cached is None else min(1.0, cached / max(1, call["prompt_tokens"]))


class LiveScreen:
    """The screen, as a context: the terminal is as it was when it ends.

    `title` stands at its top, and `hint` in the place of calls until there are some.
    """

    def __init__(self, title: str, hint: str = "", console: Console | None = None) -> None:
        self._title = title
        self._hint = hint
        self._console = console or Console()
        self._fleet: Json | None = None
        self._is_lost = False
        self._running: dict[int, Json] = {}
        self._ended: dict[int, Json] = {}
        self._places: list[str | None] = []
        self._live = Live(self, console=self._console, screen=True, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._live.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def take(self, name: str, data: Json) -> None:
        """Take an event. The screen is drawn with each look at the fleet."""
        self._is_lost = name == "lost"
        if self._is_lost:
            self._running.clear()  # their numbers begin anew
            self._ended.clear()
        if name == "fleet":
            self._fleet = data
            self._keep_colours([prefix["id"] for prefix in data["prefixes"][:MOST_PREFIXES]])
        elif name == "calls":
            self._keep(data["calls"])
            return
        self._live.refresh()

    def _keep(self, calls: list[Json]) -> None:
        for call in calls:
            self._running.pop(call["number"], None)
            kept = self._ended if call.get("state") == "ended" else self._running
            kept[call["number"]] = call
            if len(kept) > MOST_CALLS:
                del kept[next(iter(kept))]

    def _keep_colours(self, ids: list[str]) -> None:
        """Each prefix keeps its place while it is shown."""
        self._places = [place if place in ids else None for place in self._places]
        for name in ids:
            if name not in self._places:
                if None in self._places:
                    self._places[self._places.index(None)] = name
                else:
                    self._places.append(name)

    def _style(self, prefix: str | None) -> str:
        return COLOURS[self._places.index(prefix) % len(COLOURS)] if prefix in self._places and prefix else "dim"

    def __rich__(self) -> RenderableType:
        if self._fleet is None:
            return Text.assemble((" Plait ", "bold reverse"), f" {self._title}\n\n waiting for the gateway ...")
        engines = self._fleet["engines"][:MOST_ENGINES]
        prefixes = sorted(self._fleet["prefixes"][:MOST_PREFIXES], key=lambda one: self._places.index(one["id"]))
        taken = 11 + len(engines) + max(1, len(prefixes))
        rows = max(3, self._console.height - taken)
        return Group(
            *self._head(self._fleet),
            *_titled("Engines", self._engines(engines, prefixes)),
            *_titled("Shared prefixes, and the part that each engine holds", self._prefixes(prefixes, engines)),
            *_titled("Calls", self._calls(rows) if self._running or self._ended else Text(self._hint)),
        )

    def _head(self, fleet: Json) -> list[Text]:
        waiting = sum(model["waiting_calls"] for model in fleet["models"])
        held = sum(model["held_sessions"] for model in fleet["models"])
        figures = Text.assemble(
            (f" {fleet['calls_per_s']:.1f}", "bold"), " calls/s   hit rate ",
            (percent(fleet["hit_rate"]), "bold green"),
            "   median TTFT ", (seconds(fleet["ttft_s"]), "bold"),
            f"   {fleet['output_tokens_per_s']:,.0f} output tokens/s   ",
            (f"{waiting}", "bold yellow" if waiting else "bold"), " calls wait",
            f"   {held} sessions held" if held else "",
        )  # fmt: skip
        title = Text.assemble((" Plait ", "bold reverse"), f" {self._title}", ("   Ctrl-C ends", "dim"))
        if self._is_lost:
            title.append("   no connection, trying again", "bold red")
        return [title, figures]

    def _engines(self, engines: list[Json], prefixes: list[Json]) -> Table:
        table = _table("engine", "", "KV cache", "", "running", "waiting", "queued here", "to compute", "cached")
        for column in table.columns[3:]:
            column.justify = "right"
        for engine in engines:
            size = engine["kv_tokens"] or max(1, engine["cached_tokens"])
            used = engine["kv_used_tokens"] if engine["kv_used_tokens"] is not None else engine["cached_tokens"]
            state = "draining" if engine["draining"] else "stalled" if engine["stalled"] else engine["health"]
            waiting, queued = engine["waiting_calls"], engine["queued_calls"]
            table.add_row(
                Text(engine["name"], "bold"),
                Text(state, "green" if state == "up" else "red"),
                self._cache(engine["name"], prefixes, used, size),
                percent(used / size if engine["kv_tokens"] else None),
                str(engine["running_calls"]),
                Text(str(waiting), "yellow" if waiting else ""),
                Text(str(queued), "yellow" if queued else ""),
                f"{engine['outstanding_tokens']:,}",
                f"{engine['cached_tokens']:,}",
            )
        return table

    def _cache(self, engine: str, prefixes: list[Json], used: float, size: float) -> Text:
        """A bar of the KV cache: in colours what prefixes take, in grey the rest."""
        bar, cells, rest = Text(), 0, float(used)
        for prefix in prefixes:
            tokens = min(rest, prefix["tokens"] * prefix["engines"].get(engine, 0.0))
            rest -= tokens
            width = min(BAR_CELLS - cells, round(BAR_CELLS * tokens / size))
            cells += width
            bar.append("█" * width, self._style(prefix["id"]))
        width = max(0, round(BAR_CELLS * used / size) - cells)
        bar.append("█" * width, "bright_black")
        bar.append("·" * (BAR_CELLS - cells - width), "bright_black")
        return bar

    def _prefixes(self, prefixes: list[Json], engines: list[Json]) -> Table:
        table = _table("id", "tokens", "calls/min", *(engine["name"] for engine in engines))
        table.columns[1].justify = table.columns[2].justify = "right"
        for prefix in prefixes:
            style = self._style(prefix["id"])
            table.add_row(
                Text(f"■ {prefix['id']}", style),
                f"{prefix['tokens']:,}",
                f"{prefix['uses']:.0f}",
                *(_bar(prefix["engines"].get(engine["name"], 0.0), 8, style) for engine in engines),
            )
        return table

    def _calls(self, rows: int) -> Table:
        table = _table("time", "prefix", "engine", "reason", "prompt", "cached", "", "waited", "TTFT", "E2E", "outcome")
        for place in (4, 6, 7, 8, 9):
            table.columns[place].justify = "right"
        running = list(self._running.values())[: -MOST_RUNNING - 1 : -1]
        shown = [*running, *list(self._ended.values())[::-1]][:rows]
        for call in shown:
            share, ended, prefix = cached_share(call), call.get("state") == "ended", call.get("prefix")
            outcome = f"{call['outcome']} {call['status']}" if ended else "running"
            failed = ended and call["outcome"] != "ok"
            table.add_row(
                time.strftime("%H:%M:%S", time.localtime(call["at"])),
                Text(f"■ {prefix}" if prefix else "-", self._style(prefix)),
                call.get("engine", "-"),
                call.get("reason", "-"),
                f"{call['prompt_tokens']:,}",
                _bar(share or 0.0, 8, "green"),
                percent(share),
                seconds(call.get("waited_s")),
                seconds(call.get("ttft_s")),
                seconds(call.get("e2e_s")),
                Text(outcome, "red" if failed else ""),
                style="" if ended else "dim",
            )
        return table


def _titled(title: str, content: RenderableType) -> tuple[RenderableType, RenderableType]:
    return Text(f"\n {title}", "bold"), content


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim", expand=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _bar(share: float, cells: int, style: str) -> Text:
    eighths = round(min(1.0, max(0.0, share)) * cells * 8)
    whole, part = divmod(eighths, 8)
    drawn = "█" * whole + (BLOCKS[part] if part else "")
    return Text.assemble((drawn, style), ("·" * (cells - len(drawn)), "bright_black"))
