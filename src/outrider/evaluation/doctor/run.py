"""All checks, in the order in which a person would look: files, data, wiring, serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.evaluation.doctor import checkpoint, conversations, likelihood, serving, template, wiring
from outrider.evaluation.doctor.case import Case
from outrider.evaluation.doctor.finding import Check, Finding, Need, Result, fault, skipped

_TEXT: tuple[Need, ...] = ("data", "target", "tokenizer")
_MODEL: tuple[Need, ...] = ("target", "drafter", "data", "working")
_BLOCK: tuple[Need, ...] = ("target", "drafter", "block", "data", "working")

CHECKS: tuple[Check, ...] = (
    Check("checkpoint", "tensors", ("drafter",), checkpoint.tensors),
    Check("checkpoint", "fits target", ("target", "drafter"), checkpoint.fits_target),
    Check("checkpoint", "vocabulary", ("target", "drafter"), checkpoint.vocabulary),
    Check("checkpoint", "embedding and head", ("target", "drafter", "working"), checkpoint.embedding_and_head),
    Check("checkpoint", "positions", ("target", "drafter", "block"), checkpoint.positions),
    Check("data", "loss mask", ("data",), conversations.loss_mask),
    Check("data", "token ids", ("data", "target"), conversations.token_ids),
    Check("data", "ends of responses", ("data", "target"), conversations.ends),
    Check("data", "chat template", _TEXT, template.chat_template),
    Check("data", "thinking mode", _TEXT, template.thinking_mode),
    Check("data", "on-policy", ("data", "target"), likelihood.on_policy),
    Check("data", "mask token in text", ("data", "drafter", "block"), conversations.mask_in_data),
    Check("data", "draft vocabulary coverage", ("data", "drafter"), checkpoint.coverage),
    Check("data", "repeated prompts", ("data",), conversations.duplicates),
    Check("data", "evaluation prompts", (*_TEXT, "eval"), conversations.contamination),
    Check("wiring", "tap indices", _MODEL, wiring.tap_indices),
    Check("wiring", "tap order", _MODEL, wiring.tap_order),
    Check("wiring", "mask token", _BLOCK, wiring.mask_token),
    Check("wiring", "block layout", _BLOCK, wiring.block_layout),
    Check("wiring", "RoPE base", _BLOCK, wiring.rope_base),
    Check("wiring", "draft vocabulary order", _MODEL, wiring.draft_vocabulary_order),
    Check("serving", "leak", _BLOCK, serving.leak),
    Check("serving", "trained = served", _MODEL, serving.trained_against_served),
    Check("serving", "training record", _MODEL, serving.training_record),
    Check("serving", "context length", _MODEL, serving.context_length),
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
