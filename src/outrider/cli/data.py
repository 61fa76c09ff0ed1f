"""`outrider prepare` (the target's responses, from this machine or servers) and `outrider inspect` (a look at them)."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from outrider.cli.common import responding, show_lines
from outrider.data.config import InspectConfig
from outrider.training.config import PrepareConfig
from outrider.utils import measure
from outrider.utils.packaged import packaged
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.data.inspection import Row
    from outrider.data.regenerate import Regeneration


def prepare(config: PrepareConfig) -> None:
    """Generate the target's responses for training; run again to go on."""
    from outrider.data.responses import truncation_warning
    from outrider.training.dataset import recipe_prompts
    from outrider.training.responses import ResponseJob

    job, console = ResponseJob.of(config), Terminal()
    measure.set_up(job.threads)
    say = partial(show_lines, console)
    if config.overlap:
        recipe_prompts(job.data, say)
        return
    chat, target = job.load(say)
    started = time.monotonic()
    with responding(console, job.data.max_minutes) as progress:
        made = job.run(chat, target, on_progress=progress.update, say=progress.say)
    report(made, job.path, time.monotonic() - started, console=console)
    if warning := truncation_warning([reply.finished for reply in made.replies], job.data.max_new_tokens):
        say(warning)
    if made.failures and not made.replies:
        raise typer.Exit(1)


def report(made: Regeneration, path: Path, seconds: float, console: Console) -> None:
    """Counts, speed, lengths, and what to look out for."""
    from outrider.data.responses import companion_file

    counts = made.summary
    lines = [
        f"{counts.total} turns = {counts.done} done + {counts.skipped} skipped (prompt too long) "
        f"+ {counts.failed} failed + {counts.waiting} waiting",
        f"{counts.tokens} response tokens, {made.new_tokens / seconds:.0f} tokens/s in this run; "
        f"{counts.finished / max(counts.done, 1):.1%} of the responses finished by themselves",
    ]
    lengths = sorted(len(r.response) for r in made.replies)
    if len(lengths) > 1:
        cuts = statistics.quantiles(lengths, n=20, method="inclusive")
        marks = ", ".join(f"{percent}% {cuts[percent // 5 - 1]:.0f}" for percent in (5, 25, 50, 75, 95))
        lines.append(f"response length at quantile {marks}; longest {lengths[-1]}")
    if counts.inexact:
        lines.append(
            f"warning: {counts.inexact / counts.done:.1%} of the responses came as text and were split into tokens "
            "again; where the target had chosen other tokens, the drafter learns what it would not say. Prefer a "
            "server that returns token ids."
        )
    if counts.failed:
        lines.append(f"the first failure: {made.failures[0].reason}")
        lines.append(f"reasons of all: {companion_file(path, 'failed')}; the next run asks again")
    for line in [*lines, str(path)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def inspect(config: InspectConfig) -> None:
    """Show which tokens are trained on, or what a checkpoint is."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    console, path = Terminal(highlight=False, soft_wrap=True), packaged(config.path, "models")
    if path.suffix == ".jsonl":
        inspect_responses(path, config, console)
    elif path.exists():
        inspect_checkpoint(path, config, console)
    else:
        raise ValueError(f"{path} does not exist: give a responses file, *.jsonl, or a drafter directory.")


def inspect_checkpoint(path: Path, config: InspectConfig, console: Console) -> None:
    """Say what a checkpoint is.

    Raises:
        ValueError: it is in no dialect we read (told after what can be said of it), or damaged.
    """
    from outrider.checkpoints.describe import describe, describe_unknown, tensor_rows
    from outrider.checkpoints.registry import UnknownDialect
    from outrider.target.model import count_layers

    depth = None if config.target is None else count_layers(config.target)
    try:
        facts = describe(path, depth)
    except UnknownDialect as error:
        print_facts(describe_unknown(path, error.raw), console)
        raise
    print_facts(facts, console)
    if config.tensors:
        rows = tensor_rows(path)
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, shape, kind in rows:
            console.print(f"{name:{widths[0]}}  {shape:{widths[1]}}  {kind}", markup=False)


def print_facts(facts: Sequence[tuple[str, str]], console: Console) -> None:
    """Labels in a column, values beside them."""
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        console.print(f"{label:{width}}  {value}", markup=False)


def inspect_responses(path: Path, config: InspectConfig, console: Console) -> None:
    """Rows of a responses file, on the terminal or as a page.

    Raises:
        ValueError: no such file or row, or its target's tokenizer cannot be found.
    """
    from outrider.data.inspection import html_page, rows_of, terminal_text
    from outrider.data.responses import read_responses
    from outrider.target.hub import load_tokenizer, resolve_model

    row, html = config.row, config.html
    settings, replies = read_responses(path)
    rows = rows_of(replies)
    if row is not None and row >= len(rows):
        raise ValueError(f"{path} has {len(rows)} rows, numbered from 0; there is no row {row}.")
    chosen = range(min(config.limit, len(rows))) if row is None else [row]
    named = config.target or settings.get("target")
    if named is None:
        raise ValueError(f"{path} does not name its target: give --target.")
    tokenizer = load_tokenizer(resolve_model(str(named), weights=False))
    most = max((token for row in rows for token in row.sample.tokens), default=0)
    if most >= len(tokenizer):
        raise ValueError(f"{path}: token {most} is none of {named}, which has {len(tokenizer)}: give its own --target.")
    summary = [(str(name), str(value)) for name, value in settings.items()] + figures(rows)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(html_page(path.name, summary, [rows[i] for i in chosen], tokenizer=tokenizer), encoding="utf-8")
        console.print(f"{len(chosen)} of {len(rows)} rows in {html}", markup=False)
        return
    for name, value in summary:
        console.print(f"{name}: {value}", style="dim", markup=False)
    for number in chosen:
        console.print(f"\nrow {number}  {rows[number].caption}", style="bold", markup=False)
        console.print(terminal_text(rows[number], tokenizer, config.tokens))


def figures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Counts over all rows."""
    total = sum(len(row.sample.tokens) for row in rows)
    supervised = sum(row.sample.num_supervised for row in rows)
    finished = Counter(done for row in rows for done in row.finished)
    return [
        ("rows", f"{len(rows)} of {len({row.sample.id for row in rows})} conversations"),
        ("tokens", f"{total}, {supervised} supervised ({supervised / max(total, 1):.0%})"),
        ("responses", f"{finished.total()}, {finished[True]} finished by themselves"),
        ("inexact", str(sum(not exact for row in rows for exact in row.exact))),
    ]
