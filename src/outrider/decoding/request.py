"""One request of an engine: what it asks for, what each round gives it, and its state between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from outrider.decoding.structured import Grammar
from outrider.decoding.text import TextStream
from outrider.decoding.trace import RoundTrace
from outrider.decoding.verification import Origin
from outrider.drafters.base import DraftCall
from outrider.sampling import (
    Constraint,
    PositionNoise,
    Randomness,
    RandomSource,
    SamplingParams,
    SeenTokens,
)
from outrider.target.model import DecodingTarget

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class StopRules:
    """When a response ends. `stop_ids` None: the target's own stop tokens; () to ignore them."""

    max_new_tokens: int = 256
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")

    def ids(self, target: DecodingTarget) -> frozenset[int]:
        """The stop tokens."""
        return target.eos_ids if self.stop_ids is None else frozenset(self.stop_ids)


def check_prompt(target: DecodingTarget, prompt: Sequence[int]) -> None:
    """A prompt must leave room for a response.

    Raises:
        ValueError: it is empty, does not fit the target's context, or has tokens the target does not know.
    """
    if bad := [token for token in prompt if not 0 <= token < target.vocab_size]:
        raise ValueError(
            f"prompt token {bad[0]} is outside {target.name}'s vocabulary of {target.vocab_size}: tokenise the "
            "prompt for this model."
        )
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token.")
    if len(prompt) >= target.max_context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and {target.name} reads {target.max_context}, the response included: "
            "shorten the prompt."
        )


@dataclass(frozen=True)
class Request:
    """A prompt to decode, with its sampling parameters and stops.

    At temperature 0, and with `params.coupled` at any, its tokens are the same in any company. Otherwise they depend on
    its seed and on how many drafts were verified in each step, which company may change; where drawing the drafts of a
    request beside it fails, its own are drawn anew.

    `most_drafts`: draft tokens of a step, 0 for plain decoding; None: as many as the drafter has. `logprobs`: its
    outputs tell the log-probability of each token and of so many of the likeliest; None: nothing. `trace`: its outputs
    tell what each round did, draft by draft. `grammar`: what its response must follow, compiled for the engine's
    target; None: nothing. `cache_salt`: it shares cached prefixes with requests of the same salt alone.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    rules: StopRules = field(default_factory=StopRules)
    most_drafts: int | None = None
    logprobs: int | None = None
    trace: bool = False
    grammar: Grammar | None = None
    cache_salt: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token and of the likeliest tokens (id, log-probability), likeliest first.

    They are the target's own: of log softmax of its logits, before the grammar, penalties, temperature, top-k, top-p
    and min-p.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Output:
    """Tokens and text that one round gave a request.

    Attributes:
        finish: set on the request's last output.
        seed: what it is sampled with; None if another engine does not say.
        error: what ended it, if `finish` is "error".
        proposed: drafts, verified or not.
        verified: drafts that the target judged, for `reach` positions (a tree has several drafts at one).
        accepted: drafts accepted. `reach` and `accepted` leave out what is behind a stop; the counts are 0 if another
            engine does not say.
        confidences: of the proposed drafts of a chain; () if the drafter has none.
        origins: where each token comes from.
        draft_seconds, verify_seconds, other_seconds: the request's share of the step.
        cached_tokens: of its prompt, which the prefix cache had.
        logprobs, trace: of its tokens, if the request asked for them.
    """

    id: str
    tokens: list[int]
    text: str
    finish: FinishReason | None
    seed: int | None = None
    error: Exception | None = None
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    reach: int = 0
    confidences: Sequence[float] = ()
    origins: Sequence[Origin] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    trace: RoundTrace | None = None

    @property
    def seconds(self) -> float:
        """The request's share of the step, or its steps."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds


