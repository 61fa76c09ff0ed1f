"""Which samples and anchors a training step sees: a pure function of (seed, step), so that resuming is exact.

    epoch permutation(seed, epoch) -> samples of a step;  anchors(seed, epoch, sample)

An anchor is a token whose next token was generated: the last prompt token (the first anchor when decoding) and every
response token but the last. A block supervises up to gamma following tokens of the same response.
Shapes: N blocks, K = gamma draft positions, S context slots, M supervised positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.drafters.attention import BlockLayout
from outrider.training.features import Features


@dataclass(frozen=True)
class BlockBatch:
    """Inputs of one training forward and the target's view of the supervised positions (`supervised_NK` True)."""

    taps_SLD: Tensor  # scaled, float16
    layout: BlockLayout
    anchor_tokens_N: Tensor
    previous_NK: Tensor  # x_{k-1} for every draft position: the token the sequential head sees
    labels_NK: Tensor  # x_k, target vocabulary; 0 where not supervised
    supervised_NK: Tensor
    target_hidden_NKD: Tensor
    lse_NK: Tensor
    argmax_NK: Tensor


class Schedule:
    """Deals samples to steps without replacement, epoch after epoch."""

    def __init__(
        self, samples: Sequence[Sample], sequences_per_step: int, anchors_per_sequence: int, seed: int
    ) -> None:
        self.samples = samples
        self.sequences_per_step = min(sequences_per_step, len(samples))
        self.anchors_per_sequence = anchors_per_sequence
        self.seed = seed
        self.steps_per_epoch = len(samples) // self.sequences_per_step

    def step(self, step: int) -> list[tuple[int, list[int]]]:
        """[(sample index, anchor positions ascending)] of a step."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.samples), generator=_generator(self.seed, epoch))
        first = offset * self.sequences_per_step
        chosen = order[first : first + self.sequences_per_step].tolist()
        return [(i, self.anchors(i, epoch)) for i in chosen]

    def anchors(self, index: int, epoch: int) -> list[int]:
        """Anchor positions in one sample for one epoch."""
        sample = self.samples[index]
        anchors = sample.anchors
        order = torch.randperm(len(anchors), generator=_generator(self.seed, epoch, index))
        return sorted(anchors[i] for i in order[: self.anchors_per_sequence].tolist())


def _generator(*key: int) -> torch.Generator:
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % (2**63)
    return torch.Generator().manual_seed(seed)


def build_batch(
    chosen: Sequence[tuple[int, list[int]]], samples: Sequence[Sample], features: Sequence[Features], gamma: int
) -> BlockBatch:
    """Assemble the blocks of one step; context slots beyond a sample's last anchor are left out."""
    taps, lengths, anchors, sequence = [], [], [], []
    previous, labels, supervised, hidden, lse, argmax = [], [], [], [], [], []
    steps_K = torch.arange(gamma)
    for number, ((index, positions), seen) in enumerate(zip(chosen, features, strict=True)):
        sample = samples[index]
        tokens_n = torch.tensor(sample.tokens)
        anchors_N = torch.tensor(positions)
        ahead_NK = anchors_N[:, None] + 1 + steps_K  # position of x_k
        ahead_NK = ahead_NK.clamp(max=len(tokens_n))
        rows_n = torch.full((len(tokens_n) + 1,), -1)  # a token's row in hidden, lse; -1 where it was not generated
        rows_n[sample.supervised_positions] = torch.arange(sample.num_supervised)
        rows_NK = rows_n[ahead_NK]
        inside_NK = (rows_NK >= 0).cumprod(-1).bool()  # a block ends with its response
        rows_NK = rows_NK.clamp(min=0)
        labels.append(tokens_n[ahead_NK.clamp(max=len(tokens_n) - 1)] * inside_NK)
        previous.append(tokens_n[ahead_NK - 1])
        supervised.append(inside_NK)
        hidden.append(seen.hidden_RD[rows_NK])
        lse.append(seen.lse_R[rows_NK])
        argmax.append(seen.argmax_R[rows_NK])
        taps.append(seen.taps_SLD[: positions[-1]])
        lengths.append(positions[-1])
        anchors.append(anchors_N)
        sequence.append(torch.full_like(anchors_N, number))
    device = taps[0].device
    previous_NK = torch.cat(previous).to(device)
    return BlockBatch(
        taps_SLD=torch.cat(taps),
        layout=BlockLayout(lengths, torch.cat(anchors).to(device), torch.cat(sequence).to(device)),
        anchor_tokens_N=previous_NK[:, 0],
        previous_NK=previous_NK,
        labels_NK=torch.cat(labels).to(device),
        supervised_NK=torch.cat(supervised).to(device),
        target_hidden_NKD=torch.cat(hidden),
        lse_NK=torch.cat(lse),
        argmax_NK=torch.cat(argmax),
    )
