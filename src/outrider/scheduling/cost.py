"""seconds of one step  =  drafting for D requests  +  one target forward of B tokens  +  the rest;   SPS = 1 / seconds

A policy weighs tokens against seconds, so what is spent whatever it decides (drafting, bookkeeping) is part of the
step too: tau / (fixed + forward(B)) peaks at a larger B than tau / forward(B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.scheduling.view import Floats, Ints, StepView


class StepCost(Protocol):
    """What steps cost on some machine."""

    def seconds(self, tokens_N: Ints, requests: int, drafting: int, context: float, depth: int | None = None) -> Floats:
        """Seconds [N] of steps with forwards of `tokens_N` tokens.

        Args:
            requests: sequences in the step.
            drafting: how many of them a block was drafted for.
            context: their mean number of committed tokens.
            depth: tokens of the longest draft, where drafts were kept short; None: a whole block.
        """
        ...


def step_seconds(cost: StepCost, view: StepView, admitted_N: Ints) -> Floats:
    """Seconds [N] of the step of `view` if it verifies so many draft tokens in all; it has at least one request."""
    requests = len(view.drafted_R)
    drafting = int(np.count_nonzero(view.drafted_R))
    tokens_N, context = requests + view.other_tokens + admitted_N, float(view.contexts_R.mean())
    return cost.seconds(tokens_N, requests, drafting, context, view.confidences_RK.shape[1])


class SpsTable:
    """Target forward passes per second at 1, 2, 3, ... tokens, whatever the requests; beyond its end the last rate."""

    def __init__(self, sps: Sequence[float]) -> None:
        rates = np.asarray(sps, dtype=np.float64)
        if not rates.size or not (rates > 0).all():
            raise ValueError(f"SPS values {list(sps)} must be positive numbers, one per token count from 1.")
        self._seconds = 1.0 / rates

    def seconds(self, tokens_N: Ints, requests: int, drafting: int, context: float, depth: int | None = None) -> Floats:
        found_N: Floats = self._seconds[np.minimum(tokens_N, len(self._seconds)) - 1]
        return found_N
