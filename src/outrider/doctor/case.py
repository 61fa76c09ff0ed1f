"""Doctor checks: their inputs and findings, and teacher-forced acceptance of a drafter and its variants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint
from outrider.checkpoints.dialects.base import UnknownDepth
from outrider.data.conversations import Conversation
from outrider.data.responses import Reply, Sample, join_turns, read_responses
from outrider.drafters.base import DrafterWeights, DraftModule, check_fits
from outrider.drafters.dflash import DFlash, DraftLayer
from outrider.drafters.layers import BlockLayout
from outrider.target.model import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import Features, FeatureSource
from outrider.training.objective import BlockObjective, scatter
from outrider.training.watch import survival
from outrider.utils.files import read_weights

Status = Literal["ok", "unclear", "warning", "fault", "skipped"]
Need = Literal["target", "drafter", "data", "tokenizer", "eval", "working", "block"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. `figure` is one line of figures, or the reason where the check was skipped.

    "unclear": nothing wrong was found, and nothing could have been.

    `group` and `check` are filled in by `examine`.
    """

    status: Status
    figure: str
    meaning: str = ""
    remedy: str = ""
    group: str = ""
    check: str = ""


@dataclass(frozen=True)
class Check:
    """One check. `needs`: what it runs on; without it the check is skipped.

    "working" means a finite drafter that fits the target, "block" a block drafter (listed after "drafter").
    `slow`: it takes long for what it usually finds; left out of a quick examination.
    """

    group: str
    name: str
    needs: tuple[Need, ...]
    run: Callable[[Inputs], Finding]
    slow: bool = False


def ok(figure: str) -> Finding:
    return Finding("ok", figure)


def warning(figure: str, meaning: str, remedy: str) -> Finding:
    return Finding("warning", figure, meaning, remedy=remedy)


def fault(figure: str, meaning: str, remedy: str) -> Finding:
    return Finding("fault", figure, meaning, remedy=remedy)


def unclear(length: float, positions: int) -> Finding:
    """The finding of a check that this accepted length, over so few positions, gives no power to find anything."""
    return Finding(
        "unclear",
        f"cannot tell yet: accepted length too low ({length:.2f}; {positions} positions)",
        "A mistake would cost this drafter too little to be seen here.",
        remedy="Train it longer, or examine more conversations (--samples); then run the doctor again.",
    )


def skipped(reason: str) -> Finding:
    return Finding("skipped", reason)


def graded(level: int, figure: str, meaning: str, remedy: str) -> Finding:
    """ok at level 0, a warning at level 1, a fault at level 2."""
    return Finding(("warning", "fault")[level - 1], figure, meaning, remedy=remedy) if level else ok(figure)


# ----------------------------------------------------------------------------
# Teacher-forced acceptance of a drafter on given text, unchanged and with one thing changed.
#
#     length(anchor) = 1 + sum_k prod_{i <= k} a_i          a_i = 1 - TV(p_d, p_t): exact acceptance at temperature 1
#
# Both are measured at the same anchors, so their difference is paired and its noise is small. A change of aux layers,
# mask token or layout that improves a drafter by more than noise corrects a mistake. Acceptance at temperature 1 is
# compared because it is smooth, where agreement of argmaxes is 0 or 1.
#
# Where features mean little to the drafter, differences are accidents of its weights, and "no variant is better" proves
# nothing. With `uninformed`, the same drafter with its context slots shuffled, a check of the wiring can tell if
#
#     informed    the better of own and best accepts clearly more than uninformed, by a quarter of a token;  and
#     precise     best is a clear gain,  or mean(best - own) + 3 standard errors < mean(own - uninformed)
#
# Shapes: N anchors, K draft positions, L aux layers, Vd draft vocab.
# ----------------------------------------------------------------------------


_ANCHORS = 24  # per sample
_BUDGET = 2**31  # bytes of features kept
_SCREENED = 2  # samples on which variants are compared; the best is then measured on all
_GAINS = ((0.02, 3.0), (0.1, 4.0))  # (tokens per round, standard errors) of a clear gain, and of a large one
_INFORMED = 0.25  # tokens per round; by accident, weights that were never trained reach half of it


