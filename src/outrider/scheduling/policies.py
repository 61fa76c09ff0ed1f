"""admit (r, k) or stop, seeing only c_1..c_k of r and what is already admitted:

    fixed       l_r = min(length, drafted_r)
    threshold   l_r = the longest prefix with every c_k >= threshold
    prefix      the largest survival a_{r,k} = c_1 ... c_k on the frontier (r, l_r + 1), while tau * SPS(B) improves

Source: DSpark, arXiv 2607.05147, algorithm 1. Losslessness demands that admitting x_k never depends on x_k, and
c_{k+1} does: a search over all confidences, however tempting, biases the output. R requests, B tokens per forward.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Policy(Protocol):
    @property
    def floor(self) -> float:
        """No token whose confidence is below this is ever admitted, so a drafter need not draw it."""
        ...

    def lengths(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        """How many of the `drafted` tokens each request has verified; confidences are [] where a drafter has none."""
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Verify a fixed number of draft tokens; None verifies all of them."""

    length: int | None = None
    floor: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length={self.length} must be >= 0; use None to verify the whole block")

    def lengths(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        return [count if self.length is None else min(self.length, count) for count in drafted]


@dataclass(frozen=True)
class ThresholdPolicy:
    """Verify until the drafter doubts itself."""

    threshold: float

    @property
    def floor(self) -> float:
        return self.threshold

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]; it is compared with a probability")

    def lengths(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        _require_confidences(confidences, drafted)
        lengths = []
        for request, count in enumerate(drafted):
            length = 0
            while length < count and confidences[request][length] >= self.threshold:
                length += 1
            lengths.append(length)
        return lengths


@dataclass(frozen=True)
class PrefixScheduler:
    """Spend verification where survival is highest, while expected tokens per second improve.

    `sps(B)` is the measured number of target forward passes per second at B tokens.
    """

    sps: Callable[[int], float]
    floor: ClassVar[float] = 0.0

    def lengths(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        _require_confidences(confidences, drafted)
        requests = len(drafted)
        lengths = [0] * requests
        # Popped by largest survival, ties by (position, request). Only the frontier is in the heap: c_{k+1} is
        # read after x_k has been admitted, never before.
        frontier = [(-confidences[r][0], 0, r) for r in range(requests) if drafted[r] > 0]
        heapq.heapify(frontier)
        budget, tau = requests, float(requests)  # every request verifies its anchor and gains one token by it
        throughput = tau * self.sps(budget) if frontier else 0.0
        while frontier:
            negative_survival, position, request = heapq.heappop(frontier)
            improved = (tau - negative_survival) * self.sps(budget + 1)
            if improved <= throughput:
                break  # searching on for a later improvement would look at confidences not yet revealed
            budget, tau, throughput = budget + 1, tau - negative_survival, improved
            lengths[request] = position + 1
            if position + 1 < drafted[request]:
                survival = negative_survival * confidences[request][position + 1]
                heapq.heappush(frontier, (survival, position + 1, request))
        return lengths


def _require_confidences(confidences: Sequence[Sequence[float]], drafted: Sequence[int]) -> None:
    for request, count in enumerate(drafted):
        if len(confidences[request]) < count:
            raise ValueError(
                f"request {request} has {len(confidences[request])} confidences for {count} draft tokens: its drafter "
                "has no confidence head; verify a fixed length instead, or train the drafter with one"
            )
