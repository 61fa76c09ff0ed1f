"""`outrider calibrate` (confidences, or accuracies of candidates) and `outrider profile` (the cost of a step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outrider.cli.common import counting, show_lines, show_paths
from outrider.evaluation.config import CalibrateConfig, MachineProfileConfig
from outrider.evaluation.verdict import cost_verdict
from outrider.utils.terminal import Terminal, terminal_table

if TYPE_CHECKING:
    from outrider.decoding.cost import Cell, Curve, Profile
    from outrider.evaluation.calibration.candidates import Candidates
    from outrider.evaluation.calibration.fit import Calibration, SweepPoint


def calibrate(config: CalibrateConfig) -> None:
    """Fit confidences to acceptance; of medusa and hydra, measure accuracies."""
    from outrider.evaluation.calibration.calibrate import run_calibration

    console = Terminal()
    with counting(console, "calibrate") as on_progress:
        done = run_calibration(config, on_progress)
    if done.candidates is not None:
        console.print(candidates_table(done.candidates))
    if done.calibration is not None:
        console.print(quality_table(done.calibration))
        console.print(errors_table(done.calibration))
    show_lines(console, done.outcome)
    if done.points:
        console.print(sweep_table(done.points))
    show_lines(console, *done.notes)
    show_paths(console, *done.paths)


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """A row per task and threshold."""
    headings = ("task", "threshold", "tokens per step", "verified", "accepted / verified")
    view = terminal_table(headings, text=("task",), title="Verify while c_k >= threshold")
    for point in points:
        rate = "-" if point.acceptance_rate is None else f"{point.acceptance_rate:.3f}"
        numbers = (f"{point.threshold:.2f}", f"{point.tokens_per_step:.3f}", f"{point.verified_per_step:.2f}", rate)
        view.add_row(point.task, *numbers)
    return view


def quality_table(calibration: Calibration) -> Table:
    """One row per draft position: temperature, offset, ECE, Brier and ROC-AUC of the survival, before -> after.

    `chance` is the ECE that so few rounds would show of perfect confidences. Fits a terminal of 80 columns.
    """
    fit, measured = calibration.fit_rounds, calibration.measured_rounds
    title = f"Survival to position k: fitted on {fit} rounds, measured on {measured} others"
    view = terminal_table(("k", "T", "offset", "ECE", "chance", "Brier", "ROC-AUC"), title=title)
    before, after = calibration.before, calibration.after
    for i, t in enumerate(calibration.temperatures):
        cells = [
            "→".join("-" if value is None else f"{value:.3f}" for value in pair)
            for pair in (
                (before.ece[i], after.ece[i]),
                (before.brier[i], after.brier[i]),
                (before.roc_auc[i], after.roc_auc[i]),
            )
        ]
        offset = f"{calibration.offsets[i]:+.2f}"
        view.add_row(str(i + 1), f"{t:.2f}", offset, cells[0], f"{after.ece_noise[i]:.3f}", *cells[1:])
    return view


_SCALINGS = {"none": "none", "sts": "STS", "temperatures": "T", "temperatures and offsets": "T, b"}


def errors_table(calibration: Calibration) -> Table:
    """ECE by position without scaling, with STS, and by likelihood without and with offsets: of every task, and all."""
    headings = ("task", "scaling", "mean", *(str(k + 1) for k in range(len(calibration.temperatures))))
    title = "ECE of the survival, %. STS: DSpark's; T: likeliest T; T, b: and offsets; chance: if perfect"
    view = terminal_table(headings, text=("task", "scaling"), title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for found in calibration.errors:
        name = found.task or "all"
        rows = [(_SCALINGS[found.scaling], found.ece)]
        if found.scaling == "temperatures and offsets":
            rows.append(("chance", found.ece_noise))
        for kind, values in rows:
            known = [value for value in values if value is not None]
            mean = f"{100 * sum(known) / len(known):.1f}" if known else "-"
            cells = ("-" if value is None else f"{100 * value:.1f}" for value in values)
            view.add_row(name if kind == "none" else "", kind, mean, *cells)
    return view


def candidates_table(candidates: Candidates) -> Table:
    """Expected accepted drafts by tree size: of the tree these accuracies give, and of the one used without them."""
    from outrider.evaluation.calibration.candidates import expected_lengths

    first, temperature = ", ".join(f"{row[0]:.2f}" for row in candidates.accuracy), candidates.sampling["temperature"]
    drawn = f" and the likeliest tokens were tried; at temperature {temperature:g} they are drawn, so a guide only"
    lengths = expected_lengths(candidates.accuracy)
    return terminal_table(
        ("nodes", "chosen by these accuracies", "assumed shape"),
        [(str(nodes), f"{mine:.3f}", f"{default:.3f}") for nodes, mine, default in lengths],
        title=f"Accuracy of the likeliest candidate by head: {first} ({candidates.positions} positions). "
        f"Expected accepted drafts, if heads erred independently{drawn if temperature > 0 else ''}",
    )


_SHOWN = {*range(1, 9), *range(10, 33, 2), 48, 64, 96, 128, 192, 256, 512, 1024, 2048}  # token counts of the tables


def profile(config: MachineProfileConfig) -> None:
    """Measure the cost of a step on this machine, for load-aware policies."""
    from outrider.evaluation.verbs import run_profile

    console = Terminal()
    with counting(console, "profile") as on_progress:
        done = run_profile(config, on_progress)
    if config.tables:
        print_tables(done.profile, done.context, console)
    show_lines(console, f"  {config.out} ({done.profile.repeats} repeats)")
    show_paths(console, *done.paths)
    show_lines(console, *summary(done.profile, done.context, done.rows))


def summary(profile: Profile, context: int, rows: int) -> list[str]:
    """Five lines (plain step, drafts, their verification, break-even, fit of the additive form) and the verdict."""
    import numpy as np

    from outrider.decoding.profile import break_even

    counts = (profile.other.requests[0], profile.other.requests[-1])
    forwards = {n: [float(profile.table.seconds(np.array([n * k]), n, context)[0]) for k in (1, rows)] for n in counts}
    drafts, fit, even = rows - 1, profile.fit, break_even(profile, context, rows)

    def by_requests(text: Callable[[int], str]) -> str:
        return ", ".join(f"{text(n)} with {n} request{'s' * (n > 1)}" for n in dict.fromkeys(counts))

    def step(n: int) -> str:
        seconds = forwards[n][0] + profile.other.at(n)
        return f"{1e3 * seconds:.1f} ms ({n / seconds:.0f} tokens/s)"

    drafter = by_requests(lambda n: f"{1e3 * profile.draft_seconds(n):.1f} ms")
    return [
        f"plain step after {context} tokens: {by_requests(step)}",
        f"{drafts} drafts: {drafter}" if profile.draft else f"{drafts} drafts: no drafter was measured",
        f"verifying them: a forward is {by_requests(lambda n: f'{forwards[n][1] / forwards[n][0]:.2f}x a plain one')}",
        f"accepted length at which they pay: {', '.join(f'{tau:.2f} with {n}' for n, tau in even.items())} requests",
        f"additive form: off by {100 * fit.spread:.1f} % (rms), {100 * max(map(abs, fit.residuals)):.1f} % at worst",
        *cost_verdict(even, (profile.gamma or drafts) + 1),
    ]


def print_tables(profile: Profile, context: int, console: Console) -> None:
    """Forwards at one context, what a step costs besides, and how far the additive form is off."""
    title = f"one forward after {context} cached tokens each"
    cells: dict[str, Callable[[Cell, float], str]] = {
        f"{title}: milliseconds": lambda cell, _: f"{1e3 * cell.median:.1f}",
        f"{title}: forwards per second (SPS)": lambda cell, _: f"{1 / cell.median:.1f}",
        f"additive form against measured after {context} cached tokens: per cent": lambda _, off: f"{100 * off:+.1f}",
    }
    for heading, text in cells.items():
        console.print(grid_table(profile, context, heading, text=text))
    console.print(requests_table(profile))
    fit = profile.fit
    show_lines(
        console,
        f"additive form: {1e3 * fit.bias:.2f} ms + {1e3 * fit.alpha:.3f} per request + {1e3 * fit.theta:.3f} per token "
        f"+ {1e6 * fit.sigma:.3f} per 1000 cached tokens",
    )


def grid_table(profile: Profile, context: int, title: str, text: Callable[[Cell, float], str]) -> Table:
    """Tokens down, requests across; `text` of a cell and its residual."""
    requests = profile.table.requests
    found = {
        (cell.tokens, cell.requests): text(cell, residual)
        for cell, residual in zip(profile.cells, profile.fit.residuals, strict=True)
        if cell.context == context
    }
    shown = sorted({tokens for tokens, _ in found} & _SHOWN)
    rows = [(str(tokens), *(found.get((tokens, count), "") for count in requests)) for tokens in shown]
    return terminal_table(("tokens", *(f"{count} req." for count in requests)), rows, title=title)


def requests_table(profile: Profile) -> Table:
    """What a step costs besides the forward: medians with quartiles, in milliseconds."""
    curves: dict[str, Curve | None] = {"draft": profile.draft, "drafter reads": profile.extend, "other": profile.other}
    measured = {name: curve for name, curve in curves.items() if curve is not None}
    view = terminal_table(("requests", *measured), title="besides the target: milliseconds, median (quartiles)")
    for i, count in enumerate(profile.other.requests):
        quartiles = [curve.seconds[i] for curve in measured.values()]
        view.add_row(str(count), *(f"{1e3 * m:.1f} ({1e3 * low:.1f}-{1e3 * high:.1f})" for low, m, high in quartiles))
    return view
