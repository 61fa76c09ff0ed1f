"""What a check says: a status, one line of figures, and for anything not well what it means and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from outrider.evaluation.doctor.case import Case

Status = Literal["ok", "warning", "fault", "skipped"]
Need = Literal["target", "drafter", "data", "tokenizer", "eval", "working", "block"]


@dataclass(frozen=True)
class Result:
    """The outcome of one check; `figure` is the reason where it was skipped."""

    status: Status
    figure: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One check. `needs` must be there for it to run; "working" means a finite drafter that fits the target.

    "block" means a block drafter; it comes after "drafter".
    """

    group: str
    name: str
    needs: tuple[Need, ...]
    run: Callable[[Case], Result]


@dataclass(frozen=True)
class Finding:
    """A check's outcome with its name."""

    group: str
    check: str
    result: Result


def ok(figure: str) -> Result:
    return Result("ok", figure)


def warning(figure: str, meaning: str, remedy: str) -> Result:
    return Result("warning", figure, meaning, remedy)


def fault(figure: str, meaning: str, remedy: str) -> Result:
    return Result("fault", figure, meaning, remedy)


def skipped(reason: str) -> Result:
    return Result("skipped", reason)
