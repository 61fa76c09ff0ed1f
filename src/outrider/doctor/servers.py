"""The doctor of a running server: it asks, counts, replays, and judges by the rules at the end of this file.

    questions -> one at a time, greedy and sampled; a few again; all at once      text and counts of every answer
    answers   -> Replay (replay.py): what a correct drafter accepts on that text, and one with each known fault
    CHECKS    -> does it answer, are its counts possible, is its greedy text the target's and its sampled text drawn
                 from it, does it render prompts as we do, are drafts cut, is acceptance as expected, and if not, why

Counts are read from the first of these that is there: the rounds of an answer's trace (ours) or of its detailed record
(vLLM with --per-request-spec-decode-metrics detailed), its summary (vLLM, SGLang, ours), the difference of the counters
on /metrics before and after it, and `timings` (llama.cpp, mlx-vlm). A server that fails is examined as far as it got.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from operator import attrgetter, mul
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text as Line
from transformers import PreTrainedTokenizerBase

from outrider.backends.base import NO_PENALTIES, Counts, Round
from outrider.backends.openai import Endpoint, OpenAIClient, shown_url
from outrider.backends.registry import servers
from outrider.data.chat import render
from outrider.data.responses import Sample
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.doctor.evidence import STATUSES, STYLES, Check, Finding, NotMeasured, Status, always, print_advice
from outrider.doctor.replay import HEALTHY, Hypothesis, Replay, Text, length_of
from outrider.drafters.base import DrafterWeights
from outrider.evaluation.evaluate import TIE_GAP
from outrider.target.model import Target
from outrider.utils.documents import parse_json
from outrider.utils.terminal import printable

# Fields that are sent beside OpenAI's: all of them, or fewer if the server refuses.
_KNOWN: dict[str, Any] = {"return_token_ids": True, "trace": True, "repetition_penalty": 1.0, **NO_PENALTIES}
_FIELDS: tuple[dict[str, Any], ...] = ({**_KNOWN, "return_spec_tokens_details": True}, _KNOWN, {})
_REPORTING = ("return_token_ids", "trace", "return_spec_tokens_details")  # those that change no text
_REFUSED = (400, 404, 422)
_AGAIN = 4  # questions that are asked twice
_PLAIN = 2  # questions that are asked without fields beside OpenAI's
_TOGETHER = 8  # at most, at once
_SPLITS = 8  # tokens that a text has more, at most, when it is split again
_TIE_BFLOAT16 = 0.25  # logits: two steps of bfloat16 between 16 and 32
_ERRORS = 0.05  # share of tokens that are not the target's: more is another target
_UNLIKELY, _LESS_LIKELY = 6.0, 0.5  # sampled text of lower log-probability: standard deviations, and nats a token
_CLEAR = 15.0  # log-likelihood that a fault must gain over none
_COST = 0.05  # share of the accepted drafts that a fault must cost
_DROP = 0.1  # share of the accepted drafts, between two ways of asking the same
_SHOWN = 3  # likely causes
_BROKEN = (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError)  # no answer, or no such answer


@dataclass(frozen=True)
class Question:
    """A prompt: its tokens, the same as a chat's fields, and the kind of text that it asks for."""

    kind: str
    tokens: tuple[int, ...]
    chat: Mapping[str, Any]


@dataclass(frozen=True)
class ServerAnswer:
    """One answer of a server.

    Attributes:
        tokens: ids from the server (`exact`), or its text split again.
        counts: None: the server reports nothing of its drafts.
        prompt: ids that the server says it read.
        counters: counts of /metrics, if the answer itself reports counts, too.
    """

    question: Question
    temperature: float
    tokens: tuple[int, ...]
    exact: bool
    counts: Counts | None
    prompt: tuple[int, ...] | None = None
    prompt_count: int | None = None
    counters: Counts | None = None

    @property
    def verified(self) -> list[int]:
        """How many drafts each round verified, if the server describes rounds."""
        return [one.verified for one in self.counts.described] if self.counts is not None else []

    @property
    def varies(self) -> bool:
        """Whether the server chooses round by round how many drafts it verifies."""
        return len(set(self.verified)) > 1 or 0 in self.verified


