"""Findings as a terminal report, grouped, with explanations only where something is not well; and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from outrider.evaluation.doctor.finding import Finding, Status

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "fault": "bold red", "skipped": "dim"}


def verdict(findings: Sequence[Finding]) -> Status:
    """The gravest status among the findings; "skipped" only where nothing else was found."""
    found = {f.result.status for f in findings}
    order: tuple[Status, ...] = ("fault", "warning", "ok")
    return next((status for status in order if status in found), "skipped")


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """One line a check; meaning and remedy below it where it is a warning or a fault."""
    for group, members in groupby(findings, key=lambda f: f.group):
        console.print(Text(group, style="bold underline"))
        for finding in members:
            result = finding.result
            line = Text(f"{result.status:8}", style=_STYLES[result.status])
            line.append(f"{finding.check}: ", style="bold" if result.status != "skipped" else "dim")
            line.append(result.figure, style="dim" if result.status == "skipped" else "default")
            console.print(Padding(line, (0, 0, 0, 2)))
            for label, text in (("means", result.meaning), ("do", result.remedy)):
                if text:
                    console.print(Padding(Text(f"{label}: {text}"), (0, 0, 0, 12)))
    console.print(Text(summary(findings), style=_STYLES[verdict(findings)]))


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many of each, and the faults by name."""
    counts = Counter(f.result.status for f in findings)
    order: tuple[Status, ...] = ("fault", "warning", "ok", "skipped")
    listed = ", ".join(f"{counts[s]} {s}{'s' if s in ('fault', 'warning') and counts[s] != 1 else ''}" for s in order)
    faults = [f.check for f in findings if f.result.status == "fault"]
    return f"{listed}" + (f": {', '.join(faults)}" if faults else "")


def as_json(findings: Sequence[Finding], inputs: dict[str, Any]) -> dict[str, Any]:
    """Machine-readable: verdict, what was examined, and every finding."""
    flat = [{"group": f.group, "check": f.check, **asdict(f.result)} for f in findings]
    return {"verdict": verdict(findings), "inputs": inputs, "findings": flat}
