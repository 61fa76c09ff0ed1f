"""draft all -> policy -> score -> verify: one round, for any number of requests.

    batch.draft(floor)      x_1..x_K with p_d and c, each     (1 drafter pass)
    policy.lengths(view)    how many of them are verified     (sees confidences, never tokens)
    batch.score(parts)      target rows 0..l, each            (1 target pass)
    verify_chain            accepted drafts + 1 more token

The state before it: all committed tokens but the anchor are in the target's cache (docs/architecture.md).
Source: Leviathan et al., arXiv 2211.17192; DSpark, arXiv 2607.05147. Shapes: R requests, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.sampling import RandomSource
from outrider.scheduling import Policy, StepView
from outrider.verification import Verdict, verify_chain, verify_picks


@dataclass(frozen=True)
class TargetRows:
    """What the target says after `anchor, x_1 .. x_k`.

    `row(k)` is its warped distribution [V]. `pick(k)` is the token it emits, where the draft has no say in that: greedy
    and coupled decoding; None elsewhere.
    """

    row: Callable[[int], Tensor]
    pick: Callable[[int], int] | None = None

    def verdict(self, proposal: Proposal, source: RandomSource) -> Verdict:
        if self.pick is not None:
            return verify_picks(proposal.tokens, self.pick)
        return verify_chain(proposal, self.row, source)


class Batch(Protocol):
    """The requests of a round."""

    @property
    def sources(self) -> Sequence[RandomSource]:
        """One per request."""
        ...

    def draft(self, floor: float) -> list[Proposal]:
        """One block each; positions from the first confidence below `floor` on may be left out."""
        ...

    def view(self, proposals: Sequence[Proposal]) -> StepView:
        """What the policy is shown."""
        ...

    def score(self, parts: Sequence[list[int]]) -> list[TargetRows]:
        """One forward on [anchor, *part] each."""
        ...


@dataclass(frozen=True)
class RoundResult:
    proposal: Proposal  # in full, also what was not admitted
    admitted: int  # draft tokens the target verified
    verdict: Verdict
    tokens: list[int]  # to commit: the accepted drafts and the next token


def run_round(batch: Batch, policy: Policy) -> list[RoundResult]:
    proposals = batch.draft(policy.floor)
    lengths = policy.lengths(batch.view(proposals)).tolist()
    admitted = [proposal.truncated(length) for proposal, length in zip(proposals, lengths, strict=True)]
    rows = batch.score([part.tokens for part in admitted])
    results = []
    for proposal, part, target, source in zip(proposals, admitted, rows, batch.sources, strict=True):
        verdict = target.verdict(part, source)
        tokens = [*part.tokens[: verdict.accepted], verdict.next_token]
        results.append(RoundResult(proposal, len(part.tokens), verdict, tokens))
    return results
