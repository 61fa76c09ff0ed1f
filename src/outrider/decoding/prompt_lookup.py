"""Prompt lookup: drafts that continue an earlier occurrence of a request's last tokens, and their acceptance estimates.

The tokens come from the request's own text, or from other texts (a `Library`) if more tokens agree there. They are a
function of the committed text. The first estimate of token k is that of drafters/ngram.py; `LogisticEstimates` of group
m_k, the number of tokens that agree before it, correct it.

Every lookup is compared with the tokens that were committed in its place, drafted or not (in a step that pauses: if any
draft was verified). A token drawn from p_t equals the looked-up x with probability p_t(x), which is how often x is
accepted. So these estimates cost no drafts. The choice between lookup and drafter is made before either has drafted a
token, and a lookup is as certain as a chosen token (one-hot), so verification stays exact.

Shapes: R requests, K positions, N outcomes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.decoding.acceptance import LogisticEstimates
from outrider.decoding.cost import Flags, Floats, Ints
from outrider.drafters.draft import Draft
from outrider.drafters.ngram import MOST_MATCHED, Library, NgramConfig, NgramSession, copy_confidences
from outrider.sampling import SamplingParams

_LEAST_SURVIVAL = 0.1  # of a token: one that is less likely to be reached is not worth its row of the forward


@dataclass(frozen=True)
class Lookup:
    """The tokens after an earlier occurrence of a request's last `matched` tokens.

    Attributes:
        start: committed tokens when it was made.
        confidences: acceptance estimate of each token.
        from_library: they are from another text.
        sampled: they are compared with text drawn at a temperature above 0.
    """

    start: int
    matched: int
    tokens: list[int]
    confidences: list[float]
    from_library: bool = False
    sampled: bool = False

    def draft(self, limit: int, min_confidence: float) -> Draft:
        """A draft of at most `limit` tokens; it ends before tokens that promise too little."""
        count, survival = 0, 1.0
        for confidence in self.confidences[:limit]:
            survival *= confidence
            if survival < _LEAST_SURVIVAL or confidence < min_confidence:
                break
            count += 1
        return Draft.chain(self.tokens[:count], confidences=self.confidences[:count])

    def outcomes(self, text: Sequence[int]) -> list[bool]:
        """Which of its tokens agree with the committed ones, up to the first that does not."""
        outcomes: list[bool] = []
        for token, true in zip(self.tokens, text[self.start :], strict=False):
            outcomes.append(token == true)
            if token != true:
                break
        return outcomes


class PromptLookup:
    """The lookups of all requests, and their acceptance estimates.

    Args:
        config: how texts are searched, and most tokens of a lookup.
        library: other texts; responses are added to it. None: there are none.
    """

    def __init__(self, config: NgramConfig, library: Library | None = None) -> None:
        self.config, self.library = config, library
        self.estimates = LogisticEstimates(1, 4 * MOST_MATCHED)
        self._indexes: dict[str, NgramSession] = {}

    def find(
        self,
        texts: Mapping[str, Sequence[int]],
        open_to_responses: Collection[str] = (),
        sampled: Collection[str] = (),
        shortest: int = 1,
    ) -> dict[str, Lookup]:
        """The lookup of each request by id, given its committed tokens; requests without a known suffix have none.

        Args:
            open_to_responses: requests that may read the library's responses too, see `may_read_responses`.
            sampled: requests whose tokens are drawn at a temperature above 0.
            shortest: tokens of a suffix of the own text that counts; fewer are cheap to pass over.
        """
        gamma, places = self.config.gamma, dict[str, tuple[int, list[int], bool]]()
        for id, text in texts.items():
            index = self._indexes.setdefault(id, NgramSession(self.config))
            for token in text[len(index.tokens) : -1]:
                index.append(token)
            place = index.place(text[-1], shortest)
            if place is not None:
                places[id] = index.matched(place, text[-1], MOST_MATCHED), index.copy(place, text[-1], gamma), False
            if self.library is not None:
                ending = tuple(text[-MOST_MATCHED:])
                matched, tokens = self.library.find(ending, gamma, responses=id in open_to_responses)
                if tokens and (id not in places or matched > places[id][0]):
                    places[id] = matched, tokens, True
        if not places:
            return {}
        matched_RK = np.array([matched for matched, _, _ in places.values()])[:, None] + np.arange(gamma)
        from_library_N = np.repeat([from_library for _, _, from_library in places.values()], gamma)
        sampled_N = np.repeat([id in sampled for id in places], gamma)
        groups_N, prior_N1 = _groups(matched_RK.ravel(), from_library_N, sampled_N)
        ids = [id for id in places for _ in range(gamma)]
        expected_RK = self.estimates.expected(ids, groups_N, prior_N1).reshape(matched_RK.shape)
        return {
            id: Lookup(
                len(texts[id]),
                matched,
                tokens,
                confidences=expected_K[: len(tokens)].tolist(),
                from_library=from_library,
                sampled=id in sampled,
            )
            for (id, (matched, tokens, from_library)), expected_K in zip(places.items(), expected_RK, strict=True)
        }

    def expected_RK(self, lookups: Mapping[str, Lookup], ids: Sequence[str]) -> Floats | None:
        """Confidences of the lookups of these requests, 0 without one; None: nobody has one."""
        if not lookups:
            return None
        expected_RK = np.zeros((len(ids), self.config.gamma))
        for expected_K, id in zip(expected_RK, ids, strict=True):
            if id in lookups:
                expected_K[: len(lookups[id].tokens)] = lookups[id].confidences
        return expected_RK

    def observe(self, lookups: Mapping[str, Lookup], texts: Mapping[str, Sequence[int]]) -> None:
        """Update from the tokens that were committed (`texts`, by id) in the place of lookups, drafted or not."""
        if not lookups:
            return
        ids: list[str] = []
        matched: list[int] = []
        from_library: list[bool] = []
        sampled: list[bool] = []
        right: list[bool] = []
        for id, text in texts.items():
            if (lookup := lookups.get(id)) is not None:
                outcomes = lookup.outcomes(text)
                ids += [id] * len(outcomes)
                matched += range(lookup.matched, lookup.matched + len(outcomes))
                from_library += [lookup.from_library] * len(outcomes)
                sampled += [lookup.sampled] * len(outcomes)
                right += outcomes
        flags = (np.array(values, dtype=np.bool_) for values in (from_library, sampled))
        groups_N, prior_N1 = _groups(np.array(matched, dtype=np.int64), *flags)
        right_N = np.array(right, dtype=np.int64)
        self.estimates.observe(ids, np.ones_like(right_N), right_N, groups_R=groups_N, confidences_RK=prior_N1)

    def forget(self, id: str, response: Sequence[int] = ()) -> None:
        """Drop the index and estimates of a request that has left; its response goes to the library."""
        self.estimates.forget(id)
        self._indexes.pop(id, None)
        if self.library is not None:
            self.library.add(response)


def may_read_responses(params: SamplingParams) -> bool:
    """Whether the random numbers that judge a request's drafts are independent of earlier responses.

    A client's seed may be that of an earlier request too, whose tokens were drawn with the numbers that would judge
    lookups in them: too many would be accepted. A seed of our own is fresh, and a fixed text follows from no draft.
    """
    return params.fixed_text or params.seed is None


def _groups(matched_N: Ints, from_library_N: Flags, sampled_N: Flags) -> tuple[Ints, Floats]:
    """Groups [N] and prior confidences [N, 1] of looked-up tokens by how many agree before them, which text they are
    from, and whether they are compared with sampled text.
    """
    groups_N: Ints = np.minimum(matched_N, MOST_MATCHED) - 1 + MOST_MATCHED * (from_library_N + 2 * sampled_N)
    return groups_N, copy_confidences(matched_N, sampled_N)[:, None]
