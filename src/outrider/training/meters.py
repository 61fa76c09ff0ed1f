"""Where the time of training goes, what it buys, and the memory it takes, over one log window.

    step = features + forward_backward + optimizer + the rest;      evaluation (checks and saving) is kept apart
    supervised tokens/s, anchors/s = counted / (window - evaluation)

Counts are per process. On CUDA a phase ends when the GPU is done with it.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from outrider.decoding.lane import Clock

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**30


class Meters:
    """Clocks to be held open (`with meters.features:`) around the phases of a step, and counters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.features, self.forward_backward = Clock(device), Clock(device)
        self.optimizer, self.evaluation = Clock(device), Clock(device)
        self._restart()

    def _restart(self) -> None:
        self._started = time.perf_counter()
        self._steps = self._supervised = self._anchors = 0

    def count(self, supervised: int, anchors: int) -> None:
        """One more micro-batch, of so many supervised positions and anchors."""
        self._supervised += supervised
        self._anchors += anchors

    def count_step(self) -> None:
        """One more optimizer step."""
        self._steps += 1

    def window(self) -> dict[str, float]:
        """Figures since the last call (seconds are per step, evaluation's are of the whole window); starts again."""
        seconds = time.perf_counter() - self._started
        evaluation = self.evaluation.take()
        steps, training = max(1, self._steps), max(seconds - evaluation, 1e-9)
        figures = {
            "supervised_tokens_per_second": self._supervised / training,
            "anchors_per_second": self._anchors / training,
            "step_seconds": training / steps,
            "features_seconds": self.features.take() / steps,
            "forward_backward_seconds": self.forward_backward.take() / steps,
            "optimizer_seconds": self.optimizer.take() / steps,
            "evaluation_seconds": evaluation,
            "peak_memory_gib": peak_memory_gib(self.device),
        }
        self._restart()
        return figures
