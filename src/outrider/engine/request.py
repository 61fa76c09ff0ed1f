"""What goes into an engine, what comes out, and what it keeps of a request in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outrider.decoding.generate import FinishReason, StopRules, check_prompt
from outrider.decoding.text import TextStream
from outrider.sampling import PositionNoise, SamplingParams, SeededSource, SeenTokens
from outrider.target import Target


@dataclass(frozen=True)
class Request:
    """One prompt.

    At temperature 0, and with `params.coupled` at any, its tokens are the same in any company. Otherwise they depend on
    its seed and on how many drafts were verified in each step, which company may change.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    rules: StopRules = field(default_factory=StopRules)


@dataclass(frozen=True)
class Output:
    """What a step gave a request; `finish` is set on its last."""

    id: str
    tokens: list[int]
    text: str
    finish: FinishReason | None


@dataclass(frozen=True)
class StepRecord:
    """One engine step; seconds add up to its length.

    `requests` decoded, `drafting` of them with a block. `tokens` are the rows of the target forward, `prefill_tokens`
    among them; `accepted` drafts behind a stop are not counted. `running`, `waiting` and
    `used_blocks` are counted after the step. A simulated step leaves the same record, to be compared field by field.
    """

    seconds: float
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    requests: int
    drafting: int
    tokens: int
    prefill_tokens: int
    proposed: int
    admitted: int
    accepted: int
    committed: int
    running: int
    waiting: int
    used_blocks: int


class LiveRequest:
    """A request's tokens and everything that belongs to them.

    `session` is its drafter's while it runs; `unread` are tokens in the target's cache that the drafter has yet to
    read, with their taps [T, L, D].
    """

    def __init__(self, request: Request, target: Target) -> None:
        check_prompt(target, request.prompt)
        self.request, self.params = request, request.params
        self.tokens = list(request.prompt)
        self.last = min(len(self.tokens) + request.rules.max_new_tokens, target.max_context)
        self.source = SeededSource(request.params.seed)
        self.noise = PositionNoise(request.params.seed, target.vocab_size) if request.params.coupled else None
        self.seen = SeenTokens(target.vocab_size, request.params.repetition_penalty, self.tokens, target.device)
        self.text = TextStream(target.tokenizer, request.rules.stop_strings)
        self.stop_ids = request.rules.ids(target)
        self.session: Any = None
        self.unread: list[tuple[list[int], Tensor | None]] = []

    @property
    def unread_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.unread)

    def leave(self) -> None:
        """Forget what its KV blocks and its session held: it will be prefilled anew."""
        self.session = None
        self.unread.clear()

    def commit(self, tokens: Sequence[int]) -> Output:
        """Take the tokens of a round, up to the first that ends the response."""
        kept, stopped = self.text.cut(tokens, self.stop_ids)
        self.tokens += kept
        for token in kept:
            self.seen.add(token)
        finish: FinishReason | None = "stop" if stopped else "length" if len(self.tokens) == self.last else None
        return Output(self.request.id, kept, self.text.release(final=finish is not None), finish)
