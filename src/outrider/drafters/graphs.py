"""Run blocks of a drafter and their chains on a GPU in CUDA graphs, by numbers of requests, rows of a block and pages.

    inputs    anchors [R], positions [R K] | for each kind of layer: slots [R K], the plan of attention     one copy
    padding   requests up to a power of two, which write into the pool's first page and belong to nobody

Which requests draft, their contexts, slots and lengths are data of a graph. The pool of keys and the table of rotations
are replaced when they grow: graphs of the old ones are dropped.
Shapes: R requests, K rows of a block, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.cache import DraftPool, DraftSession, PooledKeys
from outrider.drafters.rope import Rope, RopeTables
from outrider.sampling import SamplingParams
from outrider.target.graphs import FEWEST_PAGES, Results, StepGraphs, power_of_two
from outrider.target.paged_attention import Sizes, most_items

_MOST_CHAINS = 64
Blocks = Callable[[Tensor, Rope, PooledKeys], Tensor]  # anchors [R], rotations of [R, K] rows -> hidden states


@dataclass(frozen=True)
class _Captured:
    inputs: Tensor
    hidden_RKH: Tensor
    graph: Any  # None if the capture failed


class BlockGraphs:
    """The graphs of a block drafter; `graphs` are its target's, which share memory with them.

    Args:
        pool: of the drafter's keys.
        rope: the rotations of its layers.
    """

    def __init__(self, graphs: StepGraphs, pool: DraftPool, rope: RopeTables) -> None:
        self.graphs, self.pool, self.rope = graphs, pool, rope
        self._captured: dict[tuple[int, Sizes], _Captured] = {}
        self._memory: tuple[list[Tensor], Rope] = pool.layers, rope.kept
        self._chains: dict[tuple[tuple[int, SamplingParams | None], int], tuple[list[Tensor], Any, Any]] = {}
        self._failed = False

    @property
    def captures(self) -> bool:
        """Whether graphs are made: if the target's are, until a capture of the drafter's own fails."""
        return self.graphs.captures and not self._failed

    def run(self, blocks: Blocks, sessions: Sequence[DraftSession], anchors: Sequence[int], rows: int) -> Tensor:
        """Hidden states [R, .., H] of one block of so many rows a request; `blocks` is the same for as many rows."""
        self.rope.cover(max(session.length for session in sessions) + rows)
        memory = self.pool.layers, self.rope.kept
        if any(new is not old for new, old in zip(memory, self._memory, strict=True)):
            self._captured.clear()
            self._memory = memory
        R = power_of_two(len(sessions))
        pages = power_of_two(sum(len(session.pages) for session in sessions))
        sizes = Sizes(R * rows, requests=R, items=most_items(R * rows), pages=max(FEWEST_PAGES, pages))
        inputs = torch.from_numpy(self._inputs(sessions, anchors, rows, sizes=sizes)).pin_memory()
        found = self._captured.get((rows, sizes))
        device = self.pool.device
        buffer = torch.empty(inputs.shape, dtype=torch.long, device=device) if found is None else found.inputs
        buffer.copy_(inputs, non_blocking=True)
        if found is None:
            hidden_RKH, graph = self.graphs.capture(lambda: self._run(blocks, buffer, rows, sizes=sizes), "drafts")
            self._failed = graph is None
            found = self._captured[rows, sizes] = _Captured(buffer, hidden_RKH, graph)
        if found.graph is not None:
            found.graph.replay()
        return found.hidden_RKH[: len(sessions)].clone()  # the next replay overwrites it

    def chain(
        self, kind: tuple[int, SamplingParams | None], inputs: Sequence[Tensor], run: Callable[..., Results]
    ) -> Results:
        """What `run` returns of inputs [R, ...], which are padded to a power of two; the next call overwrites it.

        Chains of at most `_MOST_CHAINS` kinds are captured: requests may ask for any temperature.

        Args:
            kind: positions and parameters; `run` does the same for inputs of one kind.
            inputs: on the device or on the host.
        """
        key = kind, power_of_two(len(inputs[0]))
        found: tuple[list[Tensor], Any, Any] | None = self._chains.get(key)
        if found is None:
            zeros = [torch.zeros(key[1], *x.shape[1:], dtype=x.dtype, device=self.pool.device) for x in inputs]
            found = zeros, None, None
        for buffer, own in zip(found[0], inputs, strict=True):
            source = own if own.is_cuda else own.pin_memory()
            buffer[: len(own)].copy_(source, non_blocking=True)
        if found[1] is not None:
            found[1].replay()
            return cast(Results, found[2])
        if len(self._chains) >= _MOST_CHAINS:
            return run(*found[0])
        results, graph = self.graphs.capture(lambda: run(*found[0]), "drafts")
        self._failed = graph is None
        if graph is not None:
            self._chains[key] = found[0], graph, results
            graph.replay()
        return results

    def _inputs(self, sessions: Sequence[DraftSession], anchors: Sequence[int], rows: int, sizes: Sizes) -> Any:
        """All inputs in the order of the module docstring."""
        count = len(sessions) * rows
        padded = np.zeros(sizes.requests + sizes.rows, dtype=np.int64)
        padded[: len(anchors)] = anchors
        starts = np.array([session.length for session in sessions])
        padded[sizes.requests :][:count] = (starts[:, None] + np.arange(rows)).reshape(-1)
        parts = [padded]
        for host in self.pool.plans(sessions, rows, sizes).values():
            slots_T = np.zeros(sizes.rows, dtype=np.int64)
            slots_T[:count] = host.slots_T
            parts += [slots_T, host.numbers]
        return np.concatenate(parts)

    def _run(self, blocks: Blocks, buffer: Tensor, rows: int, sizes: Sizes) -> Tensor:
        """Run the padded blocks; of the host it reads only the shapes of its arguments."""
        kinds, numbers = list(dict.fromkeys(self.pool.patterns)), sum(sizes.lengths)
        anchors_R, positions_T, *parts = buffer.split([sizes.requests, sizes.rows] + [sizes.rows, numbers] * len(kinds))
        shared = {
            pattern: (new_T, self.pool.plan_of(rest, sizes, pattern))
            for pattern, new_T, rest in zip(kinds, parts[::2], parts[1::2], strict=True)
        }
        cos, sin = (table[positions_T].unflatten(0, (-1, rows)) for table in self.rope.kept)
        return blocks(anchors_R, (cos, sin), PooledKeys(self.pool, shared))
