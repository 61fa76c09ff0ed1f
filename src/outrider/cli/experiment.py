"""`outrider experiment`: train and compare the drafters of a table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.calibrate import calibrate
from outrider.cli.command import parse
from outrider.cli.common import show_lines
from outrider.cli.evaluate import bench_drafters, evaluate
from outrider.evaluation.config import ExperimentConfig
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.config import Config
    from outrider.evaluation.experiment import Stage

_VERBS: dict[str, Callable[[Any], None]] = {"eval": evaluate, "calibrate": calibrate, "bench-drafters": bench_drafters}


def experiment(config: ExperimentConfig) -> None:
    """Train, evaluate and compare a table of drafters (docs/experiments.md)."""
    from outrider.data.sources import DATA
    from outrider.evaluation.experiment import load_table, plan
    from outrider.evaluation.run_experiment import Runner, StageFailed, check_experiment

    say = partial(show_lines, Terminal())
    table = load_table(config.table, config.overrides)
    if config.rows is not None:
        table = table.only(config.rows)
    if table.data_directory is not None:
        os.environ[DATA] = table.data_directory
    stages = plan(table)
    if config.dry_run:
        for number, stage in enumerate(stages, start=1):
            done = "done: " if stage.done else ""
            say(f"[{number}/{len(stages)}] {done}{shlex.join(['outrider', *stage.args])}")
        return
    check_experiment(table, config.table, stages, parse=settings_of)
    try:
        Runner(stages, jobs=table.jobs, logs=Path(table.out) / "logs", say=say).run()
    except StageFailed as failure:
        raise typer.Exit(failure.status) from failure


def settings_of(stage: Stage) -> Config | None:
    """The settings that a stage's words stand for; None for verbs whose options are not the user's to set."""
    verb, *args = stage.args
    return parse(_VERBS[verb], verb, list(args)) if verb in _VERBS else None
