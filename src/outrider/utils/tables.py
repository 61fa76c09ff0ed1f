"""Tables for the terminal and for Markdown: columns of text on the left, columns of figures on the right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table


def terminal_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]] = (), *, text: Collection[str] = (), **style: Any
) -> Table:
    """A table for the terminal whose cells do not wrap; columns are aligned to the right, those of `text` to the left.

    `style`: further arguments of rich's `Table`, such as `title`.
    """
    table = Table(**style)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: Collection[str] = ()) -> list[str]:
    """The lines of a Markdown table; columns are aligned to the right, those of `text` to the left."""
    head, *lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (headings, *rows))
    rule = "|" + "".join("---|" if heading in text else "---:|" for heading in headings)
    return [head, rule, *lines]
