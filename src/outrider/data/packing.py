"""Several documents per row, so that no forward pass pays for padding.

    row   [document 4 ......|document 1 ...|document 7 ..|free]      attention stays inside each document
           0                 starts[1]      starts[2]     length

Best-fit decreasing: documents from the longest to the shortest, each into the fullest row it fits in. At most 11/9 of
the fewest possible rows, plus a constant (Johnson 1973).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackedRow:
    """Document numbers of one row, where each starts in it, and its length in tokens."""

    documents: tuple[int, ...]
    starts: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class PackingPlan:
    """Rows of at most `max_row_tokens`, but for documents that are longer by themselves."""

    rows: tuple[PackedRow, ...]
    max_row_tokens: int

    @property
    def waste(self) -> float:
        """Share of the tokens that would be padding if all rows were as long as the longest."""
        width = max((row.length for row in self.rows), default=0)
        return 1 - sum(row.length for row in self.rows) / (width * len(self.rows)) if self.rows else 0.0


def pack(lengths: Sequence[int], max_row_tokens: int) -> PackingPlan:
    """Rows for documents of these lengths; a pure function, ties go by number. A document too long gets its own row.

    Raises:
        ValueError: `max_row_tokens` or a length is below 1.
    """
    if max_row_tokens < 1:
        raise ValueError(f"max_row_tokens={max_row_tokens} must be at least 1.")
    if any(length < 1 for length in lengths):
        raise ValueError(f"document {next(i for i, n in enumerate(lengths) if n < 1)} has no tokens.")
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[document], -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = max_row_tokens, len(members)
            members.append([])
        members[row].append(document)
        if free > lengths[document]:
            insort(room, (free - lengths[document], row))
    return PackingPlan(tuple(_row(documents, lengths) for documents in members), max_row_tokens)


def _row(documents: Sequence[int], lengths: Sequence[int]) -> PackedRow:
    starts, end = [], 0
    for document in documents:
        starts.append(end)
        end += lengths[document]
    return PackedRow(tuple(documents), tuple(starts), end)
