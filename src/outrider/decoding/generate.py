"""`stream` and `generate` decode one request: draft -> schedule -> verify -> commit, until a stop.

`max_new_tokens` is exact; a stop token or stop string among a round's tokens cuts the commit there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.drafting import Drafting, DraftTurn, SchedulerState
from outrider.decoding.gate import DraftGate
from outrider.decoding.policies import FixedPolicy, Policy, StepView
from outrider.decoding.request import FinishReason, RequestState, StopRules, target_rows
from outrider.decoding.round import Origin, RoundResult, run_round
from outrider.decoding.structured import Grammar
from outrider.decoding.trace import RoundTrace, path_rows, recorded
from outrider.decoding.verification import TargetRows, TypicalAcceptance
from outrider.drafters.base import Drafter, draft_slots
from outrider.drafters.draft import Draft
from outrider.sampling import Randomness, RandomSource, SamplingParams
from outrider.target.model import DecodingTarget
from outrider.utils.measure import Clock, on_device


@dataclass(frozen=True)
class RoundStats:
    """Counts and times of one round; seconds add up to its length, without the time its consumer took.

    `proposed` drafts, `admitted` of them judged by the target (of a chain fewer where a stop ended the response
    first), `accepted` of those, `committed` tokens. `confidences` are those of the proposed drafts of a chain, ()
    where a drafter has none. `depth` is that of an admitted tree; None: a chain, as deep as it is long.
    """

    proposed: int
    admitted: int
    accepted: int
    committed: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    confidences: tuple[float, ...]
    depth: int | None = None

    @property
    def reach(self) -> int:
        """Positions for which the target judged at least one draft."""
        return self.admitted if self.depth is None else self.depth


@dataclass(frozen=True)
class Chunk:
    """What one round commits. `origins` says where each token comes from; `finish` is set on the last chunk; `seed`
    is the request's, with which the same call gives the same tokens."""

    tokens: list[int]
    origins: list[Origin]
    text: str
    stats: RoundStats
    finish: FinishReason | None
    seed: int
    trace: RoundTrace | None = None  # where it was asked for


@dataclass(frozen=True)
class Generation:
    """A whole response. `seconds` includes the prefill; `seed` is the one it was sampled with."""

    tokens: list[int]
    text: str
    finish: FinishReason
    rounds: list[RoundStats]
    seconds: float
    seed: int


_PREFILL_CHUNK, _GPU_PREFILL_CHUNK = 512, 4096  # tokens; bounds the attention mask of a long prompt


