"""Every way in which a random computation may go, with its probability.

    draft x_1 -+- 0 -- draft x_2 -+- ...          An `EnumeratingSource` takes the place of the generator and answers
               +- 1 -- ...        +- ...          every `accept` and `choose` in every possible way, depth first,
               +- 2 -- ...                        while the weight of the trace is multiplied up in float64.

Shapes: V vocab.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.acceptance import Acceptance
from outrider.decoding.policies import Policy, StepView
from outrider.decoding.verification import RoundResult, TargetRows, TypicalAcceptance, verify_all
from outrider.drafters.draft import Draft
from outrider.sampling import PositionNoise, Randomness, RandomSource

T = TypeVar("T")
Tokens = tuple[int, ...]


class EnumeratingSource:
    """Replays a script of decisions; beyond its end takes the first option and remembers the others."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._script: list[int] = []
        self._widths: list[int] = []
        self._depth = 0

    def accept(self, probability: float) -> bool:
        probability = min(max(probability, 0.0), 1.0)
        return self.decide([(1, probability), (0, 1.0 - probability)]) == 1

    def choose(self, probs_V: Tensor) -> int:
        probs = probs_V.tolist()
        total = sum(probs)
        return self.decide([(index, probability / total) for index, probability in enumerate(probs)])

    def backtrack(self) -> bool:
        """Turn to the next trace; False when all have been seen."""
        while self._script and self._script[-1] + 1 == self._widths[-1]:
            self._script.pop()
            self._widths.pop()
        if self._script:
            self._script[-1] += 1
        self.weight, self._depth = 1.0, 0
        return bool(self._script)

    def decide(self, options: list[tuple[int, float]]) -> int:
        """One of the options (outcome, probability), in its turn."""
        possible = [option for option in options if option[1] > 0.0]
        if self._depth == len(self._script):
            self._script.append(0)
            self._widths.append(len(possible))
        assert self._widths[self._depth] == len(possible), "the enumerated function is not deterministic"
        outcome, probability = possible[self._script[self._depth]]
        self._depth += 1
        self.weight *= probability
        return outcome


