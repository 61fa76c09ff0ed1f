"""Figures 7 and 8 of DSpark (arXiv 2607.05147): the frontier, and what load does to throughput and budget.

Three variants are highlighted: none, the best static one and the best that chooses by the load. The others are grey.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from outrider.backends.local import NO_SPECULATION, is_adaptive
from outrider.loadtest.metrics import Frontier, PointSummary
from outrider.utils.plots import COLOURS, GREY, LineEnd, label_ends, powers_of_two, save_figure, set_title, short_name

_UNITS = {"closed": "concurrent users", "poisson": "requests per second"}
_BLACK, _STATIC, _ADAPTIVE = "#000000", COLOURS[0], COLOURS[1]
_OTHERS = 5  # grey lines at most: eight in all


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """Plot throughput against the median user's speed; levels are written at the points without speculation."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours, ends = _colours(frontier), []
    for variant, color in colours.items():
        points = [p for p in frontier.points if p.variant == variant]
        places = [(_number(p, "user_p50"), p.throughput, p.level) for p in points]
        _draw(axes, [x for x, _, _ in places], [y for _, y, _ in places], color=color)
        if color != GREY:
            ends.append(LineEnd(*places[0][:2], text=variant, color=color))
        if variant == next(reversed(colours)):
            for x, y, level in places:
                axes.annotate(f"{level:g}", (x, y), xytext=(-6, -12), textcoords="offset points", fontsize=8)
    axes.set(xlabel="tokens/s of the median user", ylabel="tokens/s of all users", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    label_ends(axes, ends)
    grey = [variant for variant, color in colours.items() if color == GREY]
    facts = [*_facts(frontier), f"grey: {', '.join(grey)}" if grey else None]
    set_title(figure, f"Throughput against user speed (numbers: {_UNITS[frontier.arrivals]})", *facts)
    save_figure(figure, path)


def plot_load(frontier: Frontier, path: Path) -> None:
    """Plot throughput with its quartiles, and rows verified per request and step, against the load."""
    figure, panels = plt.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    shown: list[tuple[Axes, str, Callable[[PointSummary], float]]] = [
        (panels[0], "tokens/s of all users (band: quartiles over repeats)", lambda p: p.throughput),
        (panels[1], "rows verified per request and step", lambda p: _number(p, "budget")),
    ]
    levels = sorted({p.level for p in frontier.points})
    for axes, label, height in shown:
        ends = []
        for variant, color in _colours(frontier).items():
            points = [p for p in frontier.points if p.variant == variant]
            _draw(axes, [p.level for p in points], [height(p) for p in points], color=color)
            if not math.isnan(height(points[-1])):
                ends.append(LineEnd(points[-1].level, height(points[-1]), text=variant, color=color))
            if axes is panels[0] and color != GREY:
                quartiles = [p.quartiles["tokens_per_second"] or (math.nan,) * 3 for p in points]
                low, high = [q[0] for q in quartiles], [q[2] for q in quartiles]
                axes.fill_between([p.level for p in points], low, high, color=color, alpha=0.12, linewidth=0)
        axes.set(ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
        if frontier.arrivals == "closed":
            axes.set_xscale("log")
            powers_of_two(axes, max(levels))
        else:
            axes.set_xticks(levels, [f"{level:g}" for level in levels])
        label_ends(axes, ends)
    panels[1].set_xlabel(_UNITS[frontier.arrivals])
    set_title(figure, "Throughput and verification budget under load", *_facts(frontier))
    save_figure(figure, path)


def _facts(frontier: Frontier) -> tuple[str | None, ...]:
    """Target, drafter, engine and date, as far as the settings tell."""
    known = [frontier.settings.get(name) for name in ("target", "drafter", "backend")]
    target, drafter, backend = (None if name is None else short_name(name) for name in known)
    return target, drafter and f"drafter {drafter}", backend and f"engine {backend}", frontier.date


def _colours(frontier: Frontier) -> dict[str, str]:
    """The colour of each variant that is drawn, in the order to draw them: grey ones first, none last."""
    totals: dict[str, float] = {}
    for point in frontier.points:
        totals[point.variant] = totals.get(point.variant, 0.0) + point.throughput
    judged = [verdict.variant for verdict in frontier.overall]  # best first
    ranked = [*judged, *sorted(totals.keys() - set(judged), key=lambda variant: -totals[variant])]
    found = {NO_SPECULATION: _BLACK} if NO_SPECULATION in totals else {}
    for adaptive, color in ((False, _STATIC), (True, _ADAPTIVE)):
        kin = (v for v in ranked if v != NO_SPECULATION and is_adaptive(v) == adaptive)
        if (best := next(kin, None)) is not None:
            found[best] = color
    others = {variant: GREY for variant in ranked if variant not in found}
    return dict(reversed((found | dict(list(others.items())[:_OTHERS])).items()))


def _draw(axes: Axes, x: list[float], y: list[float], color: str) -> None:
    grey = color == GREY
    axes.plot(x, y, color=color, marker="." if grey else "o", linewidth=1 if grey else 2, markersize=4 if grey else 5)


def _number(point: PointSummary, figure: str) -> float:
    found = point.median(figure)
    return math.nan if found is None else found


def write_plots(frontier: Frontier, directory: Path) -> list[Path]:
    """Write both pictures and return their paths."""
    paths = [directory / "frontier.png", directory / "load.png"]
    plot_frontier(frontier, paths[0])
    plot_load(frontier, paths[1])
    return paths
