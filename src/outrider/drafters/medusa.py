"""Medusa: K heads on the target's last hidden state, each of which drafts one position; and what Hydra shares with it.

    x_{n-2} -> target -> f_{n-2} --LM head-->      x_{n-1}   the anchor: the target's own, committed
                            |----- draft head 1 -> x_1       (position n)
                            |----- draft head K -> x_K       (position n + K - 1)

The target has not read the anchor when a block is drafted, so the newest feature is that of the token before it. That
is Medusa's situation too: there the anchor is what the LM head itself says at f. An anchor at position a reads slot
a - 1; a lone first token has nothing before it and its feature is zero, in training as in serving. f is taken after the
final norm, where the LM head reads it, so aux hidden states need no scale. Draft head k gives a hidden state; the
target's frozen LM head (or its rows of a reduced draft vocabulary) makes the logits.

    x = f + SiLU(W_0 z + b_0),  then  x + SiLU(W_l x + b_l)  for l = 1 .. num_layers - 1;    W = 0 at the start

Training: ce CE + l1 ||p_d - p_t||_1 at every draft position, a weighted mean (`DraftRows.loss`, drafters/base.py).

Sources: Medusa, arXiv 2401.10774, section 2.1; Hydra, arXiv 2402.05109.
Shapes: R requests, N anchors, T new tokens, S context slots, L = 1 aux layer, K heads, H hidden, Z inputs of the first
    layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import (
    UNCALIBRATED,
    BlockInputs,
    DraftCalibration,
    DraftCall,
    Drafter,
    DrafterWeights,
    DraftModule,
    DraftRows,
    Level,
    ModuleDrafter,
    check_fits,
    last_hidden_layer,
    longest_draft,
)
from outrider.drafters.cache import DraftSession
from outrider.drafters.chain import sample_chain, sample_steps
from outrider.drafters.config import Count, DrafterConfig, DraftVocabulary, NotInRecipe, draft_vocabulary
from outrider.drafters.draft import Draft, TreeSize
from outrider.drafters.trees import CandidateTree, assumed_accuracy, best_tree, draw_trees
from outrider.target.linear import Packable
from outrider.target.model import DecodingTarget, Target

Heads = TypeVar("Heads", bound="MedusaConfig")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """K = `num_heads` draft heads of `num_layers` residual layers each; the paper's have one layer and 5 heads."""

    algorithm: ClassVar[str] = "medusa"

    hidden_size: NotInRecipe[int]
    vocab_size: NotInRecipe[int]
    draft_vocab_size: DraftVocabulary
    num_target_layers: NotInRecipe[int]
    num_heads: Annotated[Count, Field(description="Draft heads, one token each.")] = 5
    num_layers: Annotated[Count, Field(description="Residual layers of each head.")] = 1

    @classmethod
    def from_target(cls: type[Heads], target: Target, *, draft_vocab_size: int | None = None, **chosen: Any) -> Heads:
        """The target's shapes and the recipe's choices."""
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocabulary(target, draft_vocab_size),
            num_target_layers=last_hidden_layer(target) + 1,
            **chosen,
        )

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.num_heads

    def describe(self) -> list[tuple[str, str]]:
        return [("draft heads", str(self.num_heads)), *super().describe()]

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The last hidden state, after the final norm."""
        return (self.num_target_layers - 1,)


class DraftHead(Packable):
    """The residual layers of one head. Zero weights make it hand on its hidden state: it starts as the LM head."""

    def __init__(self, inputs: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        sizes = [inputs] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.Linear(size, hidden_size) for size in sizes)
        self.groups = tuple((f"layers.{i}",) for i in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden_NH: Tensor, inputs_NZ: Tensor) -> Tensor:
        """The formula of the module's docstring; the residual stream keeps the type of `hidden_NH`."""
        x_NH, inputs = hidden_NH, inputs_NZ
        for layer in self.layers:
            x_NH = x_NH + F.silu(layer(inputs))
            inputs = x_NH
        return x_NH


