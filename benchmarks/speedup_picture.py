"""The picture of README.md: tokens per second over plain decoding by task, bars with quartiles, as SVG.

    python -m benchmarks.speedup_picture --out docs/pictures/speedup.svg

Reads `results.json` of `outrider eval` as docs/results holds them: the default drafter and hybrid drafts, both with
default draft lengths, at temperature 0.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer

from outrider.evaluation.plots import COLOURS, save_figure
from outrider.evaluation.results import Results

# Where the reader's system is dark. Bars and their labels keep their colours.
DARK = """<style>@media (prefers-color-scheme: dark) {
  #patch_1 path { fill: #1f2129 !important } #patch_2 path { fill: none !important }
  text { fill: #f0f0f0 }
  use, path[style*="stroke: #333333"], path[style*="stroke: #000000"] { stroke: #b8b8b8 !important }
}</style>"""
ROOT = Path(__file__).parents[1]
MEASURED = {"default drafter": "default-greedy", "--drafter hybrid": "hybrid-greedy"}
_BAR = 0.36


def main(out: Annotated[Path, typer.Option(help="the SVG file")]) -> None:
    """Draw speedups with quartiles from docs/results, the same bytes for the same figures."""
    found = {label: Results.load(ROOT / "docs" / "results" / name / "results.json") for label, name in MEASURED.items()}
    plt.rcParams.update({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(7.6, 3.3), layout="constrained")
    for row, (label, results) in enumerate(found.items()):
        places = [place + (row - 0.5) * _BAR for place in range(len(results.tasks))]
        speedups = [task.speedup for task in results.tasks]
        low, _, high = zip(*(task.speedup_quartiles for task in results.tasks), strict=True)
        axes.barh(places, speedups, _BAR * 0.9, color=COLOURS[row], label=label)
        # The ratio of all seconds may lie outside the quartiles of turns, so the lines are not drawn around it.
        middle = [(least + most) / 2 for least, most in zip(low, high, strict=True)]
        half = [(most - least) / 2 for least, most in zip(low, high, strict=True)]
        axes.errorbar(middle, places, xerr=half, fmt="none", ecolor="#333333", capsize=3)
        for place, speedup in zip(places, speedups, strict=True):
            axes.text(0.03, place, f"{speedup:.2f}x", va="center", color="white", fontweight="bold")
    axes.axvline(1.0, color="#333333", linewidth=1.2)
    axes.annotate("plain decoding", (1.0, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axes.set_yticks(range(3), [task.task for task in next(iter(found.values())).tasks])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, times plain decoding; lines are quartiles over turns")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 3.1)  # room for the legend
    axes.legend(loc="upper right", frameon=False)
    first = next(iter(found.values()))
    machine = f"{first.machine['cores']} cores of an {first.machine['cpu']}, float32, temperature 0, {first.date}"
    save_figure(figure, out, "SmolLM2-135M-Instruct with drafts, over plain decoding in the same run", machine)
    drawn = re.sub(r" *<dc:date>.*\n", "", out.read_text())
    out.write_text(re.sub(r"(<svg [^>]*>)", rf"\1\n{DARK}", drawn, count=1))


if __name__ == "__main__":
    typer.run(main)
