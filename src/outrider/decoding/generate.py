"""`stream` and `generate` decode one request: draft -> schedule -> verify -> commit, until a stop.

`max_new_tokens` is exact; a stop token or stop string among a round's tokens cuts the commit there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from outrider.decoding.request import FinishReason, SingleRequest, StopRules
from outrider.decoding.round import RoundResult, run_round
from outrider.drafters.base import Drafter
from outrider.sampling import Randomness, SamplingParams
from outrider.scheduling.policies import FixedPolicy, Policy
from outrider.target.model import DecodingTarget
from outrider.verification import TypicalAcceptance

Origin = Literal["draft", "correction", "bonus"]


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


@dataclass(frozen=True)
class Generation:
    """A whole response. `seconds` includes the prefill; `seed` is the one it was sampled with."""

    tokens: list[int]
    text: str
    finish: FinishReason
    rounds: list[RoundStats]
    seconds: float
    seed: int


def stream(
    target: DecodingTarget,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    rules: StopRules | None = None,
    policy: Policy | None = None,
    typical: TypicalAcceptance | None = None,
    *,
    randomness: Randomness | None = None,
) -> Iterator[Chunk]:
    """Decode one request and yield one chunk per round.

    Args:
        prompt: prompt tokens.
        drafter: None for plain decoding.
        policy: how many drafts to verify; all of them by default.
        typical: a lossy rule that accepts more; the output is then not distributed as the target's.
        randomness: where random draws come from; the generators of `params.seed` by default.

    Raises:
        ValueError: the prompt is empty or does not fit the target's context; or a lossy rule for coupled sampling,
            whose tokens no draft may change.
    """
    params, rules, policy = params or SamplingParams(), rules or StopRules(), policy or FixedPolicy()
    if typical is not None and params.coupled:
        raise ValueError("typical acceptance lets drafts change tokens, coupled sampling does not: choose one of them.")
    started = time.perf_counter()
    with torch.inference_mode():
        batch = SingleRequest(target, drafter, prompt, params=params, rules=rules, randomness=randomness)
    finish: FinishReason | None = None
    try:
        while finish is None:
            with torch.inference_mode():
                (result,) = run_round(batch, policy, typical)
                tokens, text, finish = batch.commit(result)
            whole, verified = result.draft, result.verified
            accepted = min(result.verdict.accepted, len(tokens))
            reach = min(verified.depth, len(tokens)) if accepted == len(tokens) else verified.depth
            draft, verify = batch.draft_clock.take(), batch.verify_clock.take()
            now = time.perf_counter()
            stats = RoundStats(
                len(whole.tokens),
                reach if whole.is_chain else len(verified.tokens),
                accepted,
                committed=len(tokens),
                draft_seconds=draft,
                verify_seconds=verify,
                other_seconds=now - started - draft - verify,
                confidences=tuple(whole.confidences) if whole.is_chain else (),
                depth=None if whole.is_chain else reach,
            )
            yield Chunk(tokens, _origins(result, len(tokens)), text, stats=stats, finish=finish, seed=batch.state.seed)
            started = time.perf_counter()
    finally:
        batch.end()


def _origins(result: RoundResult, count: int) -> list[Origin]:
    own: Origin = "correction" if result.rejected else "bonus"
    drafts: list[Origin] = ["draft"] * result.verdict.accepted
    return [*drafts, own][:count]


def generate(
    target: DecodingTarget,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    rules: StopRules | None = None,
    policy: Policy | None = None,
    typical: TypicalAcceptance | None = None,
) -> Generation:
    """Decode one request, see `stream`, and return the whole response."""
    started = time.perf_counter()
    tokens: list[int] = []
    rounds: list[RoundStats] = []
    pieces: list[str] = []
    finish: FinishReason = "length"
    seed = 0
    for chunk in stream(target, prompt, drafter, params=params, rules=rules, policy=policy, typical=typical):
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
    return sum(r.committed for r in rounds) / len(rounds), conditional, histogram
