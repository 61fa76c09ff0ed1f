"""per threshold t:  l = longest prefix with every c_k >= t,   tokens per step = mean(min(accepted, l) + 1),
                     acceptance rate = sum min(accepted, l) / sum l

Figure 5 of DSpark (arXiv 2607.05147), a curve per task, from collected rounds. Where blocks were drafted after every
token (temperature 0, evaluation/collect.py), decoding is replayed exactly: the next block follows what was committed.
Real rounds at a temperature cannot be replayed; each is cut where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from outrider.evaluation.rounds_file import Conversations
from outrider.scheduling.calibration import Rounds, Scaling, logit, sigmoid
from outrider.scheduling.view import Floats, Ints

THRESHOLDS = [round(0.05 * i, 2) for i in range(20)]


class SweepPoint(BaseModel):
    """One task at one threshold; `acceptance_rate` None: nothing was verified."""

    task: str
    threshold: float
    steps: int
    tokens_per_step: float
    verified_per_step: float
    acceptance_rate: float | None


def sweep(
    tasks: Mapping[str, Conversations], scaling: Scaling, replay: bool, thresholds: Sequence[float] = tuple(THRESHOLDS)
) -> list[SweepPoint]:
    """Every task at every threshold, with calibrated confidences.

    Args:
        replay: the rounds of a turn are blocks after every token of one text.
    """
    points = []
    for task, conversations in tasks.items():
        turns = [rounds for turns in conversations for rounds in turns if len(rounds.accepted_N)]
        if not turns:  # its only conversation was fitted on
            continue
        calibrated = [_calibrated(rounds, scaling) for rounds in turns]
        for threshold in thresholds:
            played = [
                pair
                for rounds, confidences_NK in zip(turns, calibrated, strict=True)
                for pair in _steps(rounds.accepted_N, _lengths(confidences_NK, rounds.admitted_N, threshold), replay)
            ]
            accepted, verified = (int(total) for total in np.sum(played, axis=0))
            points.append(
                SweepPoint(
                    task=Path(task).stem,
                    threshold=threshold,
                    steps=len(played),
                    tokens_per_step=accepted / len(played) + 1,
                    verified_per_step=verified / len(played),
                    acceptance_rate=accepted / verified if verified else None,
                )
            )
    return points


def _calibrated(rounds: Rounds, scaling: Scaling) -> Floats:
    return sigmoid(logit(rounds.confidences_NK) / np.array(scaling.temperatures) + np.array(scaling.offsets))


def _lengths(confidences_NK: Floats, admitted_N: Ints, threshold: float) -> Ints:
    passing_NK = confidences_NK >= threshold  # NaN behind `admitted` does not pass
    lengths_N: Ints = np.minimum(np.logical_and.accumulate(passing_NK, axis=1).sum(axis=1), admitted_N)
    return lengths_N


def _steps(accepted_N: Ints, lengths_N: Ints, replay: bool) -> Iterator[tuple[int, int]]:
    """(accepted, verified) of the steps that are played."""
    place = 0
    while place < len(accepted_N):
        left = len(accepted_N) - place - 1 if replay else int(accepted_N[place])  # the text may end before the block
        accepted = int(min(accepted_N[place], lengths_N[place], left))
        yield accepted, int(lengths_N[place])
        place += accepted + 1 if replay else 1
