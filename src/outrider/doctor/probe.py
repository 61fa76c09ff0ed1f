"""Teacher-forced acceptance of a drafter on given text, unchanged and with one thing changed.

    length(anchor) = 1 + sum_k prod_{i <= k} a_i          a_i = 1 - TV(p_d, p_t): exact acceptance at temperature 1

Both drafters are measured at the same anchors, so their difference is paired and its noise is small. A trained drafter
is best as it was trained: a change of aux layers, mask token or layout that improves it by more than noise corrects a
mistake. Acceptance at temperature 1 is compared because it is smooth; agreement of argmaxes is 0 or 1.

If features mean little to the drafter, differences are accidents of its weights, and "no variant is better" proves
nothing. With `uninformed`, the same drafter with its context slots shuffled, a comparison can tell if

    informed    the better of own and best accepts clearly more than uninformed, by a quarter of a token;  and
    precise     best is a clear gain,  or mean(best - own) + 3 standard errors < mean(own - uninformed)

Shapes: N anchors, K draft positions, S context slots, L aux layers, Vd draft vocab.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from outrider.data.responses import Sample
from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.drafters.config import mask_token_id
from outrider.drafters.layers import BlockLayout
from outrider.target.model import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import Features, FeatureSource
from outrider.training.objective import BlockObjective, scatter
from outrider.training.watch import survival

_ANCHORS = 24  # per sample
_BUDGET = 2**31  # bytes of features kept
_SCREENED = 2  # samples on which variants are compared; the best is then measured on all
_GAINS = ((0.02, 3.0), (0.1, 4.0))  # (tokens per round, standard errors) of a clear gain, and of a large one
_INFORMED = 0.25  # tokens per round; weights that were never trained reach half of it by accident


@dataclass(frozen=True)
class Variant:
    """A change of the drafter or of its inputs. None or empty: unchanged.

    Attributes:
        config: other fields of the drafter's config.
        draft_ids_Vd: another draft vocabulary; with `keeps_head` the rows of the LM head stay those of the right one.
        shuffled: the context slots of each sample in random order.
        features: raw aux hidden states [S, L, D] and the length of the prompt -> those that the drafter is given.
        module: the drafter's module -> another one of the same kind.
        offset: added to the positions of block rows, not to those of the context.
        stretch: a factor of all positions, as linear scaling of RoPE has it.
        embedding: a factor of the embeddings, applied after the target's own.
        head: rows of the LM head over the draft vocabulary, [Vd, H] -> those that are drafted with.
    """

    label: str = "as it is"
    config: dict[str, Any] = field(default_factory=dict)
    aux_layers: tuple[int, ...] | None = None
    draft_ids_Vd: Tensor | None = None
    keeps_head: bool = False
    shuffled: bool = False
    features: Callable[[Tensor, int], Tensor] | None = None
    module: Callable[[DraftModule], DraftModule] | None = None
    offset: int = 0
    stretch: float = 1.0
    embedding: float = 1.0
    head: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class _MovedBlocks(BlockLayout):
    """A layout whose rows have other positions than their tokens: block rows moved, or all of them stretched."""

    offset: int = 0
    stretch: float = 1.0

    def positions_S(self) -> Tensor:
        return super().positions_S() * self.stretch

    def block_positions_NK(self, rows: int) -> Tensor:
        return (super().block_positions_NK(rows) + self.offset) * self.stretch


@dataclass(frozen=True)
class AnchorAcceptance:
    """Acceptance per anchor and position at temperatures 1 and 0, and the anchors' positions in the text."""

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

    def __init__(self, target: Target, weights: DrafterWeights, samples: Sequence[Sample]) -> None:
        drafter = weights.module
        assert bool((drafter.aux_scale_L == 1).all()), "a loaded drafter takes raw aux hidden states"
        self.target, self.weights, self.drafter, self.samples = target, weights, drafter, samples
        self.draft_ids_Vd = draft_ids(weights)
        self.aux_layers = tuple(drafter.config.target_layer_ids)
        near = {aux_layer + step for aux_layer in self.aux_layers for step in (-1, 0, 1)}
        self.reachable = tuple(sorted({t for t in near if -1 <= t < target.num_layers - 1} | set(self.aux_layers)))
        self.features = self.source(samples)
        schedule = Schedule(samples, 1, _ANCHORS, seed=0)
        self.anchors = [schedule.anchors(i, 0) for i in range(len(samples))]
        self.objective = self._new_objective(Variant())

    def source(self, samples: Sequence[Sample]) -> FeatureSource:
        """Raw features of `samples` at all layers within one of the drafter's aux layers."""
        ones_L = torch.ones(len(self.reachable), device=self.target.device)
        return FeatureSource(
            self.target, samples, self.reachable, aux_scale_L=ones_L, budget_bytes=_BUDGET, dtype=torch.float32
        )

    def bind(self, variant: Variant) -> BlockObjective:
        """The training objective over a variant's draft vocabulary, with the drafter's own head and embedding."""
        same = variant.draft_ids_Vd is None and variant.embedding == 1.0 and variant.head is None
        return self.objective if same else self._new_objective(variant)

    def _new_objective(self, variant: Variant) -> BlockObjective:
        ids_Vd = self.draft_ids_Vd if variant.draft_ids_Vd is None else variant.draft_ids_Vd
        objective = BlockObjective(self.target, ids_Vd.to(self.target.device), self.drafter.config.objective())
        head_VH, embedding_VH = self.weights.head_VdH, self.weights.embedding_VH
        if head_VH is not None and head_VH.dim() == 2:
            objective.head_VH = head_VH.to(self.target.device)
        elif variant.keeps_head:
            objective.head_VH = self.objective.head_VH
        if embedding_VH is not None:
            objective.embed_VH = embedding_VH.to(self.target.device)
        if variant.head is not None:
            objective.head_VH = variant.head(objective.head_VH)
        objective.embed_scale *= variant.embedding
        return objective

    def batch(self, chosen: Sequence[tuple[Sample, Features, list[int]]], variant: Variant) -> BlockBatch:
        """A training batch of (sample, its features, anchors), with the variant's aux layers in its order."""
        columns = [self.reachable.index(aux_layer) for aux_layer in variant.aux_layers or self.aux_layers]
        samples, parts = [sample for sample, _, _ in chosen], list[Features]()
        for sample, features, _ in chosen:
            aux_SLD = features.aux_SLD[:, columns]
            aux_SLD = _shuffle(aux_SLD) if variant.shuffled else aux_SLD
            aux_SLD = aux_SLD if variant.features is None else variant.features(aux_SLD, sample.spans[0][0])
            parts.append(replace(features, aux_SLD=aux_SLD))
        places = [(i, anchors) for i, (_, _, anchors) in enumerate(chosen)]
        gamma = self.variant_of(variant).config.gamma
        batch = build_batch(places, samples, parts, gamma=gamma, device=self.target.device)
        if variant.offset or variant.stretch != 1.0:
            layout, offset, stretch = batch.layout, variant.offset, variant.stretch
            moved = _MovedBlocks(layout.lengths, layout.anchors_N, layout.sequence_N, offset=offset, stretch=stretch)
            batch = replace(batch, layout=moved)
        return batch

    def variant_of(self, variant: Variant) -> DraftModule:
        """The drafter with the variant's config fields; the weights are the same unless its `module` changes them."""
        drafter = copy.copy(self.drafter if variant.module is None else variant.module(self.drafter))
        drafter.config = replace(drafter.config, **variant.config)
        if "is_causal" in variant.config or "sliding_window" in variant.config:  # layers hold their attention pattern
            drafter = copy.deepcopy(drafter)
            backbone = drafter.block_backbone()
            assert backbone is not None, "only DFlash's fields are is_causal and sliding_window"
            for attention, pattern in zip(backbone.attentions, backbone.config.attention_patterns, strict=True):
                attention.pattern = pattern
        return drafter

    @torch.no_grad()
    def accept(self, chosen: Sequence[tuple[Sample, Features, list[int]]], variant: Variant) -> AnchorAcceptance:
        """Acceptance of a variant at the given anchors, one sample at a time."""
        drafter, compute = self.variant_of(variant), self.bind(variant)
        sampled, greedy, positions = [], [], []
        for one in chosen:
            batch = self.batch([one], variant)
            output = compute(drafter, batch)
            sampled.append(scatter(output.acceptance_N, batch.supervised_NK))
            greedy.append(scatter(output.agreement_N, batch.supervised_NK))
            positions.append(batch.layout.anchors_N)
        return AnchorAcceptance(torch.cat(sampled).cpu(), torch.cat(greedy).cpu(), torch.cat(positions).cpu())

    @torch.no_grad()
    def labels(self, index: int, anchors: list[int], variant: Variant) -> tuple[Tensor, Tensor]:
        """Drafts after some positions of a sample against its text; the drafts before each are the text's tokens.

        Returns:
            [N, K] the drafter's probability of the text's token, and whether it is the likeliest one; both are zero
            after the end of the response.
        """
        batch = self.batch([(self.samples[index], self.features[index], anchors)], variant)
        likely_NK, first_NK = self.bind(variant).labels(self.variant_of(variant), batch)
        return likely_NK.cpu(), first_NK.cpu()

    @cached_property
    def own(self) -> AnchorAcceptance:
        return self.measure(Variant())

    @cached_property
    def uninformed(self) -> AnchorAcceptance:
        """Acceptance of the unchanged drafter on shuffled features."""
        return self.measure(Variant(shuffled=True))

    def can_tell(self, other: AnchorAcceptance, gamma: int) -> bool:
        """Whether a mistake that `other` corrects shows, or would have, over the first `gamma` positions."""
        own_N, uninformed_N, other_N = (a.lengths_N(gamma) for a in (self.own, self.uninformed, other))
        better = bool(gain(other_N, own_N))
        worth_N = (other_N if better else own_N) - uninformed_N
        informed = gain(worth_N, torch.zeros_like(worth_N)) == len(_GAINS) and worth_N.mean().item() > _INFORMED
        gain_N = other_N - own_N
        highest = (gain_N.mean() + _GAINS[0][1] * gain_N.std() / len(gain_N) ** 0.5).item()
        return informed and (better or highest < worth_N.mean().item())

    def measure(self, variant: Variant, samples: int | None = None) -> AnchorAcceptance:
        """Acceptance at the probe's anchors, of the first `samples` samples or of all."""
        count = len(self.samples) if samples is None else min(samples, len(self.samples))
        chosen = [(self.samples[i], self.features[i], self.anchors[i]) for i in range(count)]
        return self.accept(chosen, variant)

    def best(self, variants: Sequence[Variant], tie: float = 0.0) -> tuple[Variant, AnchorAcceptance]:
        """The variant that accepts most: chosen on a few samples, then measured on all.

        Of variants within `tie` tokens per round of the best the first wins, so list the most plausible first.
        """
        winner = variants[0]
        if len(variants) > 1:
            means = [self.measure(v, _SCREENED).lengths_N().mean().item() for v in variants]
            winner = next(v for v, mean in zip(variants, means, strict=True) if mean >= max(means) - tie)
        return winner, self.measure(winner)


