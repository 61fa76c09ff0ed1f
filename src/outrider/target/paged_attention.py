"""Attention of the new rows of many requests over their pages of one pool, in one call.

    rows       a a a | b | c c            new rows of all requests, one after another, any number of each
    pages      a: 4 5 9   b: 2   c: 7 3   the slots of a page hold consecutive positions of a request
    row t of a request sees position p if     p < past   or   p - past is one of its rows that t sees
                                          and t's position - p < window

Keys and values are read where they are, without copies and masks. On a CPU the kernel (target/kernels.c) reads the
`tables` of a step. A GPU needs the work in parts: a list of items, which the host makes (`plan`) and a kernel computes
(target/paged_attention_triton.py):

    item       a tile of rows of one request  x  a chunk of its positions  x  one kv head
    tile       the query heads of a kv head and as many tokens as fit into `tile_rows`: mostly all rows of a request, so
               that each key is read once
    chunks     [0, 256), [256, 512), .. 8 of them, then 8 of twice the length, ..; if these are more than `_MOST_CHUNKS`
               for all tiles, all are doubled. Requests of more than `MOST_SEEN` rows have one chunk.

Partial results of several chunks are combined in the order of positions (flash-decoding). Where a chunk begins does not
depend on the rows: a lone request has the same bits with drafts and without. All numbers of a plan are tensors, so that
a CUDA graph serves every step of as many rows (target/graphs.py).

Shapes: R requests, T rows, W items, P pages, H query heads, K kv heads, S slots, E head dim.
Source: Flash-Decoding (Dao et al., 2023); PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.target.attention import Branches

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

MOST_SEEN = 64  # maximum rows of a request that has a tree or a block, and of one with several chunks: bits of a word
ROW_FIELDS, REQUEST_FIELDS, ITEM_FIELDS = 3, 6, 4
_MOST_CHUNKS = 64  # more than tiles
_CHUNK, _ALIKE = 256, 8
_BOUNDS: Ints = np.cumsum(np.repeat(_CHUNK << np.arange(20), _ALIKE))  # ends of the chunks


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for keys of this type on this device."""
    return device.type == "cuda" and dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def tile_rows(groups: int) -> int:
    """Rows of a tile: tokens x query heads of a kv head, at least a tensor core's 16."""
    return 1 << (max(min(16 * groups, 64), groups) - 1).bit_length()


@dataclass(frozen=True)
class Reader:
    """The new rows of one request.

    Attributes:
        past: number of positions before its rows.
        positions: of the rows.
        pages: of the request, in order.
        sees_T: of each row, the rows of the request that it sees as bits of a word; None: of a chain.
        slots: of a block drafter's layer, where position p is in slot p mod `slots`.
    """

    past: int
    positions: Sequence[int] | Ints
    pages: Sequence[int] | Ints
    sees_T: Ints | None = None
    slots: int = 0

    @property
    def end(self) -> int:
        return self.past + len(self.positions)


def bits_of(branches: Branches) -> Ints:
    """The rows that each row of a tree sees, for `Reader`."""
    sees_TT = branches.sees_TT.numpy().astype(np.uint64)
    bits: Ints = (sees_TT << np.arange(len(sees_TT), dtype=np.uint64)).sum(axis=1, dtype=np.uint64).view(np.int64)
    return bits


class Sizes(NamedTuple):
    """Numbers of rows, requests, items and pages of a plan."""

    rows: int
    requests: int
    items: int
    pages: int

    @property
    def lengths(self) -> list[int]:
        """Lengths of the parts in one array."""
        return [self.rows * ROW_FIELDS, self.requests * REQUEST_FIELDS, self.items * ITEM_FIELDS, self.pages]


class HostPlan(NamedTuple):
    """The numbers of a `Plan`, one part after another; whether a request has several chunks; slots of the rows."""

    numbers: Ints
    sizes: Sizes
    split: bool
    slots_T: Ints


@dataclass(frozen=True)
class Plan:
    """What a kernel reads of a step besides queries, keys and values; int64.

    Attributes:
        rows_T3: position, rows that it sees, first item (-1: a padding row).
        requests_R6: first row, rows, past, first of its pages, slots (see `Reader`), chunks.
        items_W4: request, first row of the tile within the request, first position, end; of padding -1.
        pages_P: pages of all requests.
        page_size: slots of a page.
        split: whether a request may have several chunks.
        window: number of visible positions, including the row's; None: all.
        drafts: the rows are blocks of a drafter: slots are taken in turn, and the window is one of the context alone.
    """

    rows_T3: Tensor
    requests_R6: Tensor
    items_W4: Tensor
    pages_P: Tensor
    page_size: int
    split: bool = True
    window: int | None = None
    drafts: bool = False

    @staticmethod
    def of(numbers: Tensor, sizes: Sizes, page_size: int, **options: Any) -> Plan:
        """View the numbers of `plan`, on the device."""
        rows, requests, items, pages = numbers.split(sizes.lengths)
        return Plan(
            rows.view(-1, ROW_FIELDS),
            requests.view(-1, REQUEST_FIELDS),
            items.view(-1, ITEM_FIELDS),
            pages_P=pages,
            page_size=page_size,
            **options,
        )


