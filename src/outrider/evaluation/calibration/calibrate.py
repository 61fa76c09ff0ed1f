"""`outrider calibrate`: collect rounds, fit confidences to acceptance, store the fit in the drafter's directory.

Drafters of heads without confidences have their candidates' accuracies measured instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from outrider.api.drafter import require_directory
from outrider.backends.sglang import CALIBRATION_FILE, write_confidence_sts
from outrider.checkpoints.checkpoint import CALIBRATION, SAMPLED_CALIBRATION, Checkpoint, add_metadata, load_checkpoint
from outrider.checkpoints.registry import methods
from outrider.data.sources import TaskSettings, find_prompts, prompts_label
from outrider.evaluation.calibration.candidates import Candidates, measure_candidates
from outrider.evaluation.calibration.collect import collect_tasks, load_rounds, save_rounds
from outrider.evaluation.calibration.fit import (
    Calibration,
    CalibrationResult,
    Rounds,
    Scaling,
    SweepPoint,
    calibrate,
    quality,
    refusal,
    sweep,
)
from outrider.evaluation.config import CalibrateConfig
from outrider.evaluation.figures import plot_reliability, plot_sweep
from outrider.evaluation.plots import short_name
from outrider.target.model import count_layers, load_target
from outrider.utils.files import check_outputs, weight_files
from outrider.utils.measure import default_dtype, today, versions


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found and where it is kept.

    Attributes:
        calibration: of confidences; None if `candidates` were measured.
        outcome: what is stored where, or why nothing is.
        points: figures by threshold, if a sweep was asked for.
        notes: what else there is to say; `paths`: files that were written.
    """

    outcome: str
    calibration: Calibration | None = None
    candidates: Candidates | None = None
    points: list[SweepPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)


