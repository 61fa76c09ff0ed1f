"""draft all -> policy -> score -> verify: one round, for any number of requests.

    batch.draft(min_confidence)      x_1..x_K with p_d and c, each     (1 drafter pass)      or a tree of N nodes
    policy.lengths(view)    how many of them are verified     (sees confidences, never tokens)
    batch.score(parts)      target rows 0..l, each            (1 target pass)
    verify_chain            accepted drafts + 1 more token                          or verify_tree

Lossless unless a `TypicalAcceptance` takes the place of the exact rules, which nothing does by itself.
The state before it: all committed tokens but the anchor are in the target's cache (docs/architecture.md).
Source: Leviathan et al., arXiv 2211.17192; DSpark, arXiv 2607.05147. Shapes: R requests, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.drafters.draft import Draft, Tree, TreeProposal
from outrider.sampling import RandomSource
from outrider.scheduling.policies import Policy
from outrider.scheduling.view import StepView
from outrider.verification import (
    TreeVerdict,
    TypicalAcceptance,
    Verdict,
    verify_chain,
    verify_picks,
    verify_tree,
    verify_tree_picks,
    verify_typical,
)


@dataclass(frozen=True)
class TargetRows:
    """What the target says after `anchor, x_1 .. x_k`; for a tree, row k follows node k - 1 and its ancestors.

    `row(k)` is its warped distribution [V]. `pick(k)` is the token it emits, where the draft has no say in that: greedy
    and coupled decoding; None elsewhere.
    """

    row: Callable[[int], Tensor]
    pick: Callable[[int], int] | None = None

    def verdict(
        self, proposal: Draft, source: RandomSource, lossy: TypicalAcceptance | None = None
    ) -> Verdict | TreeVerdict:
        """What is accepted, and the next token; by `lossy` instead of the exact rule, unless `pick` settles it."""
        if lossy is not None and self.pick is None:
            tree = proposal.tree if isinstance(proposal, TreeProposal) else Tree.chain(proposal.tokens)
            return verify_typical(tree, self.row, source, lossy)
        if isinstance(proposal, TreeProposal):
            if self.pick is not None:
                return verify_tree_picks(proposal.tree, self.pick)
            return verify_tree(proposal, self.row, source)
        if self.pick is not None:
            return verify_picks(proposal.tokens, self.pick)
        return verify_chain(proposal, self.row, source)


class Batch(Protocol):
    """The requests of a round."""

    @property
    def sources(self) -> Sequence[RandomSource]:
        """One per request."""
        ...

    def draft(self, min_confidence: float) -> Sequence[Draft]:
        """One block each; positions from the first confidence below `min_confidence` on may be left out."""
        ...

    def view(self, proposals: Sequence[Draft]) -> StepView:
        """What the policy is shown."""
        ...

    def score(self, parts: Sequence[Draft]) -> list[TargetRows]:
        """One forward on [anchor, *part.tokens] each."""
        ...


@dataclass(frozen=True)
class RoundResult:
    proposal: Draft  # in full, also what was not admitted
    admitted: int  # draft tokens the target verified
    verdict: Verdict | TreeVerdict
    tokens: list[int]  # to commit: the accepted drafts and the next token

    @property
    def part(self) -> Draft:
        """What was admitted."""
        return self.proposal.truncated(self.admitted)

    @property
    def rejected(self) -> bool:
        """Whether drafts were tried where the path ends: the next token then is a correction, else a bonus."""
        return bool(self.part.children(self.verdict.path[-1] if self.verdict.path else -1))


def run_round(batch: Batch, policy: Policy, lossy: TypicalAcceptance | None = None) -> list[RoundResult]:
    """One round. With `lossy` the output is not distributed as the target's."""
    proposals = batch.draft(policy.min_confidence)
    lengths = policy.lengths(batch.view(proposals)).tolist()
    admitted = [proposal.truncated(length) for proposal, length in zip(proposals, lengths, strict=True)]
    rows = batch.score(admitted)
    results = []
    for proposal, part, target, source in zip(proposals, admitted, rows, batch.sources, strict=True):
        verdict = target.verdict(part, source, lossy)
        tokens = [*(part.tokens[node] for node in verdict.path), verdict.next_token]
        results.append(RoundResult(proposal, len(part.tokens), verdict, tokens))
    return results