def enumerate_traces(run: Callable[[EnumeratingSource], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of `run`, with the probability of the trace that led to it."""
    source = EnumeratingSource()
    while True:
        outcome = run(source)
        yield outcome, source.weight
        if not source.backtrack():
            return


class EnumeratedUniforms:
    """`Randomness` of whole requests in one trace: every uniform number they draw is all numbers at once.

        u in [low, high)     accept(p): u < p?     choose(p_V): the v with p_0 + .. + p_{v-1} <= u < p_0 + .. + p_v

    A number is known by what draws it, number i of a seed's source or a seed's noise at a position, and every question
    narrows it down. So a source that starts again, or noise that two requests share, gives the same numbers again.
    """

    def __init__(self, trace: EnumeratingSource) -> None:
        self.trace = trace
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    @property
    def randomness(self) -> Randomness:
        return Randomness(lambda seed: _Source(self, seed), lambda seed, vocab: _Noise(self, seed, vocab))

    def place(self, number: tuple[object, ...], shares: Sequence[float]) -> int:
        """Which of the `shares` of [0, 1), one after another, a number is in."""
        low, high = self._known.get(number, (0.0, 1.0))
        ends = list(accumulate(shares))
        ends = [end / ends[-1] for end in ends]
        parts = [(max(low, before), min(high, end)) for before, end in pairwise([0.0, *ends])]
        place = self.trace.decide([(v, max(0.0, b - a) / (high - low)) for v, (a, b) in enumerate(parts)])
        self._known[number] = parts[place]
        return place


class _Source:
    """As `SeededSource`, which draws nothing for certain answers."""

    def __init__(self, uniforms: EnumeratedUniforms, seed: int) -> None:
        self.uniforms, self.seed, self.drawn = uniforms, seed, 0

    def accept(self, probability: float) -> bool:
        if not 0.0 < probability < 1.0:
            return probability >= 1.0
        return self._place([probability, 1.0 - probability]) == 0

    def choose(self, probs_V: Tensor) -> int:
        return int(probs_V.argmax()) if probs_V.max() >= 1.0 else self._place(probs_V.tolist())

    def _place(self, shares: Sequence[float]) -> int:
        self.drawn += 1
        return self.uniforms.place((self.seed, self.drawn), shares)


class _Noise(PositionNoise):
    """The race of two tokens, which compares one uniform number with a probability (tests/sampling)."""

    def __init__(self, uniforms: EnumeratedUniforms, seed: int, vocab_size: int) -> None:
        assert vocab_size == 2, "a race of more tokens takes more than one uniform number"
        super().__init__(seed, vocab_size)
        self.uniforms = uniforms

    def pick(self, probs: Tensor, position: int, ids: Tensor | None = None) -> int:
        assert ids is None, "draft ids"
        return self.uniforms.place((self.seed, "noise", position), probs.tolist())

    def ranking(self, probs: Tensor, position: int, count: int, ids: Tensor | None = None) -> list[int]:
        first = self.pick(probs, position, ids)
        return [first, 1 - first][: min(count, int((probs > 0).sum()))]


class DraftTree:
    """All that one draft may become, computed once; `draw` asks a source the same questions again."""

    def __init__(self, draft: Callable[[RandomSource], Draft]) -> None:
        self._questions: dict[Tokens, Tensor] = {}  # choices so far -> the distribution of the next
        self._proposals: dict[Tokens, Draft] = {}

        def recorded(source: RandomSource) -> tuple[Tokens, Draft]:
            recorder = _Recorder(source, self._questions)
            proposal = draft(recorder)
            return recorder.chosen, proposal

        for (chosen, proposal), _ in enumerate_traces(recorded):
            self._proposals[chosen] = proposal

    def draw(self, source: RandomSource) -> Draft:
        chosen: Tokens = ()
        while chosen in self._questions:
            chosen = (*chosen, source.choose(self._questions[chosen]))
        return self._proposals[chosen]


class _Recorder:
    """Passes questions on, and writes them down."""

    def __init__(self, source: RandomSource, questions: dict[Tokens, Tensor]) -> None:
        self.source, self.questions = source, questions
        self.chosen: Tokens = ()

    def accept(self, probability: float) -> bool:
        raise AssertionError("a draft accepts nothing")

    def choose(self, probs_V: Tensor) -> int:
        self.questions[self.chosen] = probs_V
        choice = self.source.choose(probs_V)
        self.chosen = (*self.chosen, choice)
        return choice


# ----------------------------------------------------------------------------
# P(output) = sum over decision traces of (product of decision probabilities); it must equal p_t(output) to 1e-12.
#
# The traces come from tests/proof/enumeration.py. What runs is the production code: `verify_all`,
# `sample_chain`, the policies, the warps, the sequential and confidence heads. Only the two networks are toys
# (tests/proof/toys.py).
# Rounds are enumerated one at a time, and equal contexts (and histories) merged, until every request has its tokens.
# Theory: Leviathan et al., arXiv 2211.17192; DSpark, arXiv 2607.05147. Shapes: K, V, Vd draft vocab, H draft hidden.
# ----------------------------------------------------------------------------


Distribution = dict[tuple[Tokens, ...], float]  # joint, over one continuation per request


class EnumeratedRequest(Protocol):
    """One request of an `EnumeratedBatch`."""

    @property
    def source(self) -> RandomSource: ...

    def draft(self, min_confidence: float) -> Draft: ...

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]: ...


class EnumeratedBatch:
    """Requests of one round that draft and score one by one.

    Without a history a policy sees this step alone, and every request drafts.
    """

    def __init__(
        self,
        requests: Sequence[EnumeratedRequest],
        ids: Sequence[int] = (),
        contexts: Sequence[int] = (),
        history: Acceptance | None = None,
        gate: Policy | None = None,
    ) -> None:
        self.requests, self.ids, self.contexts, self.history = requests, ids, contexts, history
        self.depths: list[int | None] = [None] * len(requests)
        if gate is not None:
            assert history is not None, "a gate decides by history"
            self.depths = gate.depths(history.plan_view(ids, contexts)).tolist()
        self.shown = StepView.of([], [])

    @property
    def sources(self) -> Sequence[RandomSource]:
        return [request.source for request in self.requests]

    def draft(self, min_confidence: float) -> list[Draft]:
        pairs = zip(self.requests, self.depths, strict=True)
        return [
            Draft.empty() if depth == 0 else request.draft(min_confidence).truncated(depth) for request, depth in pairs
        ]

    def view(self, proposals: Sequence[Draft]) -> StepView:
        confidences, drafted = [p.confidences for p in proposals], [len(p.tokens) for p in proposals]
        if self.history is None:
            self.shown = StepView.of(confidences, drafted)
        else:
            self.shown = self.history.step_view(self.ids, confidences, drafted, self.contexts)
        return self.shown

    def score(self, parts: Sequence[Draft]) -> list[TargetRows]:
        return [TargetRows(_rows(request, part)) for request, part in zip(self.requests, parts, strict=True)]


def _rows(request: EnumeratedRequest, part: Draft) -> Callable[[int], Tensor]:
    """A request scores chains; row k of a draft is the last row of the chain that leads there."""

    def row(k: int) -> Tensor:
        way = part.tokens_before(k)
        return request.score(way)(len(way))

    return row


def run_round(batch: EnumeratedBatch, policy: Policy, typical: TypicalAcceptance | None = None) -> list[RoundResult]:
    """The calls of `Engine.step` (decoding/engine.py) between drafting and the commit, for toys without tensors."""
    verified = drafts = batch.draft(policy.min_confidence)
    if any(draft.tokens for draft in drafts):
        lengths = policy.lengths(batch.view(drafts)).tolist()
        verified = [draft.truncated(length) for draft, length in zip(drafts, lengths, strict=True)]
    results = []
    verdicts = verify_all(verified, batch.score(verified), batch.sources, typical)
    for draft, part, verdict in zip(drafts, verified, verdicts, strict=True):
        if isinstance(verdict, Exception):
            raise verdict
        results.append(RoundResult(draft, part, verdict))
    return results


RequestFactory = Callable[[Tokens, RandomSource], EnumeratedRequest]
Trail = tuple[bytes, ...]  # all that was drafted so far and what became of it: what a history is a function of


@torch.inference_mode()
def exact_output_distribution(
    new_request: RequestFactory,
    prompts: Sequence[Tokens],
    policy: Policy,
    new_tokens: int,
    history: Acceptance | None = None,
    gate: Policy | None = None,
    typical: TypicalAcceptance | None = None,
) -> Distribution:
    """The joint distribution of what speculative decoding makes of the prompts, cut at `new_tokens` each.

    `new_request(context, source)` makes a request for one round. A request that has its tokens leaves the batch. With a
    `history` (still empty), what policy and `gate` remember is part of the state, and only states alike in it merge.
    A `typical` rule must show.
    """
    # Every round adds tokens, so a state has gathered all its mass when all states with fewer tokens are done.
    levels: list[dict[tuple[tuple[Tokens, ...], Trail], float]] = [{} for _ in range(len(prompts) * new_tokens + 1)]
    levels[0][tuple(() for _ in prompts), ()] = 1.0
    histories: dict[Trail, Acceptance | None] = {(): history}
    for level in levels[:-1]:
        for (outputs, trail), weight in level.items():
            live = [r for r, output in enumerate(outputs) if len(output) < new_tokens]
            contexts = [prompts[r] + outputs[r] for r in live]
            remembered = histories[trail]

            def one_round(
                source: RandomSource,
                outputs: tuple[Tokens, ...] = outputs,
                live: list[int] = live,
                contexts: list[Tokens] = contexts,
                remembered: Acceptance | None = remembered,
            ) -> tuple[tuple[Tokens, ...], StepView, list[tuple[int, int]]]:
                requests = [new_request(context, source) for context in contexts]
                batch = EnumeratedBatch(requests, live, [len(context) for context in contexts], remembered, gate)
                extended, counts = list(outputs), list[tuple[int, int]]()
                for r, result in zip(live, run_round(batch, policy, typical), strict=True):
                    extended[r] = (outputs[r] + tuple(result.tokens))[:new_tokens]
                    counts.append((len(result.verified.tokens), result.verdict.accepted))
                return tuple(extended), batch.shown, counts

            for (extended, view, counts), probability in enumerate_traces(one_round):
                after = trail
                if remembered is not None:
                    seen = live, view.drafted_R.tolist(), view.confidences_RK.tolist(), counts
                    after = (*trail, repr(seen).encode())
                    if after not in histories:
                        histories[after] = _remembering(remembered, live, view, counts)
                reached = levels[sum(map(len, extended))]
                reached[extended, after] = reached.get((extended, after), 0.0) + weight * probability
    finished: Distribution = {}
    for (outputs, _), weight in levels[-1].items():
        finished[outputs] = finished.get(outputs, 0.0) + weight
    return finished


def _remembering(
    history: Acceptance, live: Sequence[int], view: StepView, counts: Sequence[tuple[int, int]]
) -> Acceptance:
    grown = copy.deepcopy(history)
    if not len(view.drafted_R):  # nothing was drafted, so the policy was not asked
        grown.skip(len(live))
        return grown
    verified_R, accepted_R = np.array(counts).T
    grown.observe(live, view, verified_R=verified_R, accepted_R=accepted_R)
    return grown


def exact_target_distribution(
    row: Callable[[Tokens], Tensor], prompts: Sequence[Tokens], new_tokens: int
) -> Distribution:
    """What it should be: each request's tokens drawn one by one from the target, the requests independent."""
    per_request: list[dict[Tokens, float]] = []
    for prompt in prompts:
        outputs: dict[Tokens, float] = {(): 1.0}
        for _ in range(new_tokens):
            outputs = {
                (*output, token): weight * probability
                for output, weight in outputs.items()
                for token, probability in enumerate(row(prompt + output).tolist())
                if probability > 0.0
            }
        per_request.append(outputs)
    joint: Distribution = {}
    for choice in product(*(outputs.items() for outputs in per_request)):
        weight = 1.0
        for _, probability in choice:
            weight *= probability
        joint[tuple(output for output, _ in choice)] = weight
    return joint


def total_variation(actual: Mapping[tuple[Tokens, ...], float], expected: Mapping[tuple[Tokens, ...], float]) -> float:
    """Half of the sum of |actual - expected| over all outputs of either."""
    return sum(abs(actual.get(key, 0.0) - expected.get(key, 0.0)) for key in actual.keys() | expected.keys()) / 2


def max_deviation(actual: Mapping[tuple[Tokens, ...], float], expected: Mapping[tuple[Tokens, ...], float]) -> float:
    """max |actual - expected| over all outputs of either."""
    return max(abs(actual.get(key, 0.0) - expected.get(key, 0.0)) for key in actual.keys() | expected.keys())