@dataclass
class ServerClient:
    """Asks one server, one question after the other or several at once.

    Attributes:
        model: as the server calls the target; `target`: what it should serve.
        timeout: seconds that an answer may take.
        thinking: the mode that prompts were rendered in here; it is not sent.
        fields: index into _FIELDS; `silent`: questions without an answer since the last answer.
    """

    endpoint: Endpoint
    model: str
    target: Target
    _: KW_ONLY
    max_new_tokens: int
    timeout: float
    thinking: bool = False
    fields: int = 0
    failures: list[str] = field(default_factory=list)
    silent: int = 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    def ask(
        self, questions: Sequence[Question], temperature: float, together: bool = False, plain: bool = False
    ) -> list[ServerAnswer | None]:
        """Answers in the order of the questions; None if there was none, and `failures` says why.

        Args:
            together: all at once.
            plain: without the fields that switch penalties off, as most clients ask.
        """

        async def asked(client: OpenAIClient) -> list[ServerAnswer | None]:
            one = partial(self._one, client, temperature=temperature, plain=plain, counted=not together)
            if together:
                return list(await asyncio.gather(*(one(question, seed=0) for question in questions)))
            answers = list[ServerAnswer | None]()
            for seed, question in enumerate(questions):
                if self.silent >= _AGAIN:
                    break  # it answers no more: further questions would only wait
                answers.append(await one(question, seed=seed))
            return answers + [None] * (len(questions) - len(answers))

        return self._run(asked)

    def render(self, question: Question) -> ServerAnswer | None:
        """How the server's own template renders a chat; None if it has none, or does not tell."""
        body = {"model": self.model, "max_tokens": 1, "temperature": 0.0, **question.chat}
        try:
            return self._read(question, 0.0, self._run(partial(self._post, body=body, chat=True)))
        except _BROKEN:
            return None

    def _run(self, asked: Callable[[OpenAIClient], Any]) -> Any:
        async def closed() -> Any:
            client = self.endpoint.client(self.timeout)
            try:
                return await asked(client)
            finally:
                await client.aclose()

        return asyncio.run(closed())

    async def _one(
        self, client: OpenAIClient, question: Question, *, temperature: float, seed: int, counted: bool, plain: bool
    ) -> ServerAnswer | None:
        body = {"model": self.model, "max_tokens": self.max_new_tokens, "temperature": temperature}
        body |= {"prompt": list(question.tokens), "seed": seed}
        try:
            before = self.endpoint.readings() if counted else {}
            data = await self._post(client, body, chat=False, plain=plain)
            self.silent = 0
            after = self.endpoint.readings() if counted else {}
            return self._read(question, temperature, data, counters=between(before, after))
        except _BROKEN as error:
            self.failures.append(self.endpoint.printable(f"{type(error).__name__}: {error}"))
            self.silent += 1
            return None

    async def _post(self, client: OpenAIClient, body: Mapping[str, Any], chat: bool, plain: bool = False) -> Any:
        while True:
            fields = {name: value for name, value in _FIELDS[self.fields].items() if not plain or name in _REPORTING}
            answer = await client.post({**body, **fields}, chat)
            if answer.status_code in _REFUSED and self.fields + 1 < len(_FIELDS):
                self.fields += 1
                continue
            if not answer.is_success:
                raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
            return parse_json(answer.text)

    def _read(
        self, question: Question, temperature: float, data: Mapping[str, Any], counters: Counts | None = None
    ) -> ServerAnswer:
        choice = data["choices"][0]
        ids = choice.get("token_ids")
        text = choice.get("text") if "text" in choice else (choice.get("message") or {}).get("content")
        tokens = ids if ids is not None else self.tokenizer(text or "", add_special_tokens=False)["input_ids"]
        tokens = [int(token) for token in tokens]
        stops = sorted(self.target.eos_ids)
        if ids is None and choice.get("finish_reason") == "stop" and len(stops) == 1:
            tokens += stops
        prompt = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
        record = counts_of(data, len(tokens))
        counts = better_of(record, counters)
        answer = ServerAnswer(question, temperature, tuple(tokens), exact=ids is not None, counts=counts)
        count, prompt = (data.get("usage") or {}).get("prompt_tokens"), None if prompt is None else tuple(prompt)
        return replace(answer, prompt=prompt, prompt_count=count, counters=counters if record is not None else None)


# ----------------------------------------------------------------------------
# What servers count.
# ----------------------------------------------------------------------------


def counts_of(data: Mapping[str, Any], tokens: int) -> Counts | None:
    """What an answer of so many tokens says of its rounds; None if it says nothing."""
    if trace := data["choices"][0].get("trace"):
        record = (data.get("metrics") or {}).get("speculative_decoding") or {}
        return _counts_of_trace(trace, record.get("num_spec_tokens"))
    counts = (engine.counts(data, tokens) for engine in servers())
    return next((one for one in counts if one is not None), None)


def better_of(record: Counts | None, counters: Counts | None) -> Counts | None:
    """The answer's own record, unless that has sums alone and /metrics counted the same drafts exactly."""
    if record is None or counters is None:
        return record or counters
    same = record.accepted_K is None and counters.accepted == record.accepted
    return counters if same and counters.rounds else record


def _counts_of_trace(trace: Sequence[Mapping[str, Any]], slots: int | None) -> Counts | None:
    """Counts of the rounds that the drafter drafted for; in others the text was copied, or nothing was verified."""
    rounds, hits, start = list[Round](), list[int](), 0
    for one in trace:
        drafts = [draft for draft in one["drafts"] if draft["outcome"] != "left out"]
        verified = len(drafts) if one["source"] == "drafter" else 0
        accepted = sum(draft["outcome"] == "accepted" for draft in drafts) if verified else 0
        rounds.append(Round(start, verified, accepted, tokens=len(one["tokens"])))
        start += len(one["tokens"])
        hits += [accepted] if verified else []
    slots = slots or max(one.verified for one in rounds)
    if not slots:
        return None
    accepted_K = tuple(sum(hit > k for hit in hits) for k in range(slots))
    drafted = sum(one.verified for one in rounds)
    return Counts(len(hits), sum(hits), accepted_K, drafted=drafted, slots=slots, described=tuple(rounds))


def between(first: Mapping[str, Sequence[float]], last: Mapping[str, Sequence[float]]) -> Counts | None:
    """What /metrics counted between two readings of the page; None if it counts no drafts."""
    for names in (engine.metrics for engine in servers()):
        if names.rounds is None or names.accepted is None or names.rounds not in last:
            continue
        rounds, accepted, drafted = (
            round(sum(last.get(name or "", ())) - sum(first.get(name or "", ())))
            for name in (names.rounds, names.accepted, names.drafted)
        )
        new = names.accepted_K(last)
        old = names.accepted_K(first) or [0.0] * len(new)
        by_position = tuple(round(b - a) for a, b in zip(old, new, strict=True))
        return Counts(rounds, accepted, by_position or None, drafted=drafted, slots=len(new) or None)
    return None


