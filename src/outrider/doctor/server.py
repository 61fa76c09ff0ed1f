"""The doctor of a running server: what it is asked, what it counts, and findings from the comparison with a replay.

    questions -> one at a time, greedy and sampled; a few again; all at once      text and counts of every answer
    answers   -> Replay (replay.py): what a correct drafter accepts on that text, and one with each known fault
    findings  -> is it there, are its counts possible, is its greedy text the target's and its sampled text drawn from
                 it, does it render prompts as we do, are drafts cut, is acceptance what it should be, and if not, why

Counts are read from the first of these that is there: the rounds of an answer's trace (ours) or of its detailed record
(vLLM with --per-request-spec-decode-metrics detailed), its summary (vLLM, ours), the difference of the counters on
/metrics before and after it, and `timings` (llama.cpp, mlx-vlm). A server that fails is examined as far as it got.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from outrider.backends.base import NO_PENALTIES, MetricNames
from outrider.backends.openai import Endpoint, OpenAIClient, shown_url
from outrider.backends.registry import servers
from outrider.data.chat import render
from outrider.data.responses import Sample
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.doctor.case import Finding, Status, fault, ok, skipped, warning
from outrider.doctor.replay import HEALTHY, Counts, Hypothesis, Replay, Round, Text, length_of
from outrider.drafters.base import DrafterWeights
from outrider.evaluation.evaluate import TIE_GAP
from outrider.target.model import Target
from outrider.utils.documents import parse_json
from outrider.utils.terminal import printable

# What the server is asked for beside OpenAI's fields: all of it, or less where it refuses.
_KNOWN: dict[str, Any] = {"return_token_ids": True, "trace": True, "repetition_penalty": 1.0, **NO_PENALTIES}
_FIELDS: tuple[dict[str, Any], ...] = ({**_KNOWN, "return_spec_tokens_details": True}, _KNOWN, {})
_TOLD = ("return_token_ids", "trace", "return_spec_tokens_details")  # of these, what changes no text
_REFUSED = (400, 404, 422)
_AGAIN = 4  # questions that are asked twice
_SPLITS = 8  # more tokens than a text has when it is split again
_PLAIN = 2  # questions that are asked without fields beside OpenAI's
_TOGETHER = 8  # at most, at once
_TIE_BFLOAT16 = 0.25  # logits: two steps of bfloat16 between 16 and 32
_ERRORS = 0.05  # share of tokens that are not the target's: more is another target
_UNLIKELY, _LESS_LIKELY = 6.0, 0.5  # sampled text of lower log-probability: standard deviations, and nats a token
_CLEAR = 15.0  # log-likelihood that a fault must gain over none
_COST = 0.05  # share of the accepted drafts that a fault must cost
_DROP = 0.1  # share of the accepted drafts, between two ways of asking the same
_SHOWN = 3


@dataclass(frozen=True)
class Question:
    """A prompt: its tokens, the same as a chat's fields, and the kind of text that it asks for."""

    kind: str
    tokens: tuple[int, ...]
    chat: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One answer. `tokens` were told by the server, or are its text split again (`exact` false).

    `counts`: None: nothing was told of its drafts; `counters`: those of /metrics, where the answer itself tells, too.
    `prompt`: ids that the server says it read.
    """

    question: Question
    temperature: float
    tokens: tuple[int, ...]
    exact: bool
    counts: Counts | None
    prompt: tuple[int, ...] | None = None
    prompt_count: int | None = None
    counters: Counts | None = None


class ServerClient:
    """Asks one server, one question after the other or several at once.

    Args:
        model: as the server calls the target.
        target: what it should serve.
        timeout: seconds that an answer may take.
        thinking: the mode that prompts were rendered in here; the server is told nothing.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        target: Target,
        *,
        max_new_tokens: int,
        timeout: float,
        thinking: bool = False,
    ) -> None:
        assert target.tokenizer is not None
        self.endpoint, self.model, self.target, self.tokenizer = endpoint, model, target, target.tokenizer
        self.max_new_tokens, self.timeout, self.thinking = max_new_tokens, timeout, thinking
        self.fields = 0  # of _FIELDS
        self.failures: list[str] = []
        self.silent = 0  # questions without an answer, since the last answer

    def ask(
        self, questions: Sequence[Question], temperature: float, together: bool = False, plain: bool = False
    ) -> list[Answer | None]:
        """Answers in the order of the questions; None where there was none, and `failures` says why.

        Args:
            together: all at once.
            plain: without the fields that switch penalties off, as most clients ask.
        """
        return asyncio.run(self._ask(questions, temperature, together=together, plain=plain))

    async def _ask(
        self, questions: Sequence[Question], temperature: float, together: bool, plain: bool
    ) -> list[Answer | None]:
        client = self.endpoint.client(self.timeout)
        try:
            one = partial(self._one, client, temperature=temperature, plain=plain, counted=not together)
            if together:
                return list(await asyncio.gather(*(one(question, seed=0) for question in questions)))
            found = list[Answer | None]()
            for seed, question in enumerate(questions):
                if self.silent >= _AGAIN:
                    break  # it answers no more: further questions would only wait
                found.append(await one(question, seed=seed))
            return found + [None] * (len(questions) - len(found))
        finally:
            await client.aclose()

    async def _one(
        self, client: OpenAIClient, question: Question, *, temperature: float, seed: int, counted: bool, plain: bool
    ) -> Answer | None:
        body = {"model": self.model, "max_tokens": self.max_new_tokens, "temperature": temperature}
        body |= {"prompt": list(question.tokens), "seed": seed}
        try:
            before = self.endpoint.readings() if counted else {}
            data = await self._post(client, body, chat=False, plain=plain)
            self.silent = 0
            after = self.endpoint.readings() if counted else {}
            return self._read(question, temperature, data, counters=between(before, after))
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            self.failures.append(self.endpoint.printable(f"{type(error).__name__}: {error}"))
            self.silent += 1
            return None

    async def _post(self, client: OpenAIClient, body: Mapping[str, Any], chat: bool, plain: bool = False) -> Any:
        while True:
            fields = {name: value for name, value in _FIELDS[self.fields].items() if not plain or name in _TOLD}
            answer = await client.post({**body, **fields}, chat)
            if answer.status_code in _REFUSED and self.fields + 1 < len(_FIELDS):
                self.fields += 1
                continue
            if not answer.is_success:
                raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
            return parse_json(answer.text)

    def render(self, question: Question) -> Answer | None:
        """How the server's own template renders a chat; None where it has none, or does not tell."""

        async def asked() -> Any:
            client = self.endpoint.client(self.timeout)
            try:
                body = {"model": self.model, "max_tokens": 1, "temperature": 0.0, **question.chat}
                return await self._post(client, body, chat=True)
            finally:
                await client.aclose()

        try:
            return self._read(question, 0.0, asyncio.run(asked()))
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None

    def _read(
        self, question: Question, temperature: float, data: Mapping[str, Any], counters: Counts | None = None
    ) -> Answer:
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
        return Answer(
            question,
            temperature,
            tuple(tokens),
            exact=ids is not None,
            counts=better_of(record, counters),
            prompt=None if prompt is None else tuple(prompt),
            prompt_count=(data.get("usage") or {}).get("prompt_tokens"),
            counters=counters if record is not None else None,
        )


