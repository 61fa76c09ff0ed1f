"""What policies and gates know of a step: confidences computed before the tokens they judge, and counts; no tokens.

Row r of a `confidences_RK` holds c_1 .. c_drafted of request r, 0 behind them; NaN where its drafter has none.
Shapes: R requests, K draft positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PastStep:
    """Confidences and draft lengths of an earlier step."""

    confidences_RK: Floats
    drafted_R: Ints


@dataclass(frozen=True)
class StepView:
    """What a policy is shown: one step before its verification.

    `contexts_R` counts committed tokens; `other_tokens` are rows of the same target forward that verify nothing
    (chunks of prefill); `past` holds earlier steps, the latest last; `expected_K` is the mean calibrated confidence per
    position over earlier steps, None before there were any.
    """

    confidences_RK: Floats
    drafted_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    past: tuple[PastStep, ...] = ()
    expected_K: Floats | None = None

    @staticmethod
    def of(
        confidences: Sequence[Sequence[float]], drafted: Sequence[int], contexts: Sequence[int] | None = None
    ) -> StepView:
        """A view from one list of confidences per request, [] where a drafter has none."""
        drafted_R = np.asarray(drafted, dtype=np.int64)
        confidences_RK = np.zeros((len(drafted), int(drafted_R.max(initial=0))))
        for row_K, known, count in zip(confidences_RK, confidences, drafted, strict=True):
            row_K[:count] = np.nan
            known = known[:count]
            row_K[: len(known)] = known
        contexts_R = np.zeros_like(drafted_R) if contexts is None else np.asarray(contexts, dtype=np.int64)
        return StepView(confidences_RK, drafted_R, contexts_R)

    def survival_RK(self) -> Floats:
        """a_{r,k} = c_{r,1} ... c_{r,k}, not increasing in k.

        Raises:
            ValueError: a drafted token has no confidence.
        """
        if np.isnan(self.confidences_RK).any():
            missing_R = np.isnan(self.confidences_RK).any(axis=1)
            raise ValueError(
                f"request {int(missing_R.argmax())} has draft tokens without confidences: verify a fixed length; or "
                "take a block drafter: DSpark has a head for them, and outrider calibrate fits them for the others."
            )
        return np.cumprod(self.confidences_RK, axis=1, dtype=np.float64)


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class GateView:
    """What a gate is shown: what is known before a step drafts.

    `expected_RK`: a request's own mean calibrated confidence per position, NaN where it has never drafted; `idle_R`:
    steps since it last drafted, or since it came; `other_requests` decode in the same step and cannot draft in it;
    `typical_K`: the same mean over all requests there ever were, None before there were any. `contexts_R` and
    `other_tokens` as in `StepView`.
    """

    expected_RK: Floats
    idle_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    other_requests: int = 0
    typical_K: Floats | None = None


# ----------------------------------------------------------------------------
# Expected confidences from earlier steps:   e_k = mean(a_k) / mean(a_{k-1}),   exponentially weighted means
#
# e_k is the mean calibrated confidence at position k, each draft weighted by its survival up to there. That makes
# e_1 ... e_k the mean survival itself; a plain mean of c_k would count drafts that were lost before k, and its products
# would come out too low, since easy positions come together.
#
# One `History` serves an engine and its simulation alike. Shapes: R requests, K = gamma draft positions, S slots.
# ----------------------------------------------------------------------------


class History:
    """Confidences of past steps: the last two, and running means by request and over all requests.

    Args:
        gamma: most draft tokens of a block.
        decay: what one more draft leaves of the weight of those before (over all requests: one more step), in [0, 1).
    """

    def __init__(self, gamma: int, decay: float = 0.9) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be in [0, 1); 0 remembers the last draft only")
        self.gamma, self.decay = gamma, decay
        self._past: deque[PastStep] = deque(maxlen=2)
        self._all_2K: Floats | None = None  # mean a_{k-1} and mean a_k over all requests
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._means_S2K = np.empty((0, 2, gamma))  # the same by request, NaN before its first draft
        self._idle_S = np.empty(0, dtype=np.int64)

    def gate_view(
        self, ids: Sequence[Hashable], contexts: Sequence[int], other_tokens: int = 0, other_requests: int = 0
    ) -> GateView:
        """What a `DraftGate` is shown of these requests before they draft."""
        slots_R = self._slots_of(ids)
        contexts_R = np.asarray(contexts, dtype=np.int64)
        means_RK, idle_R = _ratio(self._means_S2K[slots_R]), self._idle_S[slots_R]
        return GateView(
            means_RK,
            idle_R,
            contexts_R,
            other_tokens=other_tokens,
            other_requests=other_requests,
            typical_K=self._expected_K(),
        )

    def step_view(
        self,
        ids: Sequence[Hashable],
        confidences: Sequence[Sequence[float]],
        drafted: Sequence[int],
        contexts: Sequence[int],
        other_tokens: int = 0,
    ) -> StepView:
        """What a `Policy` is shown: this step's drafts, one list per request, with what came before."""
        assert len(ids) == len(drafted) and max(drafted, default=0) <= self.gamma
        view = StepView.of(confidences, drafted, contexts)
        return replace(view, other_tokens=other_tokens, past=tuple(self._past), expected_K=self._expected_K())

    def record(self, ids: Sequence[Hashable], view: StepView) -> None:
        """Remember a step once it is over; a request that did not draft keeps its means."""
        slots_R = self._slots_of(ids)
        self._past.append(PastStep(view.confidences_RK, view.drafted_R))
        self._idle_S[slots_R] = np.where(view.drafted_R > 0, 0, self._idle_S[slots_R] + 1)
        known_R = (view.drafted_R > 0) & ~np.isnan(view.confidences_RK).any(axis=1)
        if not known_R.any():
            return
        survival_R2K = self._survival(view.confidences_RK[known_R])
        seen_RK = np.arange(self.gamma) < view.drafted_R[known_R, None]
        # A new request starts from the mean over all, so that one rejected draft does not decide about it.
        known_slots_R = slots_R[known_R]
        old_R2K = self._means_S2K[known_slots_R]
        if self._all_2K is not None:
            old_R2K = np.where(np.isnan(old_R2K), self._all_2K, old_R2K)
        self._means_S2K[known_slots_R] = self._mixed(old_R2K, survival_R2K, seen_RK)
        count_K = seen_RK.sum(axis=0)
        mean_2K = (survival_R2K * seen_RK[:, None]).sum(axis=0) / np.maximum(count_K, 1)
        old_2K = np.full_like(mean_2K, np.nan) if self._all_2K is None else self._all_2K
        self._all_2K = self._mixed(old_2K[None], mean_2K[None], (count_K > 0)[None])[0]

    def forget(self, id: Hashable) -> None:
        """Drop the means of a request that has left; its drafts stay in the means over all."""
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._means_S2K[slot], self._idle_S[slot] = np.nan, 0
            self._free.append(slot)

    def _expected_K(self) -> Floats | None:
        return None if self._all_2K is None else _ratio(self._all_2K[None])[0]

    def _survival(self, confidences_RK: Floats) -> Floats:
        """a_{k-1} and a_k, [R, 2, gamma]; 0 behind the block."""
        survival_R2K = np.zeros((len(confidences_RK), 2, self.gamma))
        drafted = confidences_RK.shape[1]
        survival_R2K[:, 1, :drafted] = np.cumprod(confidences_RK, axis=1)
        survival_R2K[:, 0, 0] = 1.0
        survival_R2K[:, 0, 1:] = survival_R2K[:, 1, :-1]
        return survival_R2K

    def _mixed(self, old_R2K: Floats, new_R2K: Floats, seen_RK: Flags) -> Floats:
        """Means with one more draft in them, where it reached; a first draft stands alone, 0 where it did not reach."""
        start_R2K = np.where(np.isnan(old_R2K), np.where(seen_RK[:, None], new_R2K, 0.0), old_R2K)
        return np.where(seen_RK[:, None], self.decay * start_R2K + (1 - self.decay) * new_R2K, start_R2K)

    def _slots_of(self, ids: Sequence[Hashable]) -> Ints:
        for id in ids:
            if id not in self._slots:
                if not self._free:
                    self._grow()
                self._slots[id] = self._free.pop()
        return np.array([self._slots[id] for id in ids], dtype=np.int64)

    def _grow(self) -> None:
        size = len(self._idle_S)
        added = max(size, 16)
        self._means_S2K = np.concatenate((self._means_S2K, np.full((added, 2, self.gamma), np.nan)))
        self._idle_S = np.concatenate((self._idle_S, np.zeros(added, dtype=np.int64)))
        self._free.extend(range(size + added - 1, size - 1, -1))


def _ratio(means_R2K: Floats) -> Floats:
    """mean(a_k) / mean(a_{k-1}), 0 where nothing got so far; NaN where nothing is known."""
    before_RK, after_RK = means_R2K[:, 0], means_R2K[:, 1]
    ratio_RK: Floats = np.divide(after_RK, before_RK, out=np.zeros_like(after_RK), where=before_RK != 0)
    return ratio_RK
