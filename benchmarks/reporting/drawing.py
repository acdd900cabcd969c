"""Plots as SVG files that are readable on light and dark pages, and whose bytes depend on nothing but the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Final

INK, FAINT, PAPER = "#010101", "#020202", "#030303"
"""Text and axes, the grid, and the background: each page has its own."""
PAGES: Final[Mapping[str, tuple[str, str]]] = {
    INK: ("#1f2328", "#e6edf3"),
    FAINT: ("#d1d9e0", "#3d444d"),
    PAPER: ("#ffffff", "#0d1117"),
}
"""Their colours on a light page and on a dark one."""
OURS_COLOUR: Final = "#2f81f7"
COLOURS: Final = ("#d4762c", "#3fa34d", "#a371f7", "#8b949e", "#d9577b")
"""Of the others, in their order. All stand out on both pages."""
MARKERS: Final = "osv^D"
SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plait",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
WIDTH_IN, HEIGHT_IN = 7.2, 3.4


@dataclass(frozen=True, slots=True)
class Line:
    """A system's values over what is varied, as (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines over the same axis. The text beside the plot tells each line's value at the end, in units of `unit`."""

    x: str
    y: str
    lines: Sequence[Line]
    unit: str = ""
    most: float | None = None
    """Where the axis of the values ends, if not at the largest."""

    def draw(self, axes: Any) -> None:
        """Draw them."""
        others = iter(zip(COLOURS, MARKERS, strict=True))
        for line in self.lines:
            colour, marker = (OURS_COLOUR, "o") if line.ours else next(others)
            axes.plot(*zip(*line.points, strict=True), color=colour, marker=marker, label=line.name,
                      linewidth=2.6 if line.ours else 1.4, zorder=3 if line.ours else 2)  # fmt: skip
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.set_ylim(bottom=0, top=self.most)
        axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))

    def text(self) -> str:
        """What the plot says, for those who do not see it."""
        ends = (f"{line.name} {line.points[-1][1]:.3g}{self.unit}" for line in self.lines)
        return f"{self.y} over {self.x}; at {self.lines[0].points[-1][0]:g}: {', '.join(ends)}."


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars: in each of the `groups`, one for each system."""

    x: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float]]
    ours: str
    unit: str = ""

    def draw(self, axes: Any) -> None:
        """Draw them, the first group at the top."""
        height, others = 0.8 / len(self.values), iter(COLOURS)
        for place, (name, values) in enumerate(self.values.items()):
            at = [group + height * (place - (len(self.values) - 1) / 2) for group in range(len(values))]
            axes.barh(at, values, height * 0.9, color=OURS_COLOUR if name == self.ours else next(others), label=name)
        axes.set_yticks(range(len(self.groups)), self.groups)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(self.x)
        axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))

    def text(self) -> str:
        """What the plot says."""
        found = (
            f"{group}: {', '.join(f'{name} {values[number]:.3g}{self.unit}' for name, values in self.values.items())}"
            for number, group in enumerate(self.groups)
        )
        return f"{self.x}; {'; '.join(found)}."


@dataclass(frozen=True, slots=True)
class Spans:
    """A timeline: in each of the rows, spans of time in seconds, by what is done in them."""

    x: str
    rows: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
    ends: Mapping[str, float] = field(default_factory=dict)
    """When each row is over."""

    def draw(self, axes: Any) -> None:
        """Draw them, the first row at the top."""
        kinds = dict.fromkeys(kind for row in self.rows.values() for kind in row)
        colours = dict(zip(kinds, (COLOURS[0], OURS_COLOUR), strict=True))
        for place, (name, row) in enumerate(self.rows.items()):
            for kind, spans in row.items():
                widths = [(begin, end - begin) for begin, end in spans]
                axes.broken_barh(widths, (place - 0.3, 0.6), color=colours[kind], label="" if place else kind)
            axes.axvline(self.ends[name], (1 - place) / 2 + 0.02, (2 - place) / 2 - 0.02, color=INK, linewidth=1.2)
        axes.set_yticks(range(len(self.rows)), self.rows)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(self.x)
        axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))

    def text(self) -> str:
        """What the plot says."""
        return f"{self.x}; {'; '.join(f'{name} ends after {end:.1f} s' for name, end in self.ends.items())}."


Plot = Lines | Bars | Spans


def svg(plot: Plot, title: str) -> str:
    """The file of a plot."""
    import matplotlib as mpl  # noqa: PLC0415 - only who draws needs it
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.use("Agg")
    with mpl.rc_context(SETTINGS):
        canvas, axes = plt.subplots(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        plot.draw(axes)
        out = StringIO()
        canvas.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        plt.close(canvas)
    return _for_both_pages(out.getvalue(), title)


def _for_both_pages(text: str, title: str) -> str:
    """The same with colours by the page that shows it, and with a title for those who have it read."""
    names = {INK: "ink", FAINT: "faint", PAPER: "paper"}
    for colour, name in names.items():
        text = text.replace(colour, f"var(--{name})")
    light, dark = ("".join(f"--{names[colour]}:{both[page]};" for colour, both in PAGES.items()) for page in (0, 1))
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}</style>"
    text = re.sub(r"^<\?xml.*?(?=<svg)", "", text, flags=re.DOTALL)
    return re.sub(r"(<svg [^>]*)>", rf'\1 role="img">\n <title>{title}</title>\n {style}', text, count=1)
