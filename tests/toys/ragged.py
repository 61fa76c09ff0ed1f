"""Ragged forwards of three requests, compared with each request run alone."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from outrider.target.cache import KVCache
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span

RAGGED_AUX_LAYERS = (-1, 0, 2, 3, 4)
BLOCK = 4
# a's blocks are consecutive, b's shuffled; c's are consecutive but for the last ones, among those of the others.
BLOCKS = {
    "a": list(range(20, 36)),
    "b": [7, 2, 5, 1, 11, 3, 9, 0, 6],
    "c": [12, 13, 14, 15, 16, 17, 18, 19, 8, 4, 10, 36],
}
# Per step and request: tokens kept from before, new tokens, rows with logits. Contexts pass the toys' window of 16.
STEPS: tuple[dict[str, tuple[int, int, int]], ...] = (
    {"a": (0, 21, 0), "b": (0, 5, 1)},  # two chunks of prompts
    {"a": (21, 1, 1), "b": (5, 8, 8), "c": (0, 1, 1)},
    {"c": (1, 30, 0), "a": (22, 8, 8)},
    # Of a's block five were rejected, of b's six: it goes back over the border of a block.
    {"a": (25, 8, 3), "b": (7, 1, 1), "c": (31, 1, 1)},
    {"b": (8, 8, 8), "c": (32, 8, 8), "a": (33, 1, 0)},
    {"a": (34, 1, 1), "b": (15, 1, 1), "c": (34, 1, 1)},  # all alike: single tokens
    {"c": (0, 12, 2), "b": (16, 20, 20)},  # c starts anew in its old blocks, with new states
)


def run_alone(target: Target) -> tuple[list[Tensor], list[list[int]]]:
    """Each request through `Target.forward` with a cache of its own; all rows in order, and the tokens used."""
    generator = torch.Generator().manual_seed(5)
    caches = {}
    rows, tokens = [], []
    for step in STEPS:
        for name, (past, new, logits) in step.items():
            drawn = torch.randint(4, target.vocab_size, (1, new), generator=generator)
            if past == 0:
                caches[name] = target.new_cache(64)
            caches[name].rollback(past)
            output = target.forward(drawn, caches[name], RAGGED_AUX_LAYERS, logits)
            assert output.aux_BTLD is not None
            rows += [output.hidden_BTD[0], output.aux_BTLD[0]]
            rows += [] if output.logits_BTV is None else [output.logits_BTV[0]]
            tokens.append(drawn[0].tolist())
    return rows, tokens


def run_ragged(target: Target, tokens: list[list[int]], blocks: dict[str, list[int]]) -> list[Tensor]:
    """The same, all requests of a step in one pass."""
    kv = PagedKV(target, 37, BLOCK)
    for pool in chain.from_iterable(kv.pools):
        pool.fill_(torch.nan)  # a slot that is read before it is written shows
    rows, left = [], iter(tokens)
    states: dict[str, KVCache | None] = {}
    for step in STEPS:
        states |= {name: target.new_states() for name, (past, _, _) in step.items() if past == 0}
        spans = [
            Span(next(left), past, blocks[name], logits, states=states[name])
            for name, (past, _, logits) in step.items()
        ]
        output = target.forward_ragged(spans, kv, RAGGED_AUX_LAYERS)
        assert output.aux_TLD is not None
        at, wanted = 0, 0
        for span in spans:
            rows += [output.hidden_TD[at : at + len(span.tokens)], output.aux_TLD[at : at + len(span.tokens)]]
            at += len(span.tokens)
            if span.logits:
                assert output.logits_NV is not None
                rows.append(output.logits_NV[wanted : wanted + span.logits])
                wanted += span.logits
        assert at == len(output.hidden_TD) and (output.logits_NV is None or wanted == len(output.logits_NV))
    return rows


def ragged_difference(
    target: Target, blocks: dict[str, list[int]] = BLOCKS, alone: tuple[list[Tensor], list[list[int]]] | None = None
) -> float:
    """Of any number, relative to the largest of its tensor where that is above one (Gemma's aux hidden states are).

    `alone`: what `run_alone` gave, None to run it.
    """
    alone_rows, tokens = alone or run_alone(target)
    together = run_ragged(target, tokens, blocks)
    assert [x.shape for x in alone_rows] == [x.shape for x in together]
    differences = [(x - y).abs().max() / x.abs().max().clamp(min=1) for x, y in zip(alone_rows, together, strict=True)]
    return float(torch.stack(differences).nan_to_num(torch.inf).max())
