"""What is printed: text that others wrote, whose escape codes would steer a terminal, and tables.

Tables, for the terminal and for Markdown, have columns of text on the left and columns of figures on the right.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Control characters but newline and tab, what turns the direction of text around, and bytes that were no UTF-8. The
# joiners of emoji and other scripts stay.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with every character that would steer a terminal, or cannot be printed, as its escape: \\x1b."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A console that prints texts, cells of tables too, as `printable` makes them; a `Text` is printed as it is."""

    def render_str(self, text: str, **settings: Any) -> Text:  # type: ignore[override]
        """The text that a string means."""
        return super().render_str(printable(text), **settings)


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
