"""outrider calibrate --target T --drafter D --tasks FILES_OR_NAMES ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.options import counting, require_drafter, split_names
from outrider.cli.runtime import load, set_up
from outrider.evaluation.calibrate import Calibration, calibrate
from outrider.evaluation.plots import plot_reliability
from outrider.evaluation.run import EvaluationConfig
from outrider.formats import add_metadata, load_drafter, versions
from outrider.sampling import SamplingParams


def calibrate_command(
    target: Annotated[str, typer.Option(help="model id or directory")],
    drafter: Annotated[str, typer.Option(help="drafter directory; the temperatures are stored in it")],
    tasks: Annotated[str, typer.Option(help="comma-separated JSONL files or shipped sets the drafter never saw")],
    fit_tasks: Annotated[
        str | None, typer.Option(help="fit on these and measure on --tasks; by default every other conversation fits")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for reliability diagrams")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="prompts per task; all by default")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="of decoding: calibrate for how you will serve")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Make a drafter's confidences mean what they say: a temperature per position, fitted on real decode rounds."""
    set_up(threads)
    console = Console()
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    loaded = load(target, device)
    directory = require_drafter(drafter, target)
    packed = load_drafter(directory).packed(loaded, calibrated=False)
    config = EvaluationConfig(max_samples, max_new_tokens, params)
    with counting(console, "calibrate") as on_progress:
        calibration, held_out = calibrate(
            loaded,
            packed,
            split_names(tasks),
            split_names(fit_tasks) if fit_tasks else [],
            config,
            versions(),
            on_progress,
        )
    add_metadata(directory, calibration=calibration.model_dump(mode="json"))
    console.print(quality_table(calibration))
    console.print(f"temperatures stored in {directory}", highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_reliability(held_out, calibration.temperatures, plot)
        console.print(f"  {plot}", highlight=False, markup=False, soft_wrap=True)


def quality_table(calibration: Calibration) -> Table:
    """One row per draft position: temperature, ECE, Brier and ROC-AUC of the survival, before -> after.

    `by chance` is the ECE that so few rounds would show of perfect confidences.
    """
    fit, measured = calibration.fit_rounds, calibration.measured_rounds
    view = Table(title=f"Survival to position k: fitted on {fit} rounds, measured on {measured} others")
    for heading in ("k", "temperature", "ECE", "by chance", "Brier", "ROC-AUC"):
        view.add_column(heading, justify="right", no_wrap=True)
    before, after = calibration.before, calibration.after
    for i, t in enumerate(calibration.temperatures):
        cells = [
            " -> ".join("-" if value is None else f"{value:.3f}" for value in pair)
            for pair in (
                (before.ece[i], after.ece[i]),
                (before.brier[i], after.brier[i]),
                (before.roc_auc[i], after.roc_auc[i]),
            )
        ]
        view.add_row(str(i + 1), f"{t:.2f}", cells[0], f"{after.ece_noise[i]:.3f}", *cells[1:])
    return view
