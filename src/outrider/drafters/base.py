"""proposal = x_1..x_l, the exact p_k each x_k was drawn from, and c_1..c_l: what every chain drafter hands over.

The distributions must be those that were *sampled from*, warps included: acceptance min(1, p_t/p_d) is lossless for
no others (Leviathan et al., arXiv 2211.17192). Shapes: K block positions, L taps, V target vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.drafters.tree import TreeProposal
from outrider.sampling import PositionNoise, RandomSource, SamplingParams, SeenTokens


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one request.

    `drafted_with` holds p_k(x_k); `row(k)` gives p_k over the target's vocabulary [V], whatever the drafter's own, and
    is asked only where a residual is needed. `confidences` c_k were known before x_k was drawn; [] if there are none.
    """

    tokens: list[int]
    drafted_with: list[float]
    row: Callable[[int], Tensor]
    confidences: list[float]

    @staticmethod
    def certain(tokens: list[int], vocab_size: int, device: torch.device | str | None = None) -> Proposal:
        """Tokens that chance had no part in: every p_k is one-hot."""

        def row(k: int) -> Tensor:
            one_hot_V = torch.zeros(vocab_size, device=device)
            one_hot_V[tokens[k]] = 1.0
            return one_hot_V

        return Proposal(tokens, [1.0] * len(tokens), row, [])

    @staticmethod
    def empty() -> Proposal:
        """No draft: the target's own token is all the round gives."""

        def row(k: int) -> Tensor:
            raise IndexError(k)

        return Proposal([], [], row, [])

    @property
    def depth(self) -> int:
        """Most draft tokens that can be accepted."""
        return len(self.tokens)

    @property
    def row_parents(self) -> None:
        """The rows of the target forward follow one another."""

    def children(self, node: int) -> list[int]:
        """The positions that may come after position `node`, -1 being the anchor."""
        return [node + 1] if node + 1 < len(self.tokens) else []

    def tokens_before(self, row: int) -> list[int]:
        """The draft tokens on the way to a row of the target forward."""
        return self.tokens[:row]

    def truncated(self, length: int | None) -> Proposal:
        return Proposal(self.tokens[:length], self.drafted_with[:length], self.row, self.confidences[:length])


Draft = Proposal | TreeProposal


@dataclass(frozen=True)
class DraftCall:
    """One request that wants a block: its session, and what its tokens are drawn with.

    `limit`: most tokens of use to it one after another, at least 1; None: the whole block. `nodes`: most draft tokens
    in all, where they branch; None: as many as the drafter has. With `noise` (coupled sampling) x_1 is drawn with that
    of `position`, the number of committed tokens, and `source` is not asked.
    """

    session: Any
    anchor: int
    params: SamplingParams
    seen: SeenTokens
    source: RandomSource
    limit: int | None = None
    noise: PositionNoise | None = None
    position: int = 0
    nodes: int | None = None


class Drafter(Protocol):
    """What decoding needs of any drafter. A session is its memory of one request's committed tokens, and no others."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `extend` takes; () if it reads none."""
        ...

    @property
    def gamma(self) -> int:
        """Most tokens that one draft can have accepted."""
        ...

    def new_session(self, capacity: int) -> Any:
        """An empty session for at most `capacity` committed tokens."""
        ...

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None) -> None:
        """Take newly committed tokens of several requests.

        Args:
            tokens: per session, those the target has just read (old anchor, accepted drafts), not the new anchor.
            taps_TLD: their raw taps [T, L, D], sessions one after the other; None where `taps` is ().
        """
        ...

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> Sequence[Draft]:
        """One block or tree per call; a block may stop at the first confidence below `floor`."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter whose drafts branch."""

    @property
    def nodes(self) -> int:
        """Most draft tokens of one tree, all branches together."""
        ...


def longest_draft(calls: Sequence[DraftCall], gamma: int) -> int:
    """How many positions anybody has use for, `gamma` at most."""
    return max(gamma if call.limit is None else min(call.limit, gamma) for call in calls)


def draft_slots(drafter: Drafter | None) -> int:
    """How many draft tokens one request brings to a target forward at most."""
    if drafter is None:
        return 0
    return drafter.nodes if isinstance(drafter, TreeDrafter) else drafter.gamma
