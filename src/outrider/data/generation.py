"""Batched plain decoding: how the target writes the responses a drafter is trained on.

sort a window of prompts by length -> left-pad a batch -> prefill -> one token per sequence per step
finished sequences leave the batch when a quarter of it is done (`KVCache.keep_rows`)

Sampling is x = min{v : u < P(0) + .. + P(v)} with uniform numbers u drawn per sequence from a seed of its own, so what
a sequence says does not depend on which others share its batch, nor on when a stopped run was taken up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.sampling import SamplingParams, warp
from outrider.target import Target

_WINDOW = 8  # batches whose prompts are sorted together: less padding, still a fair sample of the whole
_COMPACT_BELOW = 0.75  # drop finished sequences once fewer than this share of the batch is alive


@dataclass(frozen=True)
class Response:
    """Tokens of one response (the stop token included when there was one)."""

    tokens: list[int]
    finished: bool


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Batches of prompt numbers, of similar lengths each; a function of all prompts' lengths and nothing else."""
    batches = []
    for start in range(0, len(lengths), batch_size * _WINDOW):
        window = sorted(range(start, min(start + batch_size * _WINDOW, len(lengths))), key=lambda i: lengths[i])
        batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
    return batches


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    params: SamplingParams,
    seeds: Sequence[int],
) -> list[Response]:
    """Decode one batch to its end, without speculation. Repetition penalty is not applied here.

    Args:
        seeds: one per prompt, in place of `params.seed`.
    """
    width = max(len(p) for p in prompts)
    tokens_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(prompt)
    pad_B = torch.tensor([width - len(p) for p in prompts])
    cache = target.new_cache(width + max_new_tokens, pad_B.to(target.device))
    uniform_BN = _uniform(seeds, max_new_tokens).to(target.device) if params.temperature > 0 else None
    out: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    alive = list(range(len(prompts)))
    stop_ids = target.eos_ids
    step_BT = tokens_BT.to(target.device)
    for step in range(max_new_tokens):
        logits_BTV = target.forward(step_BT, cache).logits_BTV
        assert logits_BTV is not None
        if uniform_BN is None:
            next_B = logits_BTV[:, -1].argmax(-1)
        else:
            next_B = _draw(warp(logits_BTV[:, -1].float(), params, None), uniform_BN[alive, step])
        for row, token in zip(alive, next_B.tolist(), strict=True):
            if not finished[row]:
                out[row].append(token)
                finished[row] = token in stop_ids
        going = [i for i, row in enumerate(alive) if not finished[row]]
        if not going:
            break
        if len(going) < _COMPACT_BELOW * len(alive):
            keep = torch.tensor(going, device=target.device)
            cache.keep_rows(keep)
            next_B = next_B[keep]
            alive = [alive[i] for i in going]
        step_BT = next_B[:, None]
    return [Response(tokens, done) for tokens, done in zip(out, finished, strict=True)]


def _uniform(seeds: Sequence[int], count: int) -> Tensor:
    """[B, count] float64 in [0, 1), a row per seed; drawn on the CPU, so every device samples the same text."""
    rows = [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)


def _draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """[B] tokens: the first one whose cumulative probability exceeds u. Zero probabilities are never drawn."""
    cumulative_BV = probs_BV.double().cumsum(-1)
    aim_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, aim_B1, right=True)[:, 0].clamp_(max=probs_BV.shape[-1] - 1)
