"""Vanilla speculative decoding: a smaller language model of the target's tokenizer drafts, token by token.

    x_k ~ p_k = warp(LM(x_0 .. x_{k-1}))

    tokens   x_0 .. x_{n-2}                 committed, as `extend` gave them
    keys     x_0 .. x_{m-1} | d_1 d_2 ..    what the model has read: at the next `extend`, accepted drafts stay read,
                                            and the others are forgotten by setting the length back
    pass 1   [unread tokens, anchor] -> p_1        pass k   [x_{k-1}] -> p_k        all requests in one forward each

It reads no features of the target, so any checkpoint of the same tokenizer will do, and each draft token costs a whole
pass of the small model. c_k is the largest probability of p_k before the warp, known before x_k is drawn; it is
uncalibrated. Source: Leviathan et al., arXiv 2211.17192.
Shapes: R requests, T tokens, N rows, D hidden of the small model, V vocab, Vd rows both models have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.chain import sample_steps
from outrider.drafters.confidence import CertaintyEstimator, ChainHeads, ConfidenceScaling
from outrider.drafters.draft import Draft
from outrider.sampling import at_least_float32
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span

_BLOCK = 16  # slots


class GrowingKV:
    """Keys and values of a model for sessions that come and go, each in consecutive blocks of one pool.

        blocks    | a a a | b b | . . | d d d d |

    New blocks take the first gap that is wide enough, or the pool grows; attention reads a view of the pool
    (target/paged.py) because a session's blocks are consecutive.

    Raises:
        ValueError: the model has layers that keep a state, or its requests cannot be read together.
    """

    def __init__(self, model: Target) -> None:
        if model.new_states() is not None:  # drafts are read one by one, states go back by one forward only
            raise ValueError(f"{model.name} keeps states beside its keys.")
        model.check_batches()
        self._model = model
        self._held: list[range] = []  # ascending
        self.kv = PagedKV(model, 1, _BLOCK)

    def allocate(self, slots: int) -> range:
        """Consecutive blocks for `slots` tokens. May replace `kv`, whose content moves along."""
        count, start = -(-slots // _BLOCK), 0
        for held in self._held:
            if held.start - start >= count:
                break
            start = held.stop
        if start + count > self.kv.num_blocks:
            self._grow(max(start + count, 2 * self.kv.num_blocks))
        blocks = range(start, start + count)
        self._held = sorted([*self._held, blocks], key=lambda held: held.start)
        return blocks

    def free(self, blocks: range) -> None:
        """Give blocks back."""
        self._held.remove(blocks)

    def _grow(self, num_blocks: int) -> None:
        used = _BLOCK * (self._held[-1].stop if self._held else 0)
        grown = PagedKV(self._model, num_blocks, _BLOCK)
        for new, old in zip(chain.from_iterable(grown.pools), chain.from_iterable(self.kv.pools), strict=True):
            new[:, :, :used] = old[:, :, :used]
        self.kv = grown


@dataclass(frozen=True)
class StandaloneConfig:
    """What the cost of a draft depends on."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    gamma: int = 4

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma={self.gamma} of a language model as drafter must be at least 1.")


def check_same_tokens(model: Target, target: Target) -> None:
    """Token i must be the same text in both models. Embedding rows behind the tokenizer's last token do not count.

    Raises:
        ValueError: it is not (the message gives a token).
    """
    if difference := _difference(model, target):
        raise ValueError(
            f"{model.name} cannot draft for {target.name}: their vocabularies differ ({difference}). Choose a smaller "
            "model of the target's family, with the same tokenizer."
        )


def _difference(model: Target, target: Target) -> str | None:
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size == target.vocab_size:
            return None
        return f"{model.vocab_size} and {target.vocab_size} embedding rows, and no two tokenizers to compare"
    ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if not differing:
        return None
    token = min(differing)
    return f"{len(differing)} tokens, as {token!r}: {ours.get(token)} in one, {theirs.get(token)} in the other"


class StandaloneSession:
    """One request as the small model knows it. Ids it has no embedding for read as its last, `vocab_size` - 1."""

    def __init__(self, blocks: range, slots: int, vocab_size: int) -> None:
        self.blocks, self.slots, self.vocab_size = blocks, slots, vocab_size
        self.tokens: list[int] = []  # committed
        self.keys: list[int] = []  # the tokens whose keys are in the blocks, position by position

    def forget(self, part: Sequence[int]) -> None:
        """Forget the keys of drafts that turn out otherwise when `part` is committed."""
        drafts = self.keys[len(self.tokens) :]
        agreed = next((i for i, pair in enumerate(zip(drafts, part, strict=False)) if pair[0] != pair[1]), len(part))
        del self.keys[len(self.tokens) + agreed :]

    def unread(self, part: Sequence[int] = ()) -> list[int]:
        """Tokens that have no keys, committed or in `part`, which is about to be."""
        return [*self.tokens[len(self.keys) :], *part[max(0, len(self.keys) - len(self.tokens)) :]]

    def span(self, tokens: Sequence[int]) -> Span:
        """The forward of `tokens` after all that was read before."""
        return Span([min(token, self.vocab_size - 1) for token in tokens], len(self.keys), list(self.blocks), logits=0)


