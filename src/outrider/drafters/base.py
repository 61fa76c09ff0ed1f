"""proposal = x_1..x_l, the exact p_k each x_k was drawn from, and c_1..c_l: what every chain drafter hands over.

The distributions must be those that were *sampled from*, warps included: acceptance min(1, p_t/p_d) is lossless for
no others (Leviathan et al., arXiv 2211.17192). Shapes: K block positions, V target vocab.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.sampling import RandomSource, SamplingParams, SeenTokens


@dataclass
class Proposal:
    tokens: list[int]
    probs_KV: Tensor  # over the target's vocabulary, whatever the drafter's own
    confidences: list[float]  # c_k, known before x_k was drawn; [] if the drafter has none

    def truncated(self, length: int) -> "Proposal":
        return Proposal(self.tokens[:length], self.probs_KV[:length], self.confidences[:length])


class DraftSession(Protocol):
    """A drafter's memory of one request: the features of its committed tokens, and no others."""

    def extend(self, taps_TLD: Tensor) -> None:
        """Take the raw taps [T, L, D] of T newly committed tokens."""
        ...

    def propose(
        self,
        anchor: int,
        params: SamplingParams,
        seen: SeenTokens,
        source: RandomSource,
        limit: int | None = None,
        floor: float = 0.0,
    ) -> Proposal:
        """Draft up to `limit` tokens after `anchor`; may stop at the first confidence below `floor`."""
        ...


class Drafter(Protocol):
    """What the decoding loop needs of any drafter."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `extend` takes."""
        ...

    @property
    def block_size(self) -> int:
        """Most rows a draft takes: how far it may reach beyond the committed tokens."""
        ...

    def new_state(self, capacity: int) -> DraftSession:
        """An empty session for at most `capacity` committed tokens."""
        ...