# ----------------------------------------------------------------------------
# What servers count.
# ----------------------------------------------------------------------------


def counts_of(data: Mapping[str, Any], tokens: int) -> Counts | None:
    """What an answer of so many tokens says of its rounds; None where it says nothing."""
    record = (data.get("metrics") or {}).get("speculative_decoding") or {}
    slots = record.get("num_spec_tokens")
    if rounds := data["choices"][0].get("trace"):
        return _counts_of_trace(rounds, slots)
    if histogram := record.get("acceptance_histogram"):
        return Counts(
            rounds=int(record["num_spec_steps"]),
            accepted=int(record["num_accepted_draft_tokens"]),
            accepted_K=tuple(sum(histogram[k + 1 :]) for k in range(len(histogram) - 1)),
            drafted=int(record["num_draft_tokens"]),
            slots=slots or len(histogram) - 1,
            rounds_told=_steps_told(record, tokens),
        )
    if told := _sglang_record(data):
        histogram = told.get("spec_correct_drafts_histogram") or ()
        return Counts(
            rounds=int(told["spec_verify_ct"]),
            accepted=int(told["spec_num_correct_drafts"]),
            accepted_K=tuple(sum(histogram[k + 1 :]) for k in range(len(histogram) - 1)) or None,
            drafted=int(told["spec_num_proposed_drafts"]),
            slots=len(histogram) - 1 if histogram else None,
        )
    timings = data.get("timings") or {}
    if timings.get("draft_n"):
        accepted = int(timings["draft_n_accepted"])
        # mlx-vlm tells its rounds. llama.cpp does not: the first token and steps without drafts are in the difference.
        rounds = int(timings.get("draft_rounds") or int(timings["predicted_n"]) - accepted)
        return Counts(rounds, accepted, drafted=int(timings["draft_n"]))
    return None


