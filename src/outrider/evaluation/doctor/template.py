"""Were the prompts rendered as they will be when the drafter serves?

    prompt = prefix + the user's words + suffix        prefix and suffix: what the chat template puts around any message

The suffix is the generation prompt, and the thinking mode is part of it. A drafter trained behind another template, or
with thinking on, meets contexts it has never seen: fluent drafts, low acceptance. Recorded digests and flags are
compared where there are any; otherwise the template's own shell is looked for in the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import Chat, render
from outrider.data.samples import Reply
from outrider.evaluation.doctor.case import Case
from outrider.evaluation.doctor.finding import Result, fault, ok, skipped, warning

_MARKERS = ("<think>", "</think>", "<thinking>", "</thinking>", "<|channel|>analysis")
_LOOKED_AT = 200  # replies, evenly spread
_FEW, _MOST = 0.05, 0.95


@dataclass(frozen=True)
class Shell:
    """What the template puts around a first user message, as tokens."""

    prefix: list[int]
    suffix: list[int]

    def before(self, prompt: Sequence[int]) -> bool:
        return list(prompt[: len(self.prefix)]) == self.prefix

    def after(self, prompt: Sequence[int]) -> bool:
        return list(prompt[len(prompt) - len(self.suffix) :]) == self.suffix


def shell(tokenizer: PreTrainedTokenizerBase, thinking: bool) -> Shell:
    """Found by rendering messages that share neither beginning nor end."""
    first, second = (render(tokenizer, [text], [], thinking=thinking) for text in ("alpha 1", "Zulu ?"))
    return Shell(_shared_beginning(first, second), _shared_beginning(first[::-1], second[::-1])[::-1])


def _shared_beginning(first: list[int], second: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def shells(case: Case) -> list[Shell]:
    """The template's shells in the serving mode and the other one; none for a base model."""
    tokenizer = case.target.tokenizer
    assert tokenizer is not None
    return [shell(tokenizer, on) for on in (case.thinking, not case.thinking)] if tokenizer.chat_template else []


def content(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], known: Sequence[Shell]) -> str:
    """The user's words of a first turn, as far as the template lets them be told apart."""
    for around in known:
        if around.before(prompt) and around.after(prompt):
            return str(tokenizer.decode(list(prompt[len(around.prefix) : len(prompt) - len(around.suffix)])))
    return str(tokenizer.decode(list(prompt), skip_special_tokens=True))


def _records(case: Case, name: str) -> dict[str, Any]:
    """A setting as the responses file and the drafter's record have it, where they do."""
    trained = {} if case.loaded_checkpoint is None else case.loaded_checkpoint.metadata.get("responses", {})
    records = {"the data": case.settings.get(name), "the drafter": trained.get(name)}
    return {where: value for where, value in records.items() if value is not None}


def _first_turns(case: Case) -> list[Reply]:
    first = [r for r in case.replies if r.turn == 0]
    return first[:: max(1, len(first) // _LOOKED_AT)][:_LOOKED_AT]


def chat_template(case: Case) -> Result:
    """Do the prompts in the data have the shape that today's template gives them?"""
    tokenizer = case.target.tokenizer
    assert tokenizer is not None
    now = Chat.of(case.target).template_sha256
    other = {w: str(v)[:12] for w, v in _records(case, "chat_template_sha256").items() if v != now}
    remedy = "Serve with the template of training, or regenerate the responses and train with today's."
    if other:
        recorded = " and ".join(f"{where} {digest}" for where, digest in other.items())
        return fault(
            f"the chat template is {now[:12]}; recorded by {recorded}",
            "The chat template changed since the responses were made: the drafter serves contexts it never saw.",
            remedy,
        )
    if not tokenizer.chat_template:
        return ok("no chat template, prompts are plain text")
    prompts = [r.prompt for r in _first_turns(case)]
    if not prompts:
        return skipped("the data has no first turns")
    known = shells(case)
    begins = _share(prompts, lambda p: any(s.before(p) for s in known))
    ends = _share(prompts, lambda p: any(s.after(p) for s in known))
    figure = f"{begins:.0%} of {len(prompts)} prompts begin and {ends:.0%} end as the template has it"
    if ends < _MOST:
        wanted = tokenizer.decode(known[0].suffix)
        return fault(
            figure,
            f"Prompts should end with {wanted!r} before the response begins; these were made with another template, or "
            "without its generation prompt.",
            remedy,
        )
    if begins < _MOST:
        return warning(
            figure,
            "Prompts begin otherwise: system prompts or tools of their own, a template that prints the date, or "
            "another template.",
            "If the data brings its own system prompts, ignore this; else " + remedy[0].lower() + remedy[1:],
        )
    same = _share(
        prompts,
        lambda p: any(render(tokenizer, [content(tokenizer, p, known)], [], thinking=on) == p for on in (False, True)),
    )
    if same < _MOST:
        return warning(
            f"{figure}; {same:.0%} are rendered the same again",
            "The tokenizer now splits the same text into other tokens, or the template changes what users write.",
            "Check that tokenizer and template are those of training.",
        )
    return ok(f"{figure}, {same:.0%} rendered the same again")


def thinking_mode(case: Case) -> Result:
    """Was the data made in the thinking mode the drafter is to serve in?"""
    tokenizer = case.target.tokenizer
    assert tokenizer is not None
    chosen = _first_turns(case)
    if not chosen:
        return skipped("the data has no first turns")
    texts = [str(tokenizer.decode(r.response)) for r in chosen]
    marked = sum(any(m in text for m in _MARKERS) for text in texts) / len(texts)
    records = _records(case, "thinking")
    if len(set(records.values())) > 1:
        return fault(
            "; ".join(f"{where}: thinking {'on' if on else 'off'}" for where, on in records.items()),
            "The drafter was trained on responses of the other mode than these.",
            "Examine it with the data it was trained on, or train it on these.",
        )
    on = bool(next(iter(records.values()))) if records else _made_thinking(tokenizer, chosen)
    mode = {True: "on", False: "off", None: "not recorded"}
    figure = f"data: thinking {mode[on]}, serving: {mode[case.thinking]}; {marked:.0%} of responses hold thinking marks"
    if on is not None and on != case.thinking:
        return fault(
            figure,
            "The drafter was trained on the other mode: its responses begin differently and read differently.",
            f"Serve with thinking {mode[on]}, or regenerate the responses with it {mode[case.thinking]} "
            "(tell the doctor what will serve with --thinking or --no-thinking).",
        )
    if on is False and marked > _FEW:
        return fault(
            figure,
            "Responses think although the prompts ask them not to: they were not made with these prompts.",
            "Regenerate the responses from the prompts as they are rendered.",
        )
    if on is None and _FEW < marked < _MOST:
        return warning(
            figure,
            "Two modes are mixed in one file.",
            "Regenerate with one setting for all conversations.",
        )
    return ok(figure)


def _made_thinking(tokenizer: PreTrainedTokenizerBase, chosen: Sequence[Reply]) -> bool | None:
    """The mode the data was made in, read off its generation prompts; None where the template has one for both."""
    if not tokenizer.chat_template:
        return None
    off, on = (shell(tokenizer, thinking) for thinking in (False, True))
    if off.suffix == on.suffix:
        return None
    prompts = [r.prompt for r in chosen]
    shares = {False: _share(prompts, off.after), True: _share(prompts, on.after)}
    modes = [mode for mode, share in shares.items() if share > 0.5]
    return modes[0] if len(modes) == 1 else None


def _share(prompts: Sequence[list[int]], test: Any) -> float:
    return sum(bool(test(p)) for p in prompts) / len(prompts)
