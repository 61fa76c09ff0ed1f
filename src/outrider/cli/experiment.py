"""`outrider experiment`: train and compare the drafters of a table."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.api.drafter import require_drafter
from outrider.cli.calibrate import calibrate_command
from outrider.cli.common import choose_policy, choose_tree, choose_typical, show_lines, split_names
from outrider.cli.evaluate import bench_drafters, evaluate_command
from outrider.cli.options import GENERAL, option, verb_options
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
    from outrider.checkpoints.registry import method_of
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
    dry_run: Annotated[bool, option(GENERAL, "only print the commands", "--dry-run")] = False,
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
        for number, stage in enumerate(stages, start=1):
            done = "done: " if stage.done else ""
            show_lines(console, f"[{number}/{len(stages)}] {done}{shlex.join(['outrider', *stage.args])}")
        return
    check_experiment(loaded, table, stages)
    Runner(stages, jobs=loaded.jobs, logs=Path(loaded.out) / "logs", console=console).run()


# ----------------------------------------------------------------------------
# Running. With `jobs: 2`, each job in a thread that is bound to its share of the cores, which its processes inherit:
#
#     prepare -> features -> | train a 0, then its calibration ; train c 0 | -> | eval a 0 ; ... | -> bench-drafters
#                            | train b 0 ; ...                             |    | eval b 0 ; ... |
# ----------------------------------------------------------------------------

_SHOWN_LINES = 15  # of the log of a stage that failed


def command_of(stage: Stage) -> list[str]:
    """A process of its own: measurements begin with clean memory, and it is the command that can be given by hand."""
    return [sys.executable, "-m", "outrider.cli.main", *stage.args]


class Runner:
    """Runs what is not done yet of a table's stages.

    After the first failure or signal nothing is started any more, and what runs is told to save and end.

    Args:
        jobs: stages at a time.
        logs: directory for what stages print that do not run alone.

    Raises:
        ValueError: there are fewer cores than jobs.
    """

    def __init__(self, stages: Sequence[Stage], *, jobs: int, logs: Path, console: Console) -> None:
        self.stages, self.logs, self.console = stages, logs, console
        self.shares = core_shares(jobs)
        self.lock = Lock()  # of the two below: no process may start behind a signal's back
        self.running: list[subprocess.Popen[bytes]] = []
        self.ended: Exception | None = None  # why nothing is started any more

    def run(self) -> None:
        """Run them.

        Raises:
            typer.Exit: a stage failed, and the status is its own, or a signal came.
            ValueError: a stage stopped before its work was complete.
        """
        from outrider.evaluation.experiment import side_by_side

        former = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for chains in side_by_side(self.stages):
                self._run_group(chains)
                if self.ended is not None:
                    raise self.ended
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _run_group(self, chains: Sequence[Sequence[Stage]]) -> None:
        workers = min(len(self.shares), len(chains))
        shares = SimpleQueue[set[int] | None]()
        for share in self.shares if workers > 1 else [None]:
            shares.put(share)
        with ThreadPoolExecutor(workers, initializer=lambda: bind_to(shares.get())) as pool:
            list(pool.map(partial(self._run_chain, alone=workers == 1), chains))

    def _run_chain(self, chain: Sequence[Stage], alone: bool) -> None:
        for stage in chain:
            try:
                self._run_stage(stage, None if alone else self._log(stage))
            except (typer.Exit, ValueError, OSError) as error:
                self._end(error, tell=signal.SIGTERM)
            if self.ended is not None:
                return

    def _run_stage(self, stage: Stage, log: Path | None) -> None:
        number, done = f"[{self.stages.index(stage) + 1}/{len(self.stages)}]", stage.done
        show_lines(self.console, f"{number} {'done: ' if done else ''}{shlex.join(['outrider', *stage.args])}")
        if done:
            return
        began = time.monotonic()
        with nullcontext() if log is None else log.open("wb") as output:
            with self.lock:
                if self.ended is not None:
                    return
                process = subprocess.Popen(command_of(stage), stdout=output, stderr=output)
                self.running.append(process)
            status = process.wait()
        with self.lock:
            self.running.remove(process)
        if status:
            if log is not None and self.ended is None:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                show_lines(self.console, f"{number} failed; the end of {log}:", *lines[-_SHOWN_LINES:])
            raise typer.Exit(status if status > 0 else 128 - status)
        if not stage.complete:
            raise ValueError(f"{stage.output} is not complete yet; the same command goes on from there.")
        stage.mark()
        if log is not None:
            show_lines(self.console, f"{number} ended well after {(time.monotonic() - began) / 60:.1f} min")

    def _log(self, stage: Stage) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{stage.stamp.name if stage.stamp is not None else stage.args[0]}.log"

    def _signalled(self, number: int, _frame: object) -> None:
        """It is the stages' to save what they have. A terminal gives SIGINT to all processes itself."""
        self._end(typer.Exit(128 + number), tell=None if number == signal.SIGINT else number)

    def _end(self, why: Exception, tell: int | None) -> None:
        with self.lock:
            if self.ended is None and tell is not None:
                for process in self.running:
                    process.send_signal(tell)
            self.ended = self.ended or why


def core_shares(jobs: int) -> list[set[int] | None]:
    """The cores of each job, as many as of any other; None: wherever the system puts it.

    Raises:
        ValueError: there are fewer cores than jobs.
    """
    if jobs == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    if jobs > len(cores):
        raise ValueError(f"jobs {jobs}: this process may use {len(cores)} cores, and every job takes one at least.")
    each = len(cores) // jobs
    return [set(cores[place * each : (place + 1) * each]) for place in range(jobs)]


def bind_to(cores: set[int] | None) -> None:
    """Let this thread, and the processes that it starts, run on these cores alone."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
