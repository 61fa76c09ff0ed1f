"""One forward of rows that branch (target/branches.py) after a `KVCache` of one sequence, for families of transformers.

Their own masks know no siblings, so attention comes here (target/interface.py), layer by layer.
"""

from __future__ import annotations

import torch

from outrider.target.branches import Branches, additive, lowest_visible
from outrider.target.cache import KVCache, KVLayer
from outrider.target.folded import attend_folded, fold, unfold


class BranchedStep:
    """What the attention interface asks of such a forward."""

    def __init__(self, cache: KVCache, branches: Branches, groups: int) -> None:
        assert cache.pad_B is None, "branches after left padding"
        self._cache, self._branches, self._groups, self._past = cache, branches, groups, cache.length
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `RaggedStep.attend`, with k and v appended to the cache."""
        store = self._cache.layers[layer]
        assert isinstance(store, KVLayer)
        keys, values = store.update(k, v)
        low = lowest_visible(self._past, window)
        if window not in self._masks:
            mask = additive(self._branches.visible(self._past, low, window), q.dtype)
            self._masks[window] = mask.repeat_interleave(self._groups, dim=0)[None, None].to(q.device)
        folded, seen = fold(q, k.shape[1]), (keys[:, :, low:], values[:, :, low:])
        return unfold(attend_folded(folded, *seen, self._masks[window], scale, softcap, sinks_H), self._groups)