def _sglang_record(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """SGLang's record of drafts, in the answer or its first choice, as `sglext` or `meta_info`."""
    for holder in (data["choices"][0], data):
        for name in ("sglext", "meta_info"):
            told = holder.get(name) or {}
            told = told.get("spec_tokens_details") or told
            if told.get("spec_verify_ct") and "spec_num_correct_drafts" in told:
                return dict(told)
    return None


def better_of(record: Counts | None, counters: Counts | None) -> Counts | None:
    """The answer's own record, unless that has sums alone and /metrics counted the same drafts exactly."""
    if record is None or counters is None:
        return record or counters
    same = record.accepted_K is None and counters.accepted == record.accepted
    return counters if same and counters.rounds else record


def _counts_of_trace(rounds: Sequence[Mapping[str, Any]], slots: int | None) -> Counts | None:
    """Of the rounds that the drafter drafted for; in others the text was copied, or nothing was verified."""
    told, hits, start = list[Round](), list[int](), 0
    for one in rounds:
        drafts = [draft for draft in one["drafts"] if draft["outcome"] != "left out"]
        verified = len(drafts) if one["source"] == "drafter" else 0
        accepted = sum(draft["outcome"] == "accepted" for draft in drafts) if verified else 0
        told.append(Round(start, verified, accepted, tokens=len(one["tokens"])))
        start += len(one["tokens"])
        if verified:
            hits.append(accepted)
    slots = slots or max(one.verified for one in told)
    if not slots:
        return None
    return Counts(
        rounds=len(hits),
        accepted=sum(hits),
        accepted_K=tuple(sum(hit > k for hit in hits) for k in range(slots)),
        drafted=sum(one.verified for one in told),
        slots=slots,
        rounds_told=tuple(told),
    )


def _steps_told(record: Mapping[str, Any], tokens: int) -> tuple[Round, ...]:
    """The rounds of vLLM's detailed record; none where steps without drafts are missing, so that places are unknown.

    The first token comes with the prefill; the last round may go on behind the answer's end.
    """
    told, start = list[Round](), 1
    for verified, accepted in zip(
        record.get("per_step_drafted") or (), record.get("per_step_accepted") or (), strict=True
    ):
        told.append(Round(start, int(verified), int(accepted), tokens=min(int(accepted) + 1, tokens - start)))
        start += int(accepted) + 1
    return tuple(told) if told and told[-1].start < tokens <= start else ()


def between(first: Mapping[str, Sequence[float]], last: Mapping[str, Sequence[float]]) -> Counts | None:
    """What /metrics counted between two readings of the page; None where it counts no drafts."""
    for engine in servers():
        names: MetricNames = engine.metrics
        if names.rounds is None or names.accepted is None:
            continue
        if names.rounds not in last:
            continue
        rounds, accepted, drafted = (
            round(sum(last.get(name or "", ())) - sum(first.get(name or "", ())))
            for name in (names.rounds, names.accepted, names.drafted)
        )
        positions = names.accepted.replace("_total", "_per_pos_total")
        positions = positions if positions in last else positions.removesuffix("_total")  # newer llama.cpp
        new = last.get(positions, ())
        old = first.get(positions) or [0.0] * len(new)
        by_position = tuple(round(b - a) for a, b in zip(old, new, strict=True))
        return Counts(rounds, accepted, by_position or None, drafted=drafted, slots=len(new) or None)
    return None


def _given(counts: Counts) -> int:
    """Tokens that the rounds gave."""
    return counts.rounds + counts.accepted + sum(r.tokens for r in counts.rounds_told if not r.verified)


def impossible(answer: Answer) -> str | None:
    """Why the counts of an answer cannot be those of its text; None where they can."""
    counts = answer.counts
    assert counts is not None
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
    # Rounds that end behind the text count what nobody sees, and a prefill or a round without drafts is not counted.
    if given > tokens + spare or (counts.slots and tokens > 3 * spare and given < tokens / 2):
        return f"{counts.rounds} rounds with {counts.accepted} accepted drafts cannot have given {tokens} tokens"
    return None


# ----------------------------------------------------------------------------
# The examination.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong, or may be.

    Attributes:
        probability: among all hypotheses; None: seen in what the server said, not inferred from its counts.
        status: "fault" or "warning", or "unclear" for what is less likely than another.
    """

    cause: str
    probability: float | None
    status: Status
    evidence: str
    meaning: str
    remedy: str


_LIKELY = "likely causes"
_ORDER: tuple[Status, ...] = ("fault", "warning", "unclear")


@dataclass
class ServerReport:
    """Findings, and the figures behind them. `hypotheses`: the likeliest first."""

    findings: list[Finding] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, check: str, finding: Finding, group: str = "server") -> None:
        self.findings.append(replace(finding, group=group, check=check))

    @property
    def causes(self) -> list[Cause]:
        """What is wrong, the worst first; of equals what was seen comes before what was inferred."""
        likely = {h.fault.name: h.probability for h in reversed(self.hypotheses)}
        found = [
            Cause(
                f.check,
                likely.get(f.check) if f.group == _LIKELY else None,
                f.status,
                evidence=f.figure,
                meaning=f.meaning,
                remedy=f.remedy,
            )
            for f in self.findings
            if f.group == _LIKELY or (f.status in ("fault", "warning") and f.meaning)
        ]
        return sorted(found, key=lambda cause: _ORDER.index(cause.status))

    def as_json(self) -> dict[str, Any]:
        """Hypotheses and counts as JSON data."""
        counted = [a.counts for a in self.answers if a.counts is not None]
        return {
            "answers": len(self.answers),
            "rounds": sum(c.rounds for c in counted),
            "accepted": sum(c.accepted for c in counted),
            "accepted_at": _by_position(counted),
            "accepted_length": round(length_of_counts(counted), 4) if counted else None,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "hypotheses": [
                {
                    "fault": h.fault.name,
                    "variant": h.variant.label,
                    "probability": round(h.probability, 4),
                    "log_likelihood": round(h.log_likelihood, 2),
                    "accepted_length": round(h.length, 4),
                    "acceptance": [round(x, 4) for x in h.rates_K],
                }
                for h in self.hypotheses
            ],
        }


def examine_server(
    client: ServerClient,
    weights: DrafterWeights,
    questions: Sequence[Question],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    baseline: ServerClient | None = None,
    others: Mapping[str, DrafterWeights] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ServerReport:
    """Ask a server and compare what it counts with what the drafter does on its text.

    Args:
        temperatures: of equal parts of the questions; of 0 and 1.
        baseline: the same server without a drafter.
        others: further checkpoints that the server may have loaded, by name.
    """
    report, target = ServerReport(), client.target
    started = time.perf_counter()
    ends = [len(questions) * i // len(temperatures) for i in range(len(temperatures) + 1)]
    shares = [questions[start:end] for start, end in pairwise(ends)]
    pairs = list(zip(temperatures, shares, strict=True))
    answers = [a for t, share in pairs for a in client.ask(share, t) if a is not None]
    report.answers = answers
    report.add("answers", _answered(client, len(answers), sum(len(share) for share in shares)))
    if not answers:
        report.seconds["asking"] = time.perf_counter() - started
        return report
    greedy = [a for a in answers if a.temperature == 0]
    again = _ask_again(client, greedy)
    plain = baseline.ask([a.question for a in greedy], 0.0) if baseline is not None else None
    rendered = [client.render(question) for question in questions[:2]]
    report.seconds["asking"] = time.perf_counter() - started

    report.answers, counted = _counters(answers)
    report.add("counters", counted)
    answers = report.answers
    started = time.perf_counter()
    on_progress("replay", 0, 1)
    with torch.inference_mode():
        texts = {index: text for index, a in enumerate(answers) if (text := _text(target, weights, a)) is not None}
        kept = [replace(answers[index], tokens=text.tokens) for index, text in texts.items()]
        replay = Replay(target, weights, list(texts.values()))
        wrong = _text_of_target(replay, kept, plain)
        report.add("text", wrong)
        drawn = _sampled_text(replay, kept)
        report.add("sampled text", drawn)
        if plain is not None:
            report.add("with and without drafter", _both_ways(target, greedy, plain))
    report.add("prompt", _prompt(client.tokenizer, rendered, client.thinking))
    twice = _asked_again(greedy, again) if counted.status == "ok" else skipped("counts that are not to be relied on")
    report.add("asked again", twice)
    report.add("defaults", _defaults(target, greedy, again["plain"]))
    counting = [place for place, one in enumerate(kept) if one.counts is not None and one.counts.rounds]
    # Drafts of text that is not drawn from the target say nothing of the drafter.
    chosen = [place for place in counting if kept[place].temperature == 0 or drawn.status != "fault"]
    if not chosen:
        report.add("acceptance", skipped("no counts that could be compared: the server tells none, or wrong ones"))
        return report
    compared = [kept[index] for index in chosen]
    report.add("draft length", _draft_length(compared, weights))
    if not getattr(weights.config, "plain_logits", True):
        reason = "the drafter's logits are multiplied or capped, which the training forward here does not know"
        report.add("acceptance", skipped(reason))
        return report
    report.hypotheses = replay.diagnose(chosen, others or {}, partial(on_progress, "hypotheses"))
    report.seconds["replay"] = time.perf_counter() - started
    for check, group, found in _acceptance(compared, report.hypotheses, wrong.status == "fault"):
        report.add(check, found, group=group)
    return report


def _answered(client: ServerClient, got: int, asked: int) -> Finding:
    url = shown_url(client.endpoint.url)
    if got == asked:
        return ok(f"{got} of {asked} questions answered at {url}")
    reasons = ", ".join(f"{count} times {reason}" for reason, count in Counter(client.failures).most_common(2))
    make = fault if not got else warning
    return make(
        f"{got} of {asked} questions answered at {url}: {reasons}",
        "The server ended, hung or refused requests; what follows is of the answers that came.",
        "Look at the server's log and at its limits (context, requests at once, --timeout of this command).",
    )


def _ask_again(client: ServerClient, greedy: Sequence[Answer]) -> dict[str, list[Answer | None]]:
    """A few greedy questions once more: alone (prompts are cached by now), all at once, and as most clients ask."""
    questions = [a.question for a in greedy]
    alone = client.ask(questions[:_AGAIN], 0.0)
    together = client.ask(questions[:_TOGETHER], 0.0, together=True)
    plain = client.ask(questions[:_PLAIN], 0.0, plain=True) if client.fields + 1 < len(_FIELDS) else []
    return {"again": alone, "together": together, "plain": plain}


def _counters(answers: Sequence[Answer]) -> tuple[list[Answer], Finding]:
    """The answers with counts that can be those of their text, or with none, and what is wrong with the others'."""
    told = [a for a in answers if a.counts is not None]
    if not told:
        return list(answers), warning(
            "neither the answers nor /metrics count drafts",
            "Acceptance cannot be judged; the text can.",
            "Start the server with its counters: vLLM --per-request-spec-decode-metrics summary and without "
            "--disable-log-stats, llama.cpp --metrics, SGLang --enable-metrics. Without drafts there are none.",
        )
    if not any(a.counts.rounds for a in told if a.counts is not None):
        return list(answers), fault(
            f"0 rounds with drafts in {len(told)} answers",
            "The server counts drafts and makes none: it runs without the drafter, or a limit switches drafting off.",
            "Look at the server's command (speculative config) and at its limits of length.",
        )
    unlike = [(a.counters, a.counts) for a in told if a.counters and a.counts and not _agree(a.counters, a.counts)]
    better = [_fitting(a) for a in answers]
    bad = [impossible(a) if a.counts is not None else None for a in better]
    if any(bad):
        kept = [a if reason is None else replace(a, counts=None) for a, reason in zip(better, bad, strict=True)]
        return kept, fault(
            f"impossible in {sum(map(bool, bad))} of {len(told)} answers: {next(filter(None, bad))}",
            "The counters do not fit the text that was counted: other requests were served meanwhile, or the "
            "server counts wrongly.",
            "Examine a server that nobody else asks. What follows is of the answers whose counts are possible.",
        )
    if unlike:
        counters, record = unlike[0]
        return better, warning(
            f"/metrics and the answers' own records differ in {len(unlike)} of {len(told)} answers: {counters.rounds} "
            f"rounds with {counters.accepted} accepted drafts against {record.rounds} with {record.accepted} in the "
            "first of them",
            "Other requests were served meanwhile, or one of the two is wrong. Of each answer those are used that fit "
            "its length better.",
            "Examine a server that nobody else asks; report it to the engine's makers where that changes nothing.",
        )
    counts = [a.counts for a in better if a.counts is not None]
    kind = "rounds told" if counts[0].rounds_told else "counts by position" if counts[0].accepted_K else "sums"
    return better, ok(
        f"{sum(c.rounds for c in counts)} rounds, {sum(c.accepted for c in counts)} accepted drafts ({kind})"
    )


def _fitting(answer: Answer) -> Answer:
    """The answer with the counts of /metrics where these contradict its own record and fit its length better."""
    counters, record, tokens = answer.counters, answer.counts, len(answer.tokens)
    if counters is None or record is None or _agree(counters, record):
        return answer
    better = abs(_given(counters) - tokens) < abs(_given(record) - tokens)
    return replace(answer, counts=counters, counters=record) if better else answer


def _agree(counters: Counts, record: Counts) -> bool:
    if record.rounds_told:  # rounds with copies are counted as well
        return counters.accepted >= record.accepted
    return (counters.rounds, counters.accepted) == (record.rounds, record.accepted)


def _text(target: Target, weights: DrafterWeights, answer: Answer) -> Text | None:
    """The answer with what the target would go on with; None where it has no token, or does not fit the target."""
    prompt, response = list(answer.question.tokens), list(_tokens_of_text(target, answer))
    longest = len(prompt) + len(response) + weights.config.gamma + 2
    if not response or longest > target.max_context or max(response) >= target.vocab_size:
        return None
    more = generate(target, prompt + response, rules=StopRules(weights.config.gamma + 1, stop_ids=())).tokens
    tokens = prompt + response + list(more)
    sample = Sample(answer.question.kind, tokens, ((len(prompt), len(tokens)),))
    return Text(sample, len(response), answer.temperature, counts=answer.counts or Counts(0, 0))


def _tokens_of_text(target: Target, answer: Answer) -> tuple[int, ...]:
    """The answer's tokens. Where the server told text alone, that is split as the target says it, if it does."""
    if answer.exact or answer.temperature != 0 or not answer.tokens:
        return answer.tokens
    assert target.tokenizer is not None
    own = generate(target, list(answer.question.tokens), rules=StopRules(len(answer.tokens) + _SPLITS)).tokens
    text = target.tokenizer.decode(list(answer.tokens))
    fits = (end for end in range(1, len(own) + 1) if target.tokenizer.decode(own[:end]) == text)
    return tuple(own[: next(fits, 0)]) or answer.tokens


def _text_of_target(replay: Replay, answers: Sequence[Answer], plain: Sequence[Answer | None] | None) -> Finding:
    """Whether greedy text is what the target says, token by token, given the text before."""
    gaps, first = list[float](), ""
    for index, answer in enumerate(answers):
        if answer.temperature != 0:
            continue
        found = replay.gaps(index)[: len(answer.tokens)]
        gaps += found
        at = next((n for n, gap in enumerate(found) if gap >= _TIE_BFLOAT16), None)
        if at is not None and not first:
            expected, said = replay.likeliest(index, at), answer.tokens[at]
            spelled = [printable(repr(replay.probe.target.tokenizer.decode([t]))) for t in (said, expected)]  # type: ignore[union-attr]
            first = f"; first at token {at + 1} of an answer: {spelled[0]} where {spelled[1]} is {found[at]:.2f} higher"
    if not gaps:
        return skipped("no greedy answers")
    other = [gap for gap in gaps if gap >= TIE_GAP]
    errors = [gap for gap in gaps if gap >= _TIE_BFLOAT16]
    figure = f"{len(gaps) - len(other)} of {len(gaps)} greedy tokens are the target's likeliest"
    if not other:
        return ok(figure)
    figure += f"; {len(other) - len(errors)} others within {_TIE_BFLOAT16} logits, {len(errors)} farther{first}"
    if len(errors) <= _ERRORS * len(gaps) / 10:
        return ok(f"{figure} (ties of bfloat16)")
    without = "; the baseline's text says whether the drafter has to do with it" if plain is None else ""
    if len(errors) > _ERRORS * len(gaps):
        return fault(
            figure,
            f"The server's text is not this target's: another model, another prompt than was sent, or a verification "
            f"that is not lossless{without}. Drafts for another text are accepted less.",
            "Compare the server's model with --target (name, revision, files), and its generation settings; then run "
            "again.",
        )
    return warning(
        figure,
        f"Near the target, and not it: quantised or rounded weights or keys, or another fine-tune{without}.",
        "Compare the type that the server runs in with the target's; drafts then are accepted a little less.",
    )


def _sampled_text(replay: Replay, answers: Sequence[Answer]) -> Finding:
    """Whether sampled text is as likely as what is drawn from the target's distribution.

    The other direction is no fault: top-p and the like make text likelier.
    """
    sampled = [index for index, answer in enumerate(answers) if answer.temperature > 0]
    tokens = sum(len(answers[index].tokens) for index in sampled)
    if not tokens:
        return skipped("no sampled answers")
    found = [replay.surprise(index) for index in sampled]
    excess, deviation = sum(e for e, _ in found), math.sqrt(sum(v for _, v in found))
    if excess > _UNLIKELY * deviation and excess > _LESS_LIKELY * tokens:
        return fault(
            f"{tokens} sampled tokens are {excess / tokens:.2f} nats a token less likely than tokens drawn from the "
            f"target ({excess / max(deviation, 1e-9):.0f} standard deviations)",
            "Sampled text is not drawn from this target's distribution: another model, or a verification that loses "
            "the temperature. vLLM 0.32 on a CPU reads temperature, top-k and top-p of drafts from memory that nobody "
            "wrote (docs/engines: vllm-cpu-sampled-drafts). Sampled answers are left out of what follows.",
            "Ask at temperature 0, or serve sampled requests without the drafter until the engine is repaired.",
        )
    return ok(
        f"{tokens} sampled tokens are as likely as tokens drawn from the target ({-excess / tokens:+.2f} nats a token)"
    )


def _differences(
    target: Target, answers: Sequence[Answer], others: Sequence[Answer | None], names: tuple[str, str]
) -> tuple[int, int, int, list[str]]:
    """Pairs of greedy answers, how many are the same, and how many differ at a tie; how others differ, or a tie.

    Args:
        names: of both sides, in what is said of a difference.
    """
    same, ties, errors = 0, 0, list[str]()
    compared = [(a, b) for a, b in zip(answers, others, strict=False) if b is not None]
    for one, other in compared:
        at = next((n for n, (x, y) in enumerate(zip(one.tokens, other.tokens, strict=False)) if x != y), None)
        if at is None:
            same += 1
            continue
        text = torch.tensor([[*one.question.tokens, *one.tokens[:at]]], device=target.device)
        hidden_D = target.forward(text, target.new_cache(text.shape[1]), logits=0).hidden_BTD[0, -1]
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
    return len(compared), same, ties, errors


def _both_ways(target: Target, greedy: Sequence[Answer], plain: Sequence[Answer | None]) -> Finding:
    """Whether greedy text is the same with and without the drafter; a difference within a tie is none."""
    compared, same, ties, errors = _differences(target, greedy, plain, names=("with", "without"))
    figure = f"{same} of {compared} greedy texts are the same, {ties} differ at a tie"
    figure += f"; {errors[0]}" if errors else ""
    if not compared:
        return skipped("the baseline did not answer")
    if same + ties == compared:
        return ok(figure)
    return fault(
        f"{figure}; {compared - same - ties} differ elsewhere",
        "The drafter changes the text, which speculative decoding must not: verification accepts what the target does "
        "not say, or the cache is wrong after a rejection.",
        "Report it to the engine's makers with this prompt. Until then the drafter must not be used there.",
    )


def _defaults(target: Target, greedy: Sequence[Answer], plain: Sequence[Answer | None]) -> Finding:
    """Whether the server answers alike where a client says nothing of penalties, as most clients do."""
    compared, same, ties, errors = _differences(target, greedy, plain, names=("without penalties", "by default"))
    if not compared:
        return skipped("the server takes no fields beside OpenAI's")
    if same + ties == compared:
        return ok(f"{same + ties} of {compared} greedy texts are the same by the server's defaults")
    return warning(
        f"{compared - same - ties} of {compared} greedy texts differ by the server's defaults: {errors[0]}",
        "The server takes sampling parameters from the target's files (generation_config.json), such as a repetition "
        "penalty, where clients name none. Drafts are made without them and accepted less (docs/engines: penalties).",
        "Start vLLM with --generation-config vllm, or send repetition_penalty 1 and no other penalties.",
    )


def _prompt(tokenizer: PreTrainedTokenizerBase, rendered: Sequence[Answer | None], thinking: bool) -> Finding:
    """Whether the server's chat endpoint renders prompts as they are rendered here."""
    told = [a for a in rendered if a is not None and (a.prompt or a.prompt_count)]
    if not told:
        return skipped("the server has no chat endpoint, or does not tell how many tokens a prompt has")
    for answer in told:
        question = answer.question
        own = list(question.tokens)
        theirs = None if answer.prompt is None else list(answer.prompt)
        if (theirs == own) if theirs is not None else (answer.prompt_count == len(own)):
            continue
        for label, other in _renderings(tokenizer, question, thinking).items():
            if (theirs == other) if theirs is not None else (answer.prompt_count == len(other)):
                return fault(
                    f"the server's chat has {answer.prompt_count} prompt tokens, ours {len(own)}: {label}",
                    "The drafter meets other prompts than it was trained on, and is accepted less.",
                    "Start the server with the same mode and template, or train on prompts as they are served.",
                )
        where = ""
        if theirs is not None:
            pairs = zip(own, theirs, strict=False)
            at = next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(own), len(theirs)))
            end = next(
                (n for n in range(min(len(own), len(theirs)) - at) if own[-n - 1] != theirs[-n - 1]),
                min(len(own), len(theirs)) - at,
            )
            texts = [printable(repr(tokenizer.decode(x[at : len(x) - end])))[:80] for x in (theirs, own)]
            where = f"; it has {texts[0]} where ours has {texts[1]}"
        return fault(
            f"the server's chat has {answer.prompt_count} prompt tokens, ours {len(own)}{where}",
            "Another chat template or system prompt than this target's: the drafter meets prompts that it was not "
            "trained on.",
            "Give the server the target's own chat template (--chat-template) and no system prompt of its own.",
        )
    return ok(f"{len(told)} chats are rendered as here")


