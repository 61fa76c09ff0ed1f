"""What several verbs do: load the target, read options that hold more than a number, show progress and paths."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from outrider.utils.measure import default_dtype, dtype_name
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from outrider.decoding.policies import Policy
    from outrider.decoding.verification import TypicalAcceptance
    from outrider.drafters.draft import TreeSize
    from outrider.target.model import Target
    from outrider.training.parallel import Ranks


def load(
    target: str,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    place: Callable[[Any], None] = lambda model: None,
    console: Console | None = None,
) -> Target:
    """The target on a device; the console is told before. `dtype` null: see `default_dtype`."""
    from outrider.target.model import load_target

    if console is not None:
        console.print(f"loading {target}", highlight=False, markup=False, soft_wrap=True)
    return load_target(target, dtype or default_dtype(device), device, place=place)


def training_dtype(
    precision: str, device: torch.device, console: Console, began_with: str | None = None, ranks: Ranks | None = None
) -> torch.dtype:
    """The type that a recipe's precision means on a device; a line says what `auto` became.

    Args:
        began_with: the precision of the run that is resumed; None for a new one.
        ranks: all take the type that the main one finds; a collective where the precision is auto.
    """
    import torch

    from outrider.training import machine
    from outrider.training.parallel import ALONE

    if precision != "auto":
        return getattr(torch, precision)  # type: ignore[no-any-return]
    if began_with is not None:
        dtype, reason = getattr(torch, began_with), "as the run began"
    else:
        dtype, reason = (ranks or ALONE).from_main(lambda: machine.training_dtype(device))
    console.print(f"precision: {dtype_name(dtype)} ({reason})", highlight=False, soft_wrap=True)
    return dtype


def choose_policy(draft_length: int | None, confidence_threshold: float | None) -> Policy | None:
    """The scheduling policy two options describe; None where neither is given.

    Raises:
        ValueError: both are given.
    """
    from outrider.decoding.policies import FixedPolicy, ThresholdPolicy

    if confidence_threshold is None:
        return None if draft_length is None else FixedPolicy(draft_length)
    if draft_length is not None:
        raise ValueError("give --draft-length or --confidence-threshold, not both.")
    return ThresholdPolicy(confidence_threshold)


def choose_typical(text: str | None) -> TypicalAcceptance | None:
    """What `--typical` says.

    Raises:
        ValueError: not two numbers in (0, 1].
    """
    from outrider.decoding.verification import TypicalAcceptance

    if text is None or text == "default":
        return None if text is None else TypicalAcceptance()
    thresholds = split_numbers("--typical", text)
    if len(thresholds) != 2:
        raise ValueError(f"--typical {text!r}: give EPSILON,DELTA, as 0.09,0.3, or `default`.")
    return TypicalAcceptance(*thresholds)


def choose_tree(text: str | None, confidence_threshold: float | None = None) -> TreeSize | None:
    """What `--tree` says.

    Raises:
        ValueError: not of its form, or a confidence threshold is given, too.
    """
    from outrider.drafters.draft import TreeSize

    if text is None:
        return None
    if confidence_threshold is not None:
        raise ValueError(
            "--tree with --confidence-threshold: a node of a tree has no confidence of its own; leave one of them out."
        )
    return TreeSize.parse(text)


def split_names(names: str, kind: str = "task file or shipped set") -> list[str]:
    """`a, b` -> ["a", "b"]; `kind` is what they should name.

    Raises:
        ValueError: no name in it.
    """
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise ValueError(f"{names!r} names no {kind}.")
    return found


def split_numbers(option: str, text: str) -> tuple[float, ...]:
    """`1, 2` -> (1.0, 2.0)

    Raises:
        ValueError: not numbers, or infinite ones.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{option} {text!r}: give numbers, as 1,2,4.")
    return found


def split_words(option: str, text: str) -> tuple[str, ...]:
    """The words of a text as a shell reads it: `--seed 1` -> ("--seed", "1")

    Raises:
        ValueError: a quotation mark has no partner.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: {error}.") from error


def check_outputs(*directories: Path | None, files: Sequence[Path | None] = ()) -> None:
    """Refuse, before hours of work, places where results cannot be written; nothing is created.

    Raises:
        ValueError: a file is a directory, or a directory would be inside a file or inside a read-only directory.
    """
    for file in files:
        if file is not None and file.is_dir():
            raise ValueError(f"{file} is a directory: name a file.")
    for place in (*directories, *(file and file.parent for file in files)):
        there = place and next(above for above in (place, *place.parents) if above.exists())
        if there is not None and not (there.is_dir() and os.access(there, os.W_OK)):
            kind = "is read-only" if there.is_dir() else "is a file"
            raise ValueError(f"nothing can be written to {place}: {there} {kind}.")


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
