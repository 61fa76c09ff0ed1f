"""The scheduler of continuous batching: which requests are in the next step, with how many rows, in which KV blocks.

    waiting --admit--> prefilling --all but the anchor cached--> decoding --commit--> ... --finish / cancel--> gone
       ^                                                            |
       +------------- preempted: blocks freed, recomputed later ----+

It holds counts only, no tokens, tensors or clock, so that the simulator uses this very object. Verification comes first
and prefill fills what is left of the token budget, in order of arrival. A step's forward holds, per request, a chunk of
prefill, or the anchor and its drafts, or the end of its prefill and the anchor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.decoding.prefix_cache import PrefixCache


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Args:
        max_requests: running at once.
        token_budget: most rows of one target forward.
        block_size: tokens per KV block.
        num_blocks: of the KV pool; with `block_size`, how many tokens all running requests may hold.
        prompt_apart: a prompt is read without its last token, so that the first token has drafts already; else it comes
            with the prompt.
        prompt_rows: most rows of prompts in a step in which others decode, so that these need not wait for a long
            prompt; None: what the budget leaves.
        prefix_cache: KV blocks of requests that have ended are kept for those that begin alike (prefix_cache.py).
    """

    max_requests: int = 32
    token_budget: int = 512
    block_size: int = 16
    num_blocks: int = 1024
    prompt_apart: bool = False
    prompt_rows: int | None = None
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name in ("max_requests", "token_budget", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.token_budget < self.max_requests:
            raise ValueError(
                f"token_budget={self.token_budget} is below max_requests={self.max_requests}: every request needs a "
                "row per step; raise the one or lower the other."
            )


@dataclass
class Progress:
    """Progress of one request: `length` committed tokens, of which `cached` are in the KV pool, in `blocks`.

    With a prefix cache it has the `keys` of the blocks that its tokens fill, `kept` of its blocks are in the cache, and
    `found` of its tokens were there when it was first admitted.
    """

    length: int
    capacity: int  # most committed tokens
    most_drafts: int  # of a step
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    kept: int = 0
    found: int | None = None


@dataclass(frozen=True)
class Work:
    """A request's part of a step: its rows in the target forward.

    `prefill` rows of known tokens come first; with `decodes` the anchor follows and at most `limit` draft tokens, a
    slot each also where they branch.
    """

    id: str
    prefill: int
    decodes: bool
    limit: int


@dataclass(frozen=True)
class StepPlan:
    """A step's work, and the ids of requests that were admitted or preempted before it."""

    work: list[Work]
    admitted: list[str]
    preempted: list[str]


class Scheduler:
    """Plans steps: queues of waiting and running requests, and the KV blocks they hold.

    Args:
        draft_slots: most draft tokens per request and step; 0 without a drafter.
        trees: drafts are trees, which may have more nodes than the request has tokens left.
    """

    def __init__(self, config: EngineConfig, draft_slots: int, trees: bool = False) -> None:
        self.config, self.draft_slots, self.trees = config, draft_slots, trees
        self.allocator = BlockAllocator(config.num_blocks)
        self.running: dict[str, Progress] = {}  # in order of arrival
        self.waiting: deque[tuple[str, Progress]] = deque()

    def add(
        self,
        id: str,
        length: int,
        max_new_tokens: int,
        most_drafts: int | None = None,
        keys: Sequence[bytes] = (),
    ) -> None:
        """Queue a request of `length` prompt tokens, with at most so many draft tokens a step; None: `draft_slots`.

        Args:
            keys: of the blocks that its prompt fills, to look for in the prefix cache.

        Raises:
            ValueError: it could never fit into the pool.
        """
        capacity = length + max_new_tokens
        if self._blocks_for(capacity) > self.config.num_blocks:
            raise ValueError(
                f"request {id!r}: {length} prompt and {max_new_tokens} new tokens need {self._blocks_for(capacity)} KV "
                f"blocks of {self.config.block_size}, the pool has {self.config.num_blocks}; shorten it or raise "
                "num_blocks."
            )
        most = self.draft_slots if most_drafts is None else min(most_drafts, self.draft_slots)
        self.waiting.append((id, Progress(length, capacity, most, keys=list(keys))))

    def remove(self, id: str) -> None:
        """Drop a request, finished or cancelled, and free its blocks; nothing happens where there is none of that
        id.
        """
        progress = self.running.pop(id, None)
        if progress is not None:
            self.allocator.release(progress.blocks)
        else:
            self.waiting = deque(entry for entry in self.waiting if entry[0] != id)

    def plan(self) -> StepPlan:
        """The next step; blocks for all its rows are allocated when this returns."""
        preempted: list[str] = []
        limits = self._decoding_limits(preempted)
        budget = self.config.token_budget - sum(1 + limit for limit in limits.values())
        if limits and self.config.prompt_rows is not None:
            budget = min(budget, self.config.prompt_rows)
        admitted: list[str] = []
        work = [Work(id, 0, True, limit=limit) for id, limit in limits.items()]
        for id, progress in list(self.running.items()):
            if id not in limits and budget > 0:
                part = self._prefill(id, progress, budget)
                work += part
                budget -= sum(one.prefill + one.decodes for one in part)
        while budget > 0 and self.waiting and not preempted and len(self.running) < self.config.max_requests:
            id, progress = self.waiting[0]
            shared = self.allocator.share(progress.keys[: (progress.length - 1) // self.config.block_size])
            needed = self._blocks_for(progress.length) - len(shared)
            if needed > self.allocator.available:
                self.allocator.release(shared)
                break
            self.waiting.popleft()
            progress.blocks = shared + self.allocator.allocate(needed, shared[-1] if shared else None)
            progress.kept, progress.cached = len(shared), len(shared) * self.config.block_size
            progress.found = progress.cached if progress.found is None else progress.found
            self.running[id] = progress
            admitted.append(id)
            part = self._prefill(id, progress, budget)
            work += part
            budget -= sum(one.prefill + one.decodes for one in part)
        return StepPlan(work, admitted, preempted)

    def ahead(self, under_way: Mapping[str, int]) -> dict[str, int]:
        """The next step if it only decodes, while a step is under way that gives these requests so many tokens at most
        (decoding/ahead.py): most draft tokens of each request, none of which has ended for certain.

        {}: it has other work, or there are too few blocks. Blocks for all rows are allocated when this returns.
        """
        if self._may_enter() or any(p.cached != p.length - 1 for p in self.running.values()):
            return {}
        share, limits = self._share(len(self.running)), dict[str, int]()
        for id, progress in self.running.items():
            left, more = progress.capacity - progress.length, under_way.get(id, 0)
            if more and left <= 1:
                continue
            limits[id] = max(0, min(progress.most_drafts, share, left - 1))
            if not self._grow(progress, min(more + limits[id], left)):
                return {}
        return limits

    def advance(self, id: str, rows: int) -> None:
        """`rows` of prefill are cached now."""
        self.running[id].cached += rows

    def commit(self, id: str, tokens: int) -> None:
        """A decoding request got `tokens` more; all but the last are cached."""
        progress = self.running[id]
        progress.length += tokens
        progress.cached = progress.length - 1

    def keep(self, id: str) -> None:
        """Put the blocks that a request has filled into the prefix cache; it has their keys."""
        progress = self.running[id]
        for place in range(progress.kept, progress.cached // self.config.block_size):
            self.allocator.prefixes.keep(progress.blocks[place], progress.keys[place])
            progress.kept += 1

    def _prefill(self, id: str, progress: Progress, budget: int) -> list[Work]:
        """What is read of the prompt in this step: nothing if all but the anchor is read, and that comes apart."""
        missing = progress.length - 1 - progress.cached
        if self.config.prompt_apart:
            return [Work(id, min(missing, budget), False, limit=0)] if missing else []
        if missing < budget:  # the anchor fits as well
            return [Work(id, missing, True, limit=0)]
        return [Work(id, budget, False, limit=0)]

    def _decoding_limits(self, preempted: list[str]) -> dict[str, int]:
        """Most draft tokens of every decoding request, with blocks allocated for them.

        Every request gets a slot for its anchor first; where there are too few blocks, unused draft slots are taken
        back and then the youngest requests preempted. What is left goes to drafts.
        """
        decoding = [id for id, p in self.running.items() if p.cached == p.length - 1]
        self._release_draft_slots([self.running[id] for id in decoding])
        for id in decoding:
            while id in self.running and not self._grow(self.running[id], 0):
                self._preempt(next(reversed(self.running)), preempted)
        decoding = [id for id in decoding if id in self.running]
        share = self._share(len(decoding))
        limits: dict[str, int] = {}
        for id in decoding:
            progress = self.running[id]
            left = progress.capacity - progress.length - 1
            if self.trees and left > 0:
                left = self.draft_slots
            limit = max(0, min(progress.most_drafts, share, left))
            while not self._grow(progress, limit):
                limit -= 1
            limits[id] = limit
        return limits

    def _may_enter(self) -> bool:
        """Whether `plan` may admit a request, all of whose prompt might be cached."""
        if not self.waiting or len(self.running) >= self.config.max_requests:
            return False
        _, progress = self.waiting[0]
        return self._blocks_for(progress.length) - len(progress.keys) <= self.allocator.available

    def _share(self, decoding: int) -> int:
        """Most draft tokens that each of so many requests gets of the rows of a step."""
        budget = self.config.token_budget
        if self.waiting or decoding < len(self.running):  # keep a quarter of the rows for prefill
            budget = max(decoding, budget - budget // 4)
        return budget // max(decoding, 1) - 1

    def _release_draft_slots(self, decoding: Sequence[Progress]) -> None:
        """When KV blocks run out, drop drafts before preempting a request: free the blocks that drafts left unused."""
        missing = sum(max(0, self._blocks_for(p.length) - len(p.blocks)) for p in decoding)
        if missing > self.allocator.available:
            for progress in decoding:
                needed = self._blocks_for(progress.length)
                self.allocator.release(progress.blocks[needed:])
                del progress.blocks[needed:]

    def _grow(self, progress: Progress, drafts: int) -> bool:
        """Allocate blocks for the anchor and `drafts` draft tokens; False where the pool has too few left."""
        missing = self._blocks_for(progress.length + drafts) - len(progress.blocks)
        if missing > self.allocator.available:
            return False
        if missing > 0:
            progress.blocks += self.allocator.allocate(missing, progress.blocks[-1])
        return True

    def _preempt(self, id: str, preempted: list[str]) -> None:
        progress = self.running.pop(id)
        self.allocator.release(progress.blocks)
        progress.blocks = []
        self.waiting.appendleft((id, progress))
        preempted.append(id)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)


# ----------------------------------------------------------------------------
# The allocator of KV blocks, which prefers neighbours.
#
# | A A A . . . . | B B . . . . . . |     a new request starts in the middle of the largest gap, a growing one takes
#                                         the block behind its last: most requests stay one run of blocks, which
#                                         attention can view without copying. Correctness never depends on it.
#
# Requests that begin alike share blocks, so each block counts its holders. A block of the prefix cache that nobody
# holds is available: it is evicted once no other block is free.
# ----------------------------------------------------------------------------


class BlockAllocator:
    """Allocates block ids 0 .. total - 1."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"num_blocks={total} must be at least 1.")
        self.total = total
        self.prefixes = PrefixCache()
        self._free_N = np.ones(total, dtype=bool)
        self._holders_N = np.zeros(total, dtype=np.int64)
        self.available = total  # free, or idle in the prefix cache

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks, continuing block `after` where possible; the caller has checked `available`."""
        assert count <= self.available, f"{count} blocks asked for, {self.available} free"
        while count > self.available - len(self.prefixes.idle):
            self._free_N[self.prefixes.evict()] = True
        found: list[int] = []
        while len(found) < count:
            wanted = count - len(found)
            start, length = self._run_after(after, wanted) if after is not None else self._run_inside(wanted)
            if not length:
                after = None
                continue
            self._free_N[start : start + length] = False
            self._holders_N[start : start + length] = 1
            found += range(start, start + length)
            after = found[-1]
        self.available -= count
        return found

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of these keys that is in the prefix cache, held once more."""
        blocks = self.prefixes.find(keys)
        for block in blocks:
            if not self._holders_N[block]:
                del self.prefixes.idle[block]
                self.available -= 1
            self._holders_N[block] += 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, which belong to one request in the order of its positions."""
        if len(blocks):
            index = np.asarray(blocks)
            assert self._holders_N[index].all() and len(set(blocks)) == len(blocks), f"blocks {blocks} freed twice"
            self._holders_N[index] -= 1
            left = index[self._holders_N[index] == 0]
            self.available += len(left)
            # From the end: without its beginning a prefix is of no use.
            idle = [block for block in reversed(left.tolist()) if block in self.prefixes]
            self.prefixes.idle.update(dict.fromkeys(idle))
            self._free_N[left] = True
            self._free_N[idle] = False

    def _run_after(self, after: int, wanted: int) -> tuple[int, int]:
        behind = self._free_N[after + 1 : after + 1 + wanted]
        return after + 1, len(behind) if behind.all() else int(behind.argmin())

    def _run_inside(self, wanted: int) -> tuple[int, int]:
        """Where to start in the largest gap, and how much of `wanted` it holds."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free_N, [False]))))
        starts, ends = edges[::2], edges[1::2]
        largest = int((ends - starts).argmax())
        start, length = int(starts[largest]), int((ends - starts)[largest])
        if length <= wanted:
            return start, length
        neighbour = start > 0  # a request's last block is right before: leave it room to grow
        return start + ((length - wanted) // 2 if neighbour else 0), wanted