def draft_ids(weights: DrafterWeights) -> Tensor:
    """Target ids of the draft vocabulary [Vd]; all ids if it is not reduced."""
    ids_Vd = weights.draft_ids_Vd
    return torch.arange(weights.config.vocab_size) if ids_Vd is None else ids_Vd


def _shuffle(aux_SLD: Tensor) -> Tensor:
    order_S = torch.randperm(len(aux_SLD), generator=torch.Generator().manual_seed(0))
    return aux_SLD[order_S.to(aux_SLD.device)]


def gain(other_N: Tensor, own_N: Tensor) -> int:
    """Gain of paired lengths: 0 none that is clear, 1 clear, 2 large (at least a tenth of a token)."""
    gain_N = other_N - own_N
    if len(gain_N) < 2:
        return 0
    mean, error = gain_N.mean().item(), gain_N.std().item() / len(gain_N) ** 0.5
    return sum(mean > max(least, errors * error) for least, errors in _GAINS)


# ----------------------------------------------------------------------------
# Parts that are commonly taken for each other. A checkpoint may name the wrong one, and so may a server.
# ----------------------------------------------------------------------------

_MOST_MASKS = 24
_COMMON_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)


def neighbouring_layers(aux_layers: Sequence[int], target: Target) -> list[Variant]:
    """The aux layers one lower and one higher; a layer at either end of the target stays, as in engines."""
    last = target.num_layers - 2
    moved = [tuple(min(max(layer + step, -1), last) for layer in aux_layers) for step in (-1, 1)]
    return [Variant(f"aux layers {list(m)}", aux_layers=m) for m in moved if len(set(m)) == len(m)]


