"""Tables and pictures of one measurement: an evaluation, a calibration, a profile, a training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.decoding.cost import Profile
from outrider.decoding.profile import break_even
from outrider.evaluation.calibration.fit import Calibration, SweepPoint
from outrider.evaluation.plots import (
    COLOURS,
    FEWEST_ROUNDS,
    GREY,
    MOST_SERIES,
    draw_band,
    plain_ticks,
    powers_of_two,
    save_figure,
    shade,
    short_name,
    small_multiples,
)
from outrider.evaluation.results import Results, TaskResult
from outrider.evaluation.verdict import Speedup
from outrider.training.logging import Groups, read_metrics
from outrider.utils.files import write_atomically
from outrider.utils.terminal import terminal_table

_MOST_LABELS = 9  # of the bars of a narrow panel
_COUNTS, _BAR = 0.2, 0.02  # of a reliability diagram: the highest bar, and the width of bars


def facts_of(results: Results) -> tuple[str | None, ...]:
    """Target, drafter, temperature, lossy rule and date, for the title of a picture."""
    settings, drafter = results.settings, results.drafter
    name = short_name(settings.get("drafter", drafter.label))
    drafts = f"drafter {name} ({drafter.algorithm}, gamma {drafter.gamma})"
    temperature = f"temperature {settings.get('temperature', 0):g}"
    return short_name(settings.get("target")), drafts, temperature, results.lossy, results.date


def plot_acceptance(results: Results, path: Path) -> None:
    """Plot conditional acceptance by draft position with 95 % intervals, one line per task."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    tasks = results.tasks[:MOST_SERIES]
    for number, task in enumerate(tasks):
        known = [
            (k, c, 1.96 * math.sqrt(c * (1 - c) / rounds))
            for k, (c, rounds) in enumerate(zip(task.conditional_acceptance, task.reached, strict=True), start=1)
            if c is not None and rounds >= FEWEST_ROUNDS
        ]
        if not known:
            continue
        places = [k + 0.06 * (number - (len(tasks) - 1) / 2) for k, _, _ in known]
        heights, errors = [c for _, c, _ in known], [error for _, _, error in known]
        bars = axes.errorbar(places, heights, errors, color=COLOURS[number], marker="o", capsize=2, elinewidth=0.8)
        bars[0].set_label(f"{task.task} (\u03c4 {task.accepted_length:.2f})")
    gamma = results.drafter.gamma
    axes.set(xlabel="draft position k", xticks=range(1, gamma + 1), xlim=(0.5, gamma + 0.5))
    axes.set(ylabel="P(accept k | 1..k-1 accepted)", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.supxlabel(f"positions that fewer than {FEWEST_ROUNDS} rounds reached are left out", fontsize=8, color="grey")
    save_figure(figure, path, "Conditional acceptance by position", *facts_of(results))


def plot_histogram(results: Results, path: Path) -> None:
    """Plot the share of rounds by number of accepted drafts, a panel per task."""
    tasks = results.tasks[:MOST_SERIES]
    figure, panels = small_multiples(len(tasks), 4, panel=(3.0, 2.9))
    for task, axes in zip(tasks, panels, strict=True):
        shares = [count / task.rounds for count in task.acceptance_histogram]
        axes.bar(range(len(shares)), shares, width=0.8, color=COLOURS[0])
        every = math.ceil(len(shares) / _MOST_LABELS)
        for k, share in enumerate(shares):
            if every > 1 and share < 0.005:
                continue  # it would touch its neighbours'
            label = f"{100 * share:.0f}" if share >= 0.005 or not share else "<1"
            axes.annotate(label, (k, share), xytext=(0, 2), textcoords="offset points", fontsize=7, ha="center")
        axes.set_title(f"{task.task} (\u03c4 {task.accepted_length:.2f})", fontsize=10)
        axes.set_xticks(range(0, len(shares), every))
        axes.grid(alpha=0.3, axis="y")
        axes.margins(y=0.1)
    figure.supxlabel("accepted drafts in a round (numbers: per cent)", fontsize=9)
    panels[0].set_ylabel("share of rounds")
    save_figure(figure, path, "Accepted drafts by round, without the bonus token", *facts_of(results))


def plot_reliability(calibration: Calibration, path: Path, facts: Sequence[str]) -> None:
    """Plot predicted against observed survival, a panel per position, raw and calibrated, over the rounds of each bin.

    Positions that few rounds reached are left out. `calibration` has recorded its reliability.
    """
    before, after = calibration.before, calibration.after
    counts = [sum(bins.rounds) for bins in after.reliability]
    places = [i for i, count in enumerate(counts) if count >= FEWEST_ROUNDS] or [0]
    figure, panels = small_multiples(len(places), 4, panel=(2.6, 2.9))
    both = (("raw", before, COLOURS[0], "o"), ("calibrated", after, COLOURS[1], "s"))
    for i, axes in zip(places, panels, strict=True):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for number, (name, quality, color, marker) in enumerate(both):
            bins, most = quality.reliability[i], max(max(one.reliability[i].rounds) for _, one, _, _ in both)
            axes.plot(bins.predicted, bins.accepted, marker, markersize=3.5, color=color, alpha=0.85, clip_on=False)
            heights = [_COUNTS * count / most for count in bins.rounds]
            shift = (number - 0.5) * _BAR
            axes.bar([x + shift for x in bins.predicted], heights, _BAR, color=color, alpha=0.35)
            text = f"{name} {quality.ece[i]:.3f}"
            axes.text(0.04, 0.95 - 0.09 * number, text, color=color, fontsize=8, va="top", transform=axes.transAxes)
        axes.set_title(f"k = {i + 1}, {counts[i]} rounds", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.grid(alpha=0.3)
    figure.supxlabel("predicted survival to k (numbers: ECE; bars: rounds of each bin)", fontsize=9)
    figure.supylabel("share of rounds with 1..k accepted", fontsize=9)
    save_figure(figure, path, "Reliability of the confidences", *facts)


def plot_sweep(points: Sequence[SweepPoint], path: Path, facts: Sequence[str]) -> None:
    """Plot tokens per step (left) and acceptance rate (right) against the threshold, a line per task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, task in enumerate(list(dict.fromkeys(point.task for point in points))[:MOST_SERIES]):
        mine = [point for point in points if point.task == task]
        thresholds = [point.threshold for point in mine]
        rates = [math.nan if point.acceptance_rate is None else point.acceptance_rate for point in mine]
        for axes, heights in ((left, [point.tokens_per_step for point in mine]), (right, rates)):
            axes.plot(thresholds, heights, marker="o", markersize=3, color=COLOURS[number], label=task)
    left.set(xlabel="threshold", ylabel="tokens per step", ylim=(1, None))
    right.set(xlabel="threshold", ylabel="accepted / verified", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_figure(figure, path, "Verify while confidence >= threshold", *facts)


def plot_calibration(calibration: Calibration, path: Path, facts: Sequence[str]) -> None:
    """Plot the expected calibration error of the survival by draft position, before and after."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    positions, chance = range(1, len(calibration.temperatures) + 1), calibration.after.ece_noise
    axes.fill_between(positions, 0, chance, color=GREY, alpha=0.35, linewidth=0)
    axes.plot(positions, chance, color="#606060", linewidth=0, label="by chance")
    axes.plot(positions, calibration.before.ece, "o-", color=COLOURS[0], label="raw")
    axes.plot(positions, calibration.after.ece, "o-", color=COLOURS[1], label="calibrated")
    axes.set(xlabel="draft position k", ylabel="ECE of the survival to k", ylim=(0, None), xticks=positions)
    axes.grid(alpha=0.3)
    save_figure(figure, path, "Calibration error by position (grey: what perfect confidences would show)", *facts)


def plot_profile(profile: Profile, path: Path, context: int, rows: int) -> None:
    """Plot, after `context` tokens each: forwards (quartiles shaded, additive form dashed), other costs, break-even.

    `rows`: see `break_even`.
    """
    figure, (left, centre, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    fit, counts = profile.fit, profile.table.requests
    for number, requests in enumerate(counts):
        cells = [c for c in profile.cells if (c.requests, c.context) == (requests, context)]
        tokens, color = [c.tokens for c in cells], shade(number, len(counts))
        low, middle, high = ([1e3 * getattr(c, name) for c in cells] for name in ("low", "median", "high"))
        name = f"{requests} request{'s' * (requests > 1)}"
        draw_band(left, tokens, low=low, middle=middle, high=high, color=color, label=name, marker=".", markersize=6)
        fixed = fit.bias + fit.alpha * requests + fit.sigma * requests * context
        left.plot(tokens, [1e3 * (fixed + fit.theta * b) for b in tokens], "--", lw=0.8, color=color)
    left.set(xlabel="tokens of a forward", ylabel="ms", xscale="log", yscale="log")
    left.set_title("Target forward (dashed: additive form)", fontsize=10)
    powers_of_two(left, max(c.tokens for c in profile.cells))
    plain_ticks(left.yaxis)
    curves = {"draft": profile.draft, "drafter reads": profile.extend, "other": profile.other}
    for number, (label, curve) in enumerate(curves.items()):
        if curve is not None:
            medians = [1e3 * median for _, median, _ in curve.seconds]
            centre.plot(curve.requests, medians, marker="o", color=COLOURS[number], label=label)
    centre.set(xlabel="requests", ylabel="ms", xscale="log", ylim=(0, None))
    centre.set_title("Besides the target", fontsize=10)
    even = break_even(profile, context, rows)
    right.plot(list(even), list(even.values()), marker="o", color=COLOURS[0])
    right.axhline(1, color="grey", linewidth=0.8)
    right.fill_between(list(even), list(even.values()), 1, color=COLOURS[3], alpha=0.12, linewidth=0)
    right.set(xlabel="requests", ylabel="accepted length (\u03c4)", xscale="log")
    right.set_title(f"Break-even: {rows - 1} drafts pay above the line", fontsize=10)
    for axes in (centre, right):
        powers_of_two(axes, max(even))
    for axes in (left, centre, right):
        axes.grid(alpha=0.3)
    setting = profile.setting
    facts = (setting.target, setting.drafter or "no drafter", setting.processor, profile.date)
    save_figure(figure, path, f"Cost of a step after {context} tokens per request", *facts)


def plot_training(metrics: Path, picture: Path, facts: Sequence[str] = (), best_step: int | None = None) -> None:
    """Draw a metrics.jsonl by step: loss, tokens per round, acceptance by position, learning rate.

    Held-out expected accepted length and the tau of real decoding share a panel: both are tokens per round, and they
    agree up to the noise of a few prompts. A dotted line is at `best_step`, that of the best drafter.
    """
    groups = read_metrics(metrics)
    figure, axes = plt.subplots(2, 2, figsize=(13, 7), sharex=True, layout="constrained")
    expected, decoded = "expected_length_", "Tokens per round (\u03c4); drafting pays above break-even"
    panels = {
        "Loss": [("train", "loss", "training", GREY), ("held_out", "loss", "held out", COLOURS[0])],
        decoded: [
            ("held_out", f"{expected}greedy", "expected, T = 0", COLOURS[0]),
            ("held_out", f"{expected}sampled", "expected, T = 1", COLOURS[2]),
            ("decode", "tau", "decoded", COLOURS[1]),
            ("decode", "break_even", "break-even", "#000000"),
        ],
        "Held-out P(accept k | 1..k-1 accepted)": _positions(groups),
        "Learning rate": [("train", "learning_rate", "", COLOURS[0])],
    }
    _, length, acceptance, rate = axes.flat
    if best_step is not None:
        length.axvline(best_step, color="black", linestyle=":", linewidth=1)
    for panel, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for group, name, label, color in lines:
            _draw(panel, groups.get(group, []), name, label=label, color=color)
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    acceptance.set(xlabel="step", ylim=(0, 1))
    rate.set_xlabel("step")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    best = None if best_step is None else f"dotted: best drafter, step {best_step}"
    save_figure(figure, picture, "Training", *facts, best)


def _positions(groups: Groups) -> list[tuple[str, str, str, str]]:
    """(group, name, label, colour) of at most eight draft positions, the first ones and the last."""
    names = [n for n in groups.get("held_out", [{}])[-1] if n.startswith("conditional_acceptance_")]
    numbers = range(1, len(names) + 1)
    shown = [k for k in numbers if len(names) <= MOST_SERIES or k in (1, 2, 3, 4, 6, 8, 12) or k == len(names)]
    return [("held_out", names[k - 1], f"k = {k}", shade(i, len(shown))) for i, k in enumerate(shown[-MOST_SERIES:])]


def _draw(axes: Axes, entries: Sequence[Mapping[str, Any]], name: str, *, label: str, color: str) -> None:
    """Draw one figure by step, if there is any."""
    entries = [e for e in entries if name in e]
    if name.startswith("conditional_acceptance_"):
        rounds = name.replace("conditional_acceptance_", "reached_")
        entries = [e for e in entries if e.get(rounds, FEWEST_ROUNDS) >= FEWEST_ROUNDS]
    if not entries:
        return
    few, dashed = color == GREY or not label, name == "break_even"
    steps, heights = [e["step"] for e in entries], [e[name] for e in entries]
    style: dict[str, Any] = {
        "linestyle": "--" if dashed else "-",
        "marker": "" if few or dashed else "o",
        "markersize": 4,
    }
    axes.plot(steps, heights, color=color, linewidth=1 if few else 1.6, label=label or "_", **style)


def write_report(results: Results, out: Path) -> list[Path]:
    """Write results.json and the two plots to `out`; returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "results.json", out / "conditional_acceptance.png", out / "accepted_length.png"]
    write_atomically(paths[0], results.model_dump_json(indent=2) + "\n")
    plot_acceptance(results, paths[1])
    plot_histogram(results, paths[2])
    return paths


def speedups(results: Results) -> list[Speedup]:
    """The speedup of each task with its quartiles over turns, for a verdict."""
    return [
        Speedup(task.task, task.speedup, task.speedup_quartiles[0], high=task.speedup_quartiles[2], samples=task.turns,
                seconds=task.tokens / task.tokens_per_second, accepted_length=task.accepted_length)
        for task in results.tasks
    ]  # fmt: skip


HEADINGS = ("task", "tokens", "tau", "tok/s", "plain", "speedup", "quartiles", "identical")


def table(results: Results) -> Table:
    """The table for the terminal, one row per task."""
    drafts = f"drafts verified: {results.verified}"
    title = " - ".join(filter(None, ("Speculative against plain decoding, same run", drafts, results.lossy)))
    shown = [[f"[red]{cell}[/red]" if cell.endswith("differ") else cell for cell in row] for row in rows(results)]
    return terminal_table(HEADINGS, shown, text=("task",), title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def rows(results: Results) -> list[list[str]]:
    """Cells under `HEADINGS`, a row per task."""
    return [_row(task, results) for task in results.tasks]


def _row(task: TaskResult, results: Results) -> list[str]:
    low, _, high = task.speedup_quartiles
    if task.greedy_identical is None:
        same = "sampled"
    elif results.lossy:
        same = f"{task.turns - task.greedy_mismatches}/{task.turns} turns"
    elif task.greedy_mismatches:
        same = f"{task.greedy_mismatches} differ"
    else:
        same = f"yes ({task.greedy_ties} ties)" if task.greedy_ties else "yes"
    cells = [task.task, str(task.tokens), f"{task.accepted_length:.2f}", f"{task.tokens_per_second:.1f}"]
    cells += [f"{task.baseline_tokens_per_second:.1f}", f"{task.speedup:.2f}x", f"{low:.2f}-{high:.2f}", same]
    return cells
