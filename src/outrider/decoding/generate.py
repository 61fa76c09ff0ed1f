"""`stream` and `generate` decode one request: an engine that holds nothing else (decoding/engine.py).

`max_new_tokens` is exact; a stop token or stop string among a round's tokens cuts the commit there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from outrider.decoding.drafting import SchedulerState
from outrider.decoding.engine import Engine, config_alone
from outrider.decoding.policies import Policy
from outrider.decoding.request import FinishReason, Output, Request, StopRules
from outrider.decoding.structured import Grammar
from outrider.decoding.verification import TypicalAcceptance
from outrider.drafters.base import Drafter, draft_slots
from outrider.sampling import Randomness, SamplingParams
from outrider.target.model import DecodingTarget, KVPool


@dataclass(frozen=True)
class Generation:
    """A whole response. `seconds` includes the prefill; `seed` is the one it was sampled with."""

    tokens: list[int]
    text: str
    finish: FinishReason
    rounds: list[Output]
    seconds: float
    seed: int


# A CUDA graph knows the addresses that it reads and writes, so the next request of a target on a GPU takes the pool of
# the last one; by target, with its blocks.
_idle_pools: WeakKeyDictionary[DecodingTarget, tuple[int, KVPool]] = WeakKeyDictionary()


def stream(
    target: DecodingTarget,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    rules: StopRules | None = None,
    policy: Policy | None = None,
    typical: TypicalAcceptance | None = None,
    *,
    grammar: Grammar | None = None,
    randomness: Randomness | None = None,
    traced: bool = False,
    scheduler_state: SchedulerState | None = None,
) -> Iterator[Output]:
    """Decode one request and yield what each round gives; the first round's seconds include the prefill.

    Args:
        prompt: prompt tokens.
        drafter: None for plain decoding.
        policy: in which rounds it drafts, and how many drafts are verified; in each, and all of them, by default.
        typical: a lossy rule that accepts more; the output is then not distributed as the target's.
        grammar: what the response must follow (decoding/structured.py); nothing by default.
        randomness: where random draws come from; the generators of `params.seed` by default.
        traced: every output has the trace of its round.
        scheduler_state: acceptance estimates of requests before this one, which are updated; no other request may use
            them meanwhile. How much is drafted depends on them, and so do the tokens of a seed unless sampling is
            coupled.

    Raises:
        ValueError: the prompt is empty or does not fit the target's context; a lossy rule for coupled sampling, whose
            tokens no draft may change.
    """
    request = Request("", prompt, params or SamplingParams(), rules=rules or StopRules(), trace=traced, grammar=grammar)
    config, kv = config_alone(target, request, draft_slots(drafter)), None
    if target.device.type == "cuda":
        config = replace(config, num_blocks=1 << (config.num_blocks - 1).bit_length())
        blocks, kv = _idle_pools.pop(target, (0, None))
        if blocks < config.num_blocks:
            kv = None  # freed before a larger one is made
        else:
            config = replace(config, num_blocks=blocks)
    engine = Engine(
        target,
        drafter,
        policy,
        config=config,
        typical=typical,
        randomness=randomness,
        scheduler_state=scheduler_state,
        kv=kv,
    )
    reading = 0.0  # seconds of steps that only read the prompt
    try:
        for outputs in engine.run([request]):
            if not outputs:
                reading += 0.0 if engine.last is None else engine.last.seconds
                continue
            (output,) = outputs
            if output.error is not None:
                raise output.error
            yield replace(output, other_seconds=output.other_seconds + reading)
            reading = 0.0
    finally:
        if target.device.type == "cuda":
            _idle_pools[target] = config.num_blocks, engine.kv


def generate(
    target: DecodingTarget,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    rules: StopRules | None = None,
    policy: Policy | None = None,
    typical: TypicalAcceptance | None = None,
    *,
    grammar: Grammar | None = None,
    scheduler_state: SchedulerState | None = None,
) -> Generation:
    """Decode one request, see `stream`, and return the whole response."""
    started = time.perf_counter()
    rounds = list(
        stream(
            target,
            prompt,
            drafter,
            params=params,
            rules=rules,
            policy=policy,
            typical=typical,
            grammar=grammar,
            scheduler_state=scheduler_state,
        )
    )
    return generation_of(rounds, time.perf_counter() - started)


def generation_of(rounds: list[Output], seconds: float) -> Generation:
    """The response that these outputs of one request make."""
    last = rounds[-1]
    assert last.finish is not None and last.seed is not None, "the request has ended"
    tokens = [token for output in rounds for token in output.tokens]
    text = "".join(output.text for output in rounds)
    return Generation(tokens, text, last.finish, rounds=rounds, seconds=seconds, seed=last.seed)


# ----------------------------------------------------------------------------
# Acceptance of a drafter over rounds of real decoding, in the papers' convention (DSpark, arXiv 2607.05147):
#
#     tau = tokens per round, bonus included;  c_k = P(position k accepted | 1..k-1 accepted and k verified)
#
# For a tree, k is a depth: accepted at k / rounds whose path reached k - 1 and whose tree had nodes at k.
# ----------------------------------------------------------------------------


def acceptance(rounds: Sequence[Output], gamma: int) -> tuple[float, list[float | None], list[int]]:
    """(accepted length, conditional acceptance per position, histogram) of some rounds.

    A position that no round reached is None; the histogram counts rounds by accepted drafts, 0..gamma.
    """
    histogram = [0] * (gamma + 1)
    for r in rounds:
        histogram[r.accepted] += 1
    conditional: list[float | None] = []
    for k in range(1, gamma + 1):
        reached = sum(r.reach >= k and r.accepted >= k - 1 for r in rounds)
        conditional.append(sum(r.accepted >= k for r in rounds) / reached if reached else None)
    return sum(len(r.tokens) for r in rounds) / max(1, len(rounds)), conditional, histogram
