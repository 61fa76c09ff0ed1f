"""tau = tokens per round, bonus included;  c_k = P(position k accepted | 1..k-1 accepted and k verified).

For a tree, k is a depth: accepted at k / rounds whose path reached k - 1 and whose tree had nodes at k.

What rounds of real decoding say about a drafter, in the papers' convention (DSpark, arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.decoding.generate import RoundStats


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
