"""What a drafter accepts on given text, teacher-forced, as it is and with one thing changed.

    length(anchor) = 1 + sum_k prod_{i <= k} a_i          a_i = 1 - TV(p_d, p_t): exact acceptance at temperature 1

Both variants are measured at the same anchors, so their difference is paired and its noise small: a change of taps,
mask token or layout that makes a drafter better by more than noise is a change that undoes a mistake.
Acceptance at temperature 1 is compared because it is a smooth number where agreement of argmaxes is 0 or 1.

Shapes: N anchors, K draft positions, L taps, Vd draft vocab.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.drafters.method import DraftModule
from outrider.target import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import Features, FeatureSource
from outrider.training.metrics import survival
from outrider.training.objective import ObjectiveConfig
from outrider.training.step import BlockObjective, scatter
from outrider.training.vocabulary import inverse_ids

_ANCHORS = 24  # per sample
_BUDGET = 2**31  # bytes of features kept
_SCREENED = 2  # samples on which many variants are compared before the best is measured on all
_GAINS = ((0.02, 3.0), (0.1, 4.0))  # (tokens a round, standard errors) that make a gain clear, and large


@dataclass(frozen=True)
class Variant:
    """The drafter with some config fields, its taps or its draft vocabulary changed. None: as it is."""

    label: str = "as it is"
    config: dict[str, Any] = field(default_factory=dict)
    taps: tuple[int, ...] | None = None
    draft_ids_Vd: Tensor | None = None


@dataclass(frozen=True)
class Acceptance:
    """Per anchor: acceptance at each position, at temperatures 1 and 0, and where the anchor stands."""

    sampled_NK: Tensor
    greedy_NK: Tensor
    positions_N: Tensor

    def lengths_N(self, gamma: int | None = None) -> Tensor:
        """Expected accepted length at temperature 1 over the first `gamma` positions."""
        return 1 + survival(self.sampled_NK[:, :gamma]).sum(-1)

    @property
    def greedy_lengths_N(self) -> Tensor:
        return 1 + survival(self.greedy_NK).sum(-1)


class Probe:
    """Teacher-forced acceptance of one drafter on some samples."""

    def __init__(self, target: Target, drafter: DraftModule, draft_ids_Vd: Tensor, samples: Sequence[Sample]) -> None:
        assert bool((drafter.tap_scale_L == 1).all()), "a loaded drafter takes raw taps"
        self.target, self.drafter, self.samples = target, drafter, samples
        self.draft_ids_Vd = draft_ids_Vd
        self.taps = tuple(drafter.config.target_layer_ids)
        near = {tap + step for tap in self.taps for step in (-1, 0, 1)}
        self.reachable = tuple(sorted({t for t in near if -1 <= t < target.num_layers - 1} | set(self.taps)))
        self.features = self.source(samples)
        schedule = Schedule(samples, 1, _ANCHORS, seed=0)
        self.anchors = [schedule.anchors(i, 0) for i in range(len(samples))]
        self.objective = self.bind(draft_ids_Vd)

    def source(self, samples: Sequence[Sample]) -> FeatureSource:
        """Raw features of `samples` at all taps within one layer of the drafter's own."""
        ones_L = torch.ones(len(self.reachable), device=self.target.device)
        return FeatureSource(self.target, samples, self.reachable, ones_L, _BUDGET, torch.float32)

    def bind(self, draft_ids_Vd: Tensor) -> BlockObjective:
        ids = draft_ids_Vd.to(self.target.device)
        return BlockObjective(self.target, ids, inverse_ids(ids, self.target.vocab_size), ObjectiveConfig())

    def tapped(self, features: Features, taps: Sequence[int]) -> Features:
        """Features with the columns of `taps` only, in that order."""
        return replace(features, taps_SLD=features.taps_SLD[:, [self.reachable.index(tap) for tap in taps]])

    def batch(self, chosen: Sequence[tuple[Sample, Features, list[int]]], variant: Variant) -> BlockBatch:
        """One training batch of (sample, its features, anchors)."""
        samples = [sample for sample, _, _ in chosen]
        features = [self.tapped(found, variant.taps or self.taps) for _, found, _ in chosen]
        places = [(i, anchors) for i, (_, _, anchors) in enumerate(chosen)]
        return build_batch(places, samples, features, self.variant_of(variant).config.gamma)

    def variant_of(self, variant: Variant) -> DraftModule:
        """The drafter with other config fields and the same weights."""
        drafter = copy.copy(self.drafter)
        drafter.config = replace(self.drafter.config, **variant.config)
        return drafter

    @torch.no_grad()
    def accept(self, chosen: Sequence[tuple[Sample, Features, list[int]]], variant: Variant) -> Acceptance:
        """Acceptance of a variant at given anchors of given samples, one sample at a time."""
        drafter = self.variant_of(variant)
        compute = self.objective if variant.draft_ids_Vd is None else self.bind(variant.draft_ids_Vd)
        sampled, greedy, positions = [], [], []
        for one in chosen:
            batch = self.batch([one], variant)
            output = compute(drafter, batch)
            sampled.append(scatter(output.acceptance_N, batch.supervised_NK))
            greedy.append(scatter(output.agreement_N, batch.supervised_NK))
            positions.append(batch.layout.anchors_N)
        return Acceptance(torch.cat(sampled).cpu(), torch.cat(greedy).cpu(), torch.cat(positions).cpu())

    @cached_property
    def own(self) -> Acceptance:
        """The drafter as it is."""
        return self.measure(Variant())

    def measure(self, variant: Variant, samples: int | None = None) -> Acceptance:
        """Acceptance at the probe's own anchors, of the first `samples` samples or all of them."""
        count = len(self.samples) if samples is None else min(samples, len(self.samples))
        chosen = [(self.samples[i], self.features[i], self.anchors[i]) for i in range(count)]
        return self.accept(chosen, variant)

    def best(self, variants: Sequence[Variant], tie: float = 0.0) -> tuple[Variant, Acceptance]:
        """The variant that accepts most: screened on a few samples, the winner measured on all.

        Of variants within `tie` tokens a round of the best the first wins: put the likeliest first.
        """
        winner = variants[0]
        if len(variants) > 1:
            means = [self.measure(v, _SCREENED).lengths_N().mean().item() for v in variants]
            winner = next(v for v, mean in zip(variants, means, strict=True) if mean >= max(means) - tie)
        return winner, self.measure(winner)


def gain(other_N: Tensor, own_N: Tensor) -> int:
    """How much better paired lengths are: 0 not clearly, 1 a little but clearly, 2 by a tenth of a token or more."""
    gain_N = other_N - own_N
    if len(gain_N) < 2:
        return 0
    mean, error = gain_N.mean().item(), gain_N.std().item() / len(gain_N) ** 0.5
    return sum(mean > max(least, errors * error) for least, errors in _GAINS)