class SingleRequest:
    """A `Batch` (decoding/round.py) of one request over a target and, unless decoding is plain, a drafter.

    Raises:
        ValueError: as `RequestState` and `Drafting`; or a tree drafter for a target whose rows cannot branch.
    """

    def __init__(
        self,
        target: DecodingTarget,
        drafting: Drafting,
        prompt: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        *,
        randomness: Randomness | None = None,
        grammar: Grammar | None = None,
        traced: bool = False,
    ) -> None:
        self.target, self.drafting, self.traced = target, drafting, traced
        drafter = drafting.drafter
        self.state = RequestState(target, prompt, params, rules=rules, randomness=randomness, grammar=grammar)
        self._trees = drafter is not None and drafter.trees
        if self._trees:
            target.check_trees()
        self.aux_layers = () if drafter is None else drafter.aux_layers
        self._slots = draft_slots(drafter)
        self.cache = target.new_cache(self.state.capacity + self._slots + 1)
        drafting.open(self.state)
        self.draft_clock, self.verify_clock = Clock(target.device), Clock(target.device)
        self._turns: list[DraftTurn] = []
        self._view: StepView | None = None
        self._scored: tuple[list[int], Tensor | None] = [], None
        self._logits_NV: Tensor | None = None
        self._compared: dict[int, Tensor] = {}  # rows that verification read, where the request is traced
        self._rounds = 0  # traced
        try:
            self._prefill(prompt[:-1])
        except BaseException:
            self.end()
            raise

    def _prefill(self, tokens: Sequence[int]) -> None:
        most = _GPU_PREFILL_CHUNK if self.target.device.type == "cuda" else _PREFILL_CHUNK
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            chunk = on_device([part], self.target.device)
            output = self.target.forward(chunk, self.cache, self.aux_layers, logits=0)
            self._committed(part, output.aux_BTLD)

    def _committed(self, tokens: Sequence[int], aux_BTLD: Tensor | None) -> None:
        self.drafting.committed(self.state, tokens, None if aux_BTLD is None else aux_BTLD[0])
        with self.draft_clock:
            self.drafting.read_overdue([self.state])

    @property
    def sources(self) -> Sequence[RandomSource]:
        return [self.state.source]

    def draft(self, min_confidence: float) -> Sequence[Draft]:
        """See `Drafting.draft`.

        Raises:
            FailedCall: the draft could not be drawn.
        """
        left, self._view = self.state.remaining - 1, None
        self._turns = [DraftTurn("", self.state, self._slots if self._trees and left else min(self._slots, left))]
        failed: dict[str, Exception] = {}
        with self.draft_clock:
            drafts, _ = self.drafting.draft(self._turns, min_confidence, failed)
        for error in failed.values():
            raise error
        return drafts

    def view(self, drafts: Sequence[Draft]) -> StepView:
        self._view = self.drafting.view(self._turns, drafts)
        return self._view

    def score(self, drafts: Sequence[Draft]) -> list[TargetRows]:
        (draft,) = drafts
        tokens = [self.state.anchor, *draft.tokens]
        with self.verify_clock:
            block = on_device([tokens], self.target.device)
            output = self.target.forward(block, self.cache, self.aux_layers, logits=None, parents=draft.row_parents)
        assert output.logits_BTV is not None
        self._scored = tokens, output.aux_BTLD
        (rows,) = target_rows([self.state], output.logits_BTV[0], drafts)
        if self.traced:
            self._logits_NV = output.logits_BTV[0]
            rows, self._compared = recorded(rows)
        return [rows]

    def commit(self, result: RoundResult) -> tuple[list[int], str, FinishReason | None]:
        """Keep the accepted path in the caches and take the round's tokens, see `RequestState.commit`."""
        kept = [0, *(node + 1 for node in result.verdict.path)]  # rows of the old anchor and the accepted drafts
        with self.verify_clock:
            self.cache.keep_path(self.cache.length - (len(result.verified.tokens) + 1), kept)
        tokens, aux_BTLD = self._scored
        if aux_BTLD is not None:
            aux_BTLD = aux_BTLD[:, on_device(kept, aux_BTLD.device)]
        self._committed([tokens[row] for row in kept], aux_BTLD)
        done = self.state.commit(result.tokens)
        if self._turns:
            self.drafting.record(self._turns, self._view, [result])
        return done

    def trace(self, result: RoundResult, tokens: Sequence[int]) -> RoundTrace:
        """Of the round that committed `tokens`; the request is `traced`."""
        (turn,), view = self._turns, self._view
        assert self._logits_NV is not None, "a round was run"
        self._rounds += 1
        lengths_R = np.array([len(result.verified.tokens)])
        left = self.state.remaining + len(tokens)
        (rows,) = path_rows(self._logits_NV, [(0, result.verdict.path)])
        return self.drafting.trace(
            turn,
            result,
            tokens,
            rows=rows,
            compared=self._compared,
            number=self._rounds,
            reason=self.drafting.reason(turn, result, left=left, view=view, lengths_R=lengths_R, request=0),
            believed_K=None if view is None else view.confidences_RK[0],
        )

    def end(self) -> None:
        """Free what the drafter holds for the request, and what is remembered of it alone."""
        self.drafting.close(self.state)
        for turn in self._turns:
            self.drafting.forget(turn.id, self.state.response)


