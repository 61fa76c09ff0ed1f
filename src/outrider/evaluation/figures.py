"""Tables and pictures of one measurement: an evaluation, a calibration, a profile, a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
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
    LineEnd,
    draw_band,
    label_ends,
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
    ends, tasks = [], results.tasks[:MOST_SERIES]
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
        axes.errorbar(places, heights, errors, color=COLOURS[number], marker="o", capsize=2, elinewidth=0.8)
        label = f"{task.task} (\u03c4 {task.accepted_length:.2f})"
        ends.append(LineEnd(places[-1], heights[-1], text=label, color=COLOURS[number]))
    axes.set(xlabel="draft position k", ylabel="P(accept k | 1..k-1 accepted)", ylim=(0, 1))
    axes.set_xticks(range(1, results.drafter.gamma + 1))
    axes.set_xlim(0.5, results.drafter.gamma + 0.5)
    axes.grid(alpha=0.3)
    label_ends(axes, ends)
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
    ends: dict[bool, list[LineEnd]] = {True: [], False: []}
    for number, task in enumerate(list(dict.fromkeys(point.task for point in points))[:MOST_SERIES]):
        mine = [point for point in points if point.task == task]
        thresholds, color = [point.threshold for point in mine], COLOURS[number]
        left.plot(thresholds, [point.tokens_per_step for point in mine], marker="o", markersize=3, color=color)
        ends[True].append(LineEnd(thresholds[-1], mine[-1].tokens_per_step, text=task, color=color))
        known = [(point.threshold, point.acceptance_rate) for point in mine if point.acceptance_rate is not None]
        right.plot([x for x, _ in known], [y for _, y in known], marker="o", markersize=3, color=color)
        ends[False] += [LineEnd(x, y, text=task, color=color) for x, y in known[-1:]]
    left.set(xlabel="threshold", ylabel="tokens per step", ylim=(1, None))
    right.set(xlabel="threshold", ylabel="accepted / verified", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        label_ends(axes, ends[axes is left])
    save_figure(figure, path, "Verify while confidence >= threshold", *facts)


def plot_calibration(calibration: Calibration, path: Path, facts: Sequence[str]) -> None:
    """Plot the expected calibration error of the survival by draft position, before and after."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    positions, ends = range(1, len(calibration.temperatures) + 1), list[LineEnd]()
    chance = calibration.after.ece_noise
    axes.fill_between(positions, 0, chance, color=GREY, alpha=0.35, linewidth=0)
    ends.append(LineEnd(positions[-1], chance[-1], text="by chance", color="#606060"))
    both = (("raw", calibration.before, COLOURS[0]), ("calibrated", calibration.after, COLOURS[1]))
    for label, quality, color in both:
        axes.plot(positions, quality.ece, "o-", color=color)
        ends.append(LineEnd(positions[-1], quality.ece[-1], text=label, color=color))
    axes.set(xlabel="draft position k", ylabel="ECE of the survival to k", ylim=(0, None))
    axes.set_xticks(positions)
    axes.grid(alpha=0.3)
    label_ends(axes, ends)
    save_figure(figure, path, "Calibration error by position (grey: what perfect confidences would show)", *facts)


