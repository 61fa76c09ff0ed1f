"""What storing features in fewer bits does to a drafter: the same held-out anchors, the same weights, other features.

float16 features -> encode -> decode -> held-out metrics of a trained drafter
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.data.samples import Sample
from outrider.drafters.method import DraftModule
from outrider.target import Target
from outrider.training.features import Features, compute_features
from outrider.training.metrics import held_out_batches, held_out_metrics
from outrider.training.step import BlockObjective
from outrider.training.store_codec import StoreDtype, decode, encode


def store_effect(
    target: Target,
    drafter: DraftModule,
    objective: BlockObjective,
    samples: Sequence[Sample],
    dtypes: Sequence[StoreDtype],
    anchors_per_sample: int,
) -> dict[str, dict[str, float]]:
    """{"float16": metrics, dtype: metrics, ...} on fixed anchors of `samples`."""
    taps, scale_L = drafter.config.target_layer_ids, drafter.tap_scale_L
    with torch.no_grad():
        exact = list(compute_features(target, samples, taps, scale_L))
        versions = {"float16": exact} | {d: [decode(encode(target, f, d)) for f in exact] for d in dtypes}

    def metrics(features: Sequence[Features]) -> dict[str, float]:
        batches = held_out_batches(samples, features, drafter.config.gamma, anchors_per_sample)
        return held_out_metrics(drafter, objective, batches)

    return {name: metrics(features) for name, features in versions.items()}
