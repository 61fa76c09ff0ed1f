"""A trained drafter beside copies from the text so far; decoding/drafting.py chooses between them.

    trained drafter   p_d of its own, seconds for every draft
    copy              what followed the longest known suffix, in the text so far or in others (drafters/ngram.py):
                      one-hot, no seconds, and longer where the text repeats itself

Which of them drafts is decided per request and round from what is committed and what came of earlier drafts, before
either has a token: a choice that reads the drafted tokens would favour some of them. Prompt look-up beside a trained
drafter: Saxena, github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.draft import Draft
from outrider.drafters.ngram import Library, NgramConfig

COPIES = NgramConfig(gamma=16)


class HybridDrafter(Drafter):
    """`trained` with `copies` of the text so far beside it, which are no drafts of its own: it proposes as `trained`.

    Its drafts may be trees; a copy is a chain all the same.

    Args:
        library: other texts that may be copied; none by default.
    """

    copies: NgramConfig

    def __init__(self, trained: Drafter, copies: NgramConfig = COPIES, library: Library | None = None) -> None:
        self.trained, self.copies, self.library = trained, copies, library
        self.aux_layers, self.nodes = trained.aux_layers, trained.nodes
        self.config, self.heads = trained.config, trained.heads
        self.gamma = max(trained.gamma, copies.gamma)

    @property
    def slots(self) -> int:
        return max(self.trained.slots, self.copies.gamma)

    @property
    def own_slots(self) -> int:
        return self.trained.own_slots

    @property
    def own_gamma(self) -> int:
        return self.trained.own_gamma

    def new_session(self, capacity: int) -> Any:
        """See `Drafter`; the trained drafter's."""
        return self.trained.new_session(capacity)

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        self.trained.extend(sessions, tokens, aux_TLD)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> Sequence[Draft]:
        return self.trained.propose(calls, min_confidence)

    def end(self, session: Any) -> None:
        self.trained.end(session)
