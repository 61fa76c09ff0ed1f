"""KV cache with exact rollback.

    slots   0 .. pad-1 | pad .. length-1 | length .. capacity-1
            left pad   | committed       | free (stale values, never read)

Buffers are allocated once; appending writes in place and attention reads a view of the first `length` slots, so
rolling back is setting one integer: no copy, no rounding, exactly the state before the rejected tokens were seen.
Of a verified tree the slots of the accepted path move together; keys carry their positions, so they need no change.
It is a `transformers.Cache`, so every family's own attention can write into it, and lean.py can too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, kv_heads, capacity, head_dim], allocated at the first write."""

    is_compileable = False
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, dim)
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, kv_heads, T, head_dim] and return views of everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} slots asked to hold {end}"
        self.keys[:, :, self.length : end].copy_(key_states)
        self.values[:, :, self.length : end].copy_(value_states)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class KVCache(Cache):
    """One cache for all layers of a model and B sequences that share a slot index.

    Args:
        num_layers: decoder layers.
        capacity: slots (tokens, left padding included).
        pad_B: [B] int64, slots of left padding per sequence; None when nothing is padded.
    """

    def __init__(self, num_layers: int, capacity: int, pad_B: torch.Tensor | None = None) -> None:
        super().__init__(layers=[KVLayer(capacity) for _ in range(num_layers)])
        self.capacity = capacity
        self.pad_B = pad_B

    @property
    def length(self) -> int:
        """Slots in use."""
        first = self.layers[0]
        assert isinstance(first, KVLayer)
        return first.length

    def rollback(self, length: int) -> None:
        """Forget every slot from `length` on."""
        assert 0 <= length <= self.length, f"cannot roll back from {self.length} to {length}"
        for layer in self.layers:
            assert isinstance(layer, KVLayer)
            layer.length = length

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """Of the slots from `start` on keep these (rising, counted from `start`), one after another."""
        assert sorted(set(rows)) == list(rows) and start + max(rows, default=-1) < self.length, f"{rows} after {start}"
        end = start + len(rows)
        if list(rows) != list(range(len(rows))):
            for layer in self.layers:
                assert isinstance(layer, KVLayer)
                from_T = torch.tensor(rows, device=layer.keys.device) + start
                layer.keys[:, :, start:end] = layer.keys.index_select(2, from_T)
                layer.values[:, :, start:end] = layer.values.index_select(2, from_T)
        self.rollback(end)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the sequences of the batch that are not in `rows` ([B'] int64)."""
        for layer in self.layers:
            assert isinstance(layer, KVLayer)
            used = layer.length
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_empty(len(rows), *old.shape[1:])
                torch.index_select(old[:, :, :used], 0, rows, out=new[:, :, :used])
                setattr(layer, name, new)
        if self.pad_B is not None:
            self.pad_B = self.pad_B[rows]
