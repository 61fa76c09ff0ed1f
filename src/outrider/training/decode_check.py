"""Real decoding with the drafter as it is now: what held-out metrics promise, measured.

    folded weights -> serving form (`Method.serve`) -> draft, verify, commit on held-out prompts

Nothing of training is touched: weights are copied, no gradient is recorded, and randomness comes from seeds of the
prompts' own, the same at every check. At temperature 0 the output is the target's own, so no plain decoding is needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.decoding import StopRules, acceptance, generate
from outrider.drafters.catalogue import method_of
from outrider.drafters.method import DraftModule, Serving
from outrider.sampling import SamplingParams
from outrider.target import Target


def first_prompts(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """The first prompt of each of `count` conversations, as tokens."""
    firsts: dict[str, Sample] = {}
    for sample in samples:  # a conversation may come in several samples, its first turn in the first of them
        firsts.setdefault(sample.id, sample)
    return [s.tokens[: s.spans[0][0]] for s in list(firsts.values())[:count]]


@torch.no_grad()
def decode_check(
    drafter: DraftModule,
    target: Target,
    draft_ids_Vd: Tensor | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
) -> dict[str, float]:
    """Decode the prompts and count.

    `tau` is tokens per round, bonus included; `conditional_acceptance_k` is there for positions that some round
    reached; `tokens_per_second` includes the prefills, `seconds` also the time to pack the weights.
    """
    started = time.perf_counter()
    served = method_of(drafter.algorithm).serve(drafter, target, Serving(draft_ids_Vd))
    rules = StopRules(max_new_tokens)
    decoded = [
        generate(target, prompt, served, SamplingParams(temperature=temperature, seed=number), rules)
        for number, prompt in enumerate(prompts)
    ]
    rounds = [r for generation in decoded for r in generation.rounds]
    tokens = sum(len(generation.tokens) for generation in decoded)
    tau, conditional, _ = acceptance(rounds, drafter.config.gamma)
    figures: dict[str, float] = {
        "tau": tau,
        "rounds": len(rounds),
        "tokens": tokens,
        "tokens_per_second": tokens / sum(generation.seconds for generation in decoded),
    }
    figures |= {f"conditional_acceptance_{k}": c for k, c in enumerate(conditional, 1) if c is not None}
    return {**figures, "seconds": time.perf_counter() - started}