def impossible(answer: ServerAnswer) -> str | None:
    """Why the counts of an answer cannot be those of its text; None if they can."""
    counts = answer.counts
    if counts is None:
        return None
    tokens, spare = len(answer.tokens), (counts.slots or counts.drafted or 0) + 1
    given = _given(counts)
    if min(counts.rounds, counts.accepted) < 0:
        return f"counters fell ({counts.rounds} rounds, {counts.accepted} accepted)"
    if counts.drafted is not None and counts.accepted > counts.drafted:
        return f"{counts.accepted} drafts accepted of {counts.drafted} drafted"
    by_position = counts.accepted_K or ()
    if by_position and (sum(by_position) != counts.accepted or list(by_position) != sorted(by_position, reverse=True)):
        return f"accepted by position {list(by_position)}, {counts.accepted} in all"
    if by_position and by_position[0] > counts.rounds:
        return f"{by_position[0]} first drafts accepted in {counts.rounds} rounds"
    # Rounds that end after the text count unseen tokens, and a prefill or a round without drafts is not counted.
    if given > tokens + spare or (counts.slots and tokens > 3 * spare and given < tokens / 2):
        return f"{counts.rounds} rounds with {counts.accepted} accepted drafts cannot have given {tokens} tokens"
    return None


def _given(counts: Counts) -> int:
    """Tokens that the rounds gave."""
    return counts.rounds + counts.accepted + sum(r.tokens for r in counts.described if not r.verified)


def _fitting(answer: ServerAnswer) -> ServerAnswer:
    """The answer with the counts of /metrics if these contradict its own record and fit its length better."""
    counters, record, tokens = answer.counters, answer.counts, len(answer.tokens)
    if counters is None or record is None or _agree(counters, record):
        return answer
    better = abs(_given(counters) - tokens) < abs(_given(record) - tokens)
    return replace(answer, counts=counters, counters=record) if better else answer


def _agree(counters: Counts, record: Counts) -> bool:
    if record.described:  # rounds with copies are counted as well
        return counters.accepted >= record.accepted
    return (counters.rounds, counters.accepted) == (record.rounds, record.accepted)


def length_of_counts(counts: Iterable[Counts | None]) -> float:
    """Accepted length of several answers together."""
    known = [c for c in counts if c is not None]
    return 1 + sum(c.accepted for c in known) / max(1, sum(c.rounds for c in known))


def spread_of_length(rates_K: Sequence[float], rounds: int) -> float:
    """Standard deviation of the accepted length of so many rounds with these conditional acceptances."""
    reached = list(accumulate(rates_K, mul))  # P(k drafts or more are accepted)
    square = sum((2 * k - 1) * p for k, p in enumerate(reached, start=1))
    return math.sqrt(max(0.0, square - sum(reached) ** 2) / max(1, rounds))


def _by_position(counts: Sequence[Counts]) -> list[int] | None:
    if not counts or any(c.accepted_K is None for c in counts):
        return None
    slots = max(len(c.accepted_K or ()) for c in counts)
    return [sum((c.accepted_K or ())[k] for c in counts if k < len(c.accepted_K or ())) for k in range(slots)]


def _rates(counts: Sequence[Counts]) -> list[float]:
    """Acceptance at each position, of the rounds that reached it; empty if positions are not reported."""
    hits = _by_position(counts)
    if hits is None:
        return []
    tries = [sum(c.reached_K[k] for c in counts if k < len(c.reached_K)) for k in range(len(hits))]
    return [hit / try_ if try_ else 0.0 for hit, try_ in zip(hits, tries, strict=True)]


# ----------------------------------------------------------------------------
# Evidence: the answers, and what a replay of their text gives.
# ----------------------------------------------------------------------------


