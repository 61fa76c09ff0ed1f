"""Confidences c_k of drafts: the logit s_k of a confidence head, or of an estimator, and its calibration.

For a request at temperature t, with T, b fitted to greedy text and T', b' at temperature t':

    logit c_k = (1 - w) (s_k / T_k + b_k) + w (s_k / T'_k + b'_k)      w = min(1, t / t')
    estimator   s_k = w_1 logit(max p_k) + w_2 H(p_k)                  p_k = softmax of the draft logits, as they are

Sampled tokens agree with the target less often than likeliest ones, so sampled text has a fit of its own. t is the
request's, so c_k is known before x_k is drawn.

The estimator serves drafters without a confidence head: a logistic regression on how sure p_k is (maximum probability,
entropy in nats) and on the position. The drawn token's own probability says more, and must not be used: admission would
then depend on x_k, and the output would no longer be the target's (the stopping rule of DSpark, arXiv 2607.05147).
Shapes: N rows, A requests, R requests, K positions, Vd draft vocab, F = 2 features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.heads import ConfidenceHead, SequentialHead
from outrider.utils.measure import on_device

_LOGIT_LIMIT = 20.0  # float32 puts 1 - max p_k at 0 beyond; p_k is one-hot for every purpose


class Estimator(Protocol):
    """What a walk asks for the logit of c_k."""

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        """Logits [A] of the confidences at position k, counted from 0, from the draft logits before the warp."""
        ...


@dataclass(frozen=True)
class CertaintyEstimator:
    """Fitted by `outrider calibrate`: two weights for all positions, one bias per position."""

    weights: Sequence[float]
    biases: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.weights) != 2:
            raise ValueError(f"estimator weights {list(self.weights)} must be 2 numbers; run outrider calibrate again.")

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        features_AF = certainty(logits_AVd)
        return features_AF @ on_device(self.weights, features_AF.device, features_AF.dtype) + self.biases[k]


def certainty(logits_AVd: Tensor) -> Tensor:
    """(logit of the largest probability, entropy in nats) of each row, [A, 2], at temperature 1."""
    log_probs_AVd = logits_AVd.log_softmax(-1)
    top_A, place_A = log_probs_AVd.max(-1)
    others_AVd = log_probs_AVd.scatter(-1, place_A[:, None], -torch.inf)  # 1 - p from the rest: no cancellation
    logit_A = (top_A - others_AVd.logsumexp(-1)).clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)
    entropy_A = torch.special.entr(log_probs_AVd.exp()).sum(-1)
    return torch.stack((logit_A, entropy_A), dim=-1)


@dataclass(frozen=True)
class ConfidenceScaling:
    """`temperatures` T_k and `offsets` b_k per position (None: all 1, all 0), for the logits s_k of the confidence head
    or, where there is none, of an `estimator`.
    """

    temperatures: Sequence[float] | None = None
    offsets: Sequence[float] | None = None
    estimator: Estimator | None = None

    def at(self, k: int) -> tuple[float, float]:
        """1 / T_k and b_k at position k, counted from 0."""
        slope = 1.0 if self.temperatures is None else 1 / self.temperatures[k]
        return slope, 0.0 if self.offsets is None else self.offsets[k]


UNSCALED = ConfidenceScaling()


@dataclass(frozen=True)
class SampledScaling:
    """A scaling that was fitted at a `temperature` above 0."""

    temperature: float
    scaling: ConfidenceScaling


@dataclass(frozen=True)
class ChainHeads:
    """What a walk reads besides hidden states.

    `draft_ids_Vd` maps a reduced draft vocabulary into the target's (None: the same). Confidences come from the
    `confidence` head or from estimators. `sampled`: None where nothing else was fitted for sampled requests.
    """

    vocab_size: int
    sequential: SequentialHead | None = None
    confidence: ConfidenceHead | None = None
    draft_ids_Vd: Tensor | None = None
    scaling: ConfidenceScaling = UNSCALED
    sampled: SampledScaling | None = None

    @property
    def confident(self) -> bool:
        """Whether proposals come with confidences."""
        return self.confidence is not None or self.estimates

    @property
    def estimates(self) -> bool:
        """Whether confidences come from estimators."""
        return self.confidence is None and self.scaling.estimator is not None

    def calibrated(self, logit_N: Tensor, k: int, temperatures: Sequence[float]) -> Tensor:
        """c_k [N] at position k, counted from 0, for requests at these temperatures."""

        def scaled(scaling: ConfidenceScaling) -> Tensor:
            slope, offset = scaling.at(k)
            return slope * logit_N + offset

        return self._mixed(scaled, temperatures, logit_N.device).sigmoid()

    def estimated(self, logits_NVd: Tensor, k: int, temperatures: Sequence[float]) -> Tensor:
        """c_k [N] at position k, counted from 0, from the draft logits before the warp."""

        def scaled(scaling: ConfidenceScaling) -> Tensor:
            assert scaling.estimator is not None, "estimators are fitted at every temperature or at none"
            slope, offset = scaling.at(k)
            return slope * scaling.estimator(logits_NVd, k) + offset

        return self._mixed(scaled, temperatures, logits_NVd.device).sigmoid()

    def calibrated_block(self, logits_RK: Tensor, temperatures: Sequence[float]) -> Tensor:
        """c_k [R, K] at positions 0 .. K - 1, for requests at these temperatures."""

        def scaled(scaling: ConfidenceScaling) -> Tensor:
            both_2K = zip(*map(scaling.at, range(logits_RK.shape[1])), strict=True)
            slope_K, offset_K = (on_device(one, logits_RK.device, logits_RK.dtype) for one in both_2K)
            return slope_K * logits_RK + offset_K

        return self._mixed(scaled, temperatures, logits_RK.device).sigmoid()

    def scale(self, k: int, temperature: float) -> tuple[float, float]:
        """Slope and offset of the logit of c_k at position k, counted from 0, for a request at this temperature."""
        slope, offset = self.scaling.at(k)
        if self.sampled is None:
            return slope, offset
        (share,), (other_slope, other_offset) = self._shares([temperature]), self.sampled.scaling.at(k)
        return slope + share * (other_slope - slope), offset + share * (other_offset - offset)

    def uncalibrated(self, confidence: float, k: int, temperature: float) -> float:
        """The confidence at position k, counted from 0, that `calibrated` made `confidence` of."""
        slope, offset = self.scale(k, temperature)
        inside = min(max(confidence, 1e-9), 1 - 1e-9)  # float32 sigmoids reach 0 and 1
        logit = math.log(inside) - math.log1p(-inside)
        return 0.5 + 0.5 * math.tanh(0.5 * (logit - offset) / slope)

    def _shares(self, temperatures: Sequence[float]) -> list[float]:
        """w of each request."""
        if self.sampled is None:
            return [0.0] * len(temperatures)
        return [min(1.0, one / self.sampled.temperature) for one in temperatures]

    def _mixed(
        self, scaled: Callable[[ConfidenceScaling], Tensor], temperatures: Sequence[float], device: torch.device
    ) -> Tensor:
        """What both scalings give, [N, ...], row n by w of request n; of one alone where w is all 0 or all 1."""
        shares = set(own := self._shares(temperatures))
        if self.sampled is None or shares == {0.0}:
            return scaled(self.scaling)
        if shares == {1.0}:
            return scaled(self.sampled.scaling)
        greedy = scaled(self.scaling)
        share_N = on_device(own, device, greedy.dtype)
        return torch.lerp(greedy, scaled(self.sampled.scaling), share_N.view(-1, *[1] * (greedy.dim() - 1)))