def plot_profile(profile: Profile, context: int, path: Path, rows: int) -> None:
    """Plot, after `context` tokens each: forwards (quartiles shaded, additive form dashed), other costs, break-even.

    `rows`: see `break_even`.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    fit, counts, ends = profile.fit, profile.table.requests, list[LineEnd]()
    for number, requests in enumerate(counts):
        cells = [c for c in profile.cells if (c.requests, c.context) == (requests, context)]
        tokens, color = [c.tokens for c in cells], shade(number, len(counts))
        medians, name = [1e3 * c.median for c in cells], f"{requests} request{'s' * (requests > 1)}"
        band = [1e3 * c.low for c in cells], [1e3 * c.high for c in cells]
        ends.append(draw_band(left, tokens, medians, band=band, color=color, text=name, marker=".", markersize=6))
        fixed = fit.bias + fit.alpha * requests + fit.sigma * requests * context
        left.plot(tokens, [1e3 * (fixed + fit.theta * b) for b in tokens], "--", lw=0.8, color=color)
    left.set(xlabel="tokens of a forward", ylabel="ms", xscale="log", yscale="log")
    left.set_title("Target forward (dashed: additive form)", fontsize=10)
    powers_of_two(left, max(c.tokens for c in profile.cells))
    plain_ticks(left.yaxis)
    label_ends(left, ends)
    curves = {"draft": profile.draft, "drafter reads": profile.extend, "other": profile.other}
    ends = []
    for number, (label, curve) in enumerate(curves.items()):
        if curve is not None:
            medians, color = [1e3 * median for _, median, _ in curve.seconds], COLOURS[number]
            middle.plot(curve.requests, medians, marker="o", color=color)
            ends.append(LineEnd(curve.requests[-1], medians[-1], text=label, color=color))
    middle.set(xlabel="requests", ylabel="ms", xscale="log", ylim=(0, None))
    middle.set_title("Besides the target", fontsize=10)
    label_ends(middle, ends)
    even = break_even(profile, context, rows)
    right.plot(list(even), list(even.values()), marker="o", color=COLOURS[0])
    right.axhline(1, color="grey", linewidth=0.8)
    right.fill_between(list(even), list(even.values()), 1, color=COLOURS[3], alpha=0.12, linewidth=0)
    right.set(xlabel="requests", ylabel="accepted length (\u03c4)", xscale="log")
    right.set_title(f"Break-even: {rows - 1} drafts pay above the line", fontsize=10)
    for axes in (middle, right):
        powers_of_two(axes, max(even))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    setting = profile.setting
    facts = (setting.target, setting.drafter or "no drafter", setting.processor, profile.date)
    save_figure(figure, path, f"Cost of a step after {context} tokens per request", *facts)


def plot_training(metrics: Path, picture: Path, facts: Sequence[str] = (), best_step: int | None = None) -> None:
    """Draw a metrics.jsonl by step: loss, tokens per round, acceptance by position, learning rate.

    Held-out expected accepted length and the tau of real decoding share a panel: both are tokens per round, and they
    agree up to the noise of a few prompts.

    Args:
        metrics: the metrics.jsonl.
        picture: the file that is written.
        facts: target, drafter and date, for the title.
        best_step: of the best drafter, marked by a dotted line.
    """
    groups = read_metrics(metrics)
    figure, axes = plt.subplots(2, 2, figsize=(13, 7), sharex=True, layout="constrained")
    loss, length, acceptance, rate = axes.flat
    black = "#000000"
    panels = {
        loss: [("train", "loss", "training", GREY), ("held_out", "loss", "held out", COLOURS[0])],
        length: [
            ("held_out", "expected_length_greedy", "expected, T = 0", COLOURS[0]),
            ("held_out", "expected_length_sampled", "expected, T = 1", COLOURS[2]),
            ("decode", "tau", "decoded", COLOURS[1]),
            ("decode", "break_even", "break-even", black),
        ],
        acceptance: _positions(groups),
        rate: [("train", "learning_rate", "", COLOURS[0])],
    }
    titles = (
        "Loss",
        "Tokens per round (\u03c4); drafting pays above break-even",
        "Held-out P(accept k | 1..k-1 accepted)",
    )
    if best_step is not None:
        length.axvline(best_step, color="black", linestyle=":", linewidth=1)
    for panel, title in zip(axes.flat, (*titles, "Learning rate"), strict=True):
        drawn = [_draw(panel, groups, group, name=name, label=label, color=color)
                 for group, name, label, color in panels[panel]]  # fmt: skip
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
        if panel is acceptance:
            panel.set_ylim(0, 1)
        label_ends(panel, [end for end in drawn if end is not None and end.text])
    acceptance.set_xlabel("step")
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


def _draw(panel: Any, groups: Groups, group: str, name: str, label: str, *, color: str) -> LineEnd | None:
    """Draw one figure by step and give the line's end; None where there is nothing to draw."""
    entries = [e for e in groups.get(group, []) if name in e]
    if name.startswith("conditional_acceptance_"):
        rounds = name.replace("conditional_acceptance_", "reached_")
        entries = [e for e in entries if e.get(rounds, FEWEST_ROUNDS) >= FEWEST_ROUNDS]
    if not entries:
        return None
    few, dashed = color == GREY or not label, name == "break_even"
    steps, heights = [e["step"] for e in entries], [e[name] for e in entries]
    style = {"linestyle": "--" if dashed else "-", "marker": "" if few or dashed else "o", "markersize": 4}
    panel.plot(steps, heights, color=color, linewidth=1 if few else 1.6, **style)
    return LineEnd(steps[-1], heights[-1], text=label, color=color)


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
    found = []
    for task in results.tasks:
        low, _, high = task.speedup_quartiles
        seconds = task.tokens / task.tokens_per_second
        found.append(Speedup(task.task, task.speedup, low, high=high, samples=task.turns, seconds=seconds))
    return found


HEADINGS = ("task", "tokens", "tau", "tok/s", "plain", "speedup", "quartiles", "identical")


def table(results: Results) -> Table:
    """The table for the terminal, one row per task."""
    drafts = f"drafts verified: {results.verified}"
    title = " - ".join(filter(None, ("Speculative against plain decoding, same run", drafts, results.lossy)))
    found = [[f"[red]{cell}[/red]" if cell.endswith("differ") else cell for cell in row] for row in rows(results)]
    return terminal_table(HEADINGS, found, text=("task",), title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


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
