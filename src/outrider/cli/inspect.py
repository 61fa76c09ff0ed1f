"""outrider inspect: rows of a responses file with the tokens that are trained on in colour, or what a checkpoint is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from outrider.data.inspection import Row, html_page, rows_of, terminal_text
from outrider.data.responses import read_responses
from outrider.formats.describe import describe, describe_unknown, tensor_rows
from outrider.formats.dialects import UnknownDialect
from outrider.target.load import count_layers
from outrider.target.resolve import resolve_model


def inspect_command(
    path: Annotated[Path, typer.Argument(help="a responses file (*.jsonl), or a drafter directory in any dialect")],
    target: Annotated[
        str | None, typer.Option(help="whose tokenizer, or whom the drafter is for; the one the file names by default")
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, help="only this row")] = None,
    limit: Annotated[int, typer.Option(min=1, help="rows from the beginning")] = 5,
    tokens: Annotated[bool, typer.Option("--tokens", help="show token boundaries")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page here instead")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="list a checkpoint's tensors")] = False,
) -> None:
    """Look at what is trained on (supervised tokens in colour, prompts dim), or say what a checkpoint is."""
    transformers_logging.set_verbosity_error()
    console = Console(highlight=False, soft_wrap=True)
    if path.suffix == ".jsonl":
        inspect_responses(path, target, row, limit, tokens, html, console)
    elif path.exists():
        inspect_checkpoint(path, target, tensors, console)
    else:
        raise ValueError(f"{path} does not exist: give a responses file, *.jsonl, or a drafter directory.")


def inspect_checkpoint(path: Path, target: str | None, tensors: bool, console: Console) -> None:
    """Say what a checkpoint is.

    Raises:
        ValueError: it is in no dialect we read (told after what can be said of it), or damaged.
    """
    depth = None if target is None else count_layers(target)
    try:
        facts = describe(path, depth)
    except UnknownDialect as error:
        print_facts(describe_unknown(path, error.raw), console)
        raise
    print_facts(facts, console)
    if tensors:
        rows = tensor_rows(path)
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, shape, kind in rows:
            console.print(f"{name:{widths[0]}}  {shape:{widths[1]}}  {kind}", markup=False)


def print_facts(facts: Sequence[tuple[str, str]], console: Console) -> None:
    """Labels in a column, values beside them."""
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        console.print(f"{label:{width}}  {value}", markup=False)


def inspect_responses(
    path: Path, target: str | None, row: int | None, limit: int, tokens: bool, html: Path | None, console: Console
) -> None:
    """Rows of a responses file, on the terminal or as a page.

    Raises:
        ValueError: no such file or row, or its target's tokenizer cannot be found.
    """
    settings, replies = read_responses(path)
    rows = rows_of(replies)
    if row is not None and row >= len(rows):
        raise ValueError(f"{path} has {len(rows)} rows, numbered from 0; there is no row {row}.")
    chosen = range(min(limit, len(rows))) if row is None else [row]
    named = target or settings.get("target")
    if named is None:
        raise ValueError(f"{path} does not name its target: give --target.")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(named), weights=False))
    summary = [(str(name), str(value)) for name, value in settings.items()] + figures(rows)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(html_page(path.name, summary, [rows[i] for i in chosen], tokenizer), encoding="utf-8")
        console.print(f"{len(chosen)} of {len(rows)} rows in {html}", markup=False)
        return
    for name, value in summary:
        console.print(f"{name}: {value}", style="dim", markup=False)
    for number in chosen:
        console.print(f"\nrow {number}  {rows[number].caption}", style="bold", markup=False)
        console.print(terminal_text(rows[number], tokenizer, tokens))


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
