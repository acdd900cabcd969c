"""The screen of `plait status` and `plait top`: problems, engines, models, tenants; in `top` also prefixes, calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, Final, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from plait.gateway.config.values import RANK_NAME

PAGE: Final = "docs/oncall.md"

MOST_CALLS: Final = 100
"""The most running calls and the most ended calls that are kept: as many as a tall terminal shows."""

MOST_RUNNING: Final = 4
MOST_ENGINES: Final = 8
MOST_PREFIXES: Final = 8
MOST_ROWS: Final = 5
"""The most rows of problems, of models and of tenants in `plait top`."""

LEAST_CALLS: Final = 3
"""The rows that are kept free for calls."""

TITLE_LINES: Final = 3
"""The lines above the rows of a part: an empty line, the title, the names of the columns."""

BAR_CELLS: Final = 24
WIDE: Final = 200
"""The width of the screen without a terminal, in characters. A narrower terminal cuts most tables at the right."""

COLOURS: Final = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_yellow")
BLOCKS: Final = " ▏▎▍▌▋▊▉█"
Json = dict[str, Any]


def console() -> Console:
    """The console for a screen. Without Rich's markup, because names and sentences may have brackets."""
    return Console(width=None if sys.stdout.isatty() else WIDE, markup=False, highlight=False, emoji=False)


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def cached_share(call: dict[str, Any]) -> float | None:
    cached = call.get("cached_tokens")
    return None if cached is None else min(1.0, cached / max(1, call["prompt_tokens"]))


def ago(since: float) -> str:
    """How long ago a Unix time was, for people; `-` for 0."""
    if not since:
        return "-"
    passed_s = max(0.0, time.time() - since)
    if passed_s < 100:
        return f"{passed_s:.0f} s"
    return f"{passed_s / 60:.0f} min" if passed_s < 6_000 else f"{passed_s / 3_600:.0f} h"


class ScreenPart(NamedTuple):
    """A table of the screen. In `plait top`, at most the first `most` of its `rows` are shown.

    `drawn` makes the table of the shown rows. A part that is not `is_needed` is left out if there is no room for it. A
    table that is too wide is cut at the right, unless it `wraps`.
    """

    title: str
    rows: Sequence[Json]
    most: int
    drawn: Callable[[Sequence[Json]], Table]
    is_needed: bool = True
    wraps: bool = False


