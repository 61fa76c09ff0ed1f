"""Two pictures of an evaluation: conditional acceptance by position, and how many drafts a round accepts."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from outrider.evaluation.results import Results


def plot_acceptance(results: Results, path: Path) -> None:
    """Position-wise conditional acceptance, one line per task."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for task in results.tasks:
        positions = range(1, len(task.conditional_acceptance) + 1)
        label = f"{task.task} (\u03c4 {task.accepted_length:.2f})"
        heights = [math.nan if c is None else c for c in task.conditional_acceptance]
        axes.plot(positions, heights, marker="o", label=label)
        axes.set_xticks(list(positions))
    axes.set(xlabel="draft position k", ylabel="P(accept k | 1..k-1 accepted)", ylim=(0, 1))
    axes.set_title("Conditional acceptance by position")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_histogram(results: Results, path: Path) -> None:
    """Share of rounds by number of accepted drafts, grouped by task."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    width = 0.8 / len(results.tasks)
    for number, task in enumerate(results.tasks):
        counts = task.acceptance_histogram
        offset = (number - (len(results.tasks) - 1) / 2) * width
        places = [k + offset for k in range(len(counts))]
        axes.bar(places, [c / task.rounds for c in counts], width=width, label=task.task)
        axes.set_xticks(range(len(counts)))
    axes.set(xlabel="accepted drafts in a round", ylabel="share of rounds")
    axes.set_title("Accepted length, without the bonus token")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
