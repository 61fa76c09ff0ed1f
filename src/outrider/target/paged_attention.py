"""Attention of the new rows of many requests over their pages of one pool, in one call.

    rows       a a a | b | c c            new rows of all requests, one after another, any number of each
    pages      a: 4 5 9   b: 2   c: 7 3   the slots of a page hold consecutive positions of a request
    row t of a request sees position p if     p < past   or   p - past is one of its rows that t sees
                                          and t's position - p < window

Keys and values are read where they are, without copies and masks. On a CPU the kernel (target/kernels.c) reads the
`tables` of a step. A GPU needs the work in parts: a list of items, which the host (`plan`) or the device (`divide`)
makes and a kernel computes (target/paged_attention_triton.py):

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
_CHUNK, _ALIKE, _DOUBLINGS = 256, 8, 20


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


class ReaderTables(NamedTuple):
    """What the rows of a step read, for the kernels of a CPU as for those of a GPU; int64.

    Attributes:
        rows_T2: position, rows that it sees.
        requests_R4: first row, rows, past, first of its pages.
        pages_P: pages of all requests.
    """

    rows_T2: Ints
    requests_R4: Ints
    pages_P: Ints


def tables(readers: Sequence[Reader]) -> ReaderTables:
    """Make the tables of the readers' rows, one reader after another."""
    counts, past, pages = np.array([(len(r.positions), r.past, len(r.pages)) for r in readers]).T
    T = int(counts.sum())
    first_row, first_page = (np.cumsum(lengths) - lengths for lengths in (counts, pages))
    rows_T2 = np.full((T, 2), -1)
    rows_T2[:, 0] = np.fromiter(chain.from_iterable(reader.positions for reader in readers), np.int64, count=T)
    for first, reader in zip(first_row, readers, strict=True):
        if reader.sees_T is not None:
            rows_T2[first : first + len(reader.sees_T), 1] = reader.sees_T
    requests_R4 = np.stack([first_row, counts, past, first_page], axis=1)
    return ReaderTables(rows_T2, requests_R4, np.concatenate([reader.pages for reader in readers]))


@dataclass(frozen=True)
class Division:
    """The attention of a step, divided into items: the parts of a `Plan`, and of each row its request, its number among
    that request's rows, its slot, and whether it is padding, [T].
    """

    rows_T3: Tensor
    requests_R6: Tensor
    items_W4: Tensor
    request_T: Tensor
    within_T: Tensor
    slots_T: Tensor
    padding_T: Tensor

    def plan(self, tables: Tables, **options: Any) -> Plan:
        """What a kernel reads of it."""
        parts = self.rows_T3, self.requests_R6, self.items_W4
        return Plan(*parts, pages_P=tables.pages_P, page_size=tables.page_size, **options)


