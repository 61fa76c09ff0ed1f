"""What a drafter is worth on held-out, on-policy text.

    expected accepted length = 1 + sum_k prod_{i <= k} a_i      bonus included, averaged over anchors
    a_i: agreement of the argmaxes (temperature 0), or 1 - TV (temperature 1)

The teacher-forced product is exactly what decoding measures, because a sequential head only ever sees accepted tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.drafters.method import DraftModule
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import Features
from outrider.training.step import BlockObjective, scatter


def survival(acceptance_NK: Tensor) -> Tensor:
    """Chance that position k is reached and accepted: the running product."""
    return acceptance_NK.cumprod(-1)


class FeaturesByIndex(Protocol):
    """A list of features, or a source that computes them."""

    def __getitem__(self, index: int, /) -> Features: ...


def held_out_batches(
    samples: Sequence[Sample], features: FeaturesByIndex, gamma: int, anchors_per_sample: int
) -> Iterator[BlockBatch]:
    """One batch per sample, at the same anchors whenever it is asked for."""
    schedule = Schedule(samples, 1, anchors_per_sample, seed=0)
    for index in range(len(samples)):
        yield build_batch([(index, schedule.anchors(index, 0))], samples, [features[index]], gamma)


@torch.no_grad()
def held_out_metrics(drafter: DraftModule, compute: BlockObjective, batches: Iterable[BlockBatch]) -> dict[str, float]:
    """Means over held-out anchors: loss, expected accepted length at temperatures 0 and 1, acceptance per position."""
    losses: list[float] = []
    greedy, sampled, counted = [], [], []
    for batch in batches:
        output = compute(drafter, batch)
        losses.append(output.loss.item())
        greedy.append(scatter(output.agreement_N, batch.supervised_NK))
        sampled.append(scatter(output.acceptance_N, batch.supervised_NK))
        counted.append(batch.supervised_NK)
    greedy_NK, sampled_NK, counted_NK = torch.cat(greedy), torch.cat(sampled), torch.cat(counted)
    result = {
        "loss": sum(losses) / len(losses),
        "expected_length_greedy": 1 + survival(greedy_NK).sum(-1).mean().item(),
        "expected_length_sampled": 1 + survival(sampled_NK).sum(-1).mean().item(),
    }
    reached_NK = counted_NK & (torch.cat((torch.ones_like(greedy_NK[:, :1]), survival(greedy_NK)[:, :-1]), 1) > 0)
    for k in range(counted_NK.shape[1]):
        reached_N = reached_NK[:, k]
        result[f"conditional_acceptance_{k + 1}"] = greedy_NK[reached_N, k].mean().item() if reached_N.any() else 0.0
    return result
