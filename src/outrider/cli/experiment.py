"""`outrider experiment`: train and compare the drafters of a table."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.api.drafter import require_drafter
from outrider.cli.calibrate import calibrate_command
from outrider.cli.common import choose_policy, choose_tree, choose_typical, show_lines, split_names
from outrider.cli.evaluate import bench_drafters, evaluate_command
from outrider.cli.options import GENERAL, option, verb_options
from outrider.utils.measure import set_up
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.evaluation.experiment import ExperimentTable, Stage

_VERBS: dict[str, Callable[..., None]] = {
    "eval": evaluate_command,
    "calibrate": calibrate_command,
    "bench-drafters": bench_drafters,
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_ALIKE = ("max_samples", "max_new_tokens", "thinking", *_SAMPLING, "typical", "backend", "device", "threads")


def check_experiment(table: ExperimentTable, path: Path, stages: Sequence[Stage]) -> None:
    """Find before hours of training what would fail after them.

    Tasks can be read; eval, calibrate and bench-drafters take their options; drafters are there or another row makes
    them, and draft in trees and blocks where that is asked; rows are evaluated alike, as outrider compare asks.

    Raises:
        ValueError: the first that is wrong; the message names the row.
    """
    from outrider.data.sources import load_prompts, load_tasks
    from outrider.evaluation.comparison import differences

    load_tasks(table.tasks)
    _check_drafters(table, path)
    asked: dict[str, dict[str, dict[str, str]]] = {}  # by condition, then by row
    for stage in stages:
        try:
            options = _options(stage)
            if stage.args[0] == "calibrate":
                for task in split_names(options["tasks"]):
                    load_prompts(task, 1)
            if stage.args[0] == "eval":
                _check_drafts(table, stage.row, options)
                settings = {name: str(options[name]) for name in _ALIKE}
                asked.setdefault(stage.condition, {})[stage.row] = settings
        except ValueError as error:
            raise ValueError(f"{path}: {f'row {stage.row}' if stage.row else stage.args[0]}: {error}") from error
    found = list(chain.from_iterable(differences(list(rows), list(rows.values())) for rows in asked.values()))
    if found and not table.allow_different:
        raise ValueError(
            f"{path}: rows are not comparable: {'; '.join(found)}. allow_different: true compares them all the same."
        )


def _check_drafters(table: ExperimentTable, path: Path) -> None:
    made = {table.run_directory(*training).resolve() for training in table.trainings()}
    for name, row in table.rows.items():
        directory = None if row.drafter is None else require_drafter(row.drafter, table.target).directory
        if directory is None or (directory / "config.json").is_file() or directory.resolve().parent in made:
            continue
        raise ValueError(
            f"row {name}: drafter {row.drafter!r} is no directory with a config.json, none that a row of {path} will "
            "make, and neither ngram nor lm:MODEL."
        )


def _options(stage: Stage) -> dict[str, Any]:
    """What a verb would be called with; {} of verbs whose options are not the user's to set."""
    verb, *args = stage.args
    return verb_options(_VERBS[verb], verb, args) if verb in _VERBS else {}


def _check_drafts(table: ExperimentTable, name: str, options: dict[str, Any]) -> None:
    """How a row's drafts are verified, and whether it can draft so: a directory tells only when it is opened."""
    from outrider.drafters.registry import method_of
    from outrider.sampling import SamplingParams

    tree, block_size = options["tree"], options["block_size"]
    choose_policy(options["draft_length"], options["confidence_threshold"])
    choose_tree(tree, options["confidence_threshold"])
    choose_typical(options["typical"])
    SamplingParams(**{field: options[field] for field in _SAMPLING})
    drafter = table.rows[name].drafter
    if drafter is not None and require_drafter(drafter, options["target"]).directory is not None:
        return
    method = None if drafter is not None else method_of(table.row_recipe(name).drafter.algorithm)
    who = drafter if method is None else method.name
    if tree is not None and (method is None or not method.module.drafts_trees):
        raise ValueError(f"tree {tree}: {who} drafts chains; leave it out.")
    if block_size is not None and (method is None or "block_size" not in {f.name for f in fields(method.config)}):
        raise ValueError(f"block_size {block_size}: {who} has no blocks; leave it out.")