class Screen:
    """Draws the state of a gateway, which `take` keeps up to date.

    `title` is in the first line. `hint` is shown in place of calls until there are calls.
    """

    def __init__(self, title: str, hint: str = " none so far") -> None:
        self.title = title
        self._hint = hint
        self._status: Json | None = None
        self._fleet: Json | None = None
        self._refusal = ""
        self._is_lost = False
        self._running: dict[int, Json] = {}
        self._ended: dict[int, Json] = {}
        self._places: list[str | None] = []  # the id of the prefix that has each colour; None: the colour is free

    def take(self, name: str, data: Json) -> None:
        """Take an event: `status` with the answer of `/admin/status`, or an event of `AskedGateway.events`."""
        self._is_lost = name == "lost"
        if name == "status":
            self._status = data
        elif name == "fleet":
            self._fleet, self._refusal = data, ""
            self._keep_colours([prefix["id"] for prefix in data["prefixes"][:MOST_PREFIXES]])
        elif name == "calls":
            self._keep(data["calls"])
        elif name == "refused":
            self._refusal = f"   Calls are not shown: {data['error']['message']}"
        else:
            self._fleet = None
            self._running.clear()  # after a reconnect, the numbers of calls may begin anew
            self._ended.clear()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw all of the state; in `plait top`, only what fits into the terminal, problems first."""
        status, fleet, height = self._status, self._fleet, console.height if console.is_alt_screen else inf
        yield self._head()
        if status is None:
            yield Text("\n waiting for the gateway ...")
            return
        left, wide = height - 1, options.update(width=max(options.max_width, WIDE))
        if fleet is not None:
            yield self._figures(fleet, status)
            left -= 1 + TITLE_LINES + LEAST_CALLS
        for part in self._parts(status, fleet):
            shown = part.rows if height == inf else part.rows[: part.most]
            lines = TITLE_LINES + len(shown)
            if shown and (part.is_needed or lines <= left):
                left -= lines
                cut = "" if len(shown) == len(part.rows) else f", {len(shown)} of {len(part.rows)}"
                yield _title(f"{part.title}{cut}")
                yield from console.render(part.drawn(shown), options if part.wraps else wide)
        if fleet is not None:
            yield _title("Calls")
            rows = LEAST_CALLS + round(min(MOST_CALLS, max(0, left)))
            calls = self._calls(rows) if self._running or self._ended else Text(self._hint)
            yield from console.render(calls, wide)

    def _parts(self, status: Json, fleet: Json | None) -> Iterator[ScreenPart]:
        yield ScreenPart("Problems", status["problems"], MOST_ROWS, _problems, wraps=True)
        rows, most = _with_sums(self._engine_rows()), 2 * MOST_ENGINES
        if fleet is not None and len(rows) > most:
            rows, most = [row for row in rows if not RANK_NAME.search(row["name"])], MOST_ENGINES
        yield ScreenPart("Engines", rows, most, self._engines)
        yield ScreenPart("Gateways", status.get("gateways", ()), MOST_ROWS, _gateways, is_needed=False)
        if fleet is not None:
            title = "Shared prefixes, and the part that each engine holds"
            yield ScreenPart(title, self._prefix_rows(), MOST_PREFIXES, self._prefixes)
        yield ScreenPart("Models", status["models"], MOST_ROWS, _counts, is_needed=False)
        busiest = sorted(
            status["tenants"], key=lambda row: (-row["waiting_calls"], -row["answered_calls"] - row["failed_calls"])
        )
        yield ScreenPart("Tenants, since the start", busiest, MOST_ROWS, _counts, is_needed=False)

    def _engine_rows(self) -> list[Json]:
        """The engines, those that are not up first."""
        return [] if self._status is None else sorted(self._status["engines"], key=lambda row: row["state"] == "up")

    def _prefix_rows(self) -> list[Json]:
        """The shown prefixes in the order of their colours."""
        shown = [] if self._fleet is None else self._fleet["prefixes"][:MOST_PREFIXES]
        return sorted(shown, key=lambda row: self._places.index(row["id"]))

    def _head(self) -> Text:
        title = Text.assemble((" Plait ", "bold reverse"), f" {self.title}   ")
        if self._is_lost:
            return title.append("no connection, trying again", "bold red")
        if self._status is None:
            return title
        wrong = len(self._status["problems"])
        title.append(f"problems: {wrong}" if wrong else "nothing is wrong", "bold red" if wrong else "green")
        return title.append(self._refusal, "yellow")

    def _figures(self, fleet: Json, status: Json) -> Text:
        waiting = sum(model["waiting_calls"] for model in status["models"])
        return Text.assemble(
            (f" {fleet['calls_per_s']:.1f}", "bold"), " calls/s   hit rate ",
            (percent(fleet["hit_rate"]), "bold green"),
            "   median TTFT ", (seconds(fleet["ttft_s"]), "bold"),
            f"   {fleet['output_tokens_per_s']:,.0f} output tokens/s   ",
            (f"{waiting}", "bold yellow" if waiting else "bold"), " calls wait   ", ("Ctrl-C ends", "dim"),
        )  # fmt: skip

    def _engines(self, rows: Sequence[Json]) -> Table:
        """The table of engines: state and calls in all gateways, cache and queues as the watched gateway sees them."""
        live = {} if self._fleet is None else {engine["name"]: engine for engine in _with_sums(self._fleet["engines"])}
        more = ("", "KV cache", "running", "waiting", "queued here", "to compute", "cached") if live else ("KV cache",)
        why = ("why",) if any(row.get("reason") for row in rows) else ()
        right = (2, 3, *range(5 if live else 4, 4 + len(more)))
        table = _table("engine", "state", "since", "calls", *more, *why, right=right)
        table.columns[-1].no_wrap = not why  # a narrow screen takes its room, of all columns
        for row in rows:
            is_up, name = row["state"] == "up", row["name"]
            state = Text(row["state"] if is_up else f"{row['state']} {row['cause']}", "green" if is_up else "red")
            cells = self._cache(live[name]) if name in live else (*[""] * (len(more) - 1), _filled(row))
            shown = f"  {name}" if RANK_NAME.search(name) else name
            shown += f", {len(row['ranks'])} ranks" if "ranks" in row else ""
            cells += tuple(Text(row.get("reason", ""), no_wrap=True, overflow="ellipsis") for _ in why)
            table.add_row(Text(shown, "bold"), state, ago(row["since"]), f"{row['calls']}", *cells)
        return table

    def _cache(self, engine: Json) -> tuple[RenderableType, ...]:
        used = engine["cached_tokens"] if engine["kv_used_tokens"] is None else engine["kv_used_tokens"]
        size, waiting, queued = engine["kv_tokens"], engine["waiting_calls"], engine["queued_calls"]
        return (
            self._kv_bar(engine.get("ranks", [engine["name"]]), used, size or max(1, used)),
            _filled({"kv_tokens": size, "kv_used_tokens": used}),
            f"{engine['running_calls']}",
            Text(f"{waiting}", "yellow" if waiting else ""),
            Text(f"{queued}", "yellow" if queued else ""),
            f"{engine['outstanding_tokens']:,}",
            f"{engine['cached_tokens']:,}",
        )

    def _kv_bar(self, engines: Sequence[str], used: float, size: float) -> Text:
        """A bar of the KV cache: shared prefixes in their colours, the rest of the used part in grey."""
        bar, cells, rest = Text(), 0, float(used)
        for prefix in self._prefix_rows():
            tokens = min(rest, prefix["tokens"] * sum(prefix["engines"].get(name, 0.0) for name in engines))
            rest -= tokens
            width = min(BAR_CELLS - cells, round(BAR_CELLS * tokens / size))
            cells += width
            bar.append("█" * width, self._style(prefix["id"]))
        width = max(0, round(BAR_CELLS * used / size) - cells)
        bar.append("█" * width, "bright_black")
        bar.append("·" * (BAR_CELLS - cells - width), "bright_black")
        return bar

    def _prefixes(self, rows: Sequence[Json]) -> Table:
        engines = self._engine_rows()[:MOST_ENGINES]
        table = _table("id", "tokens", "calls/min", *(engine["name"] for engine in engines), right=(1, 2))
        for prefix in rows:
            style = self._style(prefix["id"])
            table.add_row(
                Text(f"■ {prefix['id']}", style),
                f"{prefix['tokens']:,}",
                f"{prefix['uses']:.0f}",
                *(_bar(prefix["engines"].get(engine["name"], 0.0), 8, style) for engine in engines),
            )
        return table

    def _calls(self, rows: int) -> Table:
        running = list(self._running.values())[: -MOST_RUNNING - 1 : -1]
        shown = [*running, *list(self._ended.values())[::-1]][:rows]
        agents = ("agent", "parent_agent") if any("agent" in call for call in shown) else ()
        table = _table("time", "prefix", "engine", "reason", "prompt", "cached", "", "waited", "TTFT", "E2E", "outcome",
                       *(name.replace("_agent", "") for name in agents), right=(4, 6, 7, 8, 9))  # fmt: skip
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
                " ".join(filter(None, (seconds(call.get("waited_s")), call.get("waited_for")))),
                seconds(call.get("ttft_s")),
                seconds(call.get("e2e_s")),
                Text(outcome, "red" if failed else ""),
                *(call.get(name, "-")[-24:] for name in agents),
                style="" if ended else "dim",
            )
        return table

    def _keep(self, calls: list[Json]) -> None:
        for call in calls:
            self._running.pop(call["number"], None)
            kept = self._ended if call.get("state") == "ended" else self._running
            kept[call["number"]] = call
            if len(kept) > MOST_CALLS:
                del kept[next(iter(kept))]

    def _keep_colours(self, ids: list[str]) -> None:
        """Give each prefix a place, which decides its colour. A prefix keeps its place while it is shown."""
        self._places = [place if place in ids else None for place in self._places]
        for name in ids:
            if name not in self._places:
                if None in self._places:
                    self._places[self._places.index(None)] = name
                else:
                    self._places.append(name)

    def _style(self, prefix: str | None) -> str:
        return COLOURS[self._places.index(prefix) % len(COLOURS)] if prefix in self._places and prefix else "dim"


def _with_sums(rows: Iterable[Json]) -> list[Json]:
    """Rows of engines; those of an address's data-parallel ranks come after a row of their sums."""
    addresses: dict[str, list[Json]] = {}
    for row in rows:
        addresses.setdefault(RANK_NAME.sub("", row["name"]), []).append(row)
    found = []
    for name, ranks in addresses.items():
        if ranks[0]["name"] != name:
            figures = [field for field, value in ranks[0].items() if type(value) is int]
            sums = {field: sum(rank[field] or 0 for rank in ranks) for field in figures}
            found.append(ranks[0] | sums | {"name": name, "ranks": [rank["name"] for rank in ranks]})
        found += ranks
    return found


