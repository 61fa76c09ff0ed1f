"""u ~ U[0, 1):   accept(p) = [u < p]     choose(p_V) = min { v : u < p_0 + ... + p_v }

All randomness of decoding passes through these two questions. A `SeededSource` answers them with a generator; the
proof tool answers them in every possible way (outrider.evaluation.enumeration). Shapes: V vocab.
"""

from typing import Protocol

import torch
from torch import Tensor


class RandomSource(Protocol):
    def accept(self, probability: float) -> bool:
        """True with the given probability; always from 1 on, never at 0."""
        ...

    def choose(self, probs_V: Tensor) -> int:
        """An index with its probability; never one of probability 0."""
        ...


class SeededSource:
    """Draws from a generator of its own: a request's tokens do not depend on who else is in the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def accept(self, probability: float) -> bool:
        if probability >= 1.0:
            return True
        if probability <= 0.0:
            return False
        return self._uniform() < probability

    def choose(self, probs_V: Tensor) -> int:
        top, index = probs_V.max(dim=-1)
        if top.item() >= 1.0:  # one-hot (to rounding): greedy decoding draws nothing and sums nothing
            return int(index)
        cumulative_V = probs_V.cumsum(-1, dtype=torch.float64)
        total = cumulative_V[-1].item()
        assert total > 0.0, f"probabilities sum to {total}"
        # right=True skips tokens of probability 0: they share their predecessor's cumulative sum.
        return int(torch.searchsorted(cumulative_V, self._uniform() * total, right=True))

    def _uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()