def stream(
    target: DecodingTarget,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    rules: StopRules | None = None,
    policy: Policy | None = None,
    typical: TypicalAcceptance | None = None,
    *,
    gate: DraftGate | None = None,
    grammar: Grammar | None = None,
    randomness: Randomness | None = None,
    traced: bool = False,
    experience: SchedulerState | None = None,
) -> Iterator[Chunk]:
    """Decode one request and yield one chunk per round.

    Args:
        prompt: prompt tokens.
        drafter: None for plain decoding.
        policy: how many drafts to verify; all of them by default.
        typical: a lossy rule that accepts more; the output is then not distributed as the target's.
        gate: in which rounds it drafts, and how deep; a whole draft in each by default.
        grammar: what the response must follow (decoding/structured.py); nothing by default.
        randomness: where random draws come from; the generators of `params.seed` by default.
        traced: every chunk has the trace of its round.
        experience: what requests before this one taught, which is added to; no other request may use it meanwhile. How
            much is drafted depends on it, and so do the tokens that a seed gives where sampling is not coupled.

    Raises:
        ValueError: the prompt is empty or does not fit the target's context; a lossy rule for coupled sampling, whose
            tokens no draft may change; or a gate beside a policy that ends drafts by their confidence.
    """
    params, rules, policy = params or SamplingParams(), rules or StopRules(), policy or FixedPolicy()
    if typical is not None and params.coupled:
        raise ValueError("typical acceptance lets drafts change tokens, coupled sampling does not: choose one of them.")
    started = time.perf_counter()
    with torch.inference_mode():
        drafting = Drafting(drafter, policy, gate, experience=experience)
        batch = SingleRequest(
            target, drafting, prompt, params=params, rules=rules, randomness=randomness, grammar=grammar, traced=traced
        )
    finish: FinishReason | None = None
    try:
        while finish is None:
            with torch.inference_mode():
                (result,) = run_round(batch, policy, typical)
                tokens, text, finish = batch.commit(result)
                trace = batch.trace(result, tokens) if traced else None
            whole, verified = result.draft, result.verified
            reach = result.reach(len(tokens))
            draft, verify = batch.draft_clock.take(), batch.verify_clock.take()
            now = time.perf_counter()
            stats = RoundStats(
                len(whole.tokens),
                reach if whole.is_chain else len(verified.tokens),
                min(result.verdict.accepted, len(tokens)),
                committed=len(tokens),
                draft_seconds=draft,
                verify_seconds=verify,
                other_seconds=now - started - draft - verify,
                confidences=tuple(whole.confidences) if whole.is_chain else (),
                depth=None if whole.is_chain else reach,
            )
            origins, seed = result.origins[: len(tokens)], batch.state.seed
            yield Chunk(tokens, origins, text, stats=stats, finish=finish, seed=seed, trace=trace)
            started = time.perf_counter()
    finally:
        batch.end()


def generate(
    target: DecodingTarget,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    rules: StopRules | None = None,
    policy: Policy | None = None,
    typical: TypicalAcceptance | None = None,
    *,
    gate: DraftGate | None = None,
    grammar: Grammar | None = None,
    experience: SchedulerState | None = None,
) -> Generation:
    """Decode one request, see `stream`, and return the whole response."""
    started = time.perf_counter()
    tokens: list[int] = []
    rounds: list[RoundStats] = []
    pieces: list[str] = []
    finish: FinishReason = "length"
    seed = 0
    chunks = stream(
        target,
        prompt,
        drafter,
        params=params,
        rules=rules,
        policy=policy,
        typical=typical,
        gate=gate,
        grammar=grammar,
        experience=experience,
    )
    for chunk in chunks:
        tokens += chunk.tokens
        rounds.append(chunk.stats)
        pieces.append(chunk.text)
        finish, seed = chunk.finish or finish, chunk.seed
    seconds = time.perf_counter() - started
    return Generation(tokens, "".join(pieces), finish, rounds=rounds, seconds=seconds, seed=seed)


# ----------------------------------------------------------------------------
# Acceptance of a drafter over rounds of real decoding, in the papers' convention (DSpark, arXiv 2607.05147):
#
#     tau = tokens per round, bonus included;  c_k = P(position k accepted | 1..k-1 accepted and k verified)
#
# For a tree, k is a depth: accepted at k / rounds whose path reached k - 1 and whose tree had nodes at k.
# ----------------------------------------------------------------------------


def acceptance(rounds: Sequence[RoundStats], gamma: int) -> tuple[float, list[float | None], list[int]]:
    """(accepted length, conditional acceptance per position, histogram) of some rounds.

    A position that no round reached is None; the histogram counts rounds by accepted drafts, 0..gamma.
    """
    histogram = [0] * (gamma + 1)
    for r in rounds:
        histogram[r.accepted] += 1
    conditional: list[float | None] = []
    for k in range(1, gamma + 1):
        reached = sum(r.reach >= k and r.accepted >= k - 1 for r in rounds)
        conditional.append(sum(r.accepted >= k for r in rounds) / reached if reached else None)
    return sum(r.committed for r in rounds) / max(1, len(rounds)), conditional, histogram
