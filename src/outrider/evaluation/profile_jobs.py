"""Things to time, timed in turns.

    sweep 1:  forward(2, 9, 64)  draft(4)  forward(1, 1, 768)  extend(8) ...     every job once, in shuffled order,
    sweep 2:  draft(32)  forward(8, 40, 256) ...                                 so that drift of the machine hits all

Contexts are random keys and values: timing needs no meaning, only memory that was really written.
Shapes: R requests, B tokens in all, S context; T tokens, L taps, D target hidden.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from outrider.decoding import StopRules
from outrider.decoding.lane import Clock
from outrider.drafters.base import DraftCall, Drafter, draft_slots
from outrider.engine import Engine, EngineConfig, Request
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target import Target
from outrider.target.paged import PagedKV, Span

Shape = tuple[int, int, int]  # R, B, S
Key = tuple[str, Shape]
Jobs = dict[Key, Callable[[], float]]  # each gives its seconds
DENSE = 32  # tokens up to which every count is measured
_BLOCK_SIZE = 16  # of the KV pool
READ = 2  # committed tokens of a request that its drafter reads after a step
_FEWEST_SWEEPS = 3  # a median of fewer says nothing
_WARM_UP_STEPS = 3


def forward_jobs(
    target: Target, taps: tuple[int, ...], shapes: Sequence[Shape], width: int, branching: bool = False
) -> Jobs:
    """Ragged forwards; those of more than `DENSE` tokens have logits for the last `width` rows of a request only.

    A request's blocks are neighbours, as the engine's allocator mostly has them. With `branching`, rows that may be an
    anchor and its drafts (up to `width`) are trees in which every node has two children.
    """
    per_request = {(r, b, s): -(-(s + -(-b // r)) // _BLOCK_SIZE) for r, b, s in shapes}
    kv = PagedKV(target, max(r * per_request[r, b, s] for r, b, s in shapes), _BLOCK_SIZE)
    for pool in chain.from_iterable(kv.pools):
        pool.uniform_(-1.0, 1.0)
    jobs: Jobs = {}
    for r, b, s in shapes:
        blocks, spans = per_request[r, b, s], []
        for i in range(r):
            tokens = _tokens(target, b // r + (i < b % r))
            logits = len(tokens) if b <= DENSE else min(len(tokens), width)
            parents = [(row - 1) // 2 for row in range(len(tokens))] if branching and len(tokens) <= width else None
            spans.append(Span(tokens, s, list(range(i * blocks, (i + 1) * blocks)), logits, parents))
        jobs["forward", (r, b, s)] = _timed(target.device, partial(target.forward_ragged, spans, kv, taps))
    return jobs


def draft_jobs(target: Target, drafter: Drafter, counts: Sequence[int], context: int) -> Jobs:
    """Greedy blocks of several requests after `context` tokens; and their sessions reading what a step committed."""
    sessions = [drafter.new_session(context) for _ in range(counts[-1])]
    for session in sessions:
        drafter.extend([session], [_tokens(target, context)], _taps(target, drafter, context))
    params, seen = SamplingParams(), SeenTokens(target.vocab_size)
    calls = [DraftCall(session, _tokens(target, 1)[0], params, seen, SeededSource(0)) for session in sessions]

    def extend(count: int) -> float:
        fresh = [drafter.new_session(READ) for _ in range(count)]
        tokens, taps_TLD = [_tokens(target, READ) for _ in fresh], _taps(target, drafter, count * READ)
        return _timed(target.device, lambda: drafter.extend(fresh, tokens, taps_TLD))()

    jobs: Jobs = {}
    for n in counts:
        jobs["draft", (n, n * draft_slots(drafter), context)] = _timed(
            target.device, partial(drafter.propose, calls[:n])
        )
        shorts = [replace(call, limit=1) for call in calls[:n]]
        jobs["draft_one", (n, n, context)] = _timed(target.device, partial(drafter.propose, shorts))
        jobs["extend", (n, n * READ, 0)] = partial(extend, n)
    return jobs


def sweep(
    jobs: Jobs, repeats: int, seconds: float, on_progress: Callable[[str, int, int], None]
) -> dict[Key, list[float]]:
    """Seconds of every job, `repeats` times or as often as `seconds` allow, but three times."""
    started = time.perf_counter()
    sizes = {(what, shape[1]): job for (what, shape), job in jobs.items()}
    for job in sizes.values():  # kernels are chosen and laid out at the first call of a size
        job()
    timed: dict[Key, list[float]] = {key: [] for key in jobs}
    order, shuffle = list(jobs), random.Random(0).shuffle
    for number in range(repeats):
        begun = time.perf_counter()
        shuffle(order)
        for done, key in enumerate(order, 1):
            timed[key].append(jobs[key]())
            on_progress("profile", number * len(order) + done, repeats * len(order))
        now = time.perf_counter()
        if number + 1 >= _FEWEST_SWEEPS and now - started + (now - begun) > seconds:
            break
    return timed


def other_seconds(target: Target, drafter: Drafter | None, requests: int, repeats: int) -> list[float]:
    """What engine steps of so many requests, decoding greedily, spend outside target and drafter."""
    steps, slots = _WARM_UP_STEPS + repeats, draft_slots(drafter)
    length = steps * (1 if drafter is None else drafter.gamma + 1) + 1  # nobody is done before the last step
    blocks = -(-(1 + length + slots) // _BLOCK_SIZE)
    config = EngineConfig(requests, requests * (slots + 1), _BLOCK_SIZE, requests * blocks)
    engine = Engine(target, drafter, config=config)
    for i in range(requests):
        engine.submit(Request(str(i), _tokens(target, 1), rules=StopRules(length, stop_ids=())))
    found = []
    for _ in range(steps):
        engine.step()
        assert engine.last is not None and engine.last.requests == requests
        found.append(engine.last.other_seconds)
    return found[_WARM_UP_STEPS:]


def _timed(device: torch.device, call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        clock = Clock(device)
        with clock:
            call()
        return clock.take()

    return seconds


def _tokens(target: Target, count: int) -> list[int]:
    return torch.randint(0, target.vocab_size, (count,)).tolist()


def _taps(target: Target, drafter: Drafter, count: int) -> torch.Tensor | None:
    shape = (count, len(drafter.taps), target.hidden_size)
    return torch.randn(shape, device=target.device, dtype=target.dtype) if drafter.taps else None
