"""OUT/metrics.jsonl as one picture: loss, tokens per round, acceptance by position and learning rate against steps.

Held-out expected accepted length and the tau of real decoding share an axis: both are tokens per round, and they should
agree up to the noise of a few prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Groups = dict[str, list[dict[str, Any]]]


def read_metrics(path: Path) -> Groups:
    """Entries by group, in the order of steps; a line that a killed process cut short is left out."""
    groups: Groups = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            entry = json.loads(line)
            groups.setdefault(entry["group"], []).append(entry)
    return groups


def plot_training(metrics: Path, picture: Path, best_step: int | None = None) -> None:
    """Draw `metrics` (a metrics.jsonl) to `picture`; a dotted line marks the best drafter's step."""
    groups = read_metrics(metrics)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, layout="constrained")
    loss, length, acceptance, rate = axes.flat
    _draw(loss, groups, "train", "loss", "training", alpha=0.5, linewidth=1)
    _draw(loss, groups, "held_out", "loss", "held out", marker="o")
    if best_step is not None:
        length.axvline(best_step, color="black", linestyle=":", linewidth=1, label="best drafter")
    _draw(length, groups, "held_out", "expected_length_greedy", "expected, temperature 0", marker="o")
    _draw(length, groups, "held_out", "expected_length_sampled", "expected, temperature 1", marker="o")
    _draw(length, groups, "decode", "tau", "decoded", marker="s", linestyle="--")
    _draw_positions(acceptance, groups)
    _draw(rate, groups, "train", "learning_rate", "", color="tab:gray")
    loss.set_title("Loss")
    length.set_title("Tokens per round (\u03c4)")
    acceptance.set_title("Held-out P(accept k | 1..k-1 accepted)")
    rate.set_title("Learning rate")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
        if panel is not rate and panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize="small", ncols=3 if panel is acceptance else 1)
    acceptance.set(ylim=(0, 1), xlabel="step")
    rate.set(xlabel="step")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def _draw_positions(panel: Any, groups: Groups) -> None:
    names = [n for n in groups.get("held_out", [{}])[-1] if n.startswith("conditional_acceptance_")]
    for k, name in enumerate(names, 1):
        _draw(panel, groups, "held_out", name, f"k = {k}", marker=".", color=plt.get_cmap("viridis")(k / len(names)))


def _draw(panel: Any, groups: Groups, group: str, name: str, label: str, **style: Any) -> None:
    entries = [entry for entry in groups.get(group, []) if name in entry]
    if entries:
        panel.plot([e["step"] for e in entries], [e[name] for e in entries], label=label, **style)
