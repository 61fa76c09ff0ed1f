"""Findings, and the rules that make them: a check measures, and the first rule whose test holds says what that means.

Check     what is measured (the symptom), and its rules in order
Rule      a test of the measurements, and the sentences of its finding: figure, cause, fix
Finding   what is printed and stored
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

Status = Literal["fault", "warning", "unclear", "ok", "skipped"]  # the worst first
STYLES: dict[Status, str] = dict(fault="bold red", warning="yellow", unclear="cyan", ok="green", skipped="dim")
STATUSES = tuple(STYLES)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        status: "unclear": nothing wrong was found, but nothing could have been.
        figure: one line of figures, or the reason why the check was skipped.
        meaning: the cause, and what it does to acceptance; `remedy`: what to do.
        probability: of a cause that was inferred from counts, among all hypotheses; None: it was seen.
    """

    status: Status
    figure: str
    meaning: str = ""
    remedy: str = ""
    group: str = ""
    check: str = ""
    probability: float | None = None


class NotMeasured(Exception):
    """A check cannot be made. Its message becomes a skipped finding; without a message there is no finding."""


def always(measured: Any) -> bool:
    """The test of the last rule."""
    return True


class Rule(NamedTuple):
    """The finding of measurements that pass a test; its texts are format strings, as "{m.cut:.0%} of {m.replies}"."""

    status: Status
    test: Callable[[Any], object]
    figure: str = "{m.figure}"
    meaning: str = ""
    remedy: str = ""


def graded(meaning: str, remedy: str, prefix: str = "", fine: str = "") -> tuple[tuple[Any, ...], ...]:
    """A fault at `m.level` 2, a warning at level 1 that begins with `prefix`, ok at level 0 after `fine`."""
    return (
        ("fault", lambda m: m.level == 2, "{m.figure}", meaning, remedy),
        ("warning", lambda m: m.level == 1, "{m.figure}", prefix + meaning, remedy),
        ("ok", always, fine + "{m.figure}"),
    )


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        measure: what is examined -> the measurements that the rules test; raises `NotMeasured`.
        needs: parts that `measure` reads; the check is skipped if one is missing.
        slow: a quick examination leaves the check out.
    """

    group: str
    name: str
    measure: Callable[[Any], SimpleNamespace]
    rules: tuple[Rule, ...]
    needs: tuple[str, ...] = ()
    slow: bool = False

    @staticmethod
    def of(
        group: str,
        name: str,
        measure: Callable[[Any], SimpleNamespace],
        *rules: tuple[Any, ...],
        needs: tuple[str, ...] = (),
        slow: bool = False,
    ) -> Check:
        """A check whose rules are rows of a table, see `Rule`."""
        return Check(group, name, measure, rules=tuple(Rule(*row) for row in rules), needs=needs, slow=slow)

    def find(self, examined: Any) -> Finding | None:
        try:
            m = self.measure(examined)
        except NotMeasured as reason:
            return self.finding("skipped", str(reason)) if str(reason) else None
        rule = next(rule for rule in self.rules if rule.test(m))
        return self.finding(rule.status, *(text.format(m=m) for text in (rule.figure, rule.meaning, rule.remedy)))

    def finding(self, status: Status, figure: str, meaning: str = "", remedy: str = "") -> Finding:
        return Finding(status, figure, meaning, remedy=remedy, group=self.group, check=self.name)


# ----------------------------------------------------------------------------
# Reports of findings.
# ----------------------------------------------------------------------------


def verdict(findings: Sequence[Finding]) -> Status:
    """The worst status of the findings; "skipped" only if all were skipped."""
    return min((f.status for f in findings), key=STATUSES.index, default="skipped")


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print one line per check, with cause and fix below it unless the finding before has the same."""
    printed = ""
    for group, members in groupby(findings, key=lambda f: f.group):
        console.print(Text(group, style="bold underline"))
        for finding in members:
            skipped = finding.status == "skipped"
            line = Text(f"{finding.status:8}", style=STYLES[finding.status])
            line.append(f"{finding.check}: ", style="dim" if skipped else "bold")
            line.append(finding.figure, style="dim" if skipped else "default")
            console.print(Padding(line, (0, 0, 0, 2)))
            if printed != finding.meaning + finding.remedy:
                print_advice(finding.meaning, finding.remedy, console, indent=12)
            printed = finding.meaning + finding.remedy or printed


def print_advice(meaning: str, remedy: str, console: Console, indent: int) -> None:
    """Print a cause and its fix, each if there is one."""
    for label, text in (("means", meaning), ("do", remedy)):
        if text:
            console.print(Padding(Text(f"{label}: {text}"), (0, 0, 0, indent)))


def print_summary(findings: Sequence[Finding], console: Console) -> None:
    """Print how many findings there are of each status, and the faults by name."""
    counts = Counter(f.status for f in findings)
    plural = {s: "s" if s in ("fault", "warning") and counts[s] != 1 else "" for s in STATUSES}
    faults = ", ".join(f.check for f in findings if f.status == "fault")
    line = ", ".join(f"{counts[s]} {s}{plural[s]}" for s in STATUSES) + (f": {faults}" if faults else "")
    console.print(Text(line, style=STYLES[verdict(findings)]))


def as_json(findings: Sequence[Finding], inputs: dict[str, Any]) -> dict[str, Any]:
    """The report as JSON data: verdict, what was examined, all findings."""
    names = ("group", "check", "status", "figure", "meaning", "remedy")
    rows = [{name: getattr(finding, name) for name in names} for finding in findings]
    return {"verdict": verdict(findings), "inputs": inputs, "findings": rows}
