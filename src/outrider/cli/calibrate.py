"""`outrider calibrate` (confidences, or accuracies of candidates) and `outrider profile` (the cost of a step)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outrider.api.drafter import AUTO, choose_drafter, require_directory
from outrider.cli import options as opt
from outrider.cli.common import (
    check_outputs,
    choose_tree,
    counting,
    load,
    show_lines,
    show_paths,
    split_names,
    split_numbers,
)
from outrider.cli.options import FILES, MODELS, PROMPTS, SAMPLING, SMOLLM2, option
from outrider.evaluation.verdict import cost_verdict
from outrider.utils.measure import set_up, today, versions
from outrider.utils.terminal import Terminal, terminal_table

if TYPE_CHECKING:
    from outrider.checkpoints.checkpoint import Checkpoint
    from outrider.decoding.cost import Cell, Curve, Profile
    from outrider.evaluation.calibration.candidates import Candidates
    from outrider.evaluation.calibration.fit import Calibration, CalibrationResult, Scaling, SweepPoint


def calibrate_command(
    *,
    target: opt.TargetName,
    drafter: Annotated[str, option(MODELS, "drafter directory; what is found is stored in it")],
    tasks: Annotated[str, option(PROMPTS, "JSONL files or shipped sets it never saw")],
    fit_tasks: Annotated[str | None, option(PROMPTS, "fit on these; else on half of --tasks")] = None,
    data_dir: opt.DataDirectory = None,
    max_samples: opt.MaxSamples = None,
    thinking: opt.Thinking = False,
    max_new_tokens: opt.MaxNewTokens = 256,
    temperature: Annotated[float, option(SAMPLING, "as you will serve; 0: the likeliest token", min=0.0)] = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.Seed = 0,
    plot: Annotated[Path | None, option(FILES, "PNG file for reliability diagrams")] = None,
    sweep: Annotated[Path | None, option(FILES, "PNG file of figures by threshold; JSON beside it")] = None,
    rounds: Annotated[
        Path | None, option(FILES, "NPZ file of collected rounds: used if it exists, else written")
    ] = None,
    export_sglang: Annotated[Path | None, option(FILES, "directory for SGLang's calibration file")] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Fit confidences to acceptance; of medusa and hydra, measure accuracies."""
    from outrider.checkpoints.checkpoint import CALIBRATION, SAMPLED_CALIBRATION, add_metadata, load_checkpoint
    from outrider.data.sources import TaskSettings, find_prompts, prompts_label
    from outrider.drafters.dflash import BlockDrafter
    from outrider.drafters.medusa import HeadsDrafter
    from outrider.evaluation.calibration.candidates import measure_candidates
    from outrider.evaluation.calibration.collect import collect_tasks, load_rounds, save_rounds
    from outrider.evaluation.calibration.fit import calibrate, refusal
    from outrider.evaluation.calibration.fit import sweep as sweep_thresholds
    from outrider.evaluation.figures import plot_reliability, plot_sweep
    from outrider.evaluation.plots import short_name
    from outrider.sampling import SamplingParams
    from outrider.target.model import count_layers

    set_up(threads)
    console = Terminal()
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    config = TaskSettings(max_samples, max_new_tokens, params, thinking=thinking)
    check_outputs(export_sglang, files=[plot, sweep, rounds])
    directory = require_directory(drafter, target)
    check_outputs(directory)
    checkpoint = load_checkpoint(directory, num_target_layers=count_layers(target))
    _check(checkpoint, directory, about_confidences=any((fit_tasks, plot, rounds, sweep, export_sglang)))
    measured, fitted = split_names(tasks), split_names(fit_tasks) if fit_tasks else []

    def where(task: str) -> Path | str:
        found = find_prompts(task)
        return task if found is None else found.path.resolve()

    taken = {where(task) for task in fitted}  # two names may stand for one file where there is no network
    if both := [task for task in measured if where(task) in taken]:
        raise ValueError(f"{', '.join(both)}: in --tasks and --fit-tasks; measure on what was not fitted on.")
    names = list(dict.fromkeys((*fitted, *measured)))
    labels = {task: prompts_label(task) for task in names}
    digest = _digest(directory)
    about = {"target": target, "drafter": digest, "settings": asdict(config), "tasks": list(labels.values())}
    if rounds is not None and rounds.exists():
        collected = load_rounds(rounds, about)
    else:
        loaded = load(target, device)
        packed = checkpoint.weights.serve(loaded)
        if packed.calibratable == "candidates":
            with counting(console, "calibrate") as on_progress:
                candidates = measure_candidates(
                    loaded,
                    cast(HeadsDrafter, packed),
                    names,
                    settings=config,
                    versions=versions(),
                    on_progress=on_progress,
                )
            add_metadata(directory, candidates=candidates.model_dump(mode="json"))
            console.print(candidates_table(candidates))
            console.print(f"accuracies stored in {directory}", highlight=False, markup=False, soft_wrap=True)
            return
        with counting(console, "calibrate") as on_progress:
            collected = collect_tasks(
                loaded, cast(BlockDrafter, packed), names, settings=config, on_progress=on_progress
            )
        if rounds is not None:
            save_rounds(rounds, collected, about)
    measured_on, fitted_on = ([labels[task] for task in some] for some in (measured, fitted))
    found = calibrate(collected, measured_on, fitted_on, settings=config, versions=versions())
    console.print(quality_table(found.calibration))
    console.print(errors_table(found.calibration))
    section, whose = (SAMPLED_CALIBRATION, " of sampled requests") if params.temperature else (CALIBRATION, "")
    if found.storable:
        add_metadata(directory, **{section: found.calibration.model_dump(mode="json")})
        what = "temperatures" if found.refused is None else f"estimator without temperatures ({found.refused})"
        what += whose
        outcome = f"{what} stored in {directory}"
    elif params.temperature and CALIBRATION in checkpoint.metadata:
        # Without a section of their own, sampled requests would have the fit to greedy text.
        add_metadata(directory, **{section: found.unfitted.model_dump(mode="json")})
        outcome = f"sampled requests are left without a fit ({found.refused}), and not with the greedy one: {directory}"
    else:
        outcome = f"not stored: {found.refused}; {directory} is unchanged. More prompts may help."
    console.print(outcome, highlight=False, markup=False, soft_wrap=True)
    written, facts = [], (short_name(target), f"drafter {short_name(drafter)}", f"temperature {temperature:g}", today())
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_reliability(found.calibration, plot, facts)
        written.append(plot)
    if sweep is not None:
        points = sweep_thresholds(found.measured, found.serving, replay=temperature == 0.0)
        plot_sweep(points, sweep, facts)
        sweep.with_suffix(".json").write_text(json.dumps([point.model_dump() for point in points], indent=2) + "\n")
        console.print(sweep_table(points))
        written += [sweep, sweep.with_suffix(".json")]
    if export_sglang is not None:
        console.print("SGLang has no offsets: temperatures were fitted alone for its file", soft_wrap=True)
        if (refused := refusal(found.held_out, found.alone)) is None:
            written.append(_export(found, found.alone, export_sglang))
        else:
            console.print(f"not exported: {refused}", highlight=False, markup=False, soft_wrap=True)
    show_paths(console, *written)


