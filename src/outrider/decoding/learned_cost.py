"""The cost of steps as an engine learns it: a profile that is corrected by what each step takes.

A profile is one minute of a machine. Other work, sampled rows or another mixture of lengths make it wrong, and a policy
that believes a wrong shape may never draft again. So every step without prompts is a measurement of two parts, the
draft and the rest:

    log(seconds taken / seconds of the profile)  =  pace + error_k + noise

    pace       how fast the machine is now: a random walk, which no decision depends on
    error_k    how wrong the profile is about parts of kind k: 0 at first; what was learned counts less by `_KEPT` a
               step
    kind       of the rest: log2 of the R requests, log2 of the rows a request has in the forward
               of a draft: log2 of the requests that draft, log2 of its tokens

Errors of near kinds are correlated (exp(-distance / `_REACH`)), so what one number of rows takes says something about
others. All of them and the pace are one normal vector, estimated by a Kalman filter. A step that takes much longer than
expected counts as `_STRAY` standard deviations: other work only adds.

A policy that never takes one kind of step learns nothing about it. So `trial` asks for both: in turns until there are
`_TRIALS` of each (drafts of the whole length, a half and a quarter), and later for the sort that the policy does not
choose after 16, 32, .. 512 steps without it. Only counts and times of earlier steps are read, so the output stays exact
(decoding/policies.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from outrider.decoding.cost import Floats, Ints, StepCost

# Nodes of the kinds, for each power of two of requests: rows of a request 1, 1.4, 2, .. 16; tokens of a draft
# 1, 2, .. 16.
_ROWS, _DEPTHS = 9, 5
_ROWS_PER_OCTAVE = 2
_ERROR, _REACH = 1.2, 12.0  # standard deviation of an error before it is measured; nodes
_PACE, _WANDER = 3.0, 0.3  # standard deviations of the pace: at first, and what each step adds
_NOISE, _STRAY = 0.05, 3.0  # of one measurement
_KEPT = 0.99998  # of what is known of an error, by each step
_FADED_EVERY = 16  # steps

_TRIALS = 3  # steps of either sort
_FIRST_WAIT, _LONGEST_WAIT = 16, 512  # steps until the sort that is not chosen is tried again


class _Errors:
    """Pace and errors: their means [N] and covariance [N, N]. Number 0 is the pace; the others are `_BLOCK` nodes of
    each number of requests (by log2) that has occurred, first those of the rows, then those of the drafts.
    """

    def __init__(self) -> None:
        self.mean, self.covariance = np.zeros(1), np.full((1, 1), _PACE**2)
        self._sizes: list[int] = []
        self._steps = 0

    def first(self, size: int) -> int:
        """The place of the first node of this size, which is added if it is new: what is known of others counts."""
        if size not in self._sizes:
            old, new = np.array(self._sizes, dtype=np.int64), np.array([size])
            share = np.linalg.solve(_correlation(old, old), _correlation(old, new)).T  # of the old errors, [1, sizes]
            carried = np.concatenate((np.zeros((_BLOCK, 1)), np.kron(share, np.eye(_BLOCK))), axis=1)
            beside = carried @ self.covariance
            rest = 1.0 - float((share @ _correlation(old, new))[0, 0])
            own = beside @ carried.T + rest * _PRIOR
            self.mean = np.append(self.mean, carried @ self.mean)
            self.covariance = np.block([[self.covariance, beside.T], [beside, own]])
            self._sizes.append(size)
        return 1 + _BLOCK * self._sizes.index(size)

    def step(self) -> None:
        """Time passes: the pace wanders, and errors become as uncertain as before they were measured."""
        self.covariance[0, 0] += _WANDER**2
        self._steps += 1
        if self._steps % _FADED_EVERY == 0:
            sizes, kept = np.array(self._sizes), _KEPT**_FADED_EVERY
            self.covariance[1:] *= kept
            self.covariance[:, 1:] *= kept
            self.covariance[1:, 1:] += (1 - kept**2) * np.kron(_correlation(sizes, sizes), _PRIOR)

    def observe(self, kinds: Ints, weights: Floats, log_ratio: float) -> None:
        """Update by a measurement of the pace and a weighted mean of errors."""
        places, factors = np.append(kinds, 0), np.append(weights, 1.0)
        toward_N = self.covariance[:, places] @ factors
        variance = float(toward_N[places] @ factors) + _NOISE**2
        surprise = log_ratio - float(self.mean[places] @ factors)
        most = _STRAY * math.sqrt(variance)
        self.mean += toward_N * (min(max(surprise, -most), most) / variance)
        self.covariance -= np.outer(toward_N, toward_N / variance)


def _correlation(here: Ints, there: Ints) -> Floats:
    correlation: Floats = np.exp(-np.abs(here[:, None] - there) / _REACH)
    return correlation


_BLOCK = _ROWS + _DEPTHS
_PRIOR = np.zeros((_BLOCK, _BLOCK))  # covariance of the errors of one size before anything is measured
for _nodes in (np.arange(_ROWS), np.arange(_ROWS, _BLOCK)):
    _PRIOR[np.ix_(_nodes, _nodes)] = _ERROR**2 * _correlation(_nodes, _nodes)


def _between(value_N: Floats, count: int) -> tuple[Ints, Ints, Floats]:
    """The nodes [N] before and after each value, and how far along it is."""
    inside_N = np.clip(value_N, 0, count - 1)
    before_N = np.minimum(inside_N.astype(np.int64), count - 2)
    return before_N, before_N + 1, inside_N - before_N


@dataclass(frozen=True)
class Trial:
    """A step to learn from: without drafts, or with drafts whose whole length is halved so many times."""

    drafts: bool
    halvings: int = 0


class _Trials:
    """Which sort of step some number of requests has to try next. Sorts: 0 without drafts, 1 with some."""

    def __init__(self) -> None:
        self._count, self._since = [0, 0], [0, 0]  # steps of each sort, and since the last of it
        self._wait = [_FIRST_WAIT, _FIRST_WAIT]

    def next(self) -> Trial | None:
        plain, drafts = self._count
        if min(plain, drafts) < _TRIALS:
            drafts_next = drafts <= plain
        elif self._since[0] >= self._wait[0] or self._since[1] >= self._wait[1]:
            drafts_next = self._since[1] >= self._wait[1]
        else:
            return None
        return Trial(drafts_next, drafts % _TRIALS if drafts_next else 0)

    def observe(self, sort: int) -> None:
        other = 1 - sort
        if self._since[sort] >= self._wait[sort]:  # it was tried again
            self._wait[sort] = min(2 * self._wait[sort], _LONGEST_WAIT)
        self._count[sort] += 1
        self._since[sort], self._since[other] = 0, self._since[other] + 1
        if self._since[other] == _FIRST_WAIT:  # so many in a row: this is the sort that pays now
            self._wait[sort] = _FIRST_WAIT


@dataclass(frozen=True)
class LearnedCost:
    """A cost that is corrected by the steps of an engine; several engines and threads may share it."""

    cost: StepCost
    _errors: _Errors = field(default_factory=_Errors, init=False, repr=False, compare=False)
    _trials: defaultdict[int, _Trials] = field(  # by the size of the step
        default_factory=lambda: defaultdict(_Trials), init=False, repr=False, compare=False
    )
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        before_N, after_N, along_N = self._rows(tokens_N, requests)
        mean = self._errors.mean
        error_N = (1 - along_N) * mean[before_N] + along_N * mean[after_N]
        seconds_N: Floats = self.cost.seconds(tokens_N, requests, context) * np.exp(mean[0] + error_N)
        return seconds_N

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        seconds = self.cost.draft_seconds(drafting, depth)
        if not seconds:
            return 0.0
        before, after, along = self._depth(drafting, depth)
        mean = self._errors.mean
        return seconds * math.exp(mean[0] + (1 - along) * mean[before] + along * mean[after])

    def observe(
        self,
        seconds: float,
        requests: int,
        context: float,
        *,
        verified: int,
        drafting: int,
        depth: int,
        draft_seconds: float = 0.0,
    ) -> None:
        """Update from a step that read no prompt.

        Args:
            seconds: of the whole step, `draft_seconds` of them for the drafts.
            verified: drafts verified in all.
            drafting: requests that a draft was made for, of `depth` tokens at most.
        """
        with self._lock:
            self._trials[_size(requests)].observe(int(verified > 0 or drafting > 0))
            self._errors.step()
            drafts = self.cost.draft_seconds(drafting, depth) if drafting else 0.0
            if drafts > 0 and draft_seconds > 0:
                before, after, along = self._depth(drafting, depth)
                kinds, weights = np.array([before, after]), np.array([1 - along, along])
                self._errors.observe(kinds, weights, math.log(draft_seconds / drafts))
            rest = seconds - (draft_seconds if drafting else 0.0)
            if rest > 0:
                rows_1 = np.array([requests + verified])
                predicted = self.cost.seconds(rows_1, requests, context)[0]
                before_1, after_1, along_1 = self._rows(rows_1, requests)
                kinds, weights = np.concatenate((before_1, after_1)), np.concatenate((1 - along_1, along_1))
                self._errors.observe(kinds, weights, math.log(rest / predicted))

    def trial(self, requests: int) -> Trial | None:
        """The step that has to come next, because too little is known of its sort; None: the policy decides.

        The answer stays the same until the next `observe`.
        """
        return self._trials[_size(requests)].next()

    def _rows(self, tokens_N: Ints, requests: int) -> tuple[Ints, Ints, Floats]:
        """The two nodes around so many rows, and how far along they are."""
        octaves_N = np.log2(np.maximum(tokens_N / requests, 1.0))
        before_N, after_N, along_N = _between(_ROWS_PER_OCTAVE * octaves_N, _ROWS)
        first = self._errors.first(_size(requests))
        return first + before_N, first + after_N, along_N

    def _depth(self, drafting: int, depth: int | None) -> tuple[int, int, float]:
        """The two nodes around drafts of so many tokens (None: whole ones), and how far along they are."""
        octaves = np.array([_DEPTHS if depth is None else math.log2(max(depth, 1))], dtype=np.float64)
        before_1, after_1, along_1 = _between(octaves, _DEPTHS)
        first = self._errors.first(_size(drafting)) + _ROWS
        return first + int(before_1[0]), first + int(after_1[0]), float(along_1[0])


def _size(requests: int) -> int:
    return round(math.log2(max(requests, 1)))


def learned(cost: StepCost | None) -> LearnedCost | None:
    """The cost as one that takes observations; None: it takes none."""
    return cost if isinstance(cost, LearnedCost) else None
