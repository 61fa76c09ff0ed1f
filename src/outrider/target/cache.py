"""Store the KV cache and recurrent states of a target, both with exact rollback.

The state of a recurrent layer (gated delta net):

    S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t k_t v_t^T        conv_t: the last inputs of a convolution

    before   S_n, conv_n  --- forward of rows n .. n+l --->  S_{n+l+1}, conv_{n+l+1}
    keep m   S_n, conv_n  --- the same rows n .. n+m-1 --->  S_{n+m}, conv_{n+m}       (this layer's module alone)

Slots of keys can be dropped; a single state per layer cannot. So a recurrent layer keeps the state before its last
forward and the rows of that forward. Rolling back to m rows runs the layer's module on these m rows again: projections
and recurrence, no attention and no MLP. If all rows stay, or none, nothing is computed. The states of a request whose
keys are in pages (target/paged.py) are a cache without slots, which rolls back in the same way.
Source: Gated Delta Networks, arXiv 2412.06464. Shapes: B sequences, T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from outrider.utils.measure import on_device

_LAYER = "linear_attn"  # the attribute of a decoder layer that holds its recurrent module


def recurrent_modules(decoder: Any) -> dict[int, torch.nn.Module]:
    """Return the recurrent modules of a decoder, by layer index."""
    return {i: getattr(layer, _LAYER) for i, layer in enumerate(decoder.layers) if hasattr(layer, _LAYER)}


class StateLayer(Protocol):
    """A layer of a cache that keeps a state instead of slots, which goes back within the last forward only."""

    @property
    def length(self) -> int:
        """Number of tokens read."""
        ...

    def assume(self, length: int) -> None:
        """Count `length` tokens as read, whatever the state is."""
        ...

    def rollback(self, length: int, cache: Cache) -> None:
        """Drop every token from `length` on, all of them from the last forward."""
        ...


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """Convolution and recurrent state of one layer; states are replaced, never written in place.

    Args:
        module: the layer's recurrent module.
    """

    is_compileable = False

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.record_past = True  # transformers then passes every update here instead of writing into the state
        self._module = module
        self.length = 0  # rows read
        self._before: tuple[Tensor | None, Tensor | None] = None, None
        self._rows_BTD: Tensor | None = None

    def lazy_initialization(self, *_: object, **__: object) -> None:
        """Do nothing: states are allocated by their updates."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Append [B, channels, T] and return the columns that the convolution sees, oldest first."""
        assert conv_kernel_size is not None, "the family's module gives no conv_kernel_size"
        earlier = self.conv_states[0]
        seen = conv_states if earlier is None else torch.cat([earlier, conv_states], dim=-1)
        self.conv_states[0] = seen[..., -conv_kernel_size:].clone()
        self.has_previous_state[0] = True
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        self.recurrent_states[0] = recurrent_states
        return recurrent_states

    @property
    def width(self) -> int:
        """Number of inputs of the convolution that are kept."""
        conv_state = self.conv_states[0]
        return 0 if conv_state is None else int(conv_state.shape[-1])

    @classmethod
    def join(cls, layers: Sequence[RecurrentLayer]) -> RecurrentLayer:
        """Return the states of layers of equal `width`, of one request each, as those of a batch."""
        joined = cls(layers[0]._module)
        if layers[0].width:
            for name in ("conv_states", "recurrent_states"):
                getattr(joined, name)[0] = torch.cat([getattr(layer, name)[0] for layer in layers])
            joined.has_previous_state[0] = True
        return joined

    def split(self, layers: Sequence[RecurrentLayer]) -> None:
        """Give the states of a batch back to the layers of its requests."""
        for i, layer in enumerate(layers):
            for name in ("conv_states", "recurrent_states"):
                getattr(layer, name)[0] = getattr(self, name)[0][i : i + 1]
            layer.has_previous_state[0] = True

    def remember(self, rows_BTD: Tensor) -> None:
        """Count the rows of a forward, and store them and the state before it for `drop`."""
        self.length += rows_BTD.shape[1]
        self._before, self._rows_BTD = (self.conv_states[0], self.recurrent_states[0]), rows_BTD

    def assume(self, length: int) -> None:
        self.length = length

    def rollback(self, length: int, cache: Cache) -> None:
        self.drop(self.length - length, cache)
        self.length = length

    @torch.inference_mode()
    def drop(self, count: int, cache: Cache) -> None:
        """Drop the last `count` rows, all of them from the last forward."""
        if count == 0:
            return
        rows_BTD = self._rows_BTD
        assert rows_BTD is not None, "a recurrent state rolls back within the last forward only"
        kept = rows_BTD.shape[1] - count
        assert kept >= 0, f"{count} rows to drop, {rows_BTD.shape[1]} in the last forward"
        self.conv_states[0], self.recurrent_states[0] = self._before
        self.has_previous_state[0] = self._before[0] is not None
        self._rows_BTD = rows_BTD[:, :kept]
        if kept:
            self._module(hidden_states=self._rows_BTD, cache_params=cache)


