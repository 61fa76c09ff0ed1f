"""Figures 7 and 8 of DSpark (arXiv 2607.05147): the frontier, and what load does to throughput and budget; and gains.

Highlighted are none and, of one drafter, the best static variant and the best that chooses by the load; of several
drafters, the best variant of each. The others are grey.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outrider.backends.local import NO_SPECULATION, drafter_of, is_adaptive
from outrider.evaluation.loadtest.metrics import INTERVAL, Frontier, PointSummary, histogram_rows, summed
from outrider.evaluation.plots import (
    COLOURS,
    GREY,
    MOST_SERIES,
    plain_ticks,
    powers_of_two,
    save_figure,
    short_name,
)

_UNITS = {"closed": "concurrent users", "poisson": "requests per second"}
_BLACK, _STATIC, _ADAPTIVE = "#000000", COLOURS[0], COLOURS[1]


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """Plot throughput against the median user's speed; levels are written at the points without speculation."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours = _colours(frontier)
    for variant, color in colours.items():
        points = [p for p in frontier.points if p.variant == variant]
        places = [(_number(p, "user_p50"), p.throughput, p.level) for p in points]
        # From the highest load to the lowest, at which the label is.
        x, y = [x for x, _, _ in reversed(places)], [y for _, y, _ in reversed(places)]
        _draw(axes, x, y, color=color, label="" if color == GREY else variant)
        if variant == next(reversed(colours)):
            for right, top, level in places:
                # To the lower left: lines fall from left to right.
                axes.annotate(
                    f"{level:g}",
                    (right, top),
                    xytext=(-6, -6),
                    textcoords="offset points",
                    fontsize=8,
                    ha="right",
                    va="center",
                )
    axes.set(xlabel="tokens/s of the median user", ylabel="tokens/s of all users", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    grey = [variant for variant, color in colours.items() if color == GREY]
    facts = [*_facts(frontier), f"grey: {', '.join(grey)}" if grey else None]
    save_figure(figure, path, f"Throughput against user speed (numbers: {_UNITS[frontier.arrivals]})", *facts)


def plot_load(frontier: Frontier, path: Path) -> None:
    """Plot throughput with its quartiles, and rows verified per request and step, against the load."""
    figure, panels = plt.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    shown: list[tuple[Axes, str, Callable[[PointSummary], float]]] = [
        (panels[0], "tokens/s of all users (band: quartiles over repeats)", lambda p: p.throughput),
        (panels[1], "rows verified per request and step", lambda p: _number(p, "budget")),
    ]
    levels = sorted({p.level for p in frontier.points})
    for axes, label, height in shown:
        for variant, color in _colours(frontier).items():
            points = [p for p in frontier.points if p.variant == variant]
            _draw(axes, [p.level for p in points], [height(p) for p in points], color=color, label=variant)
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
    panels[1].set_xlabel(_UNITS[frontier.arrivals])
    save_figure(figure, path, "Throughput and verification budget under load", *_facts(frontier))


def plot_accepted(frontier: Frontier, path: Path) -> None:
    """Plot the share of rounds, over all loads, that accepted 0, 1, 2 ... drafts, a line per variant that drafted."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for variant, color in _colours(frontier).items():
        rounds = summed(p.acceptance_histogram for p in frontier.points if p.variant == variant) or ()
        if any(rounds[1:]):
            x, y = [float(accepted) for accepted in range(len(rounds))], [count / sum(rounds) for count in rounds]
            _draw(axes, x, y, color=color, label=variant)
    axes.set(xlabel="accepted drafts in a round", ylabel="share of rounds", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    save_figure(figure, path, "Accepted drafts by round, without the bonus token", *_facts(frontier))


def plot_gains(frontier: Frontier, path: Path) -> None:
    """Plot gains over the baseline: throughput against the speed promised to users, and speed against throughput."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    against = frontier.gains[0].against
    shown = {
        "throughput": (panels[0], "tokens/s promised to a user", "tokens/s of all users"),
        "speed": (panels[1], "tokens/s of all users", "tokens/s of the median user"),
    }
    for what, (axes, given, gained) in shown.items():
        for variant, color in highlighted(frontier).items():
            found = sorted(
                (gain for gain in frontier.gains if (gain.figure, gain.variant) == (what, variant)),
                key=lambda gain: gain.at,
            )
            x, y = [gain.at for gain in found], [gain.ratio or math.nan for gain in found]
            if any(gain.ratio for gain in found):
                _draw(axes, x, y, color=color, label=variant)
                low, high = [gain.low or math.nan for gain in found], [gain.high or math.nan for gain in found]
                axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        axes.axhline(1, color=_BLACK, linewidth=0.8)
        axes.set(xlabel=given, ylabel=f"{gained}, in multiples of {against}", xscale="log")
        plain_ticks(axes.xaxis)
        axes.grid(alpha=0.3)
    bands = f"bands: {100 * INTERVAL:.0f} % intervals over repeats"
    save_figure(
        figure, path, f"Gain over {against} at equal speed per user, and at equal throughput", bands, *_facts(frontier)
    )


def _facts(frontier: Frontier) -> tuple[str | None, ...]:
    """Target, drafter, engine and date, as far as the settings tell."""
    known = [frontier.settings.get(name) for name in ("target", "drafter", "backend")]
    target, drafter, backend = (None if name is None else short_name(name) for name in known)
    choices = [short_name(about["choice"]) for about in frontier.settings.get("drafters", {}).values()]
    drafter = choices[0] if len(choices) == 1 else drafter  # of several, the variants' names tell
    sampled = [t for t in frontier.settings.get("traffic", {}).get("temperatures", ()) if t]
    temperature = "temperature " + ", ".join(f"{t:g}" for t in sampled) if sampled else None
    return target, drafter and f"drafter {drafter}", backend and f"engine {backend}", temperature, frontier.date


def highlighted(frontier: Frontier) -> dict[str, str]:
    """The colour of each variant that is not grey, in the order of `_colours`."""
    return {variant: color for variant, color in _colours(frontier).items() if color != GREY}


def _colours(frontier: Frontier) -> dict[str, str]:
    """The colour of each variant that is drawn, in the order to draw them: grey ones first, none last."""
    totals: dict[str, float] = {}
    for point in frontier.points:
        totals[point.variant] = totals.get(point.variant, 0.0) + point.throughput
    judged = [verdict.variant for verdict in frontier.overall]  # best first
    ranked = [*judged, *sorted(totals.keys() - set(judged), key=lambda variant: -totals[variant])]
    found = {NO_SPECULATION: _BLACK} if NO_SPECULATION in totals else {}
    drafters = dict.fromkeys(drafter_of(v) for v in ranked if v != NO_SPECULATION)
    if len(drafters) > 1:
        for drafter, color in zip(drafters, (c for c in COLOURS if c != _BLACK), strict=False):
            found[next(v for v in ranked if v != NO_SPECULATION and drafter_of(v) == drafter)] = color
    else:
        for adaptive, color in ((False, _STATIC), (True, _ADAPTIVE)):
            kin = (v for v in ranked if v != NO_SPECULATION and is_adaptive(v) == adaptive)
            if (best := next(kin, None)) is not None:
                found[best] = color
    others = [variant for variant in ranked if variant not in found]
    return dict(reversed((found | dict.fromkeys(others[: MOST_SERIES - len(found)], GREY)).items()))


def _draw(axes: Axes, x: list[float], y: list[float], color: str, label: str) -> None:
    marker, width, size = (".", 1, 4) if color == GREY else ("o", 2, 5)
    axes.plot(x, y, color=color, marker=marker, linewidth=width, markersize=size, label=label or "_")


def _number(point: PointSummary, figure: str) -> float:
    found = point.median(figure)
    return math.nan if found is None else found


def write_plots(frontier: Frontier, directory: Path) -> list[Path]:
    """Write the pictures, those of accepted drafts and gains where there are any, and return their paths."""
    paths = [directory / "frontier.png", directory / "load.png"]
    plot_frontier(frontier, paths[0])
    plot_load(frontier, paths[1])
    if histogram_rows(frontier):
        paths.append(directory / "accepted.png")
        plot_accepted(frontier, paths[-1])
    if any(gain.ratio for gain in frontier.gains):
        paths.append(directory / "gains.png")
        plot_gains(frontier, paths[-1])
    return paths