@dataclass(frozen=True)
class Variant:
    """A change of the drafter or of its inputs. None or empty: unchanged.

    Attributes:
        draft_ids_Vd: another draft vocabulary; with `keeps_head` the rows of the LM head stay those of the right one.
        shuffled: the context slots of each sample in random order.
        features: raw aux hidden states [S, L, D] and the length of the prompt -> those that the drafter is given.
        module: the drafter's module -> another one of the same kind.
        offset: added to the positions of block rows, not to those of the context.
        stretch: a factor of all positions, as linear scaling of RoPE has it.
        embedding: a factor of the embeddings beside the target's own.
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
class Acceptance:
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
        found = BlockObjective(self.target, ids_Vd.to(self.target.device), self.drafter.config.objective())
        head_VH, embedding_VH = self.weights.head_VdH, self.weights.embedding_VH
        if head_VH is not None and head_VH.dim() == 2:
            found.head_VH = head_VH.to(self.target.device)
        elif variant.keeps_head:
            found.head_VH = self.objective.head_VH
        if embedding_VH is not None:
            found.embed_VH = embedding_VH.to(self.target.device)
        if variant.head is not None:
            found.head_VH = variant.head(found.head_VH)
        found.embed_scale *= variant.embedding
        return found

    def batch(self, chosen: Sequence[tuple[Sample, Features, list[int]]], variant: Variant) -> BlockBatch:
        """A training batch of (sample, its features, anchors), with the variant's aux layers in its order."""
        columns = [self.reachable.index(aux_layer) for aux_layer in variant.aux_layers or self.aux_layers]
        samples = [sample for sample, _, _ in chosen]
        features = [replace(found, aux_SLD=found.aux_SLD[:, columns]) for _, found, _ in chosen]
        if variant.shuffled:
            features = [replace(found, aux_SLD=_shuffle(found.aux_SLD)) for found in features]
        if (change := variant.features) is not None:
            prompts = [sample.spans[0][0] for sample in samples]
            features = [replace(f, aux_SLD=change(f.aux_SLD, n)) for f, n in zip(features, prompts, strict=True)]
        places = [(i, anchors) for i, (_, _, anchors) in enumerate(chosen)]
        gamma = self.variant_of(variant).config.gamma
        batch = build_batch(places, samples, features, gamma=gamma, device=self.target.device)
        if variant.offset or variant.stretch != 1.0:
            layout, offset, stretch = batch.layout, variant.offset, variant.stretch
            moved = _MovedBlocks(layout.lengths, layout.anchors_N, layout.sequence_N, offset=offset, stretch=stretch)
            batch = replace(batch, layout=moved)
        return batch

    def variant_of(self, variant: Variant) -> DraftModule:
        """The drafter with the variant's config fields; the weights are the same unless its `module` changes them."""
        drafter = copy.copy(self.drafter if variant.module is None else variant.module(self.drafter))
        drafter.config = replace(drafter.config, **variant.config)
        if "is_causal" in variant.config or "sliding_window" in variant.config:  # layers hold what they see
            drafter = copy.deepcopy(drafter)
            patterns = cast(DFlash, drafter).config.attention_patterns
            for layer, pattern in zip(cast(DFlash, drafter).layers, patterns, strict=True):
                cast(DraftLayer, layer).self_attn.pattern = pattern
        return drafter

    @torch.no_grad()
    def accept(self, chosen: Sequence[tuple[Sample, Features, list[int]]], variant: Variant) -> Acceptance:
        """Acceptance of a variant at the given anchors, one sample at a time."""
        drafter, compute = self.variant_of(variant), self.bind(variant)
        sampled, greedy, positions = [], [], []
        for one in chosen:
            batch = self.batch([one], variant)
            output = compute(drafter, batch)
            sampled.append(scatter(output.acceptance_N, batch.supervised_NK))
            greedy.append(scatter(output.agreement_N, batch.supervised_NK))
            positions.append(batch.layout.anchors_N)
        return Acceptance(torch.cat(sampled).cpu(), torch.cat(greedy).cpu(), torch.cat(positions).cpu())

    @torch.no_grad()
    def labels(self, index: int, anchors: list[int], variant: Variant) -> tuple[Tensor, Tensor]:
        """Drafts behind some positions of a sample against its text, the drafts before each taken from the text.

        Returns:
            [N, K] the drafter's probability of the text's token, and whether it is its likeliest one; both are zero
            behind the end of the response.
        """
        batch = self.batch([(self.samples[index], self.features[index], anchors)], variant)
        likely_NK, first_NK = self.bind(variant).labels(self.variant_of(variant), batch)
        return likely_NK.cpu(), first_NK.cpu()

    @cached_property
    def own(self) -> Acceptance:
        """Acceptance of the unchanged drafter."""
        return self.measure(Variant())

    @cached_property
    def uninformed(self) -> Acceptance:
        """Acceptance of the unchanged drafter on shuffled features."""
        return self.measure(Variant(shuffled=True))

    def can_tell(self, other: Acceptance, gamma: int) -> bool:
        """Whether a mistake that `other` corrects shows, or would have, over the first `gamma` positions."""
        own_N, uninformed_N, other_N = (found.lengths_N(gamma) for found in (self.own, self.uninformed, other))
        better = bool(gain(other_N, own_N))
        worth_N = (other_N if better else own_N) - uninformed_N
        informed = gain(worth_N, torch.zeros_like(worth_N)) == len(_GAINS) and worth_N.mean().item() > _INFORMED
        gain_N = other_N - own_N
        highest = (gain_N.mean() + _GAINS[0][1] * gain_N.std() / len(gain_N) ** 0.5).item()
        return informed and (better or highest < worth_N.mean().item())

    def measure(self, variant: Variant, samples: int | None = None) -> Acceptance:
        """Acceptance at the probe's anchors, of the first `samples` samples or of all."""
        count = len(self.samples) if samples is None else min(samples, len(self.samples))
        chosen = [(self.samples[i], self.features[i], self.anchors[i]) for i in range(count)]
        return self.accept(chosen, variant)

    def best(self, variants: Sequence[Variant], tie: float = 0.0) -> tuple[Variant, Acceptance]:
        """The variant that accepts most: chosen on a few samples, then measured on all.

        Of variants within `tie` tokens per round of the best the first wins, so list the most plausible first.
        """
        winner = variants[0]
        if len(variants) > 1:
            means = [self.measure(v, _SCREENED).lengths_N().mean().item() for v in variants]
            winner = next(v for v, mean in zip(variants, means, strict=True) if mean >= max(means) - tie)
        return winner, self.measure(winner)


