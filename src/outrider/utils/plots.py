"""What all pictures share: colours that colour-blind readers tell apart, titles, ticks, labels at the ends of lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

matplotlib.use("Agg")

# Okabe and Ito's palette without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
GREY = "#B0B0B0"
MOST_SERIES = len(COLOURS)  # of one picture
_LABEL_POINTS = 8.0
_TITLE_WIDTH = 14  # characters per inch of a figure's width


class LineEnd(NamedTuple):
    """The last point of a line, in data coordinates, and its label."""

    x: float
    y: float
    text: str
    color: str


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and close it."""
    figure.savefig(path, dpi=150)
    plt.close(figure)


def set_title(figure: Figure, title: str, *facts: str | None) -> None:
    """The title, and below it what was measured: target, drafter, date; what is not known is left out."""
    known = " | ".join(fact for fact in facts if fact)
    width = int(_TITLE_WIDTH * figure.get_figwidth())
    figure.suptitle("\n".join([*textwrap.wrap(title, width), *textwrap.wrap(known, width)]), fontsize=10)


def short_name(name: object) -> str:
    """A model or drafter without the directories before it."""
    return str(name).rstrip("/").split("/")[-1]


def powers_of_two(axes: Axes, most: float) -> None:
    """Ticks of the x axis at 1, 2, 4, ... up to `most`: of users, requests or rows."""
    axes.xaxis.set_major_locator(FixedLocator([2**i for i in range(int(most).bit_length())]))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def plain_ticks(axes: Axes) -> None:
    """Ticks of a logarithmic y axis as 20, 50, 100 instead of powers of ten."""
    axes.yaxis.set_major_locator(FixedLocator([k * 10**i for i in range(-3, 6) for k in (1, 2, 5)]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def shade(number: int, count: int) -> str:
    """Of `count` ordered lines the colour of one, dark to light; lightness alone tells them apart."""
    colours = matplotlib.colormaps["cividis"]
    return matplotlib.colors.to_hex(colours(0.85 * number / max(1, count - 1)))


def label_ends(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Write labels to the right of the axes at the heights of their lines, moved apart where they would overlap.

    To be called when all lines are drawn and the limits are set.
    """
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = sorted(((float(to_axes.transform((end.x, end.y))[1]), end) for end in ends), key=lambda pair: pair[0])
    box = axes.get_position()
    figure = axes.get_figure(root=True)
    assert figure is not None
    height = 72 * figure.get_figheight() * box.height  # points, before the layout
    gap, heights = 1.25 * _LABEL_POINTS / height, list[float]()
    for at, _ in wanted:
        heights.append(max(at, heights[-1] + gap) if heights else max(at, 0.0))
    if heights and heights[-1] > 1.0:  # push down from the top what was pushed up
        heights[-1] = 1.0
        for i in range(len(heights) - 2, -1, -1):
            heights[i] = min(heights[i], heights[i + 1] - gap)
    for (at, end), place in zip(wanted, heights, strict=True):
        x = float(to_axes.transform((end.x, end.y))[0])
        axes.annotate(
            end.text,
            xy=(x, at),
            xytext=(1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=end.color,
            fontsize=_LABEL_POINTS,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.color, "linewidth": 0.5, "alpha": 0.5, "shrinkB": 3},
        )