def _filled(engine: Json) -> str:
    """How full the KV cache of an engine is."""
    size = engine.get("kv_tokens")
    return percent(engine["kv_used_tokens"] / size) if size else "not known"


def _problems(rows: Sequence[Json]) -> Table:
    table = _table("code", "about", "since", "what", "see")
    table.columns[3].no_wrap = False
    for row in rows:
        code, see = Text(row["code"], "bold red"), f"{PAGE}#{row['part']}"
        table.add_row(code, row["about"], ago(row["since"]), row["sentence"], see)
    return table


def _gateways(rows: Sequence[Json]) -> Table:
    table = _table("name", "version", "runs for", "store", right=(2,))
    for row in rows:
        failing = f"{row['store']} failing for {ago(row['failing_since'])}" if row["failing_since"] else ""
        store = Text(failing, "red") if failing else Text(row["store"] and f"{row['store']} ok")
        table.add_row(row["name"], row["version"], ago(row["since"]), store)
    return table


def _counts(rows: Sequence[Json]) -> Table:
    """A table of names and figures. The rows' fields are the columns, and the first field is the name."""
    names = [name.replace("_", " ") for name in rows[0]]
    table = _table(*names, right=range(1, len(names)))
    for name, *figures in (row.values() for row in rows):
        table.add_row(name, *(f"{figure:,}".removesuffix(".0") for figure in figures))
    return table


def _title(title: str) -> Text:
    return Text(f"\n {title}", "bold")


def _table(*names: str, right: Iterable[int] = ()) -> Table:
    """A table with these columns. The columns at the positions `right` have figures and are aligned right."""
    table = Table(box=None, pad_edge=True, header_style="dim", expand=False)
    for place, name in enumerate(names):
        table.add_column(name, no_wrap=True, justify="right" if place in right else "left")
    return table


def _bar(share: float, cells: int, style: str) -> Text:
    eighths = round(min(1.0, max(0.0, share)) * cells * 8)
    whole, part = divmod(eighths, 8)
    drawn = "█" * whole + (BLOCKS[part] if part else "")
    return Text.assemble((drawn, style), ("·" * (cells - len(drawn)), "bright_black"))