def draft_ids(weights: DrafterWeights) -> Tensor:
    """Target ids of the draft vocabulary [Vd]; all ids where it is not reduced."""
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


@dataclass
class Inputs:
    """The target, drafter and data under examination, each of which may be absent.

    Args:
        stored: tensors of the drafter's files, as on disk.
        settings: of the responses file.
        thinking: the mode the drafter is to serve in.
        samples: conversations that are run through the models.
        max_new_tokens: length of the responses that are decoded.
    """

    loaded_target: Target | None = None
    loaded_checkpoint: Checkpoint | None = None
    stored: dict[str, Tensor] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    eval_prompts: list[Conversation] = field(default_factory=list)
    thinking: bool = False
    samples: int = 8
    max_new_tokens: int = 48

    @property
    def target(self) -> Target:
        assert self.loaded_target is not None
        return self.loaded_target

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.loaded_checkpoint is not None
        return self.loaded_checkpoint

    @property
    def drafter(self) -> DraftModule:
        return self.checkpoint.weights.module

    @property
    def block_drafter(self) -> DFlash:
        """The drafter, for checks of blocks, mask tokens and positions."""
        assert self.drafter.block_variants
        return cast(DFlash, self.drafter)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    @cached_property
    def draft_ids_Vd(self) -> Tensor:
        """Target ids of the draft vocabulary; all ids where it is not reduced."""
        return draft_ids(self.checkpoint.weights)

    @cached_property
    def conversations(self) -> list[Sample]:
        return join_turns(self.replies)

    @cached_property
    def chosen(self) -> list[Sample]:
        """The samples that are run through the models: the longest, and others evenly spread over the file."""
        fits = [
            s
            for s in self.conversations
            if len(s.tokens) <= self.target.max_context and max(s.tokens) < self.target.vocab_size
        ]
        longest = max(fits, key=lambda s: len(s.tokens), default=None)
        if longest is None:
            raise ValueError("no conversation of the data fits the target's vocabulary and context.")
        rest = [s for s in fits if s is not longest]
        count = min(self.samples - 1, len(rest))
        return [longest, *(rest[i * len(rest) // count] for i in range(count))]

    @cached_property
    def probe(self) -> Probe:
        return Probe(self.target, self.checkpoint.weights, self.chosen)

    def missing(self, need: Need) -> str | None:
        """The reason why `need` is not met; None where it is."""
        if need == "tokenizer":
            absent = self.loaded_target is None or self.loaded_target.tokenizer is None
            return "no tokenizer was given" if absent else None
        if need == "working":
            return self._unusable
        if need == "block":
            return None if self.drafter.block_variants else f"nothing to check in {self.drafter.algorithm} drafters"
        options: dict[str, tuple[object, str]] = {
            "target": (self.loaded_target, "no target was given (--target)"),
            "drafter": (self.loaded_checkpoint, "no drafter was given (--drafter), or it could not be read"),
            "data": (self.replies, "no data was given (--data), or it could not be read"),
            "eval": (self.eval_prompts, "no evaluation prompts were given (--eval)"),
        }
        there, reason = options[need]
        return None if there else reason

    @cached_property
    def _unusable(self) -> str | None:
        try:
            check_fits(self.drafter.config, self.target, self.drafter.reads_final_layer)
        except ValueError:
            return "the drafter does not fit the target"
        if not getattr(self.drafter.config, "plain_logits", True):
            return "its logits are multiplied or capped, which training here does not know"
        return None


def read_drafter(inputs: Inputs, directory: Path, device: str = "cpu") -> Finding | None:
    """Read a drafter into `inputs`; a finding where it cannot be read.

    Raises:
        UnknownDepth: it does not say how deep its target is, and no target was given.
    """
    try:
        depth = None if inputs.loaded_target is None else inputs.loaded_target.num_layers
        inputs.loaded_checkpoint = load_checkpoint(directory, device, depth)
        inputs.stored = read_weights(directory)
    except UnknownDepth:
        raise
    except (ValueError, KeyError, OSError) as error:
        remedy = "Save the drafter again with the tool that trained it, or correct the named field of its config.json."
        return _unreadable(
            "checkpoint", str(error), "No engine that checks what it loads will serve it.", remedy=remedy
        )
    return None


def read_data(inputs: Inputs, path: Path) -> Finding | None:
    """Read a responses file into `inputs`; a finding where it cannot be read."""
    try:
        inputs.settings, inputs.replies = read_responses(path)
    except (ValueError, OSError) as error:
        remedy = "Give the responses file that `outrider prepare` or `outrider train` wrote."
        return _unreadable("data", str(error), "Training would stop at the same place.", remedy=remedy)
    if not inputs.replies:
        meaning = "There is nothing to train on, and nothing to check a drafter with."
        return _unreadable("data", "no responses in the file", meaning, remedy="Look at what prepare reported.")
    return None


def _unreadable(group: str, figure: str, meaning: str, remedy: str) -> Finding:
    return Finding("fault", figure, meaning, remedy=remedy, group=group, check="readable")
