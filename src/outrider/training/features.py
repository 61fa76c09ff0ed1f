"""Online target features: what a drafter learns from, computed when needed and kept in a bounded memory.

One prefill per sample gives, for tokens t_0 .. t_{n-2} with R generated ones among t_1 .. t_{n-1}:
    taps    [n - 1, L, D]   divided by tap_scale, float16
    hidden  [R, D]          normed last hidden states at the sample's anchors, float16; row p predicts token p + 1
    lse, argmax [R]         of the full-vocabulary logits of the same rows
Nothing is written to disk. When the memory is full the least recently used sample goes and is prefilled again on its
next visit: the same numbers, so results do not depend on the budget.

Shapes: S context slots, R generated tokens, L taps, D target hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.target import Target

_HEAD_CHUNK = 64
_LARGEST = 65504.0  # float16's largest number


@dataclass(frozen=True)
class Features:
    """The target's view of one sample; see the module docstring for rows."""

    taps_SLD: Tensor
    hidden_RD: Tensor
    lse_R: Tensor
    argmax_R: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.taps_SLD, self.hidden_RD, self.lse_R, self.argmax_R))


class FeatureSource:
    """Features of samples, by index."""

    def __init__(
        self,
        target: Target,
        samples: Sequence[Sample],
        taps: tuple[int, ...],
        tap_scale_L: Tensor,
        budget_bytes: int,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        self.target, self.samples, self.taps = target, samples, taps
        self.tap_scale_L = tap_scale_L
        self.budget_bytes = budget_bytes
        self.dtype = dtype
        self._kept: OrderedDict[int, Features] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, index: int) -> Features:
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        found = self._compute(self.samples[index])
        self._kept[index] = found
        self._bytes += found.nbytes
        while self._bytes > self.budget_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    @torch.inference_mode()
    def _compute(self, sample: Sample) -> Features:
        tokens = torch.tensor([sample.tokens[:-1]], device=self.target.device)
        cache = self.target.new_cache(tokens.shape[1])
        output = self.target.forward(tokens, cache, self.taps, logits=0)
        assert output.taps_BTLD is not None
        hidden_RD = output.hidden_BTD[0, sample.anchors].to(self.dtype)
        lse, argmax = [], []
        for rows in hidden_RD.to(self.target.dtype).split(_HEAD_CHUNK):
            logits = self.target.logits(rows).float()
            lse.append(logits.logsumexp(-1))
            argmax.append(logits.argmax(-1))
        scaled = output.taps_BTLD[0].float() / self.tap_scale_L[:, None]
        taps_SLD = scaled.clamp_(-_LARGEST, _LARGEST).to(self.dtype)
        return Features(taps_SLD, hidden_RD, torch.cat(lse), torch.cat(argmax))


@torch.inference_mode()
def measure_tap_scale(target: Target, samples: Sequence[Sample], taps: tuple[int, ...]) -> Tensor:
    """RMS of each tap [L] over a few samples, leaving out position 0, whose activations are massive outliers."""
    total = torch.zeros(len(taps), dtype=torch.float64, device=target.device)
    count = 0
    for sample in samples:
        tokens = torch.tensor([sample.tokens], device=target.device)
        output = target.forward(tokens, target.new_cache(tokens.shape[1]), taps, logits=0)
        assert output.taps_BTLD is not None
        squares_TL = output.taps_BTLD[0, 1:].double().square().mean(-1)
        # The median over tokens, so that a second outlier position does not set the scale.
        total += squares_TL.median(0).values
        count += 1
    return (total / count).sqrt().float()
