"""Drafters made for tests: they propose what a test wants, through the production walk's own data type."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters import Proposal
from outrider.sampling import RandomSource, SamplingParams, SeenTokens, warp
from outrider.target import Target

GAMMA = 7


class _State:
    """Counts the features it is given: a drafter must hear of every committed token once, and of no other."""

    def __init__(self, drafter: Oracle, capacity: int) -> None:
        self.drafter, self.capacity, self.length = drafter, capacity, 0

    def extend(self, taps_TLD: Tensor) -> None:
        self.length += len(taps_TLD)
        assert self.length <= self.capacity

    def propose(
        self,
        anchor: int,
        params: SamplingParams,
        seen: SeenTokens,
        source: RandomSource,
        limit: int | None = None,
        floor: float = 0.0,
    ) -> Proposal:
        tokens = self.drafter.block(self.length, anchor, limit)
        probs_KV = torch.zeros(len(tokens), self.drafter.target.vocab_size)
        probs_KV[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 1.0
        return Proposal(tokens, probs_KV, [0.9] * len(tokens))


class Oracle:
    """Knows the whole text (prompt and response) and proposes it, spoiling a token now and then.

    It checks the alignment of every round by itself: the anchor must be the token after the committed features.
    """

    def __init__(self, target: Target, text: Sequence[int], spoil: float, seed: int = 0) -> None:
        self.target, self.text, self.spoil = target, list(text), spoil
        self.random = random.Random(seed)
        self.taps, self.block_size = (1,), GAMMA

    def new_state(self, capacity: int) -> _State:
        return _State(self, capacity)

    def block(self, length: int, anchor: int, limit: int | None) -> list[int]:
        assert self.text[length] == anchor, "the anchor is not the token after the committed features"
        ahead = self.text[length + 1 : length + 1 + GAMMA][:limit]
        return [(t + 1) % self.target.vocab_size if self.random.random() < self.spoil else t for t in ahead]


class SelfDrafter:
    """The target drafting for itself at another temperature: exact p_d, and both acceptance and rejection happen."""

    def __init__(self, target: Target, prompt: Sequence[int], temperature: float, gamma: int) -> None:
        self.target, self.prompt = target, list(prompt)
        self.params = SamplingParams(temperature=temperature)
        self.taps, self.block_size = (1,), gamma
        self.memory: dict[tuple[int, ...], Tensor] = {}

    def new_state(self, capacity: int) -> _SelfState:
        return _SelfState(self)

    def row(self, tokens: tuple[int, ...]) -> Tensor:
        if tokens not in self.memory:
            cache = self.target.new_cache(len(tokens))
            logits = self.target.forward(torch.tensor([tokens]), cache).logits_BTV
            assert logits is not None
            self.memory[tokens] = warp(logits[0, -1], self.params)
        return self.memory[tokens]


class _SelfState:
    def __init__(self, drafter: SelfDrafter) -> None:
        self.drafter = drafter
        self.tokens: list[int] = []

    def extend(self, taps_TLD: Tensor) -> None:
        pass

    def propose(
        self,
        anchor: int,
        params: SamplingParams,
        seen: SeenTokens,
        source: RandomSource,
        limit: int | None = None,
        floor: float = 0.0,
    ) -> Proposal:
        # One request decodes from its prompt, so the text so far is the prompt and what `commit` made of it: the test
        # keeps responses no longer than one block, and drafts only once, right after the prompt.
        context = tuple(self.drafter.prompt)
        if anchor != context[-1] or self.tokens:
            return Proposal([], torch.empty(0), [])
        rows = []
        for _ in range(min(self.drafter.block_size, limit or 0)):
            row = self.drafter.row(context)
            rows.append(row)
            self.tokens.append(source.choose(row))
            context = (*context, self.tokens[-1])
        return Proposal(self.tokens, torch.stack(rows), [])
