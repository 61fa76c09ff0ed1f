"""Keep what compressed attention (DeepSeek-V4) reads of a request, with exact rollback.

A layer attends to the keys of the last `window` tokens and to compressed keys, one for every r tokens:

    tokens     . . . . | . . . . | . . . . | . .       r = 4
    entries       0         1         2                made of a window when its last token is read, seen from then on

An entry sums up its window (heavily compressed attention), or its window and a half of the window before (compressed
sparse attention, whose indexer has entries of its own, made in the same way). Plain sliding layers have none.

So a forward reads the ends of a few sequences: keys in the attention window, projections of tokens in no closed window,
halves of the last closed one, and all entries. Each is a `Tail`, which keeps the rows of the last forward and those
that it read. Rolling back within that forward sets its length: nothing is computed again, and no bit changes.

transformers' modules run as they are; they call the methods of `CompressedLayer` that its own cache has.
Source: DeepSeek-V4, sections 2.3.1 and 2.3.2, as transformers 5.23 cites them (models/deepseek_v4).
Shapes: B sequences, T rows, F numbers of a row, n windows, r tokens of a window, E head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.target.cache import StateLayer

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def compresses(config: PretrainedConfig) -> bool:
    """Return whether the layers of this model attend to compressed keys."""
    return getattr(config, "compress_rates", None) is not None


def compressed_layers(config: Any) -> dict[int, StateLayer]:
    """Make the cache layers of a model that compresses keys, by layer index."""
    rates = (config.compress_rates.get(kind) for kind in config.layer_types)
    return {i: CompressedLayer(config.sliding_window, rate) for i, rate in enumerate(rates)}


def numbers_per_token(config: Any) -> float:
    """How many numbers the entries of all layers have for each token of a text; 0 if the model compresses no keys."""
    if not compresses(config):
        return 0.0
    widths = {_SPARSE: config.head_dim + config.index_head_dim, _HEAVY: config.head_dim}
    return sum(widths[kind] / config.compress_rates[kind] for kind in config.layer_types if kind in widths)


class Tail:
    """The last rows of a sequence, [B, T, F].

    Args:
        tokens: how many tokens make a row.
    """

    def __init__(self, tokens: int = 1) -> None:
        self.length = 0  # rows so far, of which the last are kept
        self._tokens = tokens
        self._rows: Tensor | None = None  # None: zeros
        self._first = 0  # number of the first row that is kept
        self._before = 0  # rows before the last forward

    def append(self, new_BTF: Tensor, start: int) -> Tensor:
        """Append the rows of a forward; return all rows from number `start` on, and keep no others."""
        if self._rows is None:
            before_BTF = new_BTF.new_zeros(len(new_BTF), self.length - start, new_BTF.shape[2])
        else:
            assert start >= self._first, f"row {start} is gone, the first is {self._first}"
            before_BTF = self._rows[:, start - self._first : self.length - self._first]
        self._rows = torch.cat([before_BTF, new_BTF], dim=1)
        self._first, self._before = start, self.length
        self.length += new_BTF.shape[1]
        return self._rows

    def assume(self, tokens: int) -> None:
        """Count so many tokens as read; their rows are zeros."""
        self._rows, self.length = None, tokens // self._tokens
        self._before = self.length

    def rollback(self, tokens: int) -> None:
        """Drop the rows that are not of the first so many tokens, all of them from the last forward."""
        length = tokens // self._tokens
        assert self._before <= length, "compressed keys roll back within the last forward only"
        self.length = min(self.length, length)


class Compressor:
    """What one compressor has read and made: projections of tokens, halves of windows, entries."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.kv, self.gate = Tail(), Tail()
        self.half_kv, self.half_gate = Tail(rate), Tail(rate)
        self.entries = Tail(rate)
        self.closed = 0  # windows before the forward under way

    @property
    def tails(self) -> tuple[Tail, ...]:
        return self.kv, self.gate, self.half_kv, self.half_gate, self.entries


class CompressedLayer(CacheLayerMixin):
    """The cache of one layer.

    Args:
        window: number of visible tokens, including the token's own.
        rate: tokens of an entry; None: the layer has no entries.
    """

    is_compileable = False
    is_sliding = True

    def __init__(self, window: int, rate: int | None) -> None:
        super().__init__()
        self._window = window
        self._keys = Tail()
        self._compressors: dict[str, Compressor] = {}
        if rate is not None:
            self._compressors = {name: Compressor(rate) for name in ("compressor", "indexer")}

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return self._keys.length

    @property
    def _tails(self) -> list[Tail]:
        return [self._keys, *(tail for compressor in self._compressors.values() for tail in compressor.tails)]

    def assume(self, length: int) -> None:
        """Count `length` tokens as read, all of whose rows are zeros."""
        for tail in self._tails:
            tail.assume(length)

    def rollback(self, length: int, cache: Cache) -> None:
        """Drop every token from `length` on, all of them from the last forward."""
        for tail in self._tails:
            tail.rollback(length)

    def lazy_initialization(self, *_: object, **__: object) -> None:
        """Do nothing: rows are allocated when they are appended."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys [B, 1, T, E], which are the values too, and return all that the new tokens see."""
        _, start = self.get_mask_sizes(0)
        keys = self._keys.append(key_states[:, 0], start)[:, None]
        return keys, keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = max(0, self.length - self._window + 1)
        return self.length - start + query_length, start

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append projections of new tokens, [B, T, F] each.

        Returns those of the windows that now close, [B, n r, F] each, and the position of the first.
        """
        own = self._compressors[name]
        own.closed = own.kv.length // own.rate
        first = own.closed * own.rate
        open_kv, open_gate = own.kv.append(kv, first), own.gate.append(gate, first)
        count = own.kv.length // own.rate * own.rate - first
        return open_kv[:, :count], open_gate[:, :count], first

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Append the halves of closing windows that the windows after them read: the first E of [B, n, r, 2 E].

        Returns those of the window before, [B, r, E] each; None if there is none.
        """
        own = self._compressors[name]
        found: list[Tensor | None] = []
        for tail, chunk in ((own.half_kv, chunk_kv), (own.half_gate, chunk_gate)):
            halves = tail.append(chunk[..., :head_dim].flatten(2), max(0, own.closed - 1))
            found.append(halves[:, 0].unflatten(-1, (-1, head_dim)) if own.closed else None)
        return found[0], found[1]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Append the entries of closing windows, [B, n, E], and return all."""
        return self._compressors[name].entries.append(compressed, 0)
