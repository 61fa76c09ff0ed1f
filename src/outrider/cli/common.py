"""What several verbs do: load the target, read options that hold more than a number, show progress and paths."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.drafters.draft import TreeSize
from outrider.scheduling.policies import FixedPolicy, Policy, ThresholdPolicy
from outrider.target.model import Target, load_target
from outrider.utils.measure import default_dtype
from outrider.verification import TypicalAcceptance


def load(
    target: str,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    place: Callable[[Any], None] = lambda model: None,
) -> Target:
    """The target on a device. `dtype` null: see `default_dtype`."""
    return load_target(target, dtype or default_dtype(device), device, place=place)


def choose_policy(draft_length: int | None, confidence_threshold: float | None) -> Policy:
    """The scheduling policy two options describe.

    Raises:
        ValueError: both are given.
    """
    if confidence_threshold is None:
        return FixedPolicy(draft_length)
    if draft_length is not None:
        raise ValueError("give --draft-length or --confidence-threshold, not both.")
    return ThresholdPolicy(confidence_threshold)


def choose_typical(text: str | None) -> TypicalAcceptance | None:
    """What `--typical` says.

    Raises:
        ValueError: not two numbers in (0, 1].
    """
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


def show_paths(console: Console, *paths: Path) -> None:
    """What was written, a line each."""
    for path in paths:
        console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def counting(console: Console, title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar; gives the function that moves it: (what, done, total)."""
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


@contextmanager
def responding(console: Console) -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar for responses, there once any are asked for; gives what moves it: (turns done, total, tokens)."""
    columns = (
        TextColumn("[bold]responses"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("responses", total=None, tokens=0, visible=False)
        yield lambda done, total, tokens: bar.update(task, completed=done, total=total, tokens=tokens, visible=True)