def _check(checkpoint: Checkpoint, directory: Path, about_confidences: bool) -> None:
    """Whether there is anything to measure of this drafter, and options that ask for nothing else."""
    measured = checkpoint.weights.module.calibratable
    if measured == "candidates" and about_confidences:
        raise ValueError(
            f"{directory} has heads without confidences: --fit-tasks, --plot, --rounds, --sweep and "
            "--export-sglang have nothing to fit or show. Leave them out."
        )
    if measured is None:
        raise ValueError(
            f"{directory}: the drafts of {checkpoint.algorithm} cannot be calibrated, only those of block "
            f"drafters ({_methods('confidences')}) and of heads ({_methods('candidates')}). "
            "Serve it with a fixed draft length."
        )


def _methods(measured: str) -> str:
    from outrider.checkpoints.registry import methods

    return ", ".join(method.name for method in methods() if getattr(method.module, "calibratable", None) == measured)


def _digest(directory: Path) -> str:
    """Of the weights, in one file or several."""
    from outrider.utils.files import weight_files

    digest = hashlib.sha256()
    for path in weight_files(directory):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _export(found: CalibrationResult, alone: Scaling, directory: Path) -> Path:
    """SGLang's calibration file, from temperatures that were fitted without offsets."""
    from outrider.backends.sglang import CALIBRATION_FILE, write_confidence_sts
    from outrider.evaluation.calibration.fit import Rounds, quality

    path = directory / CALIBRATION_FILE
    write_confidence_sts(
        path,
        alone.temperatures,
        alone.offsets,
        dataset=",".join(found.calibration.fitted_on),
        num_samples=found.calibration.fit_rounds,
        ece_before=found.calibration.before.ece,
        ece_after=quality(Rounds.joined(found.held_out), alone).ece,
    )
    return path


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


