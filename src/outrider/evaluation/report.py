"""Report an evaluation (results.json, table, plots), and plot a calibration (reliability, threshold sweep)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from rich.table import Table

from outrider.calibration.fit import Rounds, Scaling, SweepPoint, at_position, ece, reliability
from outrider.evaluation.results import Results, TaskResult
from outrider.evaluation.verdict import Speedup
from outrider.utils.files import write_atomically
from outrider.utils.plots import save_figure
from outrider.utils.tables import terminal_table


def plot_acceptance(results: Results, path: Path) -> None:
    """Plot conditional acceptance by draft position, one line per task."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for task in results.tasks:
        positions = range(1, len(task.conditional_acceptance) + 1)
        label = f"{task.task} (\u03c4 {task.accepted_length:.2f})"
        heights = [math.nan if c is None else c for c in task.conditional_acceptance]
        axes.plot(positions, heights, marker="o", label=label)
        axes.set_xticks(list(positions))
    axes.set(xlabel="draft position k", ylabel="P(accept k | 1..k-1 accepted)", ylim=(0, 1))
    axes.set_title("\n".join(filter(None, ("Conditional acceptance by position", results.lossy))))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_histogram(results: Results, path: Path) -> None:
    """Plot the share of rounds by number of accepted drafts, grouped by task."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    width = 0.8 / len(results.tasks)
    for number, task in enumerate(results.tasks):
        counts = task.acceptance_histogram
        offset = (number - (len(results.tasks) - 1) / 2) * width
        places = [k + offset for k in range(len(counts))]
        axes.bar(places, [c / task.rounds for c in counts], width=width, label=task.task)
        axes.set_xticks(range(len(counts)))
    axes.set(xlabel="accepted drafts in a round", ylabel="share of rounds")
    axes.set_title("\n".join(filter(None, ("Accepted length, without the bonus token", results.lossy))))
    axes.grid(alpha=0.3, axis="y")
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_reliability(rounds: Rounds, scaling: Scaling, path: Path) -> None:
    """Plot predicted against observed survival, a column per position: raw above, calibrated below."""
    gamma = len(scaling.temperatures)
    size = (1.9 * gamma + 0.6, 4.4)
    figure, grid = plt.subplots(2, gamma, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    for row, (name, used) in enumerate((("raw", Scaling.identity(gamma)), ("calibrated", scaling))):
        for k in range(1, gamma + 1):
            axes, pair = grid[row][k - 1], at_position(rounds, used, k)
            found = reliability(*pair)
            full = found.count_M > 0
            count_M = found.count_M[full]
            axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            share_M = 160 * count_M / count_M.sum()
            axes.scatter(found.predicted_M[full] / count_M, found.happened_M[full] / count_M, s=share_M + 4, alpha=0.8)
            axes.set_title(f"k = {k}, {name}: ECE {ece(*pair):.3f}", fontsize=8)
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axes.grid(alpha=0.3)
    figure.supxlabel("predicted survival (area: share of rounds)", fontsize=9)
    figure.supylabel("rounds with positions 1..k accepted", fontsize=9)
    save_figure(figure, path)


def plot_sweep(points: Sequence[SweepPoint], path: Path) -> None:
    """Plot tokens per step (left) and acceptance rate (right) against the threshold, a line per task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for task in dict.fromkeys(point.task for point in points):
        mine = [point for point in points if point.task == task]
        thresholds = [point.threshold for point in mine]
        left.plot(thresholds, [point.tokens_per_step for point in mine], marker="o", markersize=3, label=task)
        rates = [math.nan if point.acceptance_rate is None else point.acceptance_rate for point in mine]
        right.plot(thresholds, rates, marker="o", markersize=3, label=task)
    left.set(xlabel="threshold", ylabel="tokens per step", ylim=(1, None))
    right.set(xlabel="threshold", ylabel="accepted / verified", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    save_figure(figure, path)


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


def table(results: Results) -> Table:
    """The table for the terminal, one row per task."""
    title = " - ".join(filter(None, ("Speculative against plain decoding, same run", results.lossy)))
    headings = ("task", "tokens", "tau", "tok/s", "plain", "speedup", "quartiles", "identical")
    return terminal_table(headings, [_row(task, results) for task in results.tasks], text=("task",), title=title)


def _row(task: TaskResult, results: Results) -> list[str]:
    low, _, high = task.speedup_quartiles
    if task.greedy_identical is None:
        same = "sampled"
    elif results.lossy:
        same = f"{task.turns - task.greedy_mismatches}/{task.turns} turns"
    elif task.greedy_mismatches:
        same = f"[red]{task.greedy_mismatches} differ[/red]"
    else:
        same = f"yes ({task.greedy_ties} ties)" if task.greedy_ties else "yes"
    cells = [task.task, str(task.tokens), f"{task.accepted_length:.2f}", f"{task.tokens_per_second:.1f}"]
    cells += [f"{task.baseline_tokens_per_second:.1f}", f"{task.speedup:.2f}x", f"{low:.2f}-{high:.2f}", same]
    return cells