@dataclass(frozen=True)
class StepRecord:
    """Counts and times of one engine step; seconds add up to its length.

    `requests` decoded, `drafting` of them with a draft. `tokens` are the rows of the target forward, `prefill_tokens`
    among them; `accepted` drafts behind a stop are not counted. `preempted` requests gave up their KV blocks before it.
    `running`, `waiting` and `used_blocks` are counted after the step. A simulated step leaves the same record, to be
    compared field by field.
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
    preempted: int
    running: int
    waiting: int
    used_blocks: int


class RequestState:
    """What decoding knows of one request between two rounds.

        committed tokens x_0 .. x_{n-1};   target cache and draft cache hold x_0 .. x_{n-2};   anchor = x_{n-1}

    Attributes:
        tokens: committed tokens, the prompt first and the anchor last.
        capacity: most committed tokens, the prompt included.
        seed: of its random draws.
        source, noise: where its random draws come from; `noise` for coupled sampling, else None.
        seen: the tokens so far, as penalties read them.
        constraint: what its response must follow; None: nothing. Such a response ends at the target's stop tokens, too,
            whatever the rules say: nothing can follow a complete one.
        text: its output text, cut at stop strings.
        rounds: that have given it tokens.
        session: its drafter's; None in plain decoding and while it does not run.
        unread: tokens in the target's cache that the drafter has yet to read, with aux hidden states [T, L, D].
        recurrent: its states, if the target has recurrent layers (`DecodingTarget.new_states`), while it runs.

    Raises:
        ValueError: the prompt is empty or does not fit the target, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        target: DecodingTarget,
        prompt: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        randomness: Randomness | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        check_prompt(target, prompt)
        self.params = params
        self.tokens = list(prompt)
        self._prompt_length = len(prompt)
        self.capacity = min(len(prompt) + rules.max_new_tokens, target.max_context)
        self.seed = params.request_seed()
        randomness = randomness or Randomness()
        self.source: RandomSource = randomness.source(self.seed)
        self.noise: PositionNoise | None = None
        if params.coupled:
            self.noise = randomness.noise(self.seed, target.vocab_size)
        self.seen = SeenTokens(target.vocab_size, params, prompt, device=target.device)
        self.text = TextStream(target.tokenizer, rules.stop_strings)
        self.constraint: Constraint | None = None if grammar is None else grammar.start()
        self.stop_ids = rules.ids(target) if grammar is None else rules.ids(target) | grammar.eos_ids
        self.rounds = 0
        self.session: Any = None
        self.unread: list[tuple[list[int], Tensor | None]] = []
        self.unread_tokens = 0
        self.recurrent: Any = None

    @property
    def anchor(self) -> int:
        """The last committed token, which is in no cache yet."""
        return self.tokens[-1]

    @property
    def response(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self._prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.capacity - len(self.tokens)

    def draft_call(self, slots: int | None = None) -> DraftCall:
        """A call for a draft no deeper than what may be committed besides the target's own token.

        Args:
            slots: most draft tokens in all, branches included; None: as many as the drafter has.
        """
        deepest = self.remaining - 1
        return DraftCall(
            self.session,
            self.anchor,
            self.params,
            seen=self.seen,
            source=self.source,
            limit=deepest if slots is None else min(slots, deepest),
            noise=self.noise,
            position=len(self.tokens),
            nodes=slots,
            constraint=self.constraint,
        )

    def commit(self, tokens: Sequence[int]) -> tuple[list[int], str, FinishReason | None]:
        """Take a round's tokens up to the first that ends the response: (tokens kept, text released, why it ended)."""
        self.rounds += 1
        kept, stopped = self.text.cut(tokens, self.stop_ids)
        self.tokens += kept
        for token in kept:
            self.seen.add(token)
            if self.constraint is not None:
                self.constraint.commit(token)
        finish: FinishReason | None = "stop" if stopped else "length" if self.remaining == 0 else None
        return kept, self.text.release(final=finish is not None), finish

    def leave(self) -> None:
        """Forget what its KV blocks, states and session held: it is prefilled anew when it runs again."""
        self.session = self.recurrent = None
        self.all_read()

    def leave_unread(self, tokens: list[int], aux_TLD: Tensor | None) -> None:
        """Note tokens, with their aux hidden states, that the drafter has yet to read."""
        self.unread.append((tokens, aux_TLD))
        self.unread_tokens += len(tokens)

    def all_read(self) -> None:
        """The drafter has read them, or never will."""
        self.unread.clear()
        self.unread_tokens = 0