class HeadsModule(DraftModule):
    """K draft heads, the trainable part. Parameter names are those of Medusa checkpoints."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, inputs: Sequence[int]) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(DraftHead(size, config.hidden_size, config.num_layers) for size in inputs)

    def check_target(self, target: DecodingTarget) -> None:
        check_fits(self.config, target, final=True)


H = TypeVar("H", bound=HeadsModule)


class HeadsDrafter(ModuleDrafter[H], ABC):
    """Serves draft heads: no cache, one vector per request."""

    def new_session(self, capacity: int) -> DraftSession:
        return DraftSession([], [torch.zeros(1, self.config.hidden_size, device=self.device)])

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Remember the last of each session's new aux hidden states."""
        assert aux_TLD is not None
        end = 0
        for session, part in zip(sessions, tokens, strict=True):
            end += len(part)
            session.length += len(part)
            if part:
                session.waiting = [aux_TLD[end - 1 : end, -1].float().clone()]  # not a view that keeps a prefill alive

    @abstractmethod
    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        """Draft logits for a tree of that depth, level by level; temperatures and penalties left out."""

    def with_trees(self, size: TreeSize) -> StaticTreeDrafter:
        """The same drafter with the best tree of so many nodes for its accuracies, assumed ones if none were measured.

        Raises:
            ValueError: a depth or a width is asked for, or there are not that many paths.
        """
        if size.shaped:
            raise ValueError(
                f"tree {size}: the shape of this drafter's trees follows from how often each head's candidates are "
                f"right (outrider calibrate); ask for {size.nodes} nodes alone. depth and top_k are for trees that "
                "grow."
            )
        return StaticTreeDrafter(self, best_tree(self.accuracy or assumed_accuracy(self.gamma), size.nodes))

    def newest(self, calls: Sequence[DraftCall]) -> Tensor:
        """The features that a block reads, [R, H]."""
        return torch.cat([call.session.waiting[0] for call in calls])


# ----------------------------------------------------------------------------
# Heads whose candidates are tried as a tree of fixed shape instead of drawn as a chain.
#
#     drafter.levels  -> draft logits per depth (Medusa: one row a depth; Hydra: one row a path)
#     CandidateTree   -> the shape     temperature 0: the likeliest tokens, *chosen*       -> Draft
#                                      above it: *drawn* without replacement (drafters/trees.py)
#
# Lossless either way, for any shape: verification accepts a chosen node with the target's own probability of it, a
# drawn one by the exact rule (decoding/verification.py). There are no confidences. Source: Medusa, arXiv 2401.10774,
# section 2.1.2, which chooses at any temperature. Drawing was accepted more often: of four siblings at the shipped
# DSpark drafter's first position one was, 0.38 of the time instead of 0.34 at temperature 1, 0.44 instead of 0.42 at
# 0.7 (180 and 126 positions of SmolLM2-135M's text).
# Shapes: R requests, N nodes.
# ----------------------------------------------------------------------------


class StaticTreeDrafter(Drafter):
    """Trees of fixed shape over Medusa's or Hydra's heads.

    Raises:
        ValueError: the tree is deeper than there are heads, or wider than the draft vocabulary.
    """

    def __init__(self, drafter: HeadsDrafter, tree: CandidateTree) -> None:
        vocab = drafter.config.draft_vocab_size
        if tree.depth > drafter.gamma or tree.width > vocab:
            raise ValueError(
                f"a candidate tree of depth {tree.depth} and width {tree.width} for a drafter of {drafter.gamma} heads "
                f"and {vocab} draft tokens: cut the tree, or train more heads."
            )
        self.drafter, self.config, self.tree = drafter, drafter.config, tree
        self.aux_layers, self.gamma, self.nodes = drafter.aux_layers, tree.depth, len(tree.paths)

    def new_session(self, capacity: int) -> DraftSession:
        return self.drafter.new_session(capacity)

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        self.drafter.extend(sessions, tokens, aux_TLD)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """The same shape for every call, less what is too deep or too much for it."""
        found: dict[int, Draft] = {}
        for sampling in (False, True):
            chosen = [r for r, call in enumerate(calls) if (call.params.temperature > 0) == sampling]
            if chosen:
                found |= zip(chosen, self._propose([calls[r] for r in chosen], sampling), strict=True)
        return [found[r] for r in range(len(calls))]

    def _propose(self, calls: Sequence[DraftCall], sampling: bool) -> list[Draft]:
        depth = longest_draft(calls, self.gamma)
        tree, level = self.tree.cut(depth), self.drafter.levels(calls, depth)
        heads, device = self.drafter.heads, self.drafter.device
        if sampling:
            return draw_trees(tree, calls, level, heads=heads, device=device)
        tokens_RN = tree.tokens(torch.tensor([call.anchor for call in calls], device=device), level, heads.draft_ids_Vd)
        return [_chosen(tree, row, call) for row, call in zip(tokens_RN.tolist(), calls, strict=True)]