def _renderings(tokenizer: PreTrainedTokenizerBase, question: Question, thinking: bool) -> dict[str, list[int]]:
    """Other ways to render a chat, by what differs."""
    messages, tools = tuple(question.chat["messages"]), question.chat.get("tools") or ()
    found: dict[str, list[int]] = {}
    other = "without thinking" if thinking else "with thinking"
    found[f"rendered {other}"] = render(tokenizer, [messages], [], tools=tools, thinking=not thinking)
    if tokenizer.bos_token_id is not None:
        found["a second BOS token"] = [tokenizer.bos_token_id, *question.tokens]
    return {label: tokens for label, tokens in found.items() if tokens != list(question.tokens)}


def _asked_again(greedy: Sequence[Answer], again: Mapping[str, Sequence[Answer | None]]) -> Finding:
    """Whether as many drafts are accepted when prompts come a second time, and when several come at once."""
    figures = []
    for way, meaning, remedy in (
        (
            "again",
            "Prompts that come a second time are accepted less: the drafter has no features of what the prefix cache "
            "holds.",
            "Switch the prefix cache off, or use an engine that caches the drafter's keys, too.",
        ),
        (
            "together",
            "Requests in one batch are accepted less than alone: the drafter's inputs are mixed up between requests, "
            "or a limit of one request stops drafting for all (docs/engines: vllm-context-limit).",
            "Serve one request at a time (vLLM --max-num-seqs 1) until it is fixed; leave room for two drafts behind "
            "the longest response (--max-model-len).",
        ),
    ):
        pairs = [
            (a, b)
            for a, b in zip(greedy, again[way], strict=False)
            if b is not None and a.counts is not None and b.counts is not None and a.tokens == b.tokens
        ]
        pairs = [(a, b) for a, b in pairs if _lengths(a) == _lengths(b) or not (_chosen(a) or _chosen(b))]
        if not pairs:
            continue
        first = length_of_counts(a.counts for a, _ in pairs)
        second = length_of_counts(b.counts for _, b in pairs)
        figures.append(f"{second:.2f} {way} against {first:.2f} ({len(pairs)} answers)")
        if second - 1 < (1 - _DROP) * (first - 1) - 0.02:
            return fault("accepted length " + ", ".join(figures), meaning, remedy)
    return ok("accepted length " + ", ".join(figures)) if figures else skipped("no counts of the same text asked twice")


