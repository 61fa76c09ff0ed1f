"""Rows that branch: row t follows its parent row, sees the cache and its own ancestors, and stands at its depth.

    parents   -1  0  0  1  1       slots     past  past+1  past+2  past+3  past+4
    depths     0  1  1  2  2       position  past + depth: what rotary embeddings and sliding windows count by

              0 1 2 3 4            Siblings share a position and do not see each other. Which rows stay is known after
        row 0 x                    verification; their keys then move into the slots that follow the cache
        row 1 x x                  (`KVCache.keep_path`, `PagedKV.keep_paths`), and nothing is computed again.
        row 2 x . x
        row 3 x x . x              Tree attention: SpecInfer, arXiv 2305.09781.
        row 4 x x . . x

Shapes: T new rows, N keys one forward sees, K kv heads, G queries per kv head, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Branches:
    """Depth of every row and which rows each one sees, itself included."""

    depths_T: torch.Tensor
    sees_TT: torch.Tensor

    @staticmethod
    def of(parents: Sequence[int]) -> Branches:
        """From the parent row of each row; the first has -1 and no other does."""
        assert all((parent == -1) == (t == 0) and parent < t for t, parent in enumerate(parents)), f"{list(parents)}"
        sees_TT = np.eye(len(parents), dtype=bool)
        for row, parent in enumerate(parents[1:], start=1):
            sees_TT[row] |= sees_TT[parent]
        return Branches(torch.from_numpy(sees_TT.sum(axis=1) - 1), torch.from_numpy(sees_TT))

    def visible(self, past: int, low: int = 0, window: int | None = None) -> torch.Tensor:
        """[T, past - low + T] bool over cached positions low .. past - 1 and the rows.

        Args:
            window: the last so many positions are visible, the row's own included; None is all.
        """
        rows = len(self.depths_T)
        visible_TN = torch.cat([torch.ones(rows, past - low, dtype=torch.bool), self.sees_TT], dim=1)
        if window is not None:
            position_T = past + self.depths_T
            position_N = torch.cat([torch.arange(low, past), position_T])
            visible_TN &= position_T[:, None] - position_N < window
        return visible_TN


def additive(visible: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0 where visible, else -inf: made once, because attention would convert a bool mask in every layer."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def lowest_visible(past: int, window: int | None) -> int:
    """The first position that any new row after `past` cached ones sees."""
    return 0 if window is None else max(0, past + 1 - window)
