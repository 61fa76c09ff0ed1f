"""The allocator of KV blocks, which prefers neighbours.

| A A A . . . . | B B . . . . . . |       a new request starts in the middle of the largest gap, a growing one takes
                                          the block behind its last: most requests stay one run of blocks, which
                                          attention can view without copying. Correctness never depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BlockAllocator:
    """Allocates block ids 0 .. total - 1."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"num_blocks={total} must be at least 1.")
        self.total = total
        self._free_N = np.ones(total, dtype=bool)
        self.available = total

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks, continuing block `after` where possible; the caller has checked `available`."""
        assert count <= self.available, f"{count} blocks asked for, {self.available} free"
        found: list[int] = []
        while len(found) < count:
            wanted = count - len(found)
            start, length = self._run_after(after, wanted) if after is not None else self._run_inside(wanted)
            if not length:
                after = None
                continue
            self._free_N[start : start + length] = False
            found += range(start, start + length)
            after = found[-1]
        self.available -= count
        return found

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        if len(blocks):
            index = np.asarray(blocks)
            assert not self._free_N[index].any() and len(set(blocks)) == len(blocks), f"blocks {blocks} freed twice"
            self._free_N[index] = True
            self.available += len(blocks)

    def _run_after(self, after: int, wanted: int) -> tuple[int, int]:
        behind = self._free_N[after + 1 : after + 1 + wanted]
        return after + 1, len(behind) if behind.all() else int(behind.argmin())

    def _run_inside(self, wanted: int) -> tuple[int, int]:
        """Where to start in the largest gap, and how much of `wanted` it holds."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free_N, [False]))))
        starts, ends = edges[::2], edges[1::2]
        largest = int((ends - starts).argmax())
        start, length = int(starts[largest]), int((ends - starts)[largest])
        if length <= wanted:
            return start, length
        neighbour = start > 0  # a request's last block is right before: leave it room to grow
        return start + ((length - wanted) // 2 if neighbour else 0), wanted