@dataclass(frozen=True)
class Tables:
    """Where requests have their pages, [R]: the first of each request in `pages_P`, and its slots (see `Reader`; None:
    all 0).
    """

    first_page_R: Tensor
    pages_P: Tensor
    page_size: int
    slots_R: Tensor | None = None

    def slots_at(self, request_T: Tensor, place_T: Tensor) -> Tensor:
        """The slots of the pool of these places of requests."""
        if self.slots_R is not None:
            own_T = self.slots_R[request_T]
            place_T = torch.where(own_T > 0, place_T % own_T.clamp(min=1), place_T)
        page_T = self.pages_P[self.first_page_R[request_T] + place_T // self.page_size]
        return page_T * self.page_size + place_T % self.page_size


def divide(
    counts_R: Tensor,
    past_R: Tensor,
    tables: Tables,
    *,
    groups: int,
    rows: int,
    items: int,
    window: int | None = None,
    depths_T: Tensor | None = None,
    sees_T: Tensor | None = None,
    spare_slot: int = 0,
) -> Division:
    """Divide the attention of a step into items, on the device of the arguments, whose values the host does not read.

    Args:
        counts_R: new rows of each request; 0: padding.
        past_R: positions before them.
        groups: query heads of a kv head.
        rows, items: so many are returned, padding included; no fewer than there are.
        window: see `Plan`.
        depths_T: positions of the rows after those before; None: of a chain.
        sees_T: the rows of its request that each row sees, as bits; None: of a chain.
        spare_slot: slot of padding rows.
    """
    device, R, slots_R = counts_R.device, len(counts_R), tables.slots_R
    end_R, tokens = past_R + counts_R, tile_rows(groups) // groups
    slots_R = torch.zeros_like(past_R) if slots_R is None else slots_R
    low_R = (end_R - slots_R).clamp(min=0).masked_fill(slots_R <= 0, 0)
    if window is not None:
        low_R = torch.maximum(low_R, past_R + 1 - window)
    tiles_R = (counts_R + tokens - 1) // tokens

    # Chunks under bounds that are doubled 0, 1, 2, .. times (b 2^d < x  <=>  b < x / 2^d rounded up): the first fits.
    doubled_D1 = 2 ** torch.arange(_DOUBLINGS, device=device)[:, None]
    bounds_B = (_CHUNK * doubled_D1).expand(-1, _ALIKE).reshape(-1).cumsum(0)
    skipped_DR = torch.searchsorted(bounds_B, low_R // doubled_D1, right=True)
    chunks_DR = torch.searchsorted(bounds_B, (end_R + doubled_D1 - 1) // doubled_D1) - skipped_DR + 1
    chunks_DR = chunks_DR.masked_fill(counts_R > MOST_SEEN, 1)
    fits_D = (tiles_R * chunks_DR).sum(1) <= tiles_R.sum() + _MOST_CHUNKS
    first_1 = fits_D.int().argmax(0, keepdim=True)
    chunks_R, skipped_R, doubled_1 = (x.index_select(0, first_1)[0] for x in (chunks_DR, skipped_DR, doubled_D1))
    bounds_B = bounds_B * doubled_1

    last_R = (tiles_R * chunks_R).cumsum(0)  # items of the requests up to here
    first_R, place_W = last_R - tiles_R * chunks_R, torch.arange(items, device=device)
    request_W = torch.searchsorted(last_R, place_W, right=True).clamp(max=R - 1)
    of_W, within_W = chunks_R[request_W], place_W - first_R[request_W]
    chunk_W = within_W % of_W
    bound_W = (skipped_R[request_W] + chunk_W).clamp(max=len(bounds_B) - 1)
    begin_W = torch.where(chunk_W == 0, low_R[request_W], bounds_B[(bound_W - 1).clamp(min=0)])
    stop_W = torch.where(chunk_W == of_W - 1, end_R[request_W], bounds_B[bound_W])
    items_W4 = torch.stack([request_W, within_W // of_W * tokens, begin_W, stop_W], dim=1)

    end_row_R = counts_R.cumsum(0)
    first_row_R, place_T = end_row_R - counts_R, torch.arange(rows, device=device)
    request_T = torch.searchsorted(end_row_R, place_T, right=True).clamp(max=R - 1)
    padding_T = place_T >= end_row_R[-1]
    within_T = (place_T - first_row_R[request_T]).masked_fill(padding_T, 0)
    positions_T = past_R[request_T] + (within_T if depths_T is None else depths_T)
    sees_T = torch.full_like(place_T, -1) if sees_T is None else sees_T
    item_T = first_R[request_T] + within_T // tokens * chunks_R[request_T]
    place_T = (past_R[request_T] + within_T).masked_fill(padding_T, 0)
    requests_R6 = torch.stack([first_row_R, counts_R, past_R, tables.first_page_R, slots_R, chunks_R], dim=1)
    return Division(
        torch.stack([positions_T, sees_T, item_T], dim=1).masked_fill(padding_T[:, None], -1),
        requests_R6.masked_fill((counts_R <= 0)[:, None], -1),
        items_W4.masked_fill((place_W >= last_R[-1])[:, None], -1),
        request_T=request_T,
        within_T=within_T,
        slots_T=tables.slots_at(request_T, place_T).masked_fill(padding_T, spare_slot),
        padding_T=padding_T,
    )


def plan(
    readers: Sequence[Reader], groups: int, page_size: int, *, window: int | None = None, sizes: Sizes | None = None
) -> HostPlan:
    """`divide` on the host.

    Args:
        groups: query heads of a kv head.
        window: see `Plan`.
        sizes: of a bucket, which are filled up with padding; None: those needed.
    """
    rows_T2, requests_R4, pages_P = tables(readers)
    _, counts, past, first_page = requests_R4.T
    T, slots = len(rows_T2), np.array([reader.slots for reader in readers])
    depths = rows_T2[:, 0] - np.repeat(past, counts)
    tokens = tile_rows(groups) // groups
    counts_R, past_R, slots_R, first_page_R, depths_T, sees_T = (
        torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))
        for x in (counts, past, slots, first_page, depths, rows_T2[:, 1])
    )
    found = divide(
        counts_R,
        past_R,
        Tables(
            first_page_R, torch.from_numpy(np.ascontiguousarray(pages_P, dtype=np.int64)), page_size, slots_R=slots_R
        ),
        groups=groups,
        rows=T,
        items=int(-(-counts // tokens).sum()) + _MOST_CHUNKS if sizes is None else sizes.items,
        window=window,
        depths_T=depths_T,
        sees_T=sees_T,
    )
    items_W4 = found.items_W4[found.items_W4[:, 0] >= 0]
    parts = [found.rows_T3.numpy(), found.requests_R6.numpy(), items_W4.numpy(), pages_P]
    sizes = sizes or Sizes(*map(len, parts))
    numbers = np.full(sum(sizes.lengths), -1, dtype=np.int64)
    start = 0
    for part, length in zip(parts, sizes.lengths, strict=True):
        numbers[start : start + part.size] = part.reshape(-1)
        start += length
    split = bool((found.requests_R6[:, 5] > 1).any())
    return HostPlan(numbers, sizes, split=split, slots_T=found.slots_T.numpy())


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
