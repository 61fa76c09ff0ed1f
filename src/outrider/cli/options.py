"""What options of several verbs mean: which drafter, which policy, which tasks; and their progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.formats import shipped_drafter
from outrider.scheduling import FixedPolicy, Policy, ThresholdPolicy

AUTO, NONE = "auto", "none"  # a directory of such a name is ./auto
HOW_TO_TRAIN = "train one: outrider train recipes/smollm2-135m-dspark.yaml with your target and prompts in it"


def find_drafter(choice: str, target: str) -> Path | None:
    """The directory `--drafter` means: auto is the shipped drafter of the target, if there is one."""
    if choice == AUTO:
        return shipped_drafter(target)
    return None if choice == NONE else Path(choice)


def require_drafter(choice: str, target: str) -> Path:
    """`find_drafter` where there must be one.

    Raises:
        ValueError: there is none.
    """
    found = find_drafter(choice, target)
    if found is None:
        raise ValueError(
            f"--drafter {choice}: no drafter for {target}. Give its directory, put it into models/, or {HOW_TO_TRAIN}."
        )
    return found


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


def recommended_threshold(metadata: Mapping[str, Any]) -> float | None:
    """The confidence threshold a drafter was found to serve best with (`outrider package` stores it)."""
    return metadata.get("recommended", {}).get("confidence_threshold")


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
        ValueError: not numbers.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r}: give numbers, as 1,2,4.") from None


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
