"""Run the doctor's checks and report their findings on the terminal or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from outrider.doctor import data, drafter
from outrider.doctor.case import Check, Finding, Inputs, Need, Status, fault, skipped

if TYPE_CHECKING:
    from outrider.doctor.server import Cause

_STYLES: dict[Status, str] = {
    "ok": "green",
    "unclear": "cyan",
    "warning": "yellow",
    "fault": "bold red",
    "skipped": "dim",
}


def verdict(findings: Sequence[Finding]) -> Status:
    """The worst status of the findings; "skipped" only if all were skipped."""
    found = {f.status for f in findings}
    order: tuple[Status, ...] = ("fault", "warning", "unclear", "ok")
    return next((status for status in order if status in found), "skipped")


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print one line per check, with meaning and remedy below it; what several share is printed with the first."""
    said = ""
    for group, members in groupby(findings, key=lambda f: f.group):
        console.print(Text(group, style="bold underline"))
        for finding in members:
            line = Text(f"{finding.status:8}", style=_STYLES[finding.status])
            line.append(f"{finding.check}: ", style="bold" if finding.status != "skipped" else "dim")
            line.append(finding.figure, style="dim" if finding.status == "skipped" else "default")
            console.print(Padding(line, (0, 0, 0, 2)))
            for label, text in (("means", finding.meaning), ("do", finding.remedy)):
                if text and said != finding.meaning + finding.remedy:
                    console.print(Padding(Text(f"{label}: {text}"), (0, 0, 0, 12)))
            said = finding.meaning + finding.remedy or said


def print_causes(causes: Sequence[Cause], console: Console) -> None:
    """Print what is wrong with a server, the worst first: how sure, by what, and what it means and asks for."""
    if not causes:
        return
    console.print(Text("what is wrong", style="bold underline"))
    for number, cause in enumerate(causes, 1):
        sure = "seen" if cause.probability is None else f"{cause.probability:.0%}"
        line = Text(f"{number}. {cause.cause} ({sure}): ", style=_STYLES[cause.status])
        line.append(cause.evidence, style="default")
        console.print(Padding(line, (0, 0, 0, 2)))
        for label, text in (("means", cause.meaning), ("do", cause.remedy)):
            if text:
                console.print(Padding(Text(f"{label}: {text}"), (0, 0, 0, 5)))


def print_summary(findings: Sequence[Finding], console: Console) -> None:
    """Print how many findings there are of each status."""
    console.print(Text(summary(findings), style=_STYLES[verdict(findings)]))