def most_items(rows: int) -> int:
    """The most items of a step of so many rows."""
    return rows + _MOST_CHUNKS


class Tables(NamedTuple):
    """What the rows of a step read, for the kernels of a CPU as for those of a GPU; int64.

    Attributes:
        rows_T2: position, rows that it sees.
        requests_R4: first row, rows, past, first of its pages.
        pages_P: pages of all requests.
    """

    rows_T2: Ints
    requests_R4: Ints
    pages_P: Ints


def tables(readers: Sequence[Reader]) -> Tables:
    """Make the tables of the readers' rows, one reader after another."""
    counts, past, pages = np.array([(len(r.positions), r.past, len(r.pages)) for r in readers]).T
    first_row, T = _starts(counts), int(counts.sum())
    rows_T2 = np.full((T, 2), -1)
    rows_T2[:, 0] = np.fromiter(chain.from_iterable(reader.positions for reader in readers), np.int64, count=T)
    for first, reader in zip(first_row, readers, strict=True):
        if reader.sees_T is not None:
            rows_T2[first : first + len(reader.sees_T), 1] = reader.sees_T
    requests_R4 = np.stack([first_row, counts, past, _starts(pages)], axis=1)
    return Tables(rows_T2, requests_R4, np.concatenate([reader.pages for reader in readers]))


def plan(
    readers: Sequence[Reader], groups: int, page_size: int, *, window: int | None = None, sizes: Sizes | None = None
) -> HostPlan:
    """Divide the attention of a step into items.

    Args:
        groups: query heads of a kv head.
        window: see `Plan`.
        sizes: of a bucket, which are filled up with padding; None: those needed.
    """
    rows_T2, requests_R4, pages_P = tables(readers)
    first_row, counts, past, first_page = requests_R4.T
    ends, slots = past + counts, np.array([reader.slots for reader in readers])
    lows = np.where(slots > 0, np.maximum(ends - slots, 0), 0)
    if window is not None:
        lows = np.maximum(lows, past + 1 - window)
    tokens = tile_rows(groups) // groups
    tiles, few, T = -(-counts // tokens), counts <= MOST_SEEN, len(rows_T2)
    bounds, most = _BOUNDS, int(tiles.sum()) + _MOST_CHUNKS
    while True:
        skipped = np.searchsorted(bounds, lows, side="right")
        chunks = np.where(few, np.searchsorted(bounds, ends) - skipped + 1, 1)
        if int((tiles * chunks).sum()) <= most:
            break
        bounds = 2 * bounds
    firsts = _starts(tiles * chunks)
    requests_R6 = np.column_stack([requests_R4, slots, chunks])

    request_W = np.repeat(np.arange(len(readers)), tiles * chunks)
    tile_W, chunk_W = np.divmod(np.arange(len(request_W)) - firsts[request_W], chunks[request_W])
    bound_W = skipped[request_W] + chunk_W
    items_W4 = np.stack(
        [
            request_W,
            tile_W * tokens,
            np.where(chunk_W == 0, lows[request_W], bounds[bound_W - 1]),
            np.where(chunk_W == chunks[request_W] - 1, ends[request_W], bounds[bound_W]),
        ],
        axis=1,
    )

    request_T = np.repeat(np.arange(len(readers)), counts)
    within_T = np.arange(T) - first_row[request_T]
    rows_T3 = np.column_stack([rows_T2, firsts[request_T] + within_T // tokens * chunks[request_T]])
    slot_T = past[request_T] + within_T
    slot_T = np.where(slots[request_T] > 0, slot_T % slots[request_T].clip(1), slot_T)
    slots_T = pages_P[first_page[request_T] + slot_T // page_size] * page_size + slot_T % page_size
    parts = [rows_T3, requests_R6, items_W4, pages_P]
    sizes = sizes or Sizes(*map(len, parts))
    numbers = np.full(sum(sizes.lengths), -1, dtype=np.int64)
    start = 0
    for part, length in zip(parts, sizes.lengths, strict=True):
        numbers[start : start + part.size] = part.reshape(-1)
        start += length
    return HostPlan(numbers, sizes, split=bool((chunks > 1).any()), slots_T=slots_T)


def _starts(lengths: Ints) -> Ints:
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


def attend(
    q_THE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out_THE: Tensor | None = None,
) -> Tensor:
    """Attend with the rows of a plan, [T, H, E] in the type of q; products are in the keys' type, sums in float32.

    Args:
        scale: factor of the scores; None: 1 / sqrt(E).
        softcap: scores become softcap * tanh(score / softcap).
        sinks_H: an additional score per head that takes probability without a value.
        out_THE: where to write; padding rows are left as they are.
    """
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format) if out_THE is None else out_THE
    scale = q_THE.shape[2] ** -0.5 if scale is None else scale
    _kernel()(q_THE, keys_KSE, values_KSE, plan=plan, scale=scale, softcap=softcap, sinks_H=sinks_H, out_THE=out_THE)
    return out_THE


def _kernel() -> Callable[..., None]:
    """The kernel of a GPU; Triton has packages for Linux only."""
    from outrider.target.paged_attention_triton import paged_attention_triton

    return paged_attention_triton
