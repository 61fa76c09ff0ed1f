"""Print untrusted text without its escape codes, and tables for the terminal and for Markdown.

Columns of text are aligned to the left, columns of figures to the right.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Control characters except newline and tab, marks that change the direction of text, and bytes that were no UTF-8. The
# joiners of emoji and other scripts stay.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape every character that controls a terminal or cannot be printed, as \\x1b."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A console that prints strings, including cells of tables, as `printable`; a `Text` is printed unchanged."""

    def render_str(self, text: str, **settings: Any) -> Text:  # type: ignore[override]
        """Render a string after escaping it."""
        return super().render_str(printable(text), **settings)


def terminal_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]] = (), *, text: Collection[str] = (), **style: Any
) -> Table:
    """Make a terminal table without wrapping; columns are right-aligned, those in `text` left-aligned.

    `style`: further arguments of rich's `Table`, such as `title`.
    """
    table = Table(**style)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: Collection[str] = ()) -> list[str]:
    """Make the lines of a Markdown table; columns are right-aligned, those in `text` left-aligned."""
    head, *lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (headings, *rows))
    rule = "|" + "".join("---|" if heading in text else "---:|" for heading in headings)
    return [head, rule, *lines]