def other_orders(aux_layers: tuple[int, ...]) -> list[Variant]:
    """The aux layers in other orders: reversed, rotated, or two of them exchanged."""
    orders = {aux_layers[::-1], *(aux_layers[i:] + aux_layers[:i] for i in range(1, len(aux_layers)))}
    for i, j in combinations(range(len(aux_layers)), 2):
        swapped = list(aux_layers)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        orders.add(tuple(swapped))
    return [Variant(f"order {list(order)}", aux_layers=order) for order in sorted(orders - {aux_layers})]


def other_masks(target: Target, mask: int) -> list[Variant]:
    """Mask tokens that could have been meant: special tokens, the default of training, neighbours by number."""
    ids: list[int | None] = [mask - 1, mask + 1, 0, *target.eos_ids]
    tokenizer = target.tokenizer
    if tokenizer is not None:
        with suppress(ValueError):  # no spare special token
            ids.insert(0, mask_token_id(target, None))
        ids += [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
        ids += sorted(tokenizer.get_added_vocab().values())
    ids += [getattr(target.config, "pad_token_id", None), target.vocab_size - 1]
    others = dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < target.vocab_size and i != mask)
    return [Variant(f"mask token {i}", {"mask_token_id": i}) for i in list(others)[:_MOST_MASKS]]


def other_bases(target: Target, base: float) -> list[Variant]:
    """Other RoPE bases: the target's, and common ones."""
    bases = dict.fromkeys([target_rope(target).get("rope_theta"), *_COMMON_BASES])
    others = [float(b) for b in bases if b is not None and float(b) != base]
    return [Variant(f"rope_theta {b:g}", {"rope_theta": b}) for b in others]


def target_rope(target: Target) -> dict[str, Any]:
    """The target's RoPE parameters; those of its full-attention layers if there are several kinds."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))