_SCALINGS = {"none": "none", "temperatures": "T", "temperatures and offsets": "T, b"}


def errors_table(calibration: Calibration) -> Table:
    """ECE by position without scaling, with temperatures alone and with offsets: of every task, and of all together."""
    headings = ("task", "scaling", "mean", *(str(k + 1) for k in range(len(calibration.temperatures))))
    title = "ECE of the survival, %. T: temperatures; T, b: and offsets; chance: if perfect"
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


def profile_command(
    *,
    out: Annotated[Path, option(FILES, "JSON file for the profile")],
    plot: Annotated[bool, option(FILES, "a PNG beside the profile")] = False,
    tables: Annotated[bool, option(FILES, "print all that was measured", "--tables")] = False,
    export_sglang: Annotated[Path | None, option(FILES, "directory for SGLang's table of steps per second")] = None,
    target: opt.TargetName = SMOLLM2,
    drafter: opt.DrafterOrNone = AUTO,
    tree: opt.Tree = None,
    max_requests: Annotated[int, option("Steps", "in one step", min=1)] = 32,
    max_tokens: Annotated[int, option("Steps", "of one forward", min=1)] = 256,
    contexts: Annotated[str, option("Steps", "cached tokens per request")] = "64,256,768",
    temperature: Annotated[str, option("Steps", "of requests, as 0, or 0,1: they take turns")] = "0",
    repeats: Annotated[int, option("Steps", "of every measurement", min=1)] = 7,
    seconds: Annotated[float, option("Steps", "fewer repeats, but three, rather than longer", min=0)] = 120.0,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Measure the cost of a step on this machine, for load-aware policies."""
    from outrider.backends.sglang import TABLE_FILE, write_sps_table
    from outrider.decoding.profile import PLAIN_WIDTH, ProfileConfig, measure_profile
    from outrider.drafters.base import draft_slots
    from outrider.evaluation.figures import plot_profile

    set_up(threads)
    console = Terminal()
    config = ProfileConfig(
        max_requests=max_requests, max_tokens=max_tokens, contexts=_contexts(contexts), repeats=repeats,
        seconds=seconds, temperatures=split_numbers("--temperature", temperature),
    )  # fmt: skip
    check_outputs(export_sglang, files=[out])
    size, choice = choose_tree(tree), choose_drafter(drafter, target)
    if choice is None and size is not None:
        raise ValueError(f"--drafter {drafter}: nothing is drafted, so --tree has no meaning.")
    loaded = load(target, device)
    ready = None if choice is None else choice.open(loaded, tree=size).drafter
    with counting(console, "profile") as on_progress:
        profile = measure_profile(loaded, ready, config, on_progress=on_progress)
    profile.save(out)
    rows = PLAIN_WIDTH if ready is None else draft_slots(ready) + 1
    if tables:
        print_tables(profile, config.middle, console)
    show_lines(console, f"  {out} ({profile.repeats} repeats)")
    if export_sglang is not None:
        one = sorted((c.tokens, c.median) for c in profile.cells if (c.requests, c.context) == (1, config.middle))
        write_sps_table(export_sglang / TABLE_FILE, one)
        show_paths(console, export_sglang / TABLE_FILE)
    if plot:
        plot_profile(profile, config.middle, out.with_suffix(".png"), rows=rows)
        show_paths(console, out.with_suffix(".png"))
    show_lines(console, *summary(profile, config.middle, rows))


def _contexts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--contexts {text!r}: give numbers of tokens, as 64,256,768.") from error


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
