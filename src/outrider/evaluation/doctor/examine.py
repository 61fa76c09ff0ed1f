"""Findings as a terminal report, grouped, with explanations only where something is not well; and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from outrider.evaluation.doctor.case import Case, Check, Finding, Need, Result, Status, fault, skipped
from outrider.evaluation.doctor.data import (
    chat_template,
    contamination,
    duplicates,
    ends,
    loss_mask,
    mask_in_data,
    on_policy,
    thinking_mode,
    token_ids,
)
from outrider.evaluation.doctor.drafter import (
    aux_indices,
    aux_order,
    block_layout,
    context_length,
    coverage,
    draft_vocabulary_order,
    embedding_and_head,
    fits_target,
    leak,
    mask_token,
    positions,
    rope_base,
    tensors,
    trained_against_served,
    training_record,
    vocabulary,
)

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


# ----------------------------------------------------------------------------
# All checks, in the order in which a person would look: files, data, wiring, serving.
# ----------------------------------------------------------------------------


_TEXT: tuple[Need, ...] = ("data", "target", "tokenizer")
_MODEL: tuple[Need, ...] = ("target", "drafter", "data", "working")
_BLOCK: tuple[Need, ...] = ("target", "drafter", "block", "data", "working")

CHECKS: tuple[Check, ...] = (
    Check("checkpoint", "tensors", ("drafter",), tensors),
    Check("checkpoint", "fits target", ("target", "drafter"), fits_target),
    Check("checkpoint", "vocabulary", ("target", "drafter"), vocabulary),
    Check("checkpoint", "embedding and head", ("target", "drafter", "working"), embedding_and_head),
    Check("checkpoint", "positions", ("target", "drafter", "block"), positions),
    Check("data", "loss mask", ("data",), loss_mask),
    Check("data", "token ids", ("data", "target"), token_ids),
    Check("data", "ends of responses", ("data", "target"), ends),
    Check("data", "chat template", _TEXT, chat_template),
    Check("data", "thinking mode", _TEXT, thinking_mode),
    Check("data", "on-policy", ("data", "target"), on_policy),
    Check("data", "mask token in text", ("data", "drafter", "block"), mask_in_data),
    Check("data", "draft vocabulary coverage", ("data", "drafter"), coverage),
    Check("data", "repeated prompts", ("data",), duplicates),
    Check("data", "evaluation prompts", (*_TEXT, "eval"), contamination),
    Check("wiring", "aux layer indices", _MODEL, aux_indices),
    Check("wiring", "aux layer order", _MODEL, aux_order),
    Check("wiring", "mask token", _BLOCK, mask_token),
    Check("wiring", "block layout", _BLOCK, block_layout),
    Check("wiring", "RoPE base", _BLOCK, rope_base),
    Check("wiring", "draft vocabulary order", _MODEL, draft_vocabulary_order),
    Check("serving", "leak", _BLOCK, leak),
    Check("serving", "trained = served", _MODEL, trained_against_served),
    Check("serving", "training record", _MODEL, training_record),
    Check("serving", "context length", _MODEL, context_length),
)


def examine(
    case: Case, on_check: Callable[[Check], None] = lambda check: None, checks: Sequence[Check] = CHECKS
) -> list[Finding]:
    """Run every check that its needs allow; one that breaks is itself a fault and stops nothing.

    Checks that the kind of drafter makes meaningless are one finding together.
    """
    findings = []
    foreign = case.missing("block") if case.loaded_checkpoint is not None else None
    for check in checks:
        if foreign is None or "block" not in check.needs:
            on_check(check)
            findings.append(Finding(check.group, check.name, _outcome(check, case)))
    if foreign is not None and (names := [check.name for check in checks if "block" in check.needs]):
        findings.append(Finding("checkpoint", "checks of block drafters", skipped(f"{foreign}: {', '.join(names)}")))
    return findings


def _outcome(check: Check, case: Case) -> Result:
    for need in check.needs:
        if reason := case.missing(need):
            return skipped(reason)
    try:
        return check.run(case)
    except Exception as error:
        return fault(
            f"the check itself broke: {type(error).__name__}: {error}",
            "What it looks at is so far from expected that it could not be examined.",
            "Correct the other findings first; report this if it stays.",
        )
