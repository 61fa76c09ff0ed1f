"""The items of a `Plan` (target/paged_attention.py) as Triton kernels: a program per item and kv head.

    _attend     online softmax over the positions of a chunk; where a request has one chunk the result is written out,
                otherwise the unnormalised sum, its maximum m and its total l
    _combine    a program per row and kv head: sums of all chunks, each times exp(m - max m), over the sum of the l

Row i of a tile is query head i mod G of token i div G. Sums are in float32. A masked position has a score below all
others and adds exactly 0; a chunk without any visible position is dropped with its maximum. So the rows beside a row do
not change its bits.
Shapes: W items, T rows, K kv heads, G query heads of each, E head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.target.paged_attention import ITEM_FIELDS, REQUEST_FIELDS, ROW_FIELDS, Plan, tile_rows

_WARPS = 4
_STAGES = 2
# Products in float64: in Triton's interpreter those of bfloat16 are wrong, those of float32 depend on their place
# in a tile.
_WIDEN = False
_LOWEST = tl.constexpr(-1e30)  # below every score; -inf - -inf would be no number
_ROW, _REQUEST, _ITEM = tl.constexpr(ROW_FIELDS), tl.constexpr(REQUEST_FIELDS), tl.constexpr(ITEM_FIELDS)


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDEN:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _normed(acc, top, total, sink_ptr, heads, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of values over the sum of weights, to which a sink adds its own."""
    if SINKS:
        sink = tl.load(sink_ptr + heads).to(tl.float32)
        higher = tl.maximum(top, sink)
        acc *= tl.exp(top - higher)[:, None]
        total = total * tl.exp(top - higher) + tl.exp(sink - higher)
    return acc / total[:, None]


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    keys_ptr,
    values_ptr,
    rows_ptr,
    requests_ptr,
    items_ptr,
    pages_ptr,
    sinks_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    q_row,
    q_head,
    key_head,
    out_row,
    scale,
    softcap,
    window,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(items_ptr + item * _ITEM + 2).to(tl.int32)
    end = tl.load(items_ptr + item * _ITEM + 3).to(tl.int32)
    if end <= begin:
        return
    request_ptr = requests_ptr + tl.load(items_ptr + item * _ITEM) * _REQUEST
    tile = tl.load(items_ptr + item * _ITEM + 1).to(tl.int32)
    first_row = tl.load(request_ptr)
    count = tl.load(request_ptr + 1).to(tl.int32)
    past = tl.load(request_ptr + 2).to(tl.int32)
    first_page = tl.load(request_ptr + 3)
    slots = tl.load(request_ptr + 4).to(tl.int32)
    chunks = tl.load(request_ptr + 5)

    place = tl.arange(0, ROWS)
    token = tile + place // GROUPS
    real = (place < ROWS // GROUPS * GROUPS) & (token < count)
    row = first_row + token
    heads = head * GROUPS + place % GROUPS
    dims = tl.arange(0, DIMS)
    inside = dims < DIM
    q_at = q_ptr + row[:, None] * q_row + heads[:, None] * q_head + dims[None, :]
    q = tl.load(q_at, mask=real[:, None] & inside[None, :], other=0.0).to(keys_ptr.dtype.element_ty)
    sees = tl.load(rows_ptr + row * _ROW + 1, mask=real, other=0)
    position = tl.load(rows_ptr + row * _ROW, mask=real, other=0).to(tl.int32)
    keys_ptr += head.to(tl.int64) * key_head
    values_ptr += head.to(tl.int64) * key_head

    top = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < end
        slot = key
        if DRAFTS:
            slot = key % slots
        page = tl.load(pages_ptr + first_page + slot // PAGE, mask=there, other=0)
        at = (page * PAGE + slot % PAGE) * DIM
        k = tl.load(keys_ptr + at[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        scores = _dot(q, k, WIDEN) * scale
        if CAPPED:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        own = key - past
        bit = tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)
        visible = (own < 0)[None, :] | (((sees[:, None] >> bit[None, :]) & 1) == 1)
        if not DRAFTS:
            visible = visible & (own[None, :] <= token[:, None])
        if WINDOW:
            written = there & (own >= 0)
            where = tl.load(rows_ptr + (first_row + own) * _ROW, mask=written, other=0).to(tl.int32)
            near = position[:, None] - tl.where(own >= 0, where, key)[None, :] < window
            if DRAFTS:
                near = near | (own >= 0)[None, :]
            visible = visible & near
        visible = visible & real[:, None] & there[None, :]
        scores = tl.where(visible, scores, _LOWEST)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(top - higher)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(values_ptr + at[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        acc = acc * kept[:, None] + _dot(weights.to(v.dtype), v, WIDEN)
        top = higher

    if chunks == 1:
        out = _normed(acc, top, total, sink_ptr=sinks_ptr, heads=heads, SINKS=SINKS)
        out_at = out_ptr + row[:, None] * out_row + heads[:, None] * DIM + dims[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])
    else:
        part = (item * tl.num_programs(1) + head) * ROWS + place
        tl.store(sums_ptr + part[:, None] * DIM + dims[None, :], acc, mask=real[:, None] & inside[None, :])
        tl.store(stats_ptr + part * 2, top, mask=real)
        tl.store(stats_ptr + part * 2 + 1, total, mask=real)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    rows_ptr,
    requests_ptr,
    items_ptr,
    sinks_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    out_row,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    item = tl.load(rows_ptr + row * _ROW + 2)
    if item < 0:
        return
    request_ptr = requests_ptr + tl.load(items_ptr + item * _ITEM) * _REQUEST
    chunks = tl.load(request_ptr + 5).to(tl.int32)
    if chunks == 1:
        return
    token = row - tl.load(request_ptr) - tl.load(items_ptr + item * _ITEM + 1)
    query = tl.arange(0, QUERIES)
    heads = head * GROUPS + query
    dims = tl.arange(0, DIMS)
    real = query < GROUPS
    both = real[:, None] & (dims < DIM)[None, :]
    top = tl.full((QUERIES,), _LOWEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, DIMS), tl.float32)
    for chunk in range(0, chunks):
        part = ((item + chunk) * tl.num_programs(1) + head) * ROWS + token * GROUPS + query
        its_top = tl.load(stats_ptr + part * 2, mask=real, other=_LOWEST)
        its_total = tl.load(stats_ptr + part * 2 + 1, mask=real, other=1.0)
        its_sum = tl.load(sums_ptr + part[:, None] * DIM + dims[None, :], mask=both, other=0.0)
        higher = tl.maximum(top, its_top)
        kept = tl.exp(top - higher)
        added = tl.exp(its_top - higher)
        total = total * kept + its_total * added
        acc = acc * kept[:, None] + its_sum * added[:, None]
        top = higher
    out = _normed(acc, top, total, sink_ptr=sinks_ptr, heads=tl.where(real, heads, 0), SINKS=SINKS)
    out_at = out_ptr + row * out_row + heads[:, None] * DIM + dims[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=both)


def paged_attention_triton(
    q_THE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    *,
    plan: Plan,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    out_THE: Tensor,
) -> None:
    """See `attend` of target/paged_attention.py."""
    (T, H, E), K, W = q_THE.shape, keys_KSE.shape[0], len(plan.items_W4)
    assert q_THE.stride(2) == 1 and keys_KSE.stride() == values_KSE.stride() and keys_KSE.stride()[1:] == (E, 1)
    assert out_THE.stride()[1:] == (E, 1) and len(plan.rows_T3) == T
    G = H // K
    rows, dims = tile_rows(G), max(16, triton.next_power_of_2(E))
    parts = W * K * rows if plan.split else 0
    sums = torch.empty(parts, E, dtype=torch.float32, device=q_THE.device)
    stats = torch.empty(parts, 2, dtype=torch.float32, device=q_THE.device)
    sinks = q_THE if sinks_H is None else sinks_H
    tables = plan.rows_T3, plan.requests_R6, plan.items_W4
    _attend[(W, K)](
        q_THE,
        keys_KSE,
        values_KSE,
        *tables,
        plan.pages_P,
        sinks,
        out_THE,
        sums,
        stats,
        q_THE.stride(0),
        q_THE.stride(1),
        keys_KSE.stride(0),
        out_THE.stride(0),
        scale,
        softcap or 1.0,
        plan.window or 0,
        GROUPS=G,
        DIM=E,
        PAGE=plan.page_size,
        WINDOW=plan.window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        DRAFTS=plan.drafts,
        WIDEN=_WIDEN,
        ROWS=rows,
        KEYS=64 if dims * keys_KSE.element_size() <= 256 else 32,
        DIMS=dims,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    if plan.split:
        _combine[(T, K)](
            *tables,
            sinks,
            out_THE,
            sums,
            stats,
            out_THE.stride(0),
            GROUPS=G,
            DIM=E,
            SINKS=sinks_H is not None,
            ROWS=rows,
            QUERIES=triton.next_power_of_2(G),
            DIMS=dims,
        )
