"""A batch decoded to its end by the code that regenerates responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.data.regenerate import Response, decode_batch
from outrider.sampling import SamplingParams
from outrider.target.model import Target


def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    params: SamplingParams,
    seeds: Sequence[int],
) -> list[Response]:
    """The responses in the order of their prompts."""
    said: dict[int, Response] = {}
    own = [replace(params, seed=seed) for seed in seeds]
    for ended in decode_batch(target, prompts, max_new_tokens, params=own):
        said |= ended
    return [said[number] for number in range(len(prompts))]
