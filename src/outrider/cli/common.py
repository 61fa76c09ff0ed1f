"""What several verbs print: lines, paths, and how far a long job is."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from outrider.utils.terminal import Terminal


def show_lines(console: Console, *lines: str) -> None:
    """Print text as it is: without colours or line breaks of our own."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_paths(console: Console, *paths: Path) -> None:
    """What was written, a line each."""
    show_lines(console, *(f"  {path}" for path in paths))


# ----------------------------------------------------------------------------
# How far a long job is, on standard error: a bar on a terminal, else a line every 10 seconds. Both tell the rate and
# the time left, from what this run did so far.
#
#     responses: 12 of 80 replies, 310 tokens/s, about 4 minutes left
# ----------------------------------------------------------------------------


_SECONDS_PER_LINE = 10.0


def time_left(seconds: float) -> str:
    """`about 40 seconds left`, `about 4 minutes left`, `about 2.5 hours left`"""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            amount = seconds / size
            return f"about {amount:.1f} {unit} left" if unit == "hours" else f"about {amount:.0f} {unit} left"
    return f"about {seconds:.0f} seconds left"


class JobProgress:
    """Shows how far a job is.

    Args:
        bar: where there is a terminal.
        unit: what is counted, in lines.
        most_seconds: after which the job ends, done or not.
    """

    def __init__(
        self, console: Console, title: str, unit: str, bar: Progress | None, most_seconds: float = math.inf
    ) -> None:
        self._end = time.monotonic() + most_seconds
        self.console, self.title, self.unit, self.bar = console, title, unit, bar
        self.done = 0
        self._task: TaskID | None = None
        self._first: tuple[float, int, int] | None = None  # time, done and tokens when the job at hand began
        self._said = time.monotonic()

    def say(self, line: str) -> None:
        """A line of its own."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def count(self, title: str, done: int, total: int) -> None:
        """`done` of `total` things; another title, or fewer things than before, is another job."""
        if title != self.title or done < self.done:
            self._first = None
        self.title = title
        self.update(done, total)

    def update(self, done: int, total: int, tokens: int = 0) -> None:
        """`done` of `total` things, in which there are so many tokens (0: tokens are not counted)."""
        now = time.monotonic()
        self.done = done
        if self._first is None:
            self._first = (now, done, tokens)
        pace = self._pace(now, total, tokens)
        if self.bar is not None:
            if self._task is None:
                self._task = self.bar.add_task(self.title, total=total, pace="")
            self.bar.update(self._task, description=self.title, completed=done, total=total, pace=pace)
        elif now - self._said >= _SECONDS_PER_LINE:
            self._said = now
            self.say(", ".join(filter(None, (f"{self.title}: {done} of {total}{self.unit}", pace))))

    def _pace(self, now: float, total: int, tokens: int) -> str:
        assert self._first is not None
        seconds, new = now - self._first[0], self.done - self._first[1]
        if seconds <= 0:
            return ""
        parts = []
        if tokens > self._first[2]:
            parts.append(f"{(tokens - self._first[2]) / seconds:.0f} tokens/s")
        elif new:
            parts.append(f"{new / seconds:.1f}/s" if new > seconds else f"{seconds / new:.1f} s each")
        if now >= self._end and self.done < total:
            parts.append("time is up: what is under way is finished")
        elif new and self.done < total:
            parts.append(time_left(min(seconds / new * (total - self.done), self._end - now)))
        return ", ".join(parts)


@contextmanager
def _progress(console: Console, title: str, unit: str = "", most_seconds: float = math.inf) -> Iterator[JobProgress]:
    errors = Terminal(stderr=True, quiet=console.quiet)
    if not errors.is_terminal:
        yield JobProgress(errors, title, unit, bar=None, most_seconds=most_seconds)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[pace]}"),
    )
    # What goes to a file stays there: only output to the terminal is moved above the bar.
    with Progress(*columns, console=errors, redirect_stdout=console.is_terminal) as bar:
        yield JobProgress(errors, title, unit, bar=bar, most_seconds=most_seconds)


@contextmanager
def counting(console: Console, title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Progress of a job of several parts; gives the function that tells it: (what, done, total)."""
    with _progress(console, title) as progress:
        yield progress.count


@contextmanager
def responding(console: Console, minutes: float | None = None) -> Iterator[JobProgress]:
    """Progress of regeneration, which Ctrl-C stops.

    Args:
        minutes: after which it ends, `data.max_minutes`; None: when all is answered.

    Raises:
        typer.Exit: Ctrl-C; the status is 130, and what is kept is said.
    """
    most_seconds = math.inf if minutes is None else 60 * minutes
    with _progress(console, "responses", " replies", most_seconds=most_seconds) as progress:
        try:
            yield progress
        except KeyboardInterrupt as error:
            progress.say(f"stopped, {progress.done} replies kept; the same command goes on")
            raise typer.Exit(128 + signal.SIGINT) from error
