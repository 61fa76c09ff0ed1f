"""What all pictures share: colours that colour-blind readers tell apart, titles, ticks, labels at the ends of lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

matplotlib.use("Agg")

# Okabe and Ito's palette without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
GREY = "#B0B0B0"
MOST_SERIES = len(COLOURS)  # of one picture
FEWEST_ROUNDS = 20  # positions that fewer rounds reached are not drawn: their rate is mostly noise
_LABEL_POINTS = 8.0
_TITLE_WIDTH = 12  # characters per inch of a figure's width


def draw_band(
    axes: Axes, x: Sequence[float], *, low: Sequence[float], middle: Sequence[float], high: Sequence[float],
    color: str, label: str, marker: str = "o", markersize: float = 3,
) -> None:  # fmt: skip
    """Draw a line through the middle values with a shaded band from the low to the high ones."""
    axes.plot(x, middle, color=color, marker=marker, markersize=markersize, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def save_figure(figure: Figure, path: Path, title: str, *facts: str | None) -> None:
    """Write a figure as its suffix says (.png, .svg), with the labels of its lines at their ends, and close it.

    Above it is the title, and below that what was measured: target, drafter, date; what is not known is left out.
    """
    for axes in figure.axes:
        _label_lines(axes)
    width = int(_TITLE_WIDTH * figure.get_figwidth())
    known = [fact.replace(" ", "\xa0") for fact in facts if fact]  # a line ends between two facts
    lines = [line.removeprefix("| ").removesuffix(" |") for line in textwrap.wrap(" | ".join(known), width)]
    figure.suptitle("\n".join([*textwrap.wrap(title, width), *lines]).replace("\xa0", " "), fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def small_multiples(count: int, columns: int, panel: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of that size (inches) with the same axes, at most so many in a row."""
    columns = min(count, columns)
    lines = math.ceil(count / columns)
    size = (max(7.2, panel[0] * columns), panel[1] * lines + 0.6)
    figure, grid = plt.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for place, axes in enumerate(grid.flat):
        if place >= count:
            axes.set_axis_off()
        axes.tick_params(labelbottom=place + columns >= count)  # where no panel is below
    return figure, list(grid.flat[:count])


def short_name(name: object) -> str:
    """A model or drafter without the directories before it."""
    return str(name).rstrip("/").split("/")[-1]


def powers_of_two(axes: Axes, most: float) -> None:
    """Ticks of the x axis at 1, 2, 4, ... up to `most`: of users, requests or rows."""
    axes.xaxis.set_major_locator(FixedLocator([2**i for i in range(int(most).bit_length())]))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as 20, 50, 100 instead of powers of ten."""
    axis.set_major_locator(FixedLocator([k * 10**i for i in range(-3, 6) for k in (1, 2, 5)]))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def shade(number: int, count: int) -> str:
    """Of `count` ordered lines the colour of one, dark to light; lightness alone tells them apart."""
    colours = matplotlib.colormaps["cividis"]
    return matplotlib.colors.to_hex(colours(0.85 * number / max(1, count - 1)))


def label_point(axes: Axes, text: str, x: float, y: float) -> None:
    """Write a small label to the right of a point; lines end at it."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", fontsize=7, va="center", color="#404040", bbox=ground
    )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights moved as little as possible (in squares) until neighbours are `gap` apart."""
    groups: list[tuple[float, int]] = []  # (lowest, how many) of labels that touch
    for height in heights:
        groups.append((height, 1))
        while len(groups) > 1 and groups[-2][0] + groups[-2][1] * gap > groups[-1][0]:
            (above, more), (low, count) = groups.pop(), groups.pop()
            groups.append(((low * count + (above - count * gap) * more) / (count + more), count + more))
    return [low + i * gap for low, count in groups for i in range(count)]


def _label_lines(axes: Axes) -> None:
    """Write the label of each line to the right of the axes at the height of its last point, without overlap."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if not lines:
        return
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [np.asarray(line.get_xydata(), dtype=np.float64) for line in lines]
    points = [xy[np.isfinite(xy).all(axis=1)] for xy in points]
    places = [(*to_axes.transform(known[-1]).tolist(), line)
              for line, known in zip(lines, points, strict=True) if len(known)]  # fmt: skip
    places.sort(key=lambda place: place[1])
    figure = axes.get_figure(root=True)
    assert figure is not None
    height = 72 * figure.get_figheight() * axes.get_position().height  # points, before the layout
    heights = apart([y for _, y, _ in places], 1.25 * _LABEL_POINTS / height)
    for (x, y, line), shifted in zip(places, heights, strict=True):
        color = line.get_color()
        axes.annotate(
            str(line.get_label()),
            xy=(x, y),
            xytext=(1.03, shifted),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=color,
            fontsize=_LABEL_POINTS,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.5, "shrinkB": 3},
        )
