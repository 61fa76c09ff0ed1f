"""outrider calibrate --target T --drafter D --tasks FILES_OR_NAMES ...

What is measured depends on how the drafter's drafts are judged before they are verified:

    block drafters (dflash, dspark, dflash2)   confidences -> temperatures and offsets     (evaluation/calibrate.py)
    heads (medusa, hydra)                      accuracy of candidates -> shapes of trees   (evaluation/candidates.py)

The checkpoint tells which, before the target is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.drafters import require_directory
from outrider.cli.options import counting, show_paths, split_names
from outrider.cli.runtime import load, set_up
from outrider.drafters.catalogue import METHODS
from outrider.drafters.dflash import DFlash
from outrider.drafters.heads import HeadsModule, ServedHeads
from outrider.drafters.packed import PackedDrafter
from outrider.evaluation.calibrate import Calibrated, Calibration, calibrate, collect_tasks, quality
from outrider.evaluation.candidates import Candidates, expected_lengths, measure_candidates
from outrider.evaluation.plots import plot_reliability, plot_sweep
from outrider.evaluation.rounds_file import load_rounds, save_rounds
from outrider.evaluation.run import EvaluationConfig
from outrider.evaluation.sweep import SweepPoint
from outrider.evaluation.sweep import sweep as sweep_thresholds
from outrider.formats import Checkpoint, add_metadata, load_drafter, versions
from outrider.formats.files import weight_files
from outrider.formats.sglang_schedule import CALIBRATION_FILE, write_confidence_sts
from outrider.sampling import SamplingParams
from outrider.scheduling.sts import fit_sts
from outrider.target.load import count_layers


def calibrate_command(
    target: Annotated[str, typer.Option(help="model id or directory")],
    drafter: Annotated[str, typer.Option(help="drafter directory; what is found is stored in it")],
    tasks: Annotated[str, typer.Option(help="comma-separated JSONL files or shipped sets the drafter never saw")],
    fit_tasks: Annotated[
        str | None, typer.Option(help="fit on these and measure on --tasks; by default every other conversation fits")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for reliability diagrams")] = None,
    rounds: Annotated[
        Path | None, typer.Option(help="NPZ file of collected rounds: used if it exists, else written")
    ] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="PNG file: tokens per step and acceptance rate per threshold; JSON beside it")
    ] = None,
    export_sglang: Annotated[Path | None, typer.Option(help="directory for SGLang's calibration file")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="prompts per task; all by default")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="of decoding: calibrate for how you will serve; of heads, a guide only above 0"),
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="ask the chat template for it")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Make a drafter's confidences mean what they say; of medusa and hydra, measure what their candidates are worth."""
    set_up(threads)
    console = Console()
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    config = EvaluationConfig(max_samples, max_new_tokens, params, thinking=thinking)
    directory = require_directory(drafter, target)
    checkpoint = load_drafter(directory, num_target_layers=count_layers(target))
    _check(checkpoint, directory, about_confidences=any((fit_tasks, plot, rounds, sweep, export_sglang)))
    measured, fitted = split_names(tasks), split_names(fit_tasks) if fit_tasks else []
    if both := sorted(set(measured) & set(fitted)):
        raise ValueError(f"{', '.join(both)}: in --tasks and --fit-tasks; measure on what was not fitted on.")
    names = list(dict.fromkeys((*fitted, *measured)))
    about = {"target": target, "drafter": _digest(directory), "settings": asdict(config), "tasks": names}
    if rounds is not None and rounds.exists():
        collected = load_rounds(rounds, about)
    else:
        loaded = load(target, device)
        packed = checkpoint.packed(loaded, calibrated=False)
        if isinstance(packed, ServedHeads):
            with counting(console, "calibrate") as on_progress:
                candidates = measure_candidates(loaded, packed, names, config, versions(), on_progress)
            add_metadata(directory, candidates=candidates.model_dump(mode="json"))
            console.print(candidates_table(candidates))
            console.print(f"accuracies stored in {directory}", highlight=False, markup=False, soft_wrap=True)
            return
        assert isinstance(packed, PackedDrafter)
        with counting(console, "calibrate") as on_progress:
            collected = collect_tasks(loaded, packed, names, config, on_progress)
        if rounds is not None:
            save_rounds(rounds, collected, about)
    found = calibrate(collected, measured, fitted, config, versions())
    add_metadata(directory, calibration=found.calibration.model_dump(mode="json"))
    console.print(quality_table(found.calibration))
    console.print(f"temperatures stored in {directory}", highlight=False, markup=False, soft_wrap=True)
    written = []
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_reliability(found.held_out, found.scaling, plot)
        written.append(plot)
    if sweep is not None:
        points = sweep_thresholds(found.measured, found.scaling, replay=temperature == 0.0)
        plot_sweep(points, sweep)
        sweep.with_suffix(".json").write_text(json.dumps([point.model_dump() for point in points], indent=2) + "\n")
        console.print(sweep_table(points))
        written += [sweep, sweep.with_suffix(".json")]
    if export_sglang is not None:
        written.append(_export(found, export_sglang))
        if any(found.scaling.offsets):
            console.print("SGLang has no offsets: temperatures were fitted alone for its file", soft_wrap=True)
    show_paths(console, *written)


