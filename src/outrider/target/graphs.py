"""Run steps of few rows on a GPU: the rows of all requests packed, in a CUDA graph per number of rows.

    rows      a a a | b | c c | . . .       T rows of all requests and padding up to a multiple of 16, larger ones of
                                            more than 256: 31 requests of one row and one of six compute 48 rows
    inputs    tokens, slots [T] | the plan of attention: rows, requests, items, pages               one copy
    prompts   of up to 256 rows beside requests that decode: in pieces of 64 rows, in the same step
    padding   writes into a spare block, belongs to no request

Which rows belong to which request, where they are and what they see are data of the graph (target/paged_attention.py),
so that the cost of a step follows its number of rows. A lone request takes 16 rows whether it has no draft or up to 15
after its anchor: plain and speculative decoding run the same kernels in the same shapes, so that greedy text is equal
by construction. Tensor cores compute 16 rows at once and the weights are read once, so fewer rows would save nothing.

If graphs cannot be captured, steps run without (`StepGraphs.captures`).

Shapes: T rows, H query heads, K kv heads, E head dim, D hidden, L aux layers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from outrider.target.fused import FusedDecoder
from outrider.target.paged import PagedKV, Span, in_pieces, reader_of
from outrider.target.paged_attention import MOST_SEEN, Ints, Plan, Sizes, attend, most_items, plan

Results = TypeVar("Results")

_FEWEST_ROWS = 16  # of a step: the rows of one tensor core product
_STEPS = 16  # row counts of graphs up to each power of two
FEWEST_PAGES = 512
MOST_PROMPT_ROWS = 256  # beside requests that decode: the weights are read about as fast as so many rows are computed


class Shape(NamedTuple):
    """A bucket: numbers of rows and of pages of all requests, and aux layers to capture."""

    rows: int
    pages: int
    aux_layers: tuple[int, ...]

    @property
    def plan(self) -> Sizes:
        """Sizes of the plan of attention. A request has a row at least."""
        return Sizes(self.rows, requests=self.rows, items=most_items(self.rows), pages=self.pages)


def computed_rows(tokens: int) -> int:
    """Return how many rows a step of so many tokens computes."""
    step = max(_FEWEST_ROWS, power_of_two(tokens) // _STEPS)
    return -(-tokens // step) * step


def shape_of(spans: Sequence[Span], kv: PagedKV, aux_layers: tuple[int, ...]) -> Shape:
    """Return the smallest bucket that holds the spans."""
    pages = sum(-(-span.end // kv.block_size) for span in spans)
    rows = computed_rows(sum(len(span.tokens) for span in spans))
    return Shape(rows, max(FEWEST_PAGES, power_of_two(pages)), aux_layers)


def power_of_two(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


def inputs_of(spans: Sequence[Span], shape: Shape, kv: PagedKV, groups: int) -> Ints:
    """Concatenate all inputs of a step, in the order of the module docstring."""
    readers = [reader_of(span, kv.block_size) for span in spans]
    host, count = plan(readers, groups, kv.block_size, sizes=shape.plan), sum(len(span.tokens) for span in spans)
    tokens, slots = np.zeros(shape.rows, dtype=np.int64), np.full(shape.rows, kv.spare_slot)
    tokens[:count], slots[:count] = [token for span in spans for token in span.tokens], host.slots_T
    return np.concatenate([tokens, slots, host.numbers])


@dataclass(frozen=True)
class _Captured:
    """The buffers of a bucket, which its graph reads and writes."""

    inputs: Tensor
    hidden_TD: Tensor
    aux_TLD: Tensor | None
    graph: Any = None  # None if the capture failed


class StepGraphs:
    """Runs steps of few rows of a decoder on a GPU.

    Attributes:
        captures: whether graphs are made. False if the environment has OUTRIDER_CUDA_GRAPHS=0, and after a failed
            capture.
    """

    def __init__(self, decoder: FusedDecoder) -> None:
        self.decoder = decoder
        self.captures = os.environ.get("OUTRIDER_CUDA_GRAPHS") != "0"
        self._steps: WeakKeyDictionary[PagedKV, dict[Shape, _Captured]] = WeakKeyDictionary()
        self._memory: Any = None  # shared by all graphs

    def pieces(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Cut prompts beside requests that decode into spans that `forward` takes, if they have few enough rows."""
        long = [len(span.tokens) for span in spans if len(span.tokens) > MOST_SEEN and span.parents is None]
        beside = self.captures and len(long) < len(spans) and sum(long) <= MOST_PROMPT_ROWS
        return in_pieces(spans, MOST_SEEN) if beside else spans

    def takes(self, spans: Sequence[Span]) -> bool:
        """Return whether `forward` runs these spans. A step that only reads prompts, or many rows of them, runs
        without a graph."""
        return self.captures and all(len(span.tokens) <= MOST_SEEN for span in spans)

    def forward(self, spans: Sequence[Span], kv: PagedKV, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Return normed last hidden states [T, D] and aux hidden states [T, L, D] of the spans' rows, without padding.

        Args:
            spans: spans of at most `MOST_SEEN` rows each.
        """
        shape, count = shape_of(spans, kv, aux_layers), sum(len(span.tokens) for span in spans)
        inputs = torch.from_numpy(inputs_of(spans, shape, kv, groups=self.decoder.groups)).pin_memory()
        steps = self._steps.setdefault(kv, {})
        step = steps.get(shape)
        buffer = torch.empty(inputs.shape, dtype=torch.long, device=kv.device) if step is None else step.inputs
        buffer.copy_(inputs, non_blocking=True)
        if step is None:
            step = steps[shape] = self._prepared(buffer, shape, kv)
        if step.graph is not None:
            step.graph.replay()
        # Copies, because the next replay overwrites its outputs.
        return step.hidden_TD[:count].clone(), None if step.aux_TLD is None else step.aux_TLD[:count].clone()

    def _prepared(self, buffer: Tensor, shape: Shape, kv: PagedKV) -> _Captured:
        """Run a bucket once and capture its graph if possible."""
        (hidden_TD, aux_TLD), graph = self.capture(lambda: self._run(buffer, shape, kv), "steps")
        self.captures = graph is not None
        return _Captured(buffer, hidden_TD, aux_TLD, graph=graph)

    def capture(self, run: Callable[[], Results], what: str) -> tuple[Results, Any]:
        """Run what reads and writes fixed memory once, which sets up the libraries' kernels, and capture it.

        Return its results, which a replay overwrites, and the graph. If the capture fails, warn and return None for it.
        """
        results, graph = run(), torch.cuda.CUDAGraph()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        try:
            # "thread_local": a thread that copies training batches meanwhile may allocate memory.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                captured = run()
        except RuntimeError as error:
            warnings.warn(f"{what} run without CUDA graphs, because a capture failed: {error}", stacklevel=3)
            return results, None
        return captured, graph

    def _run(self, buffer: Tensor, shape: Shape, kv: PagedKV) -> tuple[Tensor, Tensor | None]:
        """Run the padded step: [T, D] and [T, L, D]; of the host it reads only the shapes of its arguments."""
        tokens_T, slots_T, numbers = buffer.split([shape.rows, shape.rows, sum(shape.plan.lengths)])
        made = Plan.of(numbers, shape.plan, page_size=kv.block_size)
        return self.packed(tokens_T, slots_T, made, kv=kv, aux_layers=shape.aux_layers)

    def packed(
        self, tokens_T: Tensor, slots_T: Tensor, made: Plan, *, kv: PagedKV, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the rows of a plan, padding included: normed last hidden states [T, D], aux hidden states [T, L, D]."""
        decoder = self.decoder
        # Padding rows are not written: they stay zero.
        out_THE = decoder.embed.new_zeros(len(tokens_T), decoder.groups * decoder.kv_heads, decoder.head_dim)

        def attend_all(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for pool_KSE, new_1KTE in zip(kv.layers[layer], (k, v), strict=True):
                pool_KSE.index_copy_(1, slots_T, new_1KTE[0])
            attend(q[0].transpose(0, 1), *kv.layers[layer], plan=made, out_THE=out_THE)
            return out_THE.transpose(0, 1)[None]

        hidden_1TD, captured = decoder.run(tokens_T[None], made.rows_T3[None, :, 0], aux_layers, attention=attend_all)
        aux_TLD = torch.stack([captured[layer][0] for layer in aux_layers], dim=1) if aux_layers else None
        return hidden_1TD[0], aux_TLD