def _lengths(answer: Answer) -> list[int]:
    """How many drafts each round verified, where the server tells that."""
    return [one.verified for one in answer.counts.rounds_told] if answer.counts is not None else []


def _chosen(answer: Answer) -> bool:
    """Whether the server chooses round by round how many drafts it verifies."""
    return len(set(_lengths(answer))) > 1 or 0 in _lengths(answer)


def length_of_counts(counts: Iterable[Counts | None]) -> float:
    """Accepted length of several answers together."""
    known = [c for c in counts if c is not None]
    return 1 + sum(c.accepted for c in known) / max(1, sum(c.rounds for c in known))


def spread_of_length(rates_K: Sequence[float], rounds: int) -> float:
    """Standard deviation of the accepted length of so many rounds with these conditional acceptances."""
    reached = list(accumulate(rates_K, mul))  # P(k drafts or more are accepted)
    square = sum((2 * k - 1) * p for k, p in enumerate(reached, start=1))
    return math.sqrt(max(0.0, square - sum(reached) ** 2) / max(1, rounds))


def _draft_length(answers: Sequence[Answer], weights: DrafterWeights) -> Finding:
    """Whether as many tokens are drafted a round as the drafter has positions."""
    counts = [a.counts for a in answers if a.counts is not None]
    gamma, slots = weights.config.gamma, max((c.slots or 0 for c in counts), default=0)
    drafted, rounds = sum(c.drafted or 0 for c in counts), sum(c.rounds for c in counts)
    mean = drafted / rounds
    if any(map(_chosen, answers)) and slots >= gamma:
        return ok(f"{mean:.1f} drafts a round verified of {slots}, chosen round by round")
    # Some servers cut drafts at the end of a response: those begun in its last `slots` tokens, by half on average.
    most = slots or gamma
    ends = len(counts) * most**2 / (2 * length_of_counts(counts) * rounds)
    if 0 < slots < gamma or (not slots and 0 < mean < gamma - 0.5 - ends):
        return warning(
            f"{slots or round(mean, 1)} drafts a round, {gamma} in the drafter's block",
            "The draft length is cut by the server's settings (llama.cpp drafts 3 without --spec-draft-n-max; "
            "docs/engines: llama-cpp-short-drafts); the accepted length cannot be what training reported.",
            f"Ask for {gamma} (vLLM num_speculative_tokens, SGLang --speculative-num-draft-tokens, llama.cpp "
            "--spec-draft-n-max), unless fewer were chosen on purpose.",
        )
    if drafted and slots and mean < 0.9 * (slots - ends):
        return warning(
            f"{mean:.1f} drafts a round of {slots}",
            "Many drafts are cut short: by a limit of length, a confidence threshold, or the end of short responses.",
            "Leave room behind the longest response (vLLM --max-model-len), and look at thresholds "
            "(--spec-draft-p-min).",
        )
    return ok(f"{slots or gamma} drafts a round")


