"""Drafters made for tests: they propose what a test wants, as the production code's own `Draft`."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.draft import Draft, Siblings
from outrider.sampling import SamplingParams, warp
from outrider.target.model import Target

GAMMA = 7


def chain_of(tokens: list[int], probs_KV: Tensor, confidences: list[float]) -> Draft:
    """A chain drawn from whole distributions [K, V]."""
    drawn = {
        k - 1: Siblings(partial(probs_KV.__getitem__, k), first=probs_KV[k, x].item()) for k, x in enumerate(tokens)
    }
    return Draft.chain(tokens, drawn, confidences)


def row_of(draft: Draft, node: int, vocab: int | None = None) -> Tensor:
    """p_d of a node [V] that is its parent's first child; one-hot (of `vocab` tokens) where it was chosen."""
    drawn = draft.siblings.get(draft.parents[node])
    if drawn is not None:
        return drawn.row()
    assert vocab is not None, "a chosen node has no distribution"
    return torch.nn.functional.one_hot(torch.tensor(draft.tokens[node]), vocab).float()


def claiming(draft: Draft, probabilities: Sequence[float], vocab: int | None = None) -> Draft:
    """The same chain, saying that its tokens were drawn with other probabilities."""
    rows = [partial(row_of, draft, k, vocab) for k in range(len(draft.tokens))]
    drawn = {k - 1: Siblings(row, first=p) for k, (row, p) in enumerate(zip(rows, probabilities, strict=True))}
    return Draft.chain(draft.tokens, drawn, draft.confidences)


def drafted_with(draft: Draft) -> list[float]:
    """p_d(x) of the nodes of a chain, as verification reads them."""
    return [
        1.0 if k - 1 not in draft.siblings else draft.siblings[k - 1].first or 0.0 for k in range(len(draft.tokens))
    ]


class _State:
    """Counts the features it is given: a drafter must hear of every committed token once, and of no other."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.tokens: list[int] = []


class Oracle(Drafter):
    """Knows the whole text (prompt and response) and proposes it, spoiling a token now and then.

    It checks the alignment of every round by itself: the anchor must be the token after the committed features.
    """

    def __init__(self, target: Target, text: Sequence[int], spoil: float, seed: int = 0) -> None:
        self.target, self.text, self.spoil = target, list(text), spoil
        self.random = random.Random(seed)
        self.aux_layers, self.gamma = (1,), GAMMA

    def new_session(self, capacity: int) -> _State:
        return _State(capacity)

    def extend(self, sessions: Sequence[_State], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        assert aux_TLD is not None and len(aux_TLD) == sum(map(len, tokens))
        for session, part in zip(sessions, tokens, strict=True):
            assert list(part) == self.text[session.length : session.length + len(part)], "tokens and features differ"
            session.length += len(part)
            assert session.length <= session.capacity

    def session_at(self, session: _State, length: int) -> _State:
        earlier = copy.copy(session)
        earlier.length = length
        return earlier

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        return [self._propose(call) for call in calls]

    def _propose(self, call: DraftCall) -> Draft:
        tokens = self.block(call.session.length, call.anchor, call.limit)
        probs_KV = torch.zeros(len(tokens), self.target.vocab_size)
        probs_KV[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 1.0
        return chain_of(tokens, probs_KV, [0.9] * len(tokens))

    def block(self, length: int, anchor: int, limit: int | None) -> list[int]:
        assert self.text[length] == anchor, "the anchor is not the token after the committed features"
        ahead = self.text[length + 1 : length + 1 + GAMMA][:limit]
        return [(t + 1) % self.target.vocab_size if self.random.random() < self.spoil else t for t in ahead]


class Oracles(Oracle):
    """An oracle of several requests, which knows each by how its text begins."""

    def __init__(self, target: Target, texts: Sequence[Sequence[int]], spoil: float) -> None:
        super().__init__(target, [], spoil)
        self.texts = [list(text) for text in texts]

    def extend(self, sessions: Sequence[_State], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        for session, part in zip(sessions, tokens, strict=True):
            session.tokens += part
            session.length += len(part)

    def _propose(self, call: DraftCall) -> Draft:
        begun = [*call.session.tokens, call.anchor]
        self.text = next(text for text in self.texts if text[: len(begun)] == begun)
        return super()._propose(call)


class SelfDrafter(Drafter):
    """The target drafting for itself at another temperature: exact p_d, and both acceptance and rejection happen."""

    def __init__(self, target: Target, temperature: float, gamma: int) -> None:
        self.target = target
        self.params = SamplingParams(temperature=temperature)
        self.aux_layers, self.gamma = (1,), gamma
        self.memory: dict[tuple[int, ...], Tensor] = {}

    def new_session(self, capacity: int) -> list[int]:
        return []

    def extend(self, sessions: Sequence[list[int]], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        for session, part in zip(sessions, tokens, strict=True):
            session.extend(part)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        return [self._propose(call) for call in calls]

    def _propose(self, call: DraftCall) -> Draft:
        context = (*call.session, call.anchor)
        tokens: list[int] = []
        rows = []
        for _ in range(min(self.gamma, call.limit or 0)):
            row = self.row(context)
            rows.append(row)
            tokens.append(call.source.choose(row))
            context = (*context, tokens[-1])
        return chain_of(tokens, torch.stack(rows), [])

    def row(self, tokens: tuple[int, ...]) -> Tensor:
        if tokens not in self.memory:
            cache = self.target.new_cache(len(tokens))
            logits = self.target.forward(torch.tensor([tokens]), cache).logits_BTV
            assert logits is not None
            self.memory[tokens] = warp(logits[0, -1], self.params)
        return self.memory[tokens]
