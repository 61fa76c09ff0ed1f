"""`outrider eval`, `compare`, `report`, `bench-drafters`: what a drafter is worth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from outrider.cli.common import counting, show_lines, show_paths
from outrider.evaluation.config import CompareConfig, DraftCostConfig, EvalConfig, ReportConfig
from outrider.evaluation.verdict import comparison_verdict
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.evaluation.results import Results


def evaluate(config: EvalConfig) -> None:
    """Decode tasks with and without a drafter: speedup, accepted length, same output."""
    from outrider.evaluation.verbs import run_eval
    from outrider.training.parallel import join

    with join(config.machine.device) as ranks:
        console = Terminal(quiet=not ranks.main)
        with counting(console, "eval") as on_progress:
            done = run_eval(config, ranks, say=partial(show_lines, console), on_progress=on_progress)
        if ranks.main:
            report(done.results, config.out, console, verdict=done.verdict)


def report(results: Results, out: Path, console: Console, verdict: Sequence[str]) -> None:
    """Write the files, print the table, where the plots are, and the verdict.

    Raises:
        ValueError: greedy output differed from plain decoding and no lossy rule was asked for: a bug worth reporting.
    """
    from outrider.evaluation.figures import table, write_report

    paths = write_report(results, out)
    console.print(table(results))
    show_paths(console, *paths)
    wrong = [t.task for t in results.tasks if t.greedy_mismatches]
    if wrong and not results.lossy:
        raise ValueError(f"output differs from plain decoding on {', '.join(wrong)}; this is a bug, please report it.")
    show_lines(console, *verdict)


def compare(config: CompareConfig) -> None:
    """Compare results of eval; those of one name are seeds of one drafter."""
    from outrider.evaluation.comparison import compare_directories, notes, speedups_of, terminal, write_comparison
    from outrider.evaluation.draft_cost import cost_table

    console = Terminal()
    comparison = compare_directories(config)
    for view in terminal(comparison):
        _print_whole(console, view)
    show_lines(console, *notes(comparison))
    if comparison.draft_cost is not None:
        _print_whole(console, cost_table(comparison.draft_cost))
    if config.out is not None:
        show_paths(console, *write_comparison(comparison, config.out))
    show_lines(console, *comparison_verdict(speedups_of(comparison)))


def _print_whole(console: Console, view: Table) -> None:
    """A terminal that is narrower wraps; nothing is cut off."""
    needed = Measurement.get(console, console.options.update(max_width=1000), view).maximum
    console.width = max(console.width, needed)
    console.print(view)


def report_page(config: ReportConfig) -> None:
    """Write one HTML page of what was measured: verdicts, pictures, traces, settings."""
    write_page(config.places, config.out, config.title, console=Terminal())


def write_page(places: Sequence[Path], out: Path, title: str, *, console: Console) -> None:
    """Write the report of what is at these places, and say where a browser finds it.

    Raises:
        ValueError: see `find_sources` and `render`.
    """
    from outrider.evaluation.html_report import find_sources, render
    from outrider.utils.files import check_outputs, write_atomically

    check_outputs(files=[out])
    sources = find_sources(places)
    page = render(sources, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    count, size = len(sources), len(page.encode())
    show_lines(
        console,
        f"report of {count} file{'s' * (count > 1)}, {size / 1e3:.0f} kB; open it in a browser:",
        f"  {out.resolve().as_uri()}",
    )


def bench_drafters(config: DraftCostConfig) -> None:
    """Time drafts by their length, drafters taking turns."""
    from outrider.evaluation.draft_cost import cost_table
    from outrider.evaluation.verbs import run_draft_costs

    console = Terminal()
    with counting(console, "bench-drafters") as on_progress:
        costs, paths = run_draft_costs(config, on_progress)
    console.print(cost_table(costs))
    show_paths(console, *paths)