def experiment(
    table: Annotated[Path, typer.Argument(help="YAML with rows of recipes, seeds and tasks, or a packaged one")],
    overrides: Annotated[list[str] | None, typer.Argument(help="fields to change: seeds=[0] threads=1 ...")] = None,
    *,
    rows: Annotated[str | None, option(GENERAL, "only these rows, and those whose drafters they are (a,b)")] = None,
    dry_run: Annotated[bool, option(GENERAL, "only print the commands, and how long each takes", "--dry-run")] = False,
) -> None:
    """Train, evaluate and compare a table of drafters (docs/experiments.md)."""
    from outrider.data.sources import DATA
    from outrider.evaluation.experiment import load_table, plan

    console = Terminal()
    loaded = load_table(table, overrides or ())
    if rows is not None:
        loaded = loaded.only(split_names(rows))
    if loaded.data_directory is not None:
        os.environ[DATA] = loaded.data_directory
    stages = plan(loaded)
    if dry_run:
        _dry_run(loaded, stages, console)
        return
    check_experiment(loaded, table, stages)
    for number, stage in enumerate(stages, start=1):
        done = "done: " if stage.done else ""
        line = f"[{number}/{len(stages)}] {done}{shlex.join(['outrider', *stage.args])}"
        show_lines(console, line)
        if not done:
            run_stage(stage)


def _dry_run(table: ExperimentTable, stages: Sequence[Stage], console: Console) -> None:
    """The commands, done ones too; then what each takes, where that is known before the earlier ones have run."""
    from outrider.cli.dry_run import measurements, of_stage, spoken_time
    from outrider.target.hub import resolve_model

    numbered = [(f"[{number}/{len(stages)}]", stage) for number, stage in enumerate(stages, start=1)]
    for number, stage in numbered:
        done = "done: " if stage.done else ""
        show_lines(console, f"{number} {done}{shlex.join(['outrider', *stage.args])}")
    try:
        resolve_model(table.target, download=False)
    except ValueError:
        show_lines(console, f"times are not known: the target {table.target} is not on this machine")
        return
    set_up(table.threads)
    show_lines(console, "times; each training is measured by a step of two conversations:")
    known, whole = measurements(console, brief=True), 0.0
    for number, stage in numbered:
        if stage.done:
            continue
        name = f"{number} {stage.args[0]} {stage.row}".strip()
        try:
            seconds = of_stage(table, stage, _options(stage), known=known).seconds
        except (ValueError, OSError) as error:
            show_lines(console, f"{name}: time not known: {error}")
            continue
        if seconds:
            whole += seconds
            show_lines(console, f"{name}: about {spoken_time(seconds)}")
    show_lines(console, f"in all about {spoken_time(whole)}, without what has no time above")


def run_stage(stage: Stage) -> None:
    """A process of its own: measurements begin with clean memory, and it is the command that can be given by hand.

    Raises:
        typer.Exit: it failed; the status is its own.
        ValueError: it stopped before its work was complete.
    """
    status = run_command([sys.executable, "-m", "outrider.cli.main", *stage.args])
    if status:
        raise typer.Exit(status if status > 0 else 128 - status)
    if not stage.complete:
        raise ValueError(f"{stage.output} is not complete yet; the same command goes on from there.")
    stage.mark()


def run_command(command: list[str]) -> int:
    """Wait for a child, whatever signal comes: it is the child's to save what it has, and its status counts."""
    with subprocess.Popen(command) as child:

        def pass_on(number: int, _frame: object) -> None:
            child.send_signal(number)

        former = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),  # the terminal gave it to the child as well
            signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        }
        try:
            return child.wait()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