def _chosen(tree: CandidateTree, tokens: list[int], call: DraftCall) -> Draft:
    fitting = tree.within(call.limit, call.nodes)
    kept = CandidateTree(tuple(tree.paths[i] for i in fitting))
    return Draft([tokens[i] for i in fitting], kept.parents)


# ----------------------------------------------------------------------------
# Medusa: K heads that read the same hidden state, and nothing of each other.
#
#     h_k = f + SiLU(W_k f + b_k)  (and further layers),    p_k = softmax(LM head h_k)      k = 1 .. K
#
# f is the target's last hidden state at the token before the anchor. Because no head sees what the
# others drew, all K run at once, and candidates form a tree without another pass (drafters/trees.py).
#
# Source: Medusa, arXiv 2401.10774, section 2.1. Departure: the release trains a vocabulary matrix per head (V x H
# each); here all heads share the target's frozen one, as every drafter of this package does, and `num_layers` makes up
# for it. Checkpoints of the release are served with their own matrices.
# Shapes: R requests, N anchors, K heads, H hidden, Vd draft vocab.
# ----------------------------------------------------------------------------


class Medusa(HeadsModule):
    """The trainable heads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config, [config.hidden_size] * config.num_heads)

    def hidden(self, feature_NH: Tensor, heads: int) -> Tensor:
        """Hidden states of the first heads, [N, heads, H]."""
        return torch.stack([head(feature_NH, feature_NH) for head in self.blocks[:heads]], dim=1)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        return DraftRows(self.hidden(inputs.layout.before_anchors(inputs.aux_SLD[:, -1]), self.config.num_heads))

    @staticmethod
    def drafter() -> type[Drafter]:
        return MedusaDrafter


class MedusaDrafter(HeadsDrafter[Medusa]):
    """Serves Medusa. `own_heads`: an LM head for each draft head, in checkpoints of the release; else none."""

    def __init__(self, weights: DrafterWeights, target: Target, calibration: DraftCalibration = UNCALIBRATED) -> None:
        super().__init__(weights, target, calibration)
        several = weights.head_VdH is not None and weights.head_VdH.dim() == 3
        self.own_heads = [weights.head(target, k) for k in range(self.gamma)] if several else []

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        hidden_RKH = self.module.hidden(self.newest(calls), longest_draft(calls, self.gamma))
        if not self.own_heads:
            return sample_chain(self.head, hidden_RKH, calls, heads=self.heads, min_confidence=min_confidence)
        position = 0

        def step(k: int, previous: list[int]) -> Tensor:
            nonlocal position
            position = k
            return hidden_RKH[:, k]

        def logits(hidden_AH: Tensor) -> Tensor:
            return self.own_heads[position](hidden_AH)

        return sample_steps(
            logits, step, hidden_RKH.shape[1], calls=calls, heads=self.heads, min_confidence=min_confidence
        )

    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        """Heads do not see tokens: one row per request and depth, whatever the paths."""
        hidden_RKH = self.module.hidden(self.newest(calls), depth)
        if self.own_heads:
            logits_RKVd = torch.stack([self.own_heads[k](hidden_RKH[:, k]) for k in range(depth)], dim=1)
        else:
            logits_RKVd = self.head(hidden_RKH.flatten(0, 1)).view(*hidden_RKH.shape[:2], -1)
        return lambda k, paths_RPk: logits_RKVd[:, k : k + 1]
