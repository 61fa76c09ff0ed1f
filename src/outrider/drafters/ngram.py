"""Prompt lookup: the longest suffix of the text that occurred before  ->  the tokens that followed it then

    text      x = f ( a ) ; y = f ( b ) ; z = f ( a )       "= f (" occurred before, latest with "b ) ; z" after it
                                  `-------------- draft: what came next, up to gamma tokens

N-gram or prompt lookup (Saxena, github.com/apoorvumang/prompt-lookup-decoding; LLMA, Yang et al., arXiv 2304.04487):
no weights, no training, and strong if the response repeats its prompt or itself. The *latest* occurrence is
copied: one table entry per n-gram holds it. A copy that reaches the end of the text reads its own tokens, so a loop is
drafted whole. A round costs (new tokens) x (suffix lengths) writes to the table and at most (suffix lengths) look-ups,
however long the text is.

Nothing here is random: p_k is one-hot at any temperature, so x_k is accepted with p_t(x_k). Its confidence follows from
the number of tokens before it that agree with those before the place it is copied from, if the k - 1 copied ones are
right:

    m_k = matched + k - 1      c_k = sigmoid(a + b ln m_k)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.base import DraftCall, Drafter, Sources, WrappedDrafter
from outrider.drafters.draft import Draft

_MOST_DRAFTS = 4096  # of one round
MOST_MATCHED = 16  # tokens that agree before a copied one; of a match no more are counted
_INTERCEPT, _SLOPE = -1.11, 1.47  # a and b: fitted to 34 greedy answers of SmolLM2 to gsm8k, humaneval and mt-bench
_SAMPLED_INTERCEPT, _SAMPLED_SLOPE = -1.35, 1.18  # the same of 84 answers at temperature 1


@dataclass(frozen=True)
class NgramConfig:
    """Most tokens of a draft, and the lengths of the suffixes that are searched for, the longest first.

    Measured on SmolLM2's own greedy text: suffixes of one token raise tau by a tenth, those over four by nothing, and
    copying the most frequent continuation in place of the latest changes it by less than one per cent either way.
    """

    gamma: int = 10
    longest: int = 4
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.gamma <= _MOST_DRAFTS:
            raise ValueError(f"gamma={self.gamma} of an n-gram drafter must be from 1 to {_MOST_DRAFTS}.")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"suffixes of {self.shortest} to {self.longest} tokens: use 1 <= shortest <= longest.")


class NgramSession:
    """One request's committed tokens, and the place after the latest occurrence of each of their n-grams."""

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}  # n-gram -> place in `tokens` after its latest occurrence

    def append(self, token: int) -> None:
        """Take one committed token."""
        self.tokens.append(token)
        self.index_end()

    def index_end(self) -> None:
        """Note that what comes next follows the n-grams that end the tokens."""
        end = len(self.tokens)
        for n in range(self.config.shortest, min(self.config.longest, end) + 1):
            self.places[tuple(self.tokens[end - n : end])] = end

    def place(self, anchor: int, shortest: int = 1) -> int | None:
        """The place after the earlier occurrence of the longest known suffix of tokens and anchor; None: none is known.

        Args:
            shortest: tokens of a suffix that counts, beside the config's own.
        """
        return self.find((*self.tokens[max(0, len(self.tokens) + 1 - self.config.longest) :], anchor), shortest)

    def find(self, ending: tuple[int, ...], shortest: int = 1) -> int | None:
        """The place after the latest occurrence of the longest known suffix of a text with this ending; see `place`."""
        for n in range(min(len(ending), self.config.longest), max(self.config.shortest, shortest) - 1, -1):
            place = self.places.get(ending[-n:])
            if place is not None:
                return place
        return None

    def matched(self, place: int, anchor: int, most: int) -> int:
        """How many tokens before `place` are those that end in the anchor, `most` at most."""
        return _agreeing(self.tokens, place, [*self.tokens[max(0, len(self.tokens) + 1 - most) :], anchor])

    def copy(self, place: int, anchor: int, count: int) -> list[int]:
        """`count` tokens from `place` on; after the anchor they go on with their own beginning."""
        known = len(self.tokens)
        copied: list[int] = []
        for at in range(place, place + count):
            copied.append(self.tokens[at] if at < known else anchor if at == known else copied[at - known - 1])
        return copied


def _agreeing(tokens: Sequence[int], place: int, ending: Sequence[int]) -> int:
    """How many tokens before `place` are those that `ending` ends with."""
    count = 0
    while count < min(len(ending), place) and tokens[place - 1 - count] == ending[-1 - count]:
        count += 1
    return count


_LIBRARY = NgramConfig(longest=4, shortest=3)  # fewer tokens than three say little about another text
_LEAST_RESPONSES = 2 * (_LIBRARY.shortest + 1)  # tokens: in each half as many as must agree, and one to copy
_END = -1  # after every text of a library: no token