def run_calibration(
    config: CalibrateConfig, on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> Calibrated:
    """Calibrate the drafter in a directory, and store what is found there.

    Raises:
        ValueError: the drafter cannot be calibrated, or tasks are measured on that it is fitted on.
    """
    prompts = config.prompts
    settings = TaskSettings(
        prompts.max_samples, config.max_new_tokens, config.sampling.params(), thinking=prompts.thinking
    )
    check_outputs(config.export_sglang, files=[config.plot, config.sweep, config.rounds])
    directory = require_directory(config.drafter, config.target)
    check_outputs(directory)
    checkpoint = load_checkpoint(directory, num_target_layers=count_layers(config.target))
    _check_calibratable(checkpoint, directory, config.about_confidences)
    fitted = config.fit_tasks or ()
    _check_apart(config.tasks, fitted)
    labels = {task: prompts_label(task) for task in dict.fromkeys((*fitted, *config.tasks))}
    about = {
        "target": config.target,
        "drafter": weights_digest(directory),
        "settings": asdict(settings),
        "tasks": list(labels.values()),
    }
    if config.rounds is not None and config.rounds.exists():
        rounds = load_rounds(config.rounds, about)
    else:
        target = load_target(config.target, default_dtype(config.machine.device), config.machine.device)
        drafter, names = checkpoint.weights.serve(target), list(labels)
        if drafter.calibrates() == "candidates":
            candidates = measure_candidates(
                target, drafter, names, settings=settings, versions=versions(), on_progress=on_progress
            )
            add_metadata(directory, candidates=candidates.model_dump(mode="json"))
            return Calibrated(f"accuracies stored in {directory}", candidates=candidates)
        rounds = collect_tasks(target, drafter, names, settings=settings, on_progress=on_progress)
        if config.rounds is not None:
            save_rounds(config.rounds, rounds, about)
    result = calibrate(
        rounds,
        [labels[task] for task in config.tasks],
        [labels[task] for task in fitted],
        settings=settings,
        versions=versions(),
        method=config.fit,
    )
    outcome = _store(result, checkpoint, directory, sampled=settings.params.temperature > 0)
    return _written(config, result, outcome)


def _check_calibratable(checkpoint: Checkpoint, directory: Path, about_confidences: bool) -> None:
    """Refuse drafters of which nothing can be measured, and options that ask for what they do not have."""
    measured = checkpoint.weights.module.drafter().calibrates()
    if measured == "candidates" and about_confidences:
        raise ValueError(
            f"{directory} has heads without confidences: --fit, --fit-tasks, --plot, --rounds, --sweep and "
            "--export-sglang have nothing to fit or show. Leave them out."
        )
    if measured is None:
        raise ValueError(
            f"{directory}: the drafts of {checkpoint.algorithm} cannot be calibrated, only those with "
            f"confidences ({_methods('confidences')}) and with candidates ({_methods('candidates')}). "
            "Serve it with a fixed draft length."
        )


def _methods(measured: str) -> str:
    return ", ".join(method.name for method in methods() if method.module.drafter().calibrates() == measured)


def _check_apart(tasks: Sequence[str], fitted: Sequence[str]) -> None:
    """Refuse to measure on what was fitted on; two names may stand for one file."""

    def where(task: str) -> Path | str:
        known = find_prompts(task)
        return task if known is None else known.path.resolve()

    taken = {where(task) for task in fitted}
    if both := [task for task in tasks if where(task) in taken]:
        raise ValueError(f"{', '.join(both)}: in --tasks and --fit-tasks; measure on what was not fitted on.")


def weights_digest(directory: Path) -> str:
    """SHA-256 of a drafter's weights, in one file or several."""
    digest = hashlib.sha256()
    for path in weight_files(directory):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _store(result: CalibrationResult, checkpoint: Checkpoint, directory: Path, sampled: bool) -> str:
    """Store the fit, if it is one, and say what is stored."""
    section = SAMPLED_CALIBRATION if sampled else CALIBRATION
    if result.storable:
        add_metadata(directory, **{section: result.calibration.model_dump(mode="json")})
        what = "temperatures" if result.refused is None else f"estimator without temperatures ({result.refused})"
        return f"{what}{' of sampled requests' if sampled else ''} stored in {directory}"
    if sampled and CALIBRATION in checkpoint.metadata:
        # Without a section of their own, sampled requests would have the fit to greedy text.
        add_metadata(directory, **{section: result.unfitted.model_dump(mode="json")})
        return f"sampled requests are left without a fit ({result.refused}), and not with the greedy one: {directory}"
    return f"not stored: {result.refused}; {directory} is unchanged. More prompts may help."


def _written(config: CalibrateConfig, result: CalibrationResult, outcome: str) -> Calibrated:
    """Write the pictures and files that are asked for."""
    temperature, paths, notes, points = config.sampling.temperature, list[Path](), list[str](), list[SweepPoint]()
    drafter = f"drafter {short_name(config.drafter)}"
    facts = (short_name(config.target), drafter, f"temperature {temperature:g}", today())
    if config.plot is not None:
        config.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_reliability(result.calibration, config.plot, facts)
        paths.append(config.plot)
    if config.sweep is not None:
        points = sweep(result.measured, result.serving, replay=temperature == 0.0)
        plot_sweep(points, config.sweep, facts)
        figures = config.sweep.with_suffix(".json")
        figures.write_text(json.dumps([point.model_dump() for point in points], indent=2) + "\n")
        paths += [config.sweep, figures]
    if config.export_sglang is not None:
        if config.fit != "sts":
            notes.append("SGLang has no offsets: temperatures were fitted alone for its file")
        if (refused := refusal(result.held_out, result.alone)) is None:
            paths.append(_export(result, result.alone, config.export_sglang))
        else:
            notes.append(f"not exported: {refused}")
    return Calibrated(outcome, result.calibration, points=points, notes=notes, paths=paths)


def _export(result: CalibrationResult, alone: Scaling, directory: Path) -> Path:
    """SGLang's calibration file, from temperatures that were fitted without offsets."""
    path = directory / CALIBRATION_FILE
    write_confidence_sts(
        path,
        alone.temperatures,
        alone.offsets,
        dataset=",".join(result.calibration.fitted_on),
        num_samples=result.calibration.fit_rounds,
        ece_before=result.calibration.before.ece,
        ece_after=quality(Rounds.joined(result.held_out), alone).ece,
    )
    return path
