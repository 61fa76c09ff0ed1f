"""Run steps of few rows on a GPU: pad them to buckets, with one attention call per layer and a CUDA graph per bucket.

    spans     R requests of at most 16 rows each   ->   R' x M rows, each request over N slots
    prompts   of up to 256 rows beside requests that decode: in spans of 16 rows, in the same step
    buckets   R' = 1, 2, 4, ..; M a power of two, at least 16 rows in all; N = 256, 512, 1024, ..
    inputs    tokens, positions, slots [R' M] | past [R'] | blocks [R' N / block] | sees [R' M M]        one copy
    row m of request r sees slot n if   n < past_r,  or  n - past_r is one of its rows that m sees

A single request takes 16 rows whether it has no draft or up to 15 after its anchor: plain and speculative decoding run
the same kernels in the same shapes, so that greedy text is equal by construction. Tensor cores compute 16 rows at once
and the weights are read once, so the padding costs no time there. Padding rows write into a spare block.

The keys of each request are gathered and padded to the longest request, and one call attends for all. The same call
verifies trees, with `sees` as their mask. If graphs cannot be captured, steps run without, see `StepGraphs.captures`.

Shapes: R requests, M rows of each, T = R M, N slots of each, K kv heads, G queries per kv head, E head dim, D hidden,
L aux layers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.target.attention import Branches, additive
from outrider.target.fused import FusedDecoder
from outrider.target.kernels import MOST_ROWS
from outrider.target.paged import PagedKV, Span, in_pieces
from outrider.utils.measure import on_device

_FEWEST_ROWS = 16  # minimum rows of a step: the rows of one tensor core product
_FEWEST_KEYS = 256
MOST_PROMPT_ROWS = 256  # beside requests that decode: the weights are read about as fast as so many rows are computed


class Shape(NamedTuple):
    """A bucket: number of requests, rows and visible slots of each, and aux layers to capture."""

    requests: int
    rows: int
    keys: int
    aux_layers: tuple[int, ...]


def shape_of(spans: Sequence[Span], aux_layers: tuple[int, ...]) -> Shape:
    """Return the smallest bucket that holds the spans."""
    R = _power_of_two(len(spans))
    M = max(_power_of_two(max(len(span.tokens) for span in spans)), _FEWEST_ROWS // R)
    N = max(_FEWEST_KEYS, _power_of_two(max(span.end for span in spans)))
    return Shape(R, M, N, aux_layers=aux_layers)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def inputs_of(spans: Sequence[Span], shape: Shape, kv: PagedKV) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Concatenate all inputs of a step, in the order of the module docstring."""
    R, M, N, _ = shape
    tokens, positions = (np.zeros((R, M), dtype=np.int64) for _ in range(2))
    slots = np.full((R, M), kv.spare_slot, dtype=np.int64)
    past, blocks = np.zeros(R, dtype=np.int64), np.zeros((R, N // kv.block_size), dtype=np.int64)
    sees = np.broadcast_to(np.tri(M, dtype=np.int64), (R, M, M)).copy()
    for r, span in enumerate(spans):
        count, used = len(span.tokens), -(-span.end // kv.block_size)
        tokens[r, :count], past[r], slots[r, :count] = (
            span.tokens,
            span.past,
            kv.slots(span.blocks, span.past, span.end),
        )
        positions[r, :count] = range(span.past, span.end)
        blocks[r, :used] = span.blocks[:used]
        if span.parents is not None:
            branches = Branches.of(span.parents)
            positions[r, :count] = span.past + branches.depths_T.numpy()
            sees[r, :count, :count] = branches.sees_TT.numpy()
    return np.concatenate([part.reshape(-1) for part in (tokens, positions, slots, past, blocks, sees)])


@dataclass(frozen=True)
class _Captured:
    """The buffers of a bucket, which its graph reads and writes; without a graph each step runs its operations."""

    inputs: Tensor
    hidden_TD: Tensor
    aux_TLD: Tensor | None
    graph: Any = None


class StepGraphs:
    """Runs steps of few rows of a decoder on a GPU.

    Attributes:
        captures: whether graphs are made. False if the environment has OUTRIDER_CUDA_GRAPHS=0, and after a failed
            capture. The padded step then runs operation by operation, for two or more requests; a single request is
            not taken, because it needs fewer operations without gathered keys.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self.decoder = decoder
        self.captures = os.environ.get("OUTRIDER_CUDA_GRAPHS") != "0"
        self._steps: WeakKeyDictionary[PagedKV, dict[Shape, _Captured]] = WeakKeyDictionary()
        self._memory: Any = None  # shared by all graphs

    def pieces(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Cut prompts beside requests that decode into spans that `forward` takes, if they have few enough rows."""
        long = [len(span.tokens) for span in spans if len(span.tokens) > MOST_ROWS and span.parents is None]
        beside = self.captures and len(long) < len(spans) and sum(long) <= MOST_PROMPT_ROWS
        return in_pieces(spans, MOST_ROWS) if beside else spans

    def taken(self, spans: Sequence[Span]) -> list[int]:
        """Return which spans of a step `forward` takes."""
        few = [i for i, span in enumerate(spans) if len(span.tokens) <= MOST_ROWS]
        return few if self.captures or len(few) > 1 else []

    def forward(self, spans: Sequence[Span], kv: PagedKV, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Return normed last hidden states [T, D] and aux hidden states [T, L, D] of the spans' rows, without padding.

        Args:
            spans: spans of at most `MOST_ROWS` rows each.
        """
        shape = shape_of(spans, aux_layers)
        inputs = torch.from_numpy(inputs_of(spans, shape, kv)).pin_memory()
        steps = self._steps.setdefault(kv, {})
        step = steps.get(shape)
        if step is None:
            buffer = torch.zeros(inputs.shape, dtype=torch.long, device=kv.device)
        else:
            buffer = step.inputs
        buffer.copy_(inputs, non_blocking=True)
        if step is None:
            step = steps[shape] = self._prepared(buffer, shape, kv)
        if step.graph is not None:
            step.graph.replay()
        else:
            hidden_TD, aux_TLD = self._run(buffer, shape, kv)
            step = replace(step, hidden_TD=hidden_TD, aux_TLD=aux_TLD)
        rows = [r * shape.rows + m for r, span in enumerate(spans) for m in range(len(span.tokens))]
        rows_T = on_device(rows, kv.device, torch.long)  # copies, because the next replay overwrites its outputs
        return step.hidden_TD[rows_T], None if step.aux_TLD is None else step.aux_TLD[rows_T]

    def _prepared(self, buffer: Tensor, shape: Shape, kv: PagedKV) -> _Captured:
        """Run a bucket once, which sets up the libraries' kernels, and capture its graph if possible."""
        hidden_TD, aux_TLD = self._run(buffer, shape, kv)
        if not self.captures:
            return _Captured(buffer, hidden_TD, aux_TLD)
        graph = torch.cuda.CUDAGraph()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        try:
            # "thread_local": a thread that copies training batches meanwhile may allocate memory.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                hidden_TD, aux_TLD = self._run(buffer, shape, kv)
        except RuntimeError as error:
            self.captures = False
            warnings.warn(f"steps run without CUDA graphs, because a capture failed: {error}", stacklevel=2)
            return _Captured(buffer, hidden_TD, aux_TLD)
        return _Captured(buffer, hidden_TD, aux_TLD, graph=graph)

    def _run(self, buffer: Tensor, shape: Shape, kv: PagedKV) -> tuple[Tensor, Tensor | None]:
        """Run the padded step: [T, D] and [T, L, D]; of the host it reads only the shapes of its arguments."""
        (R, M, N, aux_layers), B, device = shape, kv.block_size, buffer.device
        sizes = [R * M] * 3 + [R, R * (N // B), R * M * M]
        tokens_T, positions_T, slots_T, past_R, blocks, sees = buffer.split(sizes)
        slots_RN = (blocks.view(R, -1, 1) * B + torch.arange(B, device=device)).view(-1)
        groups = self.decoder.groups
        slot_row_RN = torch.arange(N, device=device) - past_R[:, None]  # the row that a slot belongs to, if any
        row_RMN = slot_row_RN.clamp(0, M - 1)[:, None].expand(R, M, N)
        visible_RMN = (slot_row_RN < 0)[:, None] | (
            (slot_row_RN < M)[:, None] & (sees.view(R, M, M).gather(2, row_RMN) > 0)
        )
        mask = additive(visible_RMN, kv.dtype).repeat_interleave(groups, dim=1)[:, None]  # rows are (row, query)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            K, E = k.shape[1], k.shape[3]

            def gathered(pool_KSE: Tensor, new_1KTE: Tensor) -> Tensor:
                pool_KSE.index_copy_(1, slots_T, new_1KTE[0])
                return pool_KSE.index_select(1, slots_RN).unflatten(1, (R, N)).transpose(0, 1)

            keys, values = (gathered(*pair) for pair in zip(kv.layers[layer], (k, v), strict=True))
            q_RKQE = q.view(K, groups, R, M, E).permute(2, 0, 3, 1, 4).reshape(R, K, M * groups, E)
            out = F.scaled_dot_product_attention(q_RKQE, keys, values, attn_mask=mask)
            return out.view(R, K, M, groups, E).permute(1, 3, 0, 2, 4).reshape(1, K * groups, R * M, E)

        hidden_1TD, captured = self.decoder.run(tokens_T[None], positions_T[None], aux_layers, attention=attend)
        aux_TLD = torch.stack([captured[layer][0] for layer in aux_layers], dim=1) if aux_layers else None
        return hidden_1TD[0], aux_TLD
