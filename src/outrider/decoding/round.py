"""One decoding round for any number of requests: draft all -> policy -> score -> verify.

    batch.draft(min_confidence)   x_1..x_K with p_d and c, each     (1 drafter pass)
    policy.lengths(view)          how many of them are verified     (sees confidences, never tokens)
    batch.score(drafts)           target rows 0..l, each            (1 target pass)
    verify                        accepted drafts + 1 more token

The state before it: all committed tokens but the anchor are in the target's cache (docs/architecture.md).
Source: Leviathan et al., arXiv 2211.17192; DSpark, arXiv 2607.05147. Shapes: R requests, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from outrider.decoding.policies import Policy, StepView
from outrider.decoding.verification import PendingVerdict, TargetRows, TypicalAcceptance, Verdict, draw_together, verify
from outrider.drafters.draft import Draft
from outrider.sampling import RandomSource


class Batch(Protocol):
    """The requests of a round."""

    @property
    def sources(self) -> Sequence[RandomSource]:
        """One per request."""
        ...

    def draft(self, min_confidence: float) -> Sequence[Draft]:
        """One draft each; positions from the first confidence below `min_confidence` on may be left out."""
        ...

    def view(self, drafts: Sequence[Draft]) -> StepView:
        """What the policy is shown; not asked for where nothing was drafted."""
        ...

    def score(self, drafts: Sequence[Draft]) -> list[TargetRows]:
        """The target's rows for each draft, from one forward on [anchor, *draft.tokens] each."""
        ...


Origin = Literal["draft", "correction", "bonus"]


@dataclass(frozen=True)
class RoundResult:
    """A request's share of a round: its draft in full, the nodes of it that the target verified, and the verdict."""

    draft: Draft
    verified: Draft
    verdict: Verdict

    @property
    def tokens(self) -> list[int]:
        """To commit: the accepted draft tokens and the next token."""
        return [*(self.draft.tokens[node] for node in self.verdict.path), self.verdict.next_token]

    def reach(self, committed: int) -> int:
        """Positions for which the target judged a draft, where `committed` of `tokens` were kept: fewer at a stop."""
        depth = self.verified.depth
        return min(depth, committed) if self.verdict.accepted >= committed else depth

    @property
    def rejected(self) -> bool:
        """Whether drafts were tried where the path ends: the next token then is a correction, else a bonus."""
        return bool(self.verified.children(self.verdict.path[-1] if self.verdict.path else -1))

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` comes from; a bonus is also what plain decoding gives."""
        own: Origin = "correction" if self.rejected else "bonus"
        return [*["draft"] * self.verdict.accepted, own]  # type: ignore[list-item]


def run_round(batch: Batch, policy: Policy, typical: TypicalAcceptance | None = None) -> list[RoundResult]:
    """One round: the results of all requests of the batch.

    Args:
        typical: a lossy rule instead of the exact one; the output is then not distributed as the target's.
    """
    results: list[RoundResult] = []
    for result in attempt_round(batch, policy, typical):
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def attempt_round(
    batch: Batch, policy: Policy, typical: TypicalAcceptance | None = None
) -> list[RoundResult | Exception]:
    """`run_round` where what goes wrong in one request's verification is its result, so that the others have theirs."""
    verified = drafts = batch.draft(policy.min_confidence)
    if any(draft.tokens for draft in drafts):
        lengths = policy.lengths(batch.view(drafts)).tolist()
        verified = [draft.truncated(length) for draft, length in zip(drafts, lengths, strict=True)]
    verdicts: list[Verdict | PendingVerdict | Exception] = []
    for part, rows, source in zip(verified, batch.score(verified), batch.sources, strict=True):
        try:
            verdicts.append(verify(part, rows, source, typical=typical))
        except Exception as error:
            verdicts.append(error)
    return [
        RoundResult(draft, part, verdict) if isinstance(verdict, Verdict) else verdict
        for draft, part, verdict in zip(drafts, verified, draw_together(verdicts, batch.sources), strict=True)
    ]