def _acceptance(
    answers: Sequence[Answer], hypotheses: Sequence[Hypothesis], other_text: bool
) -> list[tuple[str, str, Finding]]:
    """The comparison with a correct implementation, and the likeliest causes where it is not one."""
    counts = [a.counts for a in answers if a.counts is not None]
    right = next(h for h in hypotheses if h.fault is HEALTHY)
    best = max(hypotheses, key=lambda h: h.log_likelihood)
    seen, expected = length_of_counts(counts), right.length
    gain = best.log_likelihood - right.log_likelihood
    cost = (expected - seen) / max(expected - 1, 1e-9)
    rates = _rates(counts)
    shown = f"{_percent(rates)} at the positions, {_percent(right.rates_K)} expected" if rates else "no positions told"
    figure = f"accepted length {seen:.2f}, {expected:.2f} of a correct implementation on this text; {shown}"
    found = [("acceptance", "server", ok(figure))]
    splits = _splits(answers, right)
    if gain < _CLEAR or best is right:
        chance = 2 * spread_of_length(right.rates_K, sum(c.rounds for c in counts))
        if abs(cost) > 2 * _COST and abs(expected - seen) > chance and expected > 1.05 and not other_text:
            found = [
                (
                    "acceptance",
                    "server",
                    warning(
                        figure,
                        "Acceptance is not what it should be, and none of the known faults explains it better than "
                        "chance.",
                        "Examine more prompts (--max-samples); compare drafts block by block (docs/engines.md).",
                    ),
                )
            ]
        return [*found, ("where", "server", ok(splits))]
    costly = cost > _COST
    found = [("acceptance", "server", (fault if costly else warning)(figure, "", ""))]
    found.append(("where", "server", ok(splits)))
    names = set[str]()
    for one in sorted(hypotheses, key=lambda h: -h.log_likelihood):
        if one.fault is HEALTHY or one.fault.name in names or len(names) == _SHOWN:
            continue
        if names and one.log_likelihood < best.log_likelihood - 5 * _CLEAR:
            continue
        names.add(one.fault.name)
        line = (
            f"{one.probability:.0%}: {one.variant.label}: accepted length {one.length:.2f}, {_percent(one.rates_K)} "
            f"(log-likelihood {one.log_likelihood - right.log_likelihood:+.0f} against no fault)"
        )
        if len(names) == 1:
            make = fault if costly else warning
            found.append((one.fault.name, _LIKELY, make(line, one.fault.meaning, one.fault.remedy)))
        else:
            found.append((one.fault.name, _LIKELY, Finding("unclear", line)))
    return found


