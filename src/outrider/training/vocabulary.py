"""A reduced draft vocabulary: the tokens worth drafting, by frequency in the target's own responses.

Lossless all the same: a token outside it is never drafted, and verification can still emit it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.data.samples import Sample


def choose_draft_ids(
    samples: Sequence[Sample], vocab_size: int, draft_vocab_size: int, always: frozenset[int]
) -> Tensor:
    """[Vd] ascending target ids: `always` (stop tokens), then the most frequent of responses, then of all text."""
    responses = Counter(token for sample in samples for token in sample.supervised_tokens)
    everything = Counter(token for sample in samples for token in sample.tokens)
    ranked = [*sorted(always), *(t for t, _ in responses.most_common()), *(t for t, _ in everything.most_common())]
    ids = list(dict.fromkeys([*ranked, *range(vocab_size)]))[:draft_vocab_size]
    return torch.tensor(sorted(ids))


def inverse_ids(draft_ids_Vd: Tensor, vocab_size: int) -> Tensor:
    """[V] index into the draft vocabulary, -1 outside it."""
    inverse_V = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids_Vd.device)
    inverse_V[draft_ids_Vd] = torch.arange(len(draft_ids_Vd), device=draft_ids_Vd.device)
    return inverse_V
