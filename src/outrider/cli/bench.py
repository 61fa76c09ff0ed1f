"""`outrider bench` (load on an engine), `bench-table` (several engines) and `simulate` (a predicted load)."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from outrider.cli.common import counting, show_lines, show_paths
from outrider.evaluation.loadtest.config import BenchConfig, EnginesTableConfig, SimulateConfig
from outrider.evaluation.verdict import load_verdict
from outrider.utils.terminal import Terminal, terminal_table

if TYPE_CHECKING:
    from outrider.evaluation.loadtest.bench import Bench
    from outrider.evaluation.loadtest.metrics import Frontier, Gain, PointSummary
    from outrider.evaluation.loadtest.simulate import PointError
    from outrider.evaluation.loadtest.traces import Traces


def bench(config: BenchConfig) -> None:
    """Put load on an engine, ours or another: throughput against user speed."""
    from outrider.evaluation.loadtest.bench import run_bench
    from outrider.training.parallel import join

    with join(config.machine.device) as ranks:
        console = Terminal(quiet=not ranks.main)
        with counting(console, "bench") as on_progress:
            measured = run_bench(config, ranks, say=partial(show_lines, console), on_progress=on_progress)
        if ranks.main:
            report(measured, config.out, console)


def report(measured: Bench, out: Path, console: Console) -> None:
    """Write frontier.json and the plots, print tables and verdicts.

    Raises:
        ValueError: output differs from plain decoding's although it must not.
    """
    from outrider.evaluation.loadtest.plots import write_plots

    frontier = measured.frontier
    path = frontier.save(out)
    show_points(frontier, console)
    show_paths(console, path, *write_plots(frontier, out))
    if wrong := measured.differing:
        raise ValueError(
            f"output differs from plain decoding with {', '.join(wrong)}; this is a bug, please report it."
        )
    show_gains(frontier, console)
    show_lines(console, *_verdict(frontier))


def show_gains(frontier: Frontier, console: Console) -> None:
    """Gains of the highlighted variants, at six values at most; frontier.json has all."""
    from outrider.evaluation.loadtest.metrics import INTERVAL
    from outrider.evaluation.loadtest.plots import highlighted

    titles = {
        "throughput": ("throughput over that of {}", "tokens/s promised to a user"),
        "speed": ("tokens/s of the median user over those with {}", "tokens/s of all users"),
    }
    for figure, (title, given) in titles.items():
        found = {(gain.variant, gain.at): gain for gain in frontier.gains if gain.figure == figure}
        if not found:
            return
        values = sorted({at for _, at in found})
        values = [values[place * (len(values) - 1) // 5] for place in range(6)] if len(values) > 6 else values
        against = next(iter(found.values())).against
        rows = [
            (variant, *(_gain_cell(found[variant, at]) for at in values))
            for variant in reversed(highlighted(frontier))
            if (variant, values[0]) in found
        ]
        if any(any(cells) for _, *cells in rows):
            note = f"by {given} (below: {100 * INTERVAL:.0f} % interval; blank: outside of what was measured)"
            show_lines(console, f"{title.format(against)}, {note}")
            headings = ("variant", *(f"{at:.3g}" for at in values))
            console.print(terminal_table(headings, rows, text=("variant",), box=None, padding=(0, 1, 0, 0)))
        else:
            show_lines(console, f"{title.format(against)}: the curves have no {given} in common; measure more loads")


def _gain_cell(gain: Gain) -> str:
    if gain.ratio is None:
        return ""
    return f"{gain.ratio:.2f}" if gain.low is None else f"{gain.ratio:.2f}\n{gain.low:.2f}-{gain.high:.2f}"


def show_points(frontier: Frontier, console: Console) -> None:
    from outrider.evaluation.loadtest.metrics import histogram_rows, table_rows

    headings, *rows = table_rows(frontier)
    ours = "draft in % of the time" if "draft" in headings else "gap between outputs in ms"
    title = f"medians; {frontier.arrivals} arrivals; TTFT in ms, {ours}, other: mismatches"
    table = terminal_table(headings, rows, text=("variant",), title=title, box=None, padding=(0, 1, 0, 0))
    console.print(table)
    if histogram := histogram_rows(frontier):
        headings, *rows = histogram
        show_lines(console, "rounds by accepted drafts, in % (below: how many were accepted)")
        console.print(terminal_table(headings, rows, text=("variant",), box=None, padding=(0, 1, 0, 0)))
    for level in frontier.levels:
        console.print(
            f"load {level.level:g}: best adaptive {level.adaptive} is {level.ratio:.3f}x best static {level.static}",
            highlight=False,
        )
    for verdict in frontier.overall:
        kind = "adaptive" if verdict.adaptive else "static"
        console.print(
            f"{verdict.variant} ({kind}): {verdict.mean_ratio:.2f}x no speculation (mean of loads), "
            f"{verdict.worst_ratio:.2f}x at worst",
            highlight=False,
        )


def _verdict(frontier: Frontier) -> list[str]:
    """What the measured ratios say, and the next command where there is one drafter."""
    from outrider.backends.local import is_adaptive
    from outrider.evaluation.loadtest.metrics import speedups

    ratios, settings = speedups(frontier), frontier.settings
    if not ratios:
        return ["No verdict: add `none` to --variants, and loads at which it meets the service level."]
    adapt = ""
    drafters = list(settings.get("drafters", {}).values())
    if len(drafters) == 1 and not any(map(is_adaptive, ratios)):
        models = shlex.join(["--target", settings["target"], "--drafter", drafters[0]["choice"]])
        adapt = (
            f"outrider profile {models} --out profile.json, then this command with --profile profile.json and another"
        )
        adapt += " --out: variants that choose by the load"
    return load_verdict(ratios, "plain" if frontier.arrivals == "closed" else "plain's goodput", adapt=adapt)


def bench_table(config: EnginesTableConfig) -> None:
    """Compare engines that bench measured, each with itself without speculation."""
    from outrider.evaluation.loadtest.bench import HEADINGS, side_by_side
    from outrider.utils.terminal import markdown_table

    rows, console = side_by_side(config.directories), Terminal()
    console.print(engines_table(rows))
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        lines = markdown_table(HEADINGS, rows, text=HEADINGS[:2])
        config.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        show_paths(console, config.out)


def engines_table(rows: list[tuple[str, ...]]) -> Table:
    """The rows of `side_by_side` for the terminal."""
    from outrider.evaluation.loadtest.bench import HEADINGS

    return terminal_table(HEADINGS, rows, text=HEADINGS[:2], box=None, padding=(0, 1, 0, 0))


def simulate(config: SimulateConfig) -> None:
    """Predict a load test from a profile and recorded drafts."""
    from outrider.evaluation.loadtest.plots import write_plots
    from outrider.evaluation.loadtest.predict import predict, record_traces

    console = Terminal()
    if config.recording is not None:
        with counting(console, "record") as on_progress:
            traces = record_traces(config, say=partial(show_lines, console), on_progress=on_progress)
        show_traces(traces, console)
        show_paths(console, config.recording)
        return
    with counting(console, "simulate") as on_progress:
        predicted = predict(config, on_progress)
    assert config.out is not None
    path = predicted.frontier.save(config.out)
    console.print(points_table(predicted.frontier.points))
    show_paths(console, path, *write_plots(predicted.frontier, config.out))
    if predicted.compared is not None:
        report_simulation(predicted.compared, config.out / "validation.json", console)


def show_traces(traces: Traces, console: Console) -> None:
    """How much was recorded, and how good the drafts are."""
    positions, matching = len(traces.accepted_N), int(traces.accepted_N.sum())
    mean = f"on average {matching / positions:.2f} drafts right"
    console.print(f"{len(traces.responses)} responses, {positions} positions, {mean}")


def points_table(points: list[PointSummary]) -> Table:
    """Throughput by variant and level."""
    levels = sorted({point.level for point in points})
    view = Table(title="simulated tokens per second")
    view.add_column("variant")
    for level in levels:
        view.add_column(f"{level:g}", justify="right", no_wrap=True)
    found = {(point.variant, point.level): f"{point.throughput:.1f}" for point in points}
    for variant in dict.fromkeys(point.variant for point in points):
        view.add_row(variant, *(found[variant, level] for level in levels))
    return view


def report_simulation(compared: list[PointError], path: Path, console: Console) -> None:
    """Print and write the error at every point; the worst is named."""
    from outrider.evaluation.loadtest.simulate import errors_of, validation_rows

    headings, *rows = validation_rows(compared)
    title = "tokens per second: simulated against measured"
    console.print(terminal_table(headings, rows, text=("variant",), title=title))
    show_lines(console, *errors_of(compared))
    worst = max(compared, key=lambda one: abs(one.error))
    content = {"points": [one.model_dump() for one in compared], "worst": worst.model_dump()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    show_paths(console, path)
