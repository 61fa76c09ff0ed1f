"""Printing text that others wrote: names, ids, and answers of servers and models may hold escape codes."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
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
