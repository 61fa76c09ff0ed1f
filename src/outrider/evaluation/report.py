"""An evaluation on disk and on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from outrider.evaluation.plots import plot_acceptance, plot_histogram
from outrider.evaluation.results import Results
from outrider.formats.files import write_atomically


def write_report(results: Results, out: Path) -> list[Path]:
    """Write results.json and the two plots to `out`; returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "results.json", out / "conditional_acceptance.png", out / "accepted_length.png"]
    write_atomically(paths[0], results.model_dump_json(indent=2) + "\n")
    plot_acceptance(results, paths[1])
    plot_histogram(results, paths[2])
    return paths


def table(results: Results) -> Table:
    """The figures people compare, one row per task."""
    view = Table(title=" - ".join(filter(None, ("Speculative against plain decoding, same run", results.lossy))))
    for heading in ("task", "tokens", "tau", "tok/s", "plain", "speedup", "quartiles", "identical"):
        view.add_column(heading, justify="left" if heading == "task" else "right", no_wrap=True)
    for task in results.tasks:
        low, _, high = task.speedup_quartiles
        if task.greedy_identical is None:
            same = "sampled"
        elif results.lossy:
            same = f"{task.turns - task.greedy_mismatches}/{task.turns} turns"
        elif task.greedy_mismatches:
            same = f"[red]{task.greedy_mismatches} differ[/red]"
        else:
            same = f"yes ({task.greedy_ties} ties)" if task.greedy_ties else "yes"
        view.add_row(
            task.task,
            str(task.tokens),
            f"{task.accepted_length:.2f}",
            f"{task.tokens_per_second:.1f}",
            f"{task.baseline_tokens_per_second:.1f}",
            f"{task.speedup:.2f}x",
            f"{low:.2f}-{high:.2f}",
            same,
        )
    return view
