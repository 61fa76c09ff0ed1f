"""Figures 7 and 8 of DSpark (arXiv 2607.05147): the frontier, and what load does to throughput and budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Colormap

from outrider.backends.local import NO_SPECULATION, is_adaptive
from outrider.loadtest.metrics import Frontier, PointSummary
from outrider.utils.plots import save_figure

_UNITS = {"closed": "concurrent users", "poisson": "requests per second"}


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """Plot throughput against the median user's speed; levels are written at the points of one variant."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for variant, points in _by_variant(frontier).items():
        places = [(_number(p, "user_p50"), p.throughput, p.level) for p in points]
        axes.plot([x for x, _, _ in places], [y for _, y, _ in places], label=variant, **_style(frontier, variant))
    best = frontier.points and max(frontier.points, key=lambda p: p.throughput).variant
    for point in frontier.points:
        if point.variant == best:
            place = (_number(point, "user_p50"), point.throughput)
            axes.annotate(f"{point.level:g}", place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="tokens/s of the median user", ylabel="tokens/s of all users", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"Throughput against user speed (numbers: {_UNITS[frontier.arrivals]})")
    _finish(axes)
    save_figure(figure, path)


def plot_load(frontier: Frontier, path: Path) -> None:
    """Plot throughput with its quartiles, and rows verified per request and step, against the load."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for variant, points in _by_variant(frontier).items():
        levels, style = [p.level for p in points], _style(frontier, variant)
        quartiles = [p.quartiles["tokens_per_second"] or (math.nan,) * 3 for p in points]
        above.plot(levels, [p.throughput for p in points], label=variant, **style)
        above.fill_between(
            levels, [q[0] for q in quartiles], [q[2] for q in quartiles], color=style["color"], alpha=0.12, linewidth=0
        )
        below.plot(levels, [_number(p, "budget") for p in points], **style)
    levels = sorted({p.level for p in frontier.points})
    above.set(ylabel="tokens/s of all users", ylim=(0, None), xscale="log")
    below.set(ylabel="rows verified per request and step", xlabel=_UNITS[frontier.arrivals], ylim=(0, None))
    below.set_xticks(levels, [f"{level:g}" for level in levels])
    below.minorticks_off()
    above.set_title("Throughput and verification budget under load (band: quartiles over repeats)")
    below.grid(alpha=0.3)
    _finish(above)
    save_figure(figure, path)


def _by_variant(frontier: Frontier) -> dict[str, list[PointSummary]]:
    found: dict[str, list[PointSummary]] = {}
    for point in frontier.points:
        found.setdefault(point.variant, []).append(point)
    return found


def _style(frontier: Frontier, variant: str) -> dict[str, Any]:
    """Line style: dotted black without speculation, dashed and cold for static variants, solid and warm for others."""
    if variant == NO_SPECULATION:
        return {"color": "black", "linestyle": ":", "marker": "s", "markersize": 4}
    adaptive = is_adaptive(variant)
    kin = [v for v in _by_variant(frontier) if v != NO_SPECULATION and is_adaptive(v) == adaptive]
    shades: Colormap = matplotlib.colormaps["autumn" if adaptive else "winter"]
    color = shades(0.85 * kin.index(variant) / max(1, len(kin) - 1))
    return {"color": color, "linestyle": "-" if adaptive else "--", "marker": "o" if adaptive else "^", "markersize": 4}


def _number(point: PointSummary, figure: str) -> float:
    found = point.median(figure)
    return math.nan if found is None else found


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def write_plots(frontier: Frontier, directory: Path) -> list[Path]:
    """Write both pictures and return their paths."""
    paths = [directory / "frontier.png", directory / "load.png"]
    plot_frontier(frontier, paths[0])
    plot_load(frontier, paths[1])
    return paths