class StandaloneDrafter(Drafter):
    """A `Drafter` over a whole small model.

    Args:
        model: the small model, on the target's device.
        gamma: most tokens of a draft; `StandaloneConfig`'s by default.

    Raises:
        ValueError: the vocabularies differ, or the model's state is more than keys and values.
    """

    def __init__(self, model: Target, target: Target, gamma: int = StandaloneConfig.gamma) -> None:
        check_same_tokens(model, target)
        self.model = model
        self.config = StandaloneConfig(model.num_layers, model.hidden_size, model.vocab_size, gamma=gamma)
        self.aux_layers: tuple[int, ...] = ()
        self.gamma = gamma
        self.shared = min(model.vocab_size, target.vocab_size)
        ids_Vd = None if self.shared == target.vocab_size else torch.arange(self.shared, device=target.device)
        # The logit of the largest probability as it is; `CertaintyEstimator` can learn more (drafters/confidence.py).
        estimator = CertaintyEstimator((1.0, 0.0), (0.0,) * gamma)
        self.heads: ChainHeads = ChainHeads(
            target.vocab_size, draft_ids_Vd=ids_Vd, scaling=ConfidenceScaling(estimator=estimator)
        )
        try:
            self.memory = GrowingKV(model)
        except ValueError as error:
            raise ValueError(
                f"{model.name} (model_type {model.config.model_type!r}) cannot draft: what it remembers of a text "
                "cannot be cut back to the accepted tokens, many requests side by side. Choose a model whose layers "
                "are all attention, without dynamic rotation, or --drafter ngram."
            ) from error

    def new_session(self, capacity: int) -> StandaloneSession:
        """An empty KV cache for one request of at most `capacity` committed tokens."""
        slots = min(capacity + self.gamma, self.model.max_context)
        return StandaloneSession(self.memory.allocate(slots), slots, self.model.vocab_size)

    def end(self, session: StandaloneSession) -> None:
        """Free the session's KV blocks."""
        self.memory.free(session.blocks)

    def extend(
        self, sessions: Sequence[StandaloneSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None
    ) -> None:
        """Take newly committed tokens. Many are read at once; few wait for the next draft, where they cost nothing."""
        reading = []
        for session, part in zip(sessions, tokens, strict=True):
            session.forget(part)
            unread = session.unread(part)
            if len(unread) > self.gamma + 1 and len(session.tokens) + len(part) <= session.slots:
                reading.append((session, unread))
        if reading:
            self._read(reading)
        for session, part in zip(sessions, tokens, strict=True):
            session.tokens += part

    def _read(self, reading: Sequence[tuple[StandaloneSession, list[int]]]) -> Tensor:
        """One forward, [T, D]. Its tokens count as read when it is over: one that failed can be given again."""
        spans = [session.span(tokens) for session, tokens in reading]
        hidden_TD = self.model.forward_ragged(spans, self.memory.kv).hidden_TD
        for session, tokens in reading:
            session.keys += tokens
        return hidden_TD

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A chain for every call; empty where the text is longer than the small model reads."""
        lengths = [self._length(call) for call in calls]
        able = [r for r, length in enumerate(lengths) if length > 0]
        proposals = [Draft.empty() for _ in calls]
        if not able:
            return proposals
        limited = [replace(calls[r], limit=lengths[r]) for r in able]
        for call in limited:
            session: StandaloneSession = call.session
            del session.keys[len(session.tokens) :]  # of a draft that nothing was committed after

        def step(k: int, previous: list[int]) -> Tensor:
            return self._step(limited, k, previous)

        drawn = sample_steps(
            self._logits, step, max(lengths), calls=limited, heads=self.heads, min_confidence=min_confidence
        )
        for r, proposal in zip(able, drawn, strict=True):
            proposals[r] = proposal
        return proposals

    def _length(self, call: DraftCall) -> int:
        """How many tokens may be drafted: the small model reads all of them but the last."""
        session: StandaloneSession = call.session
        left = self.model.max_context - len(session.tokens)
        return min(self.gamma, left, self.gamma if call.limit is None else call.limit)

    def _step(self, calls: Sequence[DraftCall], k: int, previous: Sequence[int]) -> Tensor:
        """Normed last hidden states [R, D] that p_k comes from; rows of calls that want no k-th token are zero."""
        wanting = [r for r, call in enumerate(calls) if k < (call.limit or 0)]
        reading: list[tuple[StandaloneSession, list[int]]] = []
        for r in wanting:
            session: StandaloneSession = calls[r].session
            reading.append((session, [*session.unread(), previous[r]]))  # behind the first step nothing is unread
        hidden_TD = self._read(reading)
        ends = torch.tensor([len(tokens) for _, tokens in reading], device=hidden_TD.device).cumsum(0)
        hidden_RD = hidden_TD.new_zeros(len(calls), hidden_TD.shape[1])
        hidden_RD[wanting] = hidden_TD[ends - 1]
        return hidden_RD

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Over the tokens both models have, [N, Vd]; in float32 at least."""
        return at_least_float32(self.model.logits(hidden_ND)[:, : self.shared])