def _by_position(counts: Sequence[Counts]) -> list[int] | None:
    if not counts or any(c.accepted_K is None for c in counts):
        return None
    slots = max(len(c.accepted_K or ()) for c in counts)
    return [sum((c.accepted_K or ())[k] for c in counts if k < len(c.accepted_K or ())) for k in range(slots)]


def _rates(counts: Sequence[Counts]) -> list[float]:
    """Acceptance at each position, of the rounds that reached it."""
    hits = _by_position(counts)
    if hits is None:
        return []
    tries = [sum(c.reached_K[k] for c in counts if k < len(c.reached_K)) for k in range(len(hits))]
    return [hit / try_ if try_ else 0.0 for hit, try_ in zip(hits, tries, strict=True)]


def _percent(rates: Sequence[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates) + " %"


def _splits(answers: Sequence[Answer], right: Hypothesis) -> str:
    """Accepted length and what is expected, by kind of text, temperature and length of the context."""
    lengths = sorted(len(a.question.tokens) + len(a.tokens) for a in answers)
    middle = lengths[len(lengths) // 2]
    groups: dict[str, list[int]] = {}
    for index, answer in enumerate(answers):
        size = len(answer.question.tokens) + len(answer.tokens)
        names = {answer.question.kind, f"temperature {answer.temperature:g}"}
        names.add(f"up to {middle} tokens" if size <= middle else f"over {middle} tokens")
        for name in sorted(names):
            groups.setdefault(name, []).append(index)
    parts = []
    for name, members in groups.items():
        seen = length_of_counts(answers[i].counts for i in members)
        parts.append(f"{name} {seen:.2f} of {length_of([right.expected[i] for i in members]):.2f}")
    return "; ".join(parts)
