"""Batched plain decoding: how the target writes the responses a drafter is trained on.

sort a window of prompts by length -> left-pad a batch -> prefill -> one token per sequence per step
finished sequences leave the batch when a quarter of it is done (`KVCache.keep_rows`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.sampling import SamplingParams, warp
from outrider.target import Target

_WINDOW = 8  # batches whose prompts are sorted together: less padding, still a fair sample of the whole
_COMPACT_BELOW = 0.75  # drop finished sequences once fewer than this share of the batch is alive


@dataclass(frozen=True)
class Response:
    """Tokens of one response (the stop token included when there was one)."""

    index: int
    tokens: list[int]
    finished: bool


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    params: SamplingParams,
    generator: torch.Generator,
) -> list[Response]:
    """Decode one batch to its end, without speculation. Repetition penalty is not applied here."""
    width = max(len(p) for p in prompts)
    tokens_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(prompt)
    pad_B = torch.tensor([width - len(p) for p in prompts])
    cache = target.new_cache(width + max_new_tokens, pad_B.to(target.device))
    out: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    alive = list(range(len(prompts)))
    stop_ids = target.eos_ids
    step_BT = tokens_BT.to(target.device)
    for _ in range(max_new_tokens):
        logits_BTV = target.forward(step_BT, cache).logits_BTV
        assert logits_BTV is not None
        if params.temperature == 0:
            next_B = logits_BTV[:, -1].argmax(-1)
        else:
            next_B = torch.multinomial(warp(logits_BTV[:, -1].float(), params, None), 1, generator=generator)[:, 0]
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
    return [Response(i, out[i], finished[i]) for i in range(len(prompts))]


def generate_all(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    params: SamplingParams,
    batch_size: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[Response]]:
    """Responses to all prompts, batch by batch; `index` refers to `prompts`. `stop` is asked between batches."""
    generator = torch.Generator(device=target.device).manual_seed(params.seed)
    for start in range(0, len(prompts), batch_size * _WINDOW):
        window = sorted(range(start, min(start + batch_size * _WINDOW, len(prompts))), key=lambda i: len(prompts[i]))
        for first in range(0, len(window), batch_size):
            if stop():
                return
            chosen = window[first : first + batch_size]
            responses = generate_batch(target, [prompts[i] for i in chosen], max_new_tokens, params, generator)
            yield [Response(chosen[r.index], r.tokens, r.finished) for r in responses]
