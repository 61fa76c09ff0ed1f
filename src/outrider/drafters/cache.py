"""The draft KV cache: keys and values of committed tokens, which the rows of a draft attend to in serving.

On a CPU each request has tensors of its own (`DraftKV`, read by `CachedKeys`). On a GPU the keys of all requests of a
block drafter are in one tensor a layer, in pages (`DraftPool`, read by `PooledKeys`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import finalize

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.config import LayerConfig
from outrider.drafters.layers import EVERYTHING, Attention, AttentionPattern
from outrider.target.paged_attention import (
    MOST_SEEN,
    Division,
    HostPlan,
    Plan,
    Reader,
    Sizes,
    Tables,
    attend,
    divide,
    most_items,
)
from outrider.target.paged_attention import plan as make_plan
from outrider.utils.measure import on_device

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class DraftKV:
    """Keys and values of one draft layer for one request in float32, written in place and read up to an end.

        slots   0 .. committed-1 | rows of the draft in hand | free

    Position p is in slot p mod S. Where rows have a window, S slots for the window and a draft's rows are enough: a
    position takes the slot of one that no row sees any more. A draft's own rows are written behind what is committed
    and overwritten by the next draft: forgetting costs nothing. The query heads of one key head are folded into rows,
    so keys are never repeated.
    Shapes: T rows, S slots read, Q heads, G kv heads, E head dim.
    """

    def __init__(self, config: LayerConfig, slots: int, device: torch.device) -> None:
        self.groups = config.num_attention_heads // config.num_key_value_heads
        shape = (config.num_key_value_heads, slots, config.head_dim)
        self.keys_GSE, self.values_GSE = torch.empty(shape, device=device), torch.empty(shape, device=device)

    @property
    def slots(self) -> int:
        return self.keys_GSE.shape[1]

    def write(self, start: int, k_TGE: Tensor, v_TGE: Tensor) -> None:
        """Put the rows at position `start` and on; of more rows than there are slots the last."""
        end, S = start + len(k_TGE), self.slots
        if end <= S:
            self.keys_GSE[:, start:end] = k_TGE.transpose(0, 1)
            self.values_GSE[:, start:end] = v_TGE.transpose(0, 1)
            return
        places_T = torch.arange(max(start, end - S), end, device=k_TGE.device) % S
        self.keys_GSE[:, places_T] = k_TGE[-S:].transpose(0, 1)
        self.values_GSE[:, places_T] = v_TGE[-S:].transpose(0, 1)

    def attend(self, q_TQE: Tensor, end: int, visible_TS: Tensor | None) -> Tensor:
        """Over the positions before `end` that slots hold, or those of them that are visible: [T, Q, E]."""
        T, heads, E = q_TQE.shape
        mask = None if visible_TS is None else visible_TS.repeat(self.groups, 1)
        q_GRE = q_TQE.transpose(0, 1).reshape(1, heads // self.groups, -1, E)  # rows: query group x T
        keys, values = self.keys_GSE[None, :, :end], self.values_GSE[None, :, :end]
        out = F.scaled_dot_product_attention(q_GRE, keys, values, attn_mask=mask)
        return out.view(heads, T, E).transpose(0, 1)


@dataclass
class DraftSession:
    """What a drafter remembers of one request.

    Attributes:
        caches: keys and values, layer by layer; none where they are in a `DraftPool`.
        waiting: states [m, H] of the newest committed tokens that are used together with a later token, layer by layer.
        length: number of committed tokens.
        pages: of the pool, in order.
        slots: of these pages, that each layer has.
    """

    caches: list[DraftKV]
    waiting: list[Tensor] = field(default_factory=list)
    length: int = 0
    pages: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    slots: Sequence[int] = ()

    def rows(self, layer: int, positions_T: Ints) -> Ints:
        """Rows of the pool where a layer's keys of these positions are."""
        slots_T = positions_T % self.slots[layer]
        rows_T: Ints = self.pages[slots_T // _PAGE] * _PAGE + slots_T % _PAGE
        return rows_T


def serving_mask(
    pattern: AttentionPattern, length: int, rows: int, slots: int | None = None, device: torch.device | None = None
) -> Tensor | None:
    """What the rows of one block see of `length` context positions and themselves, bool [K, S]; None: everything.

    `slots`: of a cache that may have fewer (`DraftKV`); None: position p is in slot p.
    """
    if pattern == EVERYTHING or (pattern.window is None and rows == 1):
        return None
    end = length + rows
    positions_S = torch.arange(end, device=device)
    if slots is not None and end > slots:
        positions_S = positions_S[-slots:].roll(end % slots)
    distance_KS = torch.arange(length, end, device=device)[:, None] - positions_S
    return _sees(pattern, distance_KS, positions_S >= length)


def _sees(pattern: AttentionPattern, distance: Tensor, own: Tensor) -> Tensor:
    """Whether rows see keys so many positions before them; `own`: keys of their block."""
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if pattern.window is None else visible & ((distance < pattern.window) | own)


class CachedKeys:
    """The key source of serving: new rows of several requests over their request's cache and one another.

    Their keys are written behind the cached rows, request by request, and forgotten when others are written there.

    Args:
        starts: rows of each request's caches that come before its new ones.
        counts: new rows of each request; rows stand request after request.
        visible: of each request, which of the cached and new rows each new one sees, [count, start + count], or None
            for all; without it the layer's pattern decides.
    """

    def __init__(
        self,
        sessions: Sequence[DraftSession],
        starts: Sequence[int],
        counts: Sequence[int],
        visible: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.requests, self.counts, self.visible = list(zip(sessions, starts, strict=True)), list(counts), visible
        self._masks: dict[AttentionPattern, Sequence[Tensor | None]] = {}

    def attend(self, attention: Attention, q_XQE: Tensor, k_XGE: Tensor, v_XGE: Tensor) -> Tensor:
        parts = zip(*(x.flatten(0, -3).split(self.counts) for x in (q_XQE, k_XGE, v_XGE)), strict=True)
        masks, attended = self._visible(attention, q_XQE.device), []
        for (session, start), mask, (q, k, v) in zip(self.requests, masks, parts, strict=True):
            kv = session.caches[attention.layer]
            kv.write(start, k, v)
            attended.append(kv.attend(q, start + len(q), mask))
        return torch.cat(attended).view(q_XQE.shape)

    def _visible(self, attention: Attention, device: torch.device) -> Sequence[Tensor | None]:
        if self.visible is not None:
            return self.visible
        pattern = attention.pattern  # layers alike in it have as many slots
        if pattern not in self._masks:
            self._masks[pattern] = [
                serving_mask(pattern, start, count, slots=session.caches[attention.layer].slots, device=device)
                for (session, start), count in zip(self.requests, self.counts, strict=True)
            ]
        return self._masks[pattern]


class RequestCaches:
    """Keys and values of the requests of a block drafter on a CPU: each request has caches of its own."""

    def __init__(self, config: LayerConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def session(self, slots: Sequence[int]) -> DraftSession:
        """An empty session of so many slots in each layer."""
        return DraftSession([DraftKV(self.config, count, self.device) for count in slots])

    def append(
        self, sessions: Sequence[DraftSession], counts: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Write keys and values [T, G, E] of new tokens, layer by layer, after the committed ones."""
        for i, (k, v) in enumerate(layers):
            for session, keys, values in zip(sessions, k.split(counts), v.split(counts), strict=True):
                session.caches[i].write(session.length, keys, values)

    def source(self, sessions: Sequence[DraftSession], rows: int) -> CachedKeys:
        """The key source of drafts of so many rows a request."""
        return CachedKeys(sessions, [session.length for session in sessions], [rows] * len(sessions))


# ----------------------------------------------------------------------------
# On a GPU the keys of all requests of a block drafter are in one tensor a layer, in pages: the new rows of all requests
# are written by one copy and attend by one call (target/paged_attention.py).
#
#     position p  ->  slot s = p mod S of its request  ->  page table[s // 16]  ->  row 16 page + s mod 16 of the pool
#
# Shapes: R requests, K rows of each, T new tokens, Q heads, G kv heads, E head dim.
# ----------------------------------------------------------------------------


_PAGE = 16


class DraftPool:
    """Keys and values of the requests of a block drafter, [2, G, pages * 16, E] a layer. It grows as asked.

    `patterns`: what rows see, layer by layer; layers alike in it have as many slots of a session.
    `dtype`: of keys and values, whatever rows are.
    """

    def __init__(
        self, config: LayerConfig, patterns: Sequence[AttentionPattern], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.patterns, self.device = list(patterns), device
        self.groups = config.num_attention_heads // config.num_key_value_heads
        shape = (2, config.num_key_value_heads, _PAGE, config.head_dim)  # the first page is for padding (graphs.py)
        with torch.inference_mode(False):  # calls in and out of that mode write into them
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in patterns]
        self._free: list[int] = []

    def session(self, slots: Sequence[int]) -> DraftSession:
        """An empty session of so many slots in each layer; its pages are free again when it is forgotten."""
        count = -(-max(slots) // _PAGE)
        if len(self._free) < count:
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        session = DraftSession([], pages=np.array(pages, dtype=np.int64), slots=slots)
        finalize(session, self._free.extend, pages)
        return session

    def _grow(self, more: int) -> None:
        """By that many pages at least, by half in any case."""
        there = self.layers[0].shape[2] // _PAGE
        more = max(more, there // 2)
        with torch.inference_mode(False):
            self.layers = [F.pad(pool, (0, 0, 0, more * _PAGE)) for pool in self.layers]
        self._free += reversed(range(there, there + more))

    def append(
        self, sessions: Sequence[DraftSession], counts: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Write keys and values [T, G, E] of new tokens, layer by layer, after the committed ones."""
        for i, ((k, v), (rows_T, kept_T)) in enumerate(zip(layers, self.rows_of(sessions, counts), strict=True)):
            self.write(i, rows_T, keys_values=(k, v) if kept_T is None else (k[kept_T], v[kept_T]))

    def source(self, sessions: Sequence[DraftSession], rows: int) -> PooledKeys:
        """The key source of drafts of so many rows a request."""
        shared = {}
        for pattern, host in self.plans(sessions, rows).items():
            numbers = on_device(torch.from_numpy(np.concatenate([host.slots_T, host.numbers])), self.device)
            new_T, rest = numbers.split([len(host.slots_T), len(host.numbers)])
            shared[pattern] = new_T, self.plan_of(rest, host.sizes, pattern, split=host.split)
        return PooledKeys(self, shared)

    def plans(
        self, sessions: Sequence[DraftSession], rows: int, sizes: Sizes | None = None
    ) -> dict[AttentionPattern, HostPlan]:
        """The plans of attention of so many new rows of each request, for each kind of layer.

        Args:
            sizes: of a bucket, which are filled up with padding; None: those needed.
        """
        assert rows <= MOST_SEEN, f"a draft of {rows} rows"
        found: dict[AttentionPattern, HostPlan] = {}
        for layer, pattern in enumerate(self.patterns):
            if pattern in found:
                continue
            sees_K = (2 << np.arange(rows)) - 1 if pattern.causal else np.full(rows, -1)
            readers = []
            for session in sessions:
                end, slots = session.length + rows, session.slots[layer]
                pages = session.pages[: -(-min(end, slots) // _PAGE)]
                readers.append(Reader(session.length, range(session.length, end), pages, sees_T=sees_K, slots=slots))
            found[pattern] = make_plan(readers, self.groups, _PAGE, window=pattern.window, sizes=sizes)
        return found

    def plan_of(self, numbers: Tensor, sizes: Sizes, pattern: AttentionPattern, split: bool = True) -> Plan:
        """The numbers of one of `plans`, on the device."""
        return Plan.of(numbers, sizes, _PAGE, split=split, window=pattern.window, drafts=True)

    def write(self, layer: int, rows_T: Tensor, *, keys_values: tuple[Tensor, Tensor]) -> None:
        """Put keys and values of tokens, [T, G, E] each, into these rows."""
        pool = self.layers[layer]
        pool.index_copy_(2, rows_T, torch.stack(keys_values).to(pool.dtype).transpose(1, 2))

    def rows_of(self, sessions: Sequence[DraftSession], counts: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Rows of the pool for new tokens after the committed ones, layer by layer, and which tokens these are.

        If there are more than a layer has slots, the last: the others would be overwritten. None: all of them.
        """
        rows_of: dict[AttentionPattern, tuple[Tensor, Tensor | None]] = {}
        for layer, pattern in enumerate(self.patterns):
            if pattern in rows_of:
                continue
            rows, kept, first = [], [], 0
            for session, count in zip(sessions, counts, strict=True):
                few = min(count, session.slots[layer])
                end, first = session.length + count, first + count
                rows.append(session.rows(layer, np.arange(end - few, end)))
                kept.append(np.arange(first - few, first))
            rows_T = np.concatenate(rows)
            kept_T = None if len(rows_T) == first else on_device(torch.from_numpy(np.concatenate(kept)), self.device)
            rows_of[pattern] = on_device(torch.from_numpy(rows_T), self.device), kept_T
        return [rows_of[pattern] for pattern in self.patterns]

    # Where anchors and lengths are on the device alone (decoding/ahead.py), plans are made there. Numbers of the host:
    # first pages [R] | slots [R] of each kind of layer | pages of all requests [P].

    def table(self, sessions: Sequence[DraftSession], requests: int, pages: int) -> Ints:
        """The numbers of these sessions, padded to so many requests and pages."""
        kinds = list(dict.fromkeys(self.patterns))
        head_XR, pages_P = np.zeros((1 + len(kinds), requests), dtype=np.int64), np.zeros(pages, dtype=np.int64)
        ends = np.cumsum([len(session.pages) for session in sessions])
        head_XR[0, 1 : len(sessions)] = ends[:-1]
        for row_R, pattern in zip(head_XR[1:], kinds, strict=True):
            layer = self.patterns.index(pattern)
            row_R[: len(sessions)] = [session.slots[layer] for session in sessions]
        pages_P[: ends[-1]] = np.concatenate([session.pages for session in sessions])
        return np.concatenate([head_XR.reshape(-1), pages_P])

    def tables_of(self, table: Tensor, requests: int) -> dict[AttentionPattern, Tables]:
        """Where sessions have their pages in each kind of layer, of a `table` on the device."""
        kinds = list(dict.fromkeys(self.patterns))
        head, pages_P = table.split([requests * (1 + len(kinds)), len(table) - requests * (1 + len(kinds))])
        first_page_R, *slots = head.view(-1, requests).unbind(0)
        return {
            pattern: Tables(first_page_R, pages_P, _PAGE, slots_R=slots_R)
            for pattern, slots_R in zip(kinds, slots, strict=True)
        }

    def source_of(self, table: Tensor, lengths_R: Tensor, real_R: Tensor, rows: int) -> PooledKeys:
        """The key source of drafts of so many rows behind these lengths. `real_R`: 1, or 0 for padding."""
        R, shared = len(lengths_R), {}
        for pattern, tables in self.tables_of(table, R).items():
            sees_K = 2 ** torch.arange(1, rows + 1, device=table.device) - 1
            found = divide(
                rows * real_R,
                lengths_R,
                tables,
                groups=self.groups,
                rows=R * rows,
                items=most_items(R * rows),
                window=pattern.window,
                sees_T=sees_K.repeat(R) if pattern.causal else None,
            )
            shared[pattern] = found.slots_T, found.plan(tables, window=pattern.window, drafts=True)
        return PooledKeys(self, shared)

    def append_at(
        self, table: Tensor, rows: Division, positions_T: Tensor, *, layers: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Write keys and values [T, G, E] of new tokens, layer by layer; `rows` says whose they are.

        Padding goes to the first page.
        """
        at = {
            pattern: tables.slots_at(rows.request_T, positions_T).masked_fill(rows.padding_T, 0)
            for pattern, tables in self.tables_of(table, len(rows.requests_R6)).items()
        }
        for i, (keys_values, pattern) in enumerate(zip(layers, self.patterns, strict=True)):
            self.write(i, at[pattern], keys_values=keys_values)


class PooledKeys:
    """The key source of drafts whose keys are in a pool: K new rows of each request, behind its committed tokens.

    `shared`: for each kind of layer the rows of the pool that take the new keys, [R K], and the plan of attention.
    """

    def __init__(self, pool: DraftPool, shared: Mapping[AttentionPattern, tuple[Tensor, Plan]]) -> None:
        self.pool, self.shared = pool, shared

    def attend(self, attention: Attention, q_RKQE: Tensor, k_RKGE: Tensor, v_RKGE: Tensor) -> Tensor:
        layer, (new_T, plan) = attention.layer, self.shared[attention.pattern]
        self.pool.write(layer, new_T, keys_values=(k_RKGE.flatten(0, 1), v_RKGE.flatten(0, 1)))
        keys_GSE, values_GSE = self.pool.layers[layer]
        return attend(q_RKQE.flatten(0, 1), keys_GSE, values_GSE, plan=plan).unflatten(0, q_RKQE.shape[:2])