@dataclass
class Evidence:
    """Answers of one server, and what follows from them.

    Attributes:
        asked: number of questions; `answers`: to those that were answered.
        again: greedy questions once more, by the way of asking: "again" alone (prompts are cached by now), "together"
            all at once, "plain" as most clients ask.
        baseline: answers of the same server without a drafter to the greedy questions.
        rendered: chats as the server renders them.
        others: further checkpoints that the server may have loaded, by name.
    """

    client: ServerClient
    weights: DrafterWeights
    asked: int
    answers: list[ServerAnswer]
    again: Mapping[str, Sequence[ServerAnswer | None]] = field(default_factory=dict)
    baseline: Sequence[ServerAnswer | None] | None = None
    rendered: Sequence[ServerAnswer | None] = ()
    others: Mapping[str, DrafterWeights] = field(default_factory=dict)
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return self.client.target

    @cached_property
    def greedy(self) -> list[ServerAnswer]:
        return [a for a in self.answers if a.temperature == 0]

    @cached_property
    def judged(self) -> list[ServerAnswer]:
        """The answers with counts that can be those of their text, or with none."""
        if not any(a.counts.rounds for a in self.answers if a.counts is not None):
            return self.answers
        return [replace(a, counts=None) if impossible(a) else a for a in map(_fitting, self.answers)]

    @cached_property
    @torch.inference_mode()
    def replayed(self) -> tuple[Replay, list[ServerAnswer]]:
        """The replay of the answers that fit the target, and these with their tokens as they were split here."""
        self.on_progress("replay", 0, 1)
        pairs = [(a, text) for a in self.judged if (text := _text(self.target, self.weights, a)) is not None]
        kept = [replace(answer, tokens=text.tokens) for answer, text in pairs]
        return Replay(self.target, self.weights, [text for _, text in pairs]), kept

    @cached_property
    def chosen(self) -> list[int]:
        """Places of the replayed answers whose counts are compared; text of another target says nothing of drafts."""
        counting = [(i, a) for i, a in enumerate(self.replayed[1]) if a.counts is not None and a.counts.rounds]
        return [i for i, answer in counting if answer.temperature == 0 or not _unlikely(self.sampled)]

    @cached_property
    def compared(self) -> list[ServerAnswer]:
        return [self.replayed[1][place] for place in self.chosen]

    @cached_property
    def counts(self) -> list[Counts]:
        """Counts of the compared answers."""
        return [a.counts for a in self.compared if a.counts is not None]

    @property
    def incomparable(self) -> str | None:
        """Why acceptance cannot be compared; None if it can."""
        if not self.chosen:
            return "no counts that could be compared: the server reports none, or wrong ones"
        if not getattr(self.weights.config, "plain_logits", True):
            return "the drafter's logits are multiplied or capped, which the training forward here does not know"
        return None

    @cached_property
    def hypotheses(self) -> list[Hypothesis]:
        """No fault and the likely ones, the likeliest first; none if acceptance cannot be compared."""
        if self.incomparable is not None:
            return []
        return self.replayed[0].diagnose(self.chosen, self.others, partial(self.on_progress, "hypotheses"))

    @property
    def right(self) -> Hypothesis:
        """The hypothesis of no fault."""
        return next(h for h in self.hypotheses if h.fault is HEALTHY)

    @property
    def best(self) -> Hypothesis:
        return max(self.hypotheses, key=lambda h: h.log_likelihood)

    # What the checks below measure, one property per check.

    @cached_property
    def answered(self) -> SimpleNamespace:
        """How many questions were answered, and why the others were not."""
        reasons = ", ".join(f"{count} times {reason}" for reason, count in Counter(self.client.failures).most_common(2))
        figure = f"{len(self.answers)} of {self.asked} questions answered at {shown_url(self.client.endpoint.url)}"
        return SimpleNamespace(answered=len(self.answers), asked=self.asked, figure=figure, reasons=reasons)

    @cached_property
    def counters(self) -> SimpleNamespace:
        """Whether the server counts drafts, and whether its counts are possible and agree."""
        counted = [a for a in self.answers if a.counts is not None]
        pairs = [(a.counters, a.counts) for a in counted if a.counters is not None and a.counts is not None]
        unlike = [
            f"{page.rounds} rounds with {page.accepted} accepted drafts against {record.rounds} with {record.accepted}"
            for page, record in pairs
            if not _agree(page, record)
        ]
        bad = [reason for a in self.answers if (reason := impossible(_fitting(a)))]
        counts = [a.counts for a in self.judged if a.counts is not None]
        rounds, kind = sum(c.rounds for c in counts), "sums"
        if counts and (counts[0].described or counts[0].accepted_K):
            kind = "rounds described" if counts[0].described else "counts by position"
        m = SimpleNamespace(answers=len(counted), bad=len(bad), unlike=len(unlike))
        m.reason, m.difference = next(iter(bad), ""), next(iter(unlike), "")
        m.drafting = any(a.counts.rounds for a in counted if a.counts is not None)
        m.figure = f"{rounds} rounds, {sum(c.accepted for c in counts)} accepted drafts ({kind})"
        return m

    @cached_property
    @torch.inference_mode()
    def text(self) -> SimpleNamespace:
        """Whether greedy text is the target's, token by token, given the text before."""
        replay, answers = self.replayed
        assert self.target.tokenizer is not None
        gaps, first = list[float](), ""
        for index, answer in enumerate(answers):
            if answer.temperature != 0:
                continue
            here = replay.gaps(index)[: len(answer.tokens)]
            gaps += here
            at = next((n for n, gap in enumerate(here) if gap >= _TIE_BFLOAT16), None)
            if at is not None and not first:
                ids = answer.tokens[at], replay.likeliest(index, at)
                answer_, target_ = (printable(repr(self.target.tokenizer.decode([token]))) for token in ids)
                first = f"; first at token {at + 1} of an answer: {answer_} where {target_} is {here[at]:.2f} higher"
        other, errors = (sum(gap >= limit for gap in gaps) for limit in (TIE_GAP, _TIE_BFLOAT16))
        figure = f"{len(gaps) - other} of {len(gaps)} greedy tokens are the target's likeliest"
        if other:
            figure += f"; {other - errors} others within {_TIE_BFLOAT16} logits, {errors} farther{first}"
        unknown = "; --baseline-url shows whether the drafter causes it" if self.baseline is None else ""
        return SimpleNamespace(tokens=len(gaps), other=other, errors=errors, figure=figure, unknown=unknown)

    @cached_property
    @torch.inference_mode()
    def sampled(self) -> SimpleNamespace:
        """By how much sampled text is less likely than draws of the target's distribution.

        The other direction is no fault: top-p and top-k make text likelier.
        """
        replay, answers = self.replayed
        drawn = [index for index, answer in enumerate(answers) if answer.temperature > 0]
        tokens = sum(len(answers[index].tokens) for index in drawn)
        surprises = [replay.surprise(index) for index in drawn]
        excess, deviation = sum(e for e, _ in surprises), math.sqrt(sum(v for _, v in surprises))
        m = SimpleNamespace(tokens=tokens, excess=excess, deviation=deviation, nats=excess / max(1, tokens))
        m.likelier, m.deviations = -m.nats, excess / max(deviation, 1e-9)
        return m

    @cached_property
    def with_and_without(self) -> SimpleNamespace:
        """Whether greedy text is the same with and without the drafter."""
        if self.baseline is None:
            raise NotMeasured
        m = differences(self.target, self.greedy, self.baseline, names=("with", "without"))
        if not m.compared:
            raise NotMeasured("the baseline did not answer")
        return m

    @cached_property
    def defaults(self) -> SimpleNamespace:
        """Whether the server answers alike if a client sends no penalties, as most clients do."""
        m = differences(self.target, self.greedy, self.again["plain"], names=("without penalties", "by default"))
        if not m.compared:
            raise NotMeasured("the server takes no fields beside OpenAI's")
        return m

    @cached_property
    def prompt(self) -> SimpleNamespace:
        """Whether the server's chat endpoint renders prompts as they are rendered here."""
        tokenizer = self.client.tokenizer
        answers = [a for a in self.rendered if a is not None and (a.prompt or a.prompt_count)]
        if not answers:
            raise NotMeasured("the server has no chat endpoint, or does not report how many tokens a prompt has")

        def rendered_as(answer: ServerAnswer, tokens: Sequence[int]) -> bool:
            return answer.prompt_count == len(tokens) if answer.prompt is None else list(answer.prompt) == list(tokens)

        other = next((a for a in answers if not rendered_as(a, a.question.tokens)), None)
        m = SimpleNamespace(chats=len(answers), other=other, label=None, figure="")
        if other is not None:
            ours, theirs = list(other.question.tokens), other.prompt
            ways = _renderings(tokenizer, other.question, self.client.thinking).items()
            m.label = next((label for label, tokens in ways if rendered_as(other, tokens)), None)
            m.figure = f"the server's chat has {other.prompt_count} prompt tokens, ours {len(ours)}"
            if m.label is None and theirs is not None:
                m.figure += _difference(tokenizer, ours, list(theirs))
        return m

    @cached_property
    def asked_again(self) -> SimpleNamespace:
        """Whether as many drafts are accepted when prompts come a second time, and when several come at once."""
        if not self.counters.drafting or self.counters.bad or self.counters.unlike:
            raise NotMeasured("counts that are not reliable")
        figures, less = list[str](), None
        for way in ("again", "together"):
            pairs = [
                (a, b)
                for a, b in zip(self.greedy, self.again[way], strict=False)
                if b is not None and a.counts is not None and b.counts is not None and a.tokens == b.tokens
                if a.verified == b.verified or not (a.varies or b.varies)
            ]
            if not pairs or less is not None:
                continue
            first = length_of_counts(a.counts for a, _ in pairs)
            second = length_of_counts(b.counts for _, b in pairs)
            figures.append(f"{second:.2f} {way} against {first:.2f} ({len(pairs)} answers)")
            less = way if second - 1 < (1 - _DROP) * (first - 1) - 0.02 else None
        if not figures:
            raise NotMeasured("no counts of the same text asked twice")
        return SimpleNamespace(less=less, figure="accepted length " + ", ".join(figures))

    @cached_property
    def draft_length(self) -> SimpleNamespace:
        """How many tokens are drafted a round, and how many positions the drafter has."""
        if not self.chosen:
            raise NotMeasured
        counts, gamma = self.counts, self.weights.config.gamma
        slots, rounds = max(c.slots or 0 for c in counts), sum(c.rounds for c in counts)
        mean, drafts = sum(c.drafted or 0 for c in counts) / rounds, slots or gamma
        # Some servers cut drafts at the end of a response: those begun in its last `slots` tokens, by half on average.
        ends = len(counts) * drafts**2 / (2 * length_of_counts(counts) * rounds)
        m = SimpleNamespace(mean=mean, slots=slots, gamma=gamma, drafts=drafts, ends=ends)
        m.varies, m.figure = any(a.varies for a in self.compared), f"{slots or round(mean, 1)} drafts a round"
        return m

    @cached_property
    def acceptance(self) -> SimpleNamespace:
        """Acceptance against that of a correct implementation on the same text, and against that with each fault."""
        if self.incomparable is not None:
            raise NotMeasured(self.incomparable)
        right, best = self.right, self.best
        length, expected, rates = length_of_counts(self.counts), right.length, _rates(self.counts)
        shown = f"{_percent(rates)} at the positions, {_percent(right.rates_K)} expected" if rates else "no positions"
        m = SimpleNamespace(length=length, expected=expected, foreign=_foreign(self.text))
        m.chance = 2 * spread_of_length(right.rates_K, sum(c.rounds for c in self.counts))
        m.explained = best is not right and best.log_likelihood - right.log_likelihood >= _CLEAR
        m.cost = (expected - length) / max(expected - 1, 1e-9)
        m.figure = f"accepted length {length:.2f}, {expected:.2f} of a correct implementation on this text; {shown}"
        return m

    @cached_property
    def where(self) -> SimpleNamespace:
        """Accepted length and expected length by kind of text, temperature and length of the context."""
        if self.incomparable is not None:
            raise NotMeasured
        sizes = [len(a.question.tokens) + len(a.tokens) for a in self.compared]
        middle = sorted(sizes)[len(sizes) // 2]
        groups: dict[str, list[int]] = {}
        for index, (answer, size) in enumerate(zip(self.compared, sizes, strict=True)):
            side = f"up to {middle} tokens" if size <= middle else f"over {middle} tokens"
            for name in sorted({answer.question.kind, f"temperature {answer.temperature:g}", side}):
                groups.setdefault(name, []).append(index)
        parts = [
            f"{name} {length_of_counts(self.compared[i].counts for i in members):.2f} of "
            f"{length_of([self.right.expected[i] for i in members]):.2f}"
            for name, members in groups.items()
        ]
        return SimpleNamespace(figure="; ".join(parts))


def _text(target: Target, weights: DrafterWeights, answer: ServerAnswer) -> Text | None:
    """The answer and the target's continuation; None if it has no token, or does not fit the target."""
    prompt, response = list(answer.question.tokens), list(_tokens_of_text(target, answer))
    longest = len(prompt) + len(response) + weights.config.gamma + 2
    if not response or longest > target.max_context or max(response) >= target.vocab_size:
        return None
    more = generate(target, prompt + response, rules=StopRules(weights.config.gamma + 1, stop_ids=())).tokens
    tokens = prompt + response + list(more)
    sample = Sample(answer.question.kind, tokens, ((len(prompt), len(tokens)),))
    return Text(sample, len(response), answer.temperature, counts=answer.counts or Counts(0, 0))


def _tokens_of_text(target: Target, answer: ServerAnswer) -> tuple[int, ...]:
    """The answer's tokens. Text without token ids is split as the target decodes it, if the target decodes it."""
    if answer.exact or answer.temperature != 0 or not answer.tokens:
        return answer.tokens
    assert target.tokenizer is not None
    own = generate(target, list(answer.question.tokens), rules=StopRules(len(answer.tokens) + _SPLITS)).tokens
    text = target.tokenizer.decode(list(answer.tokens))
    fits = (end for end in range(1, len(own) + 1) if target.tokenizer.decode(own[:end]) == text)
    return tuple(own[: next(fits, 0)]) or answer.tokens


def _foreign(m: SimpleNamespace) -> bool:
    return bool(m.errors > _ERRORS * m.tokens)


def _unlikely(m: SimpleNamespace) -> bool:
    return bool(m.excess > _UNLIKELY * m.deviation and m.excess > _LESS_LIKELY * m.tokens)


@torch.inference_mode()
def differences(
    target: Target, answers: Sequence[ServerAnswer], others: Sequence[ServerAnswer | None], names: tuple[str, str]
) -> SimpleNamespace:
    """How many pairs of greedy answers are the same, differ at a tie, or differ elsewhere.

    Args:
        names: of both sides, for the description of the first difference.
    """
    same, ties, errors = 0, 0, list[str]()
    compared = [(a, b) for a, b in zip(answers, others, strict=False) if b is not None]
    for one, other in compared:
        at = next((n for n, (x, y) in enumerate(zip(one.tokens, other.tokens, strict=False)) if x != y), None)
        if at is None:
            same += 1
            continue
        context = torch.tensor([[*one.question.tokens, *one.tokens[:at]]], device=target.device)
        hidden_D = target.forward(context, target.new_cache(context.shape[1]), logits=0).hidden_BTD[0, -1]
        logits_V = target.logits(hidden_D.float())
        pair = [logits_V[tokens[at]].item() for tokens in (one.tokens, other.tokens)]
        line = f"token {at + 1}: {one.tokens[at]} ({pair[0]:.4f}) {names[0]}, "
        line += f"{other.tokens[at]} ({pair[1]:.4f}) {names[1]}"
        if abs(pair[0] - pair[1]) < _TIE_BFLOAT16:
            ties += 1
            kind = "float32" if abs(pair[0] - pair[1]) < TIE_GAP else "bfloat16"
            errors += [] if errors else [f"tie of {kind}, {line}"]
        else:
            errors.insert(0, line)
    m = SimpleNamespace(compared=len(compared), same=same, first=f"; {errors[0]}" if errors else "")
    m.alike, m.different = same + ties, len(compared) - same - ties
    m.figure = f"{same} of {len(compared)} greedy texts are the same, {ties} differ at a tie{m.first}"
    return m


def _renderings(tokenizer: PreTrainedTokenizerBase, question: Question, thinking: bool) -> dict[str, list[int]]:
    """Other ways to render a chat, by what differs."""
    messages, tools = tuple(question.chat["messages"]), question.chat.get("tools") or ()
    other = "without thinking" if thinking else "with thinking"
    ways = {f"rendered {other}": render(tokenizer, [messages], [], tools=tools, thinking=not thinking)}
    if tokenizer.bos_token_id is not None:
        ways["a second BOS token"] = [tokenizer.bos_token_id, *question.tokens]
    return {label: tokens for label, tokens in ways.items() if tokens != list(question.tokens)}


def _difference(tokenizer: PreTrainedTokenizerBase, ours: list[int], theirs: list[int]) -> str:
    """The texts between the common beginning and the common end of two prompts."""
    shorter = min(len(ours), len(theirs))
    start = next((n for n, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), shorter)
    end = next((n for n in range(shorter - start) if ours[-n - 1] != theirs[-n - 1]), shorter - start)
    texts = [printable(repr(tokenizer.decode(x[start : len(x) - end])))[:80] for x in (theirs, ours)]
    return f"; it has {texts[0]} where ours has {texts[1]}"


def _percent(rates: Sequence[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates) + " %"


# ----------------------------------------------------------------------------
# The rules: what is measured (the check), the test, and the sentences (figure, cause, fix).
# ----------------------------------------------------------------------------

SERVER, LIKELY = "server", "likely causes"
_SILENT = (
    "The server ended, hung or refused requests; the other checks read the answers that came.",
    "Look at the server's log and at its limits (context, requests at once, --timeout of this command).",
)

CHECKS: tuple[Check, ...] = (
    Check.of(SERVER, "answers", attrgetter("answered"),
        ("ok", lambda m: m.answered == m.asked),
        ("fault", lambda m: not m.answered, "{m.figure}: {m.reasons}", *_SILENT),
        ("warning", always, "{m.figure}: {m.reasons}", *_SILENT)),
    Check.of(SERVER, "counters", attrgetter("counters"),
        ("warning", lambda m: not m.answers, "neither the answers nor /metrics count drafts",
         "Acceptance cannot be judged; the text can.",
         "Start it with counters: vLLM --per-request-spec-decode-metrics summary and no --disable-log-stats, llama.cpp "
         "--metrics, SGLang --enable-metrics."),
        ("fault", lambda m: not m.drafting, "0 rounds with drafts in {m.answers} answers",
         "The server makes no drafts: it runs without the drafter, or a limit switches drafting off.",
         "Look at the server's command (speculative config) and at its limits of length."),
        ("fault", lambda m: m.bad, "impossible in {m.bad} of {m.answers} answers: {m.reason}",
         "The counters do not fit the text: other requests were served meanwhile, or the server counts wrongly.",
         "Examine a server that nobody else asks. The other checks read the answers with possible counts."),
        ("warning", lambda m: m.unlike,
         "/metrics and the answers' own records differ in {m.unlike} of {m.answers} answers: {m.difference} in the "
         "first of them",
         "Other requests were served meanwhile, or one is wrong. Counts that fit an answer's length are used.",
         "Examine a server that nobody else asks. If they differ still, report it to the engine's makers."),
        ("ok", always)),
    Check.of(SERVER, "text", attrgetter("text"),
        ("skipped", lambda m: not m.tokens, "no greedy answers"),
        ("ok", lambda m: not m.other),
        ("ok", lambda m: m.errors <= _ERRORS * m.tokens / 10, "{m.figure} (ties of bfloat16)"),
        ("fault", _foreign, "{m.figure}",
         "The server's text is not this target's: another model, another prompt than was sent, or lossy "
         "verification{m.unknown}. Drafts for another text are accepted less.",
         "Compare the server's model with --target (name, revision, files) and its settings; then run again."),
        ("warning", always, "{m.figure}",
         "The server's model is near the target: quantised weights or keys, or a fine-tune{m.unknown}.",
         "Compare the type that the server runs in with the target's; drafts are accepted a little less then.")),
    Check.of(SERVER, "sampled text", attrgetter("sampled"),
        ("skipped", lambda m: not m.tokens, "no sampled answers"),
        ("fault", _unlikely,
         "{m.tokens} sampled tokens are {m.nats:.2f} nats a token less likely than tokens drawn from the target "
         "({m.deviations:.0f} standard deviations)",
         "Sampled text is not drawn from this target's distribution: another model, or verification loses the "
         "temperature, as in vLLM 0.32 on a CPU (docs/engines.md: vllm-cpu-sampled-drafts). Other checks leave it out.",
         "Ask at temperature 0, or serve sampled requests without the drafter until the engine is repaired."),
        ("ok", always,
         "{m.tokens} sampled tokens are as likely as tokens drawn from the target ({m.likelier:+.2f} nats a token)")),
    Check.of(SERVER, "with and without drafter", attrgetter("with_and_without"),
        ("ok", lambda m: not m.different),
        ("fault", always, "{m.figure}; {m.different} differ elsewhere",
         "The drafter changes the text: verification is not lossless, or the cache is wrong after a rejection.",
         "Report it to the engine's makers with this prompt, and serve without the drafter until then.")),
    Check.of(SERVER, "prompt", attrgetter("prompt"),
        ("ok", lambda m: m.other is None, "{m.chats} chats are rendered as here"),
        ("fault", lambda m: m.label is not None, "{m.figure}: {m.label}",
         "The drafter meets other prompts than it was trained on, and is accepted less.",
         "Start the server with the same mode and template, or train on prompts as they are served."),
        ("fault", always, "{m.figure}",
         "The server has another chat template or system prompt than this target; the drafter was not trained on it.",
         "Give the server the target's own chat template (--chat-template) and no system prompt of its own.")),
    Check.of(SERVER, "asked again", attrgetter("asked_again"),
        ("fault", lambda m: m.less == "again", "{m.figure}",
         "Prompts that come again are accepted less: the drafter lacks features of what the prefix cache holds.",
         "Switch the prefix cache off, or use an engine that caches the drafter's keys, too."),
        ("fault", lambda m: m.less == "together", "{m.figure}",
         "Requests in one batch are accepted less than alone: the drafter's inputs are mixed up, or one request's "
         "limit stops drafting for all (docs/engines.md: vllm-context-limit).",
         "Serve one request at a time (vLLM --max-num-seqs 1) until it is fixed; leave room for two drafts after the "
         "longest response (--max-model-len)."),
        ("ok", always)),
    Check.of(SERVER, "defaults", attrgetter("defaults"),
        ("ok", lambda m: not m.different,
         "{m.alike} of {m.compared} greedy texts are the same by the server's defaults"),
        ("warning", always, "{m.different} of {m.compared} greedy texts differ by the server's defaults{m.first}",
         "For parameters that clients leave out, the server reads generation_config.json, such as a repetition "
         "penalty. Drafts are made without it and accepted less (docs/engines.md: penalties).",
         "Start vLLM with --generation-config vllm, or send repetition_penalty 1 and no other penalties.")),
    Check.of(SERVER, "draft length", attrgetter("draft_length"),
        ("ok", lambda m: m.varies and m.slots >= m.gamma,
         "{m.mean:.1f} drafts a round verified of {m.slots}, chosen round by round"),
        ("warning", lambda m: 0 < m.slots < m.gamma or (not m.slots and 0 < m.mean < m.gamma - 0.5 - m.ends),
         "{m.figure}, {m.gamma} in the drafter's block",
         "The server's settings cut the drafts (llama.cpp drafts 3 by default; docs/engines.md: "
         "llama-cpp-short-drafts), and with them the accepted length.",
         "Ask for {m.gamma} (vLLM num_speculative_tokens, SGLang --speculative-num-draft-tokens, llama.cpp "
         "--spec-draft-n-max), unless fewer were chosen on purpose."),
        ("warning", lambda m: m.slots and 0 < m.mean < 0.9 * (m.slots - m.ends),
         "{m.mean:.1f} drafts a round of {m.slots}",
         "Many drafts are cut short: by a limit of length, a confidence threshold, or the end of short responses.",
         "Leave room after the longest response (vLLM --max-model-len); lower thresholds (--spec-draft-p-min)."),
        ("ok", always, "{m.drafts} drafts a round")),
    Check.of(SERVER, "acceptance", attrgetter("acceptance"),
        ("fault", lambda m: m.explained and m.cost > _COST),
        ("warning", lambda m: m.explained),
        ("warning",
         lambda m: abs(m.cost) > 2 * _COST and abs(m.expected - m.length) > m.chance
         and m.expected > 1.05 and not m.foreign,
         "{m.figure}", "Acceptance is not as expected, and none of the known faults explains it better than chance.",
         "Examine more prompts (--questions); compare drafts block by block (docs/engines.md)."),
        ("ok", always)),
    Check.of(SERVER, "where", attrgetter("where"),
        ("ok", always)),
)  # fmt: skip


def likely_causes(e: Evidence) -> list[Finding]:
    """The faults that explain the counts, the likeliest first; none if no fault is clearly better than none."""
    if not e.hypotheses or not e.acceptance.explained:
        return []
    right, best, costly = e.right, e.best, e.acceptance.cost > _COST
    findings = dict[str, Finding]()
    for one in sorted(e.hypotheses, key=lambda h: -h.log_likelihood):
        if one.fault is HEALTHY or one.fault.name in findings or len(findings) == _SHOWN:
            continue
        if findings and one.log_likelihood < best.log_likelihood - 5 * _CLEAR:
            continue
        line = (
            f"{one.probability:.0%}: {one.variant.label}: accepted length {one.length:.2f}, {_percent(one.rates_K)} "
            f"(log-likelihood {one.log_likelihood - right.log_likelihood:+.0f} against no fault)"
        )
        status: Status = "unclear" if findings else "fault" if costly else "warning"
        advice = ("", "") if findings else (one.fault.meaning, one.fault.remedy)
        names = {"group": LIKELY, "check": one.fault.name}
        findings[one.fault.name] = Finding(status, line, *advice, **names, probability=one.probability)
    return list(findings.values())


# ----------------------------------------------------------------------------
# The examination and its report.
# ----------------------------------------------------------------------------


def examine_server(
    client: ServerClient,
    weights: DrafterWeights,
    questions: Sequence[Question],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    baseline: ServerClient | None = None,
    others: Mapping[str, DrafterWeights] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Evidence:
    """Ask a server, and compare its counts with the drafter's acceptance on its text.

    Args:
        temperatures: of equal parts of the questions; of 0 and 1.
        baseline: the same server without a drafter.
        others: further checkpoints that the server may have loaded, by name.
    """
    started = time.perf_counter()
    ends = [len(questions) * i // len(temperatures) for i in range(len(temperatures) + 1)]
    shares = zip(temperatures, pairwise(ends), strict=True)
    answers = [a for t, (start, end) in shares for a in client.ask(questions[start:end], t) if a is not None]
    e = Evidence(client, weights, len(questions), answers=answers, others=others or {}, on_progress=on_progress)
    if not answers:
        e.findings = [finding for check in CHECKS[:1] if (finding := check.find(e)) is not None]
        return e
    repeated = [a.question for a in e.greedy]
    e.again = {
        "again": client.ask(repeated[:_AGAIN], 0.0),
        "together": client.ask(repeated[:_TOGETHER], 0.0, together=True),
        "plain": client.ask(repeated[:_PLAIN], 0.0, plain=True) if client.fields + 1 < len(_FIELDS) else [],
    }
    e.baseline = baseline.ask(repeated, 0.0) if baseline is not None else None
    e.rendered = [client.render(question) for question in questions[:2]]
    asked = time.perf_counter()
    e.findings = [finding for check in CHECKS if (finding := check.find(e)) is not None] + likely_causes(e)
    e.seconds = {"asking": asked - started, "replay": time.perf_counter() - asked}
    return e


def causes(findings: Sequence[Finding]) -> list[Finding]:
    """What is wrong, the worst first; of equals, what was seen comes before what was inferred from counts."""
    named = [f for f in findings if f.group == LIKELY or (f.status in ("fault", "warning") and f.meaning)]
    return sorted(named, key=lambda f: STATUSES.index(f.status))


def server_json(e: Evidence) -> dict[str, Any]:
    counted = [a.counts for a in e.judged if a.counts is not None]
    hypotheses = [
        {"fault": h.fault.name, "variant": h.variant.label, "probability": round(h.probability, 4)}
        | {"log_likelihood": round(h.log_likelihood, 2), "accepted_length": round(h.length, 4)}
        | {"acceptance": [round(x, 4) for x in h.rates_K]}
        for h in (e.hypotheses if e.answers else [])
    ]
    server = {
        "answers": len(e.answers),
        "rounds": sum(c.rounds for c in counted),
        "accepted": sum(c.accepted for c in counted),
        "accepted_at": _by_position(counted),
        "accepted_length": round(length_of_counts(counted), 4) if counted else None,
        "seconds": {name: round(value, 1) for name, value in e.seconds.items()},
        "hypotheses": hypotheses,
    }
    names = ("probability", "status", "meaning", "remedy")
    rows = [
        {"cause": f.check, "evidence": f.figure} | {name: getattr(f, name) for name in names}
        for f in causes(e.findings)
    ]
    return {"causes": rows, "server": server}


def print_causes(findings: Sequence[Finding], console: Console) -> None:
    """Print what is wrong with a server, the worst first: how likely, the evidence, cause and fix."""
    if not (named := causes(findings)):
        return
    console.print(Line("what is wrong", style="bold underline"))
    for number, cause in enumerate(named, 1):
        sure = "seen" if cause.probability is None else f"{cause.probability:.0%}"
        line = Line(f"{number}. {cause.check} ({sure}): ", style=STYLES[cause.status])
        line.append(cause.figure, style="default")
        console.print(Padding(line, (0, 0, 0, 2)))
        print_advice(cause.meaning, cause.remedy, console, indent=5)
