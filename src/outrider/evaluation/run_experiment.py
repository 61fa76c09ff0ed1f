"""Checks an experiment before hours of training, and runs its stages."""

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

from outrider.api.drafter import require_drafter
from outrider.api.scheduling import given_typical
from outrider.checkpoints.registry import method_of
from outrider.config import Config
from outrider.data.sources import load_prompts, load_tasks
from outrider.drafters.draft import TreeSize
from outrider.evaluation.comparison import differences
from outrider.evaluation.config import CalibrateConfig, EvalConfig
from outrider.evaluation.experiment import ExperimentTable, Stage, side_by_side

Parse = Callable[[Stage], Config | None]
Say = Callable[[str], None]
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_ALIKE = ("max_samples", "max_new_tokens", "thinking", *_SAMPLING, "typical", "backend", "device", "threads")


def check_experiment(table: ExperimentTable, path: Path, stages: Sequence[Stage], parse: Parse) -> None:
    """Find before hours of training what would fail after them.

    Tasks can be read; eval, calibrate and bench-drafters take their options; drafters are there or another row makes
    them, and draft in trees and blocks where that is asked; rows are evaluated alike, as outrider compare asks.

    Args:
        parse: the settings that a stage's words stand for; None for verbs whose options are not the user's to set.

    Raises:
        ValueError: the first that is wrong; the message names the row.
    """
    load_tasks(table.tasks)
    _check_drafters(table, path)
    asked: dict[str, dict[str, dict[str, str]]] = {}  # by condition, then by row
    for stage in stages:
        try:
            config = parse(stage)
            if isinstance(config, CalibrateConfig):
                for task in config.tasks:
                    load_prompts(task, 1)
            if isinstance(config, EvalConfig):
                _check_drafts(table, stage.row, config)
                settings = config.settings()
                asked.setdefault(stage.condition, {})[stage.row] = {name: str(settings[name]) for name in _ALIKE}
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


def _check_drafts(table: ExperimentTable, name: str, config: EvalConfig) -> None:
    """How a row's drafts are verified, and whether it can draft so: a directory tells only when it is opened."""
    tree, block_size = config.tree, config.block_size
    if tree is not None:
        TreeSize.parse(tree)
    given_typical(config.typical)
    drafter = table.rows[name].drafter
    if drafter is not None and require_drafter(drafter, config.target).directory is not None:
        return
    method = None if drafter is not None else method_of(table.row_recipe(name).drafter.algorithm)
    who = drafter if method is None else method.name
    if tree is not None and (method is None or not method.module.drafts_trees()):
        raise ValueError(f"tree {tree}: {who} drafts chains; leave it out.")
    if block_size is not None and (method is None or "block_size" not in {f.name for f in fields(method.config)}):
        raise ValueError(f"block_size {block_size}: {who} has no blocks; leave it out.")


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


class StageFailed(Exception):
    """A stage ended with this exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class Runner:
    """Runs what is not done yet of a table's stages.

    After the first failure or signal nothing is started any more, and what runs is told to save and end.

    Args:
        jobs: stages at a time.
        logs: directory for what stages print that do not run alone.

    Raises:
        ValueError: there are fewer cores than jobs.
    """

    def __init__(self, stages: Sequence[Stage], *, jobs: int, logs: Path, say: Say) -> None:
        self.stages, self.logs, self.say = stages, logs, say
        self.shares = core_shares(jobs)
        self.lock = Lock()  # of the two below: no process may start behind a signal's back
        self.running: list[subprocess.Popen[bytes]] = []
        self.ended: Exception | None = None  # why nothing is started any more

    def run(self) -> None:
        """Run them.

        Raises:
            StageFailed: a stage failed, and the status is its own, or a signal came.
            ValueError: a stage stopped before its work was complete.
        """
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
            except (StageFailed, ValueError, OSError) as error:
                self._end(error, tell=signal.SIGTERM)
            if self.ended is not None:
                return

    def _run_stage(self, stage: Stage, log: Path | None) -> None:
        number, done = f"[{self.stages.index(stage) + 1}/{len(self.stages)}]", stage.done
        self.say(f"{number} {'done: ' if done else ''}{shlex.join(['outrider', *stage.args])}")
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
                for line in (f"{number} failed; the end of {log}:", *lines[-_SHOWN_LINES:]):
                    self.say(line)
            raise StageFailed(status if status > 0 else 128 - status)
        if not stage.complete:
            raise ValueError(f"{stage.output} is not complete yet; the same command goes on from there.")
        stage.mark()
        if log is not None:
            self.say(f"{number} ended well after {(time.monotonic() - began) / 60:.1f} min")

    def _log(self, stage: Stage) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{stage.stamp.name if stage.stamp is not None else stage.args[0]}.log"

    def _signalled(self, number: int, _frame: object) -> None:
        """It is the stages' to save what they have. A terminal gives SIGINT to all processes itself."""
        self._end(StageFailed(128 + number), tell=None if number == signal.SIGINT else number)

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
