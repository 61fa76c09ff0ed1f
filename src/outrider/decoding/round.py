"""draft all -> policy -> score -> verify: one round, for any number of requests.

    lane.draft(floor)       x_1..x_K with p_d and c           (1 drafter pass)
    policy.lengths(...)     how many of them are verified     (sees confidences, never tokens)
    lane.score(x_1..x_l)    target rows 0..l                  (1 target pass)
    verify_chain            accepted drafts + 1 more token

The state before it: all committed tokens but the anchor are in the target's cache (docs/architecture.md).
Source: Leviathan et al., arXiv 2211.17192; DSpark, arXiv 2607.05147. Shapes: V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.sampling import RandomSource
from outrider.scheduling import Policy
from outrider.verification import Verdict, verify_chain


class Lane(Protocol):
    """One request in a round."""

    @property
    def source(self) -> RandomSource: ...

    def draft(self, floor: float) -> Proposal:
        """One block; positions from the first confidence below `floor` on may be left out."""
        ...

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        """One forward on [anchor, *tokens]; gives the warped target distribution of row k when asked for it."""
        ...


@dataclass(frozen=True)
class RoundResult:
    proposal: Proposal  # in full, also what was not admitted
    admitted: int  # draft tokens the target verified
    verdict: Verdict
    tokens: list[int]  # to commit: the accepted drafts and the next token


def run_round(lanes: Sequence[Lane], policy: Policy) -> list[RoundResult]:
    proposals = [lane.draft(policy.floor) for lane in lanes]
    lengths = policy.lengths([p.confidences for p in proposals], [len(p.tokens) for p in proposals])
    admitted = [proposal.truncated(length) for proposal, length in zip(proposals, lengths, strict=True)]
    # All lanes are scored before any row is read: lanes that share a batch can queue here and run one forward then.
    rows = [lane.score(part.tokens) for lane, part in zip(lanes, admitted, strict=True)]
    results = []
    for lane, proposal, part, target_row in zip(lanes, proposals, admitted, rows, strict=True):
        verdict = verify_chain(part, target_row, lane.source)
        tokens = [*part.tokens[: verdict.accepted], verdict.next_token]
        results.append(RoundResult(proposal, len(part.tokens), verdict, tokens))
    return results