def remember_inputs(module: Any, _args: Any, inputs: dict[str, Any]) -> None:
    """Store the input rows of a recurrent module (a forward pre-hook); other caches are left alone."""
    cache = inputs.get("cache_params")
    layer = None if cache is None else cache.layers[module.layer_idx]
    if isinstance(layer, RecurrentLayer):
        layer.remember(inputs["hidden_states"])


# ----------------------------------------------------------------------------
# KV cache with exact rollback.
#
#     slots   0 .. length-1 | length .. capacity-1
#             committed     | free (stale values, never read)
#
# Buffers are allocated once; appending writes in place and attention reads a view of the first `length` slots, so
# rollback sets one integer, without copies or rounding. Sliding layers keep all slots, too; a mask hides those outside
# the window. Latents (MLA) are stored unexpanded. After verifying a tree, the slots of the accepted path move together;
# keys contain their positions, so they stay the same. Recurrent layers have a state instead of slots and roll back as
# described above, as do layers of compressed attention (target/compressed.py). The cache is a `transformers.Cache`, so
# every family's attention can write into it.
# ----------------------------------------------------------------------------


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, kv_heads, capacity, head_dim], allocated at the first write."""

    is_compileable = False
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, dim)
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, kv_heads, T, head_dim] and return views of everything so far."""
        start = self.length
        keys, values = self.reserve(key_states, value_states)
        keys[:, :, start:].copy_(key_states)
        values[:, :, start:].copy_(value_states)
        return keys, values

    def reserve(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Extend as `update`, but leave the new slots for the caller to write."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        assert end <= self.capacity, f"{end} tokens in a cache of {self.capacity} slots"
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class KVCache(Cache):
    """The cache of all layers of a model, for B sequences that share a slot index.

    Args:
        num_layers: number of decoder layers.
        capacity: slots, one per token; 0 for states only.
        states: the layers that have a state instead of slots, by index.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        states: Mapping[int, StateLayer] | None = None,
    ) -> None:
        own: dict[int, Any] = dict(states or {})
        super().__init__(layers=[own.get(i) or KVLayer(capacity) for i in range(num_layers)])
        self.capacity = capacity
        self._states: list[StateLayer] = list(own.values())
        self._stores = [layer for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def _used(self) -> list[KVLayer]:
        """Layers that hold keys; of layers that share keys (Gemma 4) only the first."""
        return [store for store in self._stores if store.is_initialized]

    @property
    def length(self) -> int:
        """Number of tokens read, which is the number of used slots."""
        return (self._states or self._stores)[0].length

    def assume(self, length: int) -> None:
        """Count `length` tokens as read by layers with a state, for measurements that do not depend on content."""
        for state in self._states:
            state.assume(length)

    def rollback(self, length: int) -> None:
        """Drop every slot from `length` on; with layers that keep a state only within the last forward."""
        assert 0 <= length <= self.length, f"cannot roll back from {self.length} to {length}"
        for store in self._used:
            store.length = length
        for state in self._states:
            state.rollback(length, self)  # a forward that failed may have reached only some of the layers

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """Keep only the slots `rows` (ascending, relative to `start`) after `start`, and move them together."""
        assert sorted(set(rows)) == list(rows) and start + max(rows, default=-1) < self.length, f"{rows} after {start}"
        end = start + len(rows)
        if list(rows) != list(range(len(rows))):
            assert not self._states, "branches in a state"
            for layer in self._used:
                from_T = on_device(rows, layer.keys.device) + start
                layer.keys[:, :, start:end] = layer.keys.index_select(2, from_T)
                layer.values[:, :, start:end] = layer.values.index_select(2, from_T)
        self.rollback(end)