class Library:
    """Texts beside a request's own that prompt lookup searches: documents, and the latest responses to other requests.

    Args:
        documents: token ids of each.
        responses: most tokens of responses that are kept, the latest; each response ends with a mark, which counts as
            one. 0: none. With responses, the speed of one request's answer tells whether another one had the same text.

    Raises:
        ValueError: so few tokens of responses that none of them could ever be copied.
    """

    def __init__(self, documents: Sequence[Sequence[int]] = (), responses: int = 0) -> None:
        if responses != 0 and responses < _LEAST_RESPONSES:
            raise ValueError(
                f"{responses} tokens of earlier responses hold nothing to copy: keep 0, or at least {_LEAST_RESPONSES}."
            )
        self.responses = responses
        self._documents, self._latest, self._before = (NgramSession(_LIBRARY) for _ in range(3))
        for document in documents:
            _append(self._documents, [*document, _END])

    def add(self, response: Sequence[int]) -> None:
        """Keep a response, or the end of one that is longer than all that may be kept.

        Two halves: a response that does not fit into the later one takes the place of the earlier one. One that is
        longer than a half goes on in the next, and no copy crosses from one to the other.
        """
        half = self.responses // 2
        if not (half and response):
            return
        text = [*response, _END][-2 * half :]
        if len(self._latest.tokens) + len(text) > half:
            self._turn_over()
        _append(self._latest, text[:half])
        if text[half:]:
            self._turn_over()
            _append(self._latest, text[half:])

    def _turn_over(self) -> None:
        self._before, self._latest = self._latest, NgramSession(_LIBRARY)

    def find(self, ending: tuple[int, ...], count: int, *, responses: bool = True) -> tuple[int, list[int]]:
        """How many tokens of a text's ending agree at the best place, and up to `count` tokens after it.

        (0, []) if there is no place; the latest of places that agree equally far. Without `responses` documents alone
        are searched.
        """
        best: tuple[int, list[int]] = 0, []
        for session in (*((self._latest, self._before) if responses else ()), self._documents):
            place = session.find(ending)
            if place is not None and (matched := _agreeing(session.tokens, place, ending)) > best[0]:
                tokens = session.tokens[place : place + count]
                best = matched, tokens[: tokens.index(_END)] if _END in tokens else tokens
        return best


def _append(session: NgramSession, text: Sequence[int]) -> None:
    for token in text:
        if token != _END:  # a place with nothing after it would hide an earlier one
            session.index_end()
        session.tokens.append(token)


class NgramDrafter(Drafter):
    """A `Drafter` by prompt lookup alone; it reads no features of the target."""

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self.aux_layers: tuple[int, ...] = ()
        self.gamma = self.config.gamma

    def new_session(self, capacity: int) -> NgramSession:
        """An empty index; `capacity` is not needed."""
        return NgramSession(self.config)

    def extend(self, sessions: Sequence[NgramSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Index newly committed tokens."""
        for session, part in zip(sessions, tokens, strict=True):
            for token in part:
                session.append(token)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """The tokens that followed before; empty if no suffix is known."""
        return [self._propose(call, min_confidence) for call in calls]

    def _propose(self, call: DraftCall, min_confidence: float) -> Draft:
        session: NgramSession = call.session
        place = session.place(call.anchor)
        if place is None:
            return Draft.empty()
        count = self.gamma if call.limit is None else min(self.gamma, call.limit)
        matched = session.matched(place, call.anchor, MOST_MATCHED)
        confidences_K = copy_confidences(matched + np.arange(count))
        count = int(np.logical_and.accumulate(confidences_K >= min_confidence).sum())
        tokens = session.copy(place, call.anchor, count)
        return Draft.chain(tokens, confidences=confidences_K[:count].tolist())


def copy_confidences(matched: NDArray[np.int64], sampled: NDArray[np.bool_] | bool = False) -> NDArray[np.float64]:
    """P(a copied token is accepted | so many tokens before it agree), any shape; lower in `sampled` text."""
    level, slope = (np.where(sampled, *both) for both in ((_SAMPLED_INTERCEPT, _INTERCEPT), (_SAMPLED_SLOPE, _SLOPE)))
    confidences: NDArray[np.float64] = 1 / (1 + np.exp(-(level + slope * np.log(matched))))
    return confidences


# ----------------------------------------------------------------------------
# A trained drafter with prompt lookup beside it; decoding/drafting.py chooses between the two.
#
#     trained drafter   p_d of its own, seconds for every draft
#     prompt lookup     what followed the longest known suffix, in the text so far or in others: one-hot, no seconds,
#                       and longer if the text repeats itself
#
# Which of them drafts is decided per request and round from committed tokens and the outcomes of earlier drafts, before
# either has a token: a choice that reads the drafted tokens would favour some of them.
# ----------------------------------------------------------------------------


LOOKUP = NgramConfig(gamma=16)


class HybridDrafter(WrappedDrafter):
    """A drafter made of two: `trained`, which proposes, and prompt lookup, whose drafts are chains of their own.

    Args:
        library: other texts that prompt lookup may search; none by default.
    """

    def __init__(self, trained: Drafter, lookup: NgramConfig = LOOKUP, library: Library | None = None) -> None:
        super().__init__(trained)
        self.lookup, self.library = lookup, library
        self.gamma = max(trained.gamma, lookup.gamma)

    @property
    def slots(self) -> int:
        return max(self.drafter.slots, self.lookup.gamma)

    @property
    def sources(self) -> Sources:
        return Sources(self.drafter, self.lookup, self.library)

    def limited(self, drafts: int) -> HybridDrafter:
        lookup = replace(self.lookup, gamma=min(drafts, self.lookup.gamma))
        return HybridDrafter(self.drafter.limited(drafts), lookup, self.library)