def _check(checkpoint: Checkpoint, directory: Path, about_confidences: bool) -> None:
    """Whether there is anything to measure of this drafter, and options that ask for nothing else."""
    heads = isinstance(checkpoint.drafter, HeadsModule)
    if heads and about_confidences:
        raise ValueError(
            f"{directory} has heads without confidences: --fit-tasks, --plot, --rounds, --sweep and "
            "--export-sglang have nothing to fit or show. Leave them out."
        )
    if not heads and not isinstance(checkpoint.drafter, DFlash):
        raise ValueError(
            f"{directory}: the drafts of {checkpoint.drafter.algorithm} cannot be calibrated, only those of block "
            f"drafters ({_methods(DFlash)}) and of heads ({_methods(HeadsModule)}). Serve it with a fixed draft length."
        )


def _methods(kind: type) -> str:
    return ", ".join(
        method.name for method in METHODS if isinstance(method.module, type) and issubclass(method.module, kind)
    )


def _digest(directory: Path) -> str:
    """Of the weights, in one file or several."""
    digest = hashlib.sha256()
    for path in weight_files(directory):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _export(found: Calibrated, directory: Path) -> Path:
    """SGLang's calibration file, from temperatures fitted without offsets."""
    path, alone = directory / CALIBRATION_FILE, fit_sts(found.fit, offsets=False)
    write_confidence_sts(
        path,
        alone.temperatures,
        alone.offsets,
        ",".join(found.calibration.fitted_on),
        found.calibration.fit_rounds,
        found.calibration.before.ece,
        quality(found.held_out, alone).ece,
    )
    return path


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """A row per task and threshold."""
    view = Table(title="Verify while c_k >= threshold")
    for heading in ("task", "threshold", "tokens per step", "verified per step", "acceptance rate"):
        view.add_column(heading, justify="left" if heading == "task" else "right", no_wrap=True)
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
    view = Table(title=f"Survival to position k: fitted on {fit} rounds, measured on {measured} others")
    for heading in ("k", "T", "offset", "ECE", "chance", "Brier", "ROC-AUC"):
        view.add_column(heading, justify="right", no_wrap=True)
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
        offset = "-" if calibration.offsets is None else f"{calibration.offsets[i]:+.2f}"
        view.add_row(str(i + 1), f"{t:.2f}", offset, cells[0], f"{after.ece_noise[i]:.3f}", *cells[1:])
    return view


def candidates_table(candidates: Candidates) -> Table:
    """Expected accepted drafts by tree size: of the tree these accuracies give, and of the one used without them."""
    first, temperature = ", ".join(f"{row[0]:.2f}" for row in candidates.accuracy), candidates.sampling["temperature"]
    drawn = f" and the likeliest tokens were tried; at temperature {temperature:g} they are drawn, so a guide only"
    view = Table(
        title=f"Accuracy of the likeliest candidate by head: {first} ({candidates.positions} positions). "
        f"Expected accepted drafts, if heads erred independently{drawn if temperature > 0 else ''}"
    )
    for heading in ("nodes", "chosen by these accuracies", "assumed shape"):
        view.add_column(heading, justify="right", no_wrap=True)
    for nodes, mine, default in expected_lengths(candidates.accuracy):
        view.add_row(str(nodes), f"{mine:.3f}", f"{default:.3f}")
    return view