def replaced(findings: Sequence[Finding], newer: Sequence[Finding]) -> list[Finding]:
    """The findings with those of the same check replaced by the newer ones, in the order of the report."""
    found = {(f.group, f.check): f for f in (*findings, *newer)}
    order = [(check.group, check.name) for check in CHECKS]
    return sorted(found.values(), key=lambda f: order.index((f.group, f.check)) if (f.group, f.check) in order else -1)


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many of each, and the faults by name."""
    counts = Counter(f.status for f in findings)
    order: tuple[Status, ...] = ("fault", "warning", "unclear", "ok", "skipped")
    listed = ", ".join(f"{counts[s]} {s}{'s' if s in ('fault', 'warning') and counts[s] != 1 else ''}" for s in order)
    faults = [f.check for f in findings if f.status == "fault"]
    return f"{listed}" + (f": {', '.join(faults)}" if faults else "")


def as_json(findings: Sequence[Finding], inputs: dict[str, Any]) -> dict[str, Any]:
    """The report as JSON data: verdict, what was examined, all findings."""
    order = ("group", "check", "status", "figure", "meaning", "remedy")
    flat = [{name: getattr(finding, name) for name in order} for finding in findings]
    return {"verdict": verdict(findings), "inputs": inputs, "findings": flat}


# ----------------------------------------------------------------------------
# All checks, in the order of the report: files, data, wiring, serving.
# ----------------------------------------------------------------------------


_TEXT: tuple[Need, ...] = ("data", "target", "tokenizer")
_MODEL: tuple[Need, ...] = ("target", "drafter", "data", "working")
_BLOCK: tuple[Need, ...] = ("target", "drafter", "block", "data", "working")

CHECKS: tuple[Check, ...] = (
    Check("checkpoint", "tensors", ("drafter",), run=drafter.tensors),
    Check("checkpoint", "fits target", ("target", "drafter"), run=drafter.fits_target),
    Check("checkpoint", "vocabulary", ("target", "drafter"), run=drafter.vocabulary),
    Check("checkpoint", "embedding and head", ("target", "drafter", "working"), run=drafter.embedding_and_head),
    Check("checkpoint", "positions", ("target", "drafter", "block"), run=drafter.positions),
    Check("data", "loss mask", ("data",), run=data.loss_mask),
    Check("data", "token ids", ("data", "target"), run=data.token_ids),
    Check("data", "ends of responses", ("data", "target"), run=data.ends),
    Check("data", "chat template", _TEXT, run=data.chat_template),
    Check("data", "thinking mode", _TEXT, run=data.thinking_mode),
    Check("data", "on-policy", ("data", "target"), run=data.on_policy),
    Check("data", "mask token in text", ("data", "drafter", "block"), run=data.mask_in_data),
    Check("data", "draft vocabulary coverage", ("data", "drafter"), run=drafter.coverage),
    Check("data", "repeated prompts", ("data",), run=data.duplicates),
    Check("data", "evaluation prompts", (*_TEXT, "eval"), run=data.contamination),
    Check("wiring", "aux layer indices", _MODEL, run=drafter.aux_indices),
    Check("wiring", "aux layer order", _MODEL, run=drafter.aux_order, slow=True),
    Check("wiring", "mask token", _BLOCK, run=drafter.mask_token, slow=True),
    Check("wiring", "block layout", _BLOCK, run=drafter.block_layout),
    Check("wiring", "RoPE base", _BLOCK, run=drafter.rope_base, slow=True),
    Check("wiring", "draft vocabulary order", _MODEL, run=drafter.draft_vocabulary_order),
    Check("serving", "leak", _BLOCK, run=drafter.leak),
    Check("serving", "trained = served", _MODEL, run=drafter.trained_against_served),
    Check("serving", "training record", _MODEL, run=drafter.training_record),
    Check("serving", "context length", _MODEL, run=drafter.context_length, slow=True),
)

QUICK = tuple(check for check in CHECKS if not check.slow)
QUICK_SAMPLES, QUICK_TOKENS = 2, 16  # at most, in a quick examination
# After a quick examination: what it left out, and what it saw on few conversations.
LONG = tuple(check for check in CHECKS if check.slow or check.needs in (_MODEL, _BLOCK) or check.run is data.on_policy)


def left_out(inputs: Inputs) -> str:
    """What a quick examination leaves out, of checks and conversations."""
    names = ", ".join(check.name for check in CHECKS if check.slow)
    count = len(inputs.conversations)
    seen = f"; {min(inputs.samples, count)} of {count} conversations were run through the models" if count else ""
    return f"left out: {names}{seen}"


def examine(
    inputs: Inputs,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    checks: Sequence[Check] = CHECKS,
) -> list[Finding]:
    """Run every check whose needs are met; a check that raises is a fault and stops nothing.

    Checks of block drafters are one skipped finding together where the drafter is of another kind.
    """
    findings = []
    foreign = inputs.missing("block") if inputs.loaded_checkpoint is not None else None
    chosen = [check for check in checks if foreign is None or "block" not in check.needs]
    on_progress(0, len(chosen))
    for done, check in enumerate(chosen, 1):
        findings.append(replace(_outcome(check, inputs), group=check.group, check=check.name))
        on_progress(done, len(chosen))
    if foreign is not None and (names := [check.name for check in CHECKS if "block" in check.needs]):
        reason = f"{foreign}: {', '.join(names)}"
        findings.append(Finding("skipped", reason, group="checkpoint", check="checks of block drafters"))
    return findings


def _outcome(check: Check, inputs: Inputs) -> Finding:
    for need in check.needs:
        if reason := inputs.missing(need):
            return skipped(reason)
    try:
        return check.run(inputs)
    except Exception as error:
        return fault(
            f"the check itself broke: {type(error).__name__}: {error}",
            "What it looks at is so far from expected that it could not be examined.",
            "Correct the other findings first; report this if it stays.",
        )
