"""Heads whose candidates are tried as a tree of fixed shape instead of drawn as a chain.

    drafter.levels  -> draft logits per depth (Medusa: one row a depth; Hydra: one row a path)
    CandidateTree   -> the shape     temperature 0: the likeliest tokens, *chosen*       -> TreeProposal
                                     above it: *drawn* without replacement (drafters/drawn_tree.py)

Lossless either way, for any shape: verification accepts a chosen node with the target's own probability of it, a drawn
one by the exact rule (verification/tree.py). There are no confidences. Source: Medusa, arXiv 2401.10774, section 2.1.2,
which chooses at any temperature. Drawing was accepted more often: of four siblings at the shipped DSpark drafter's
first position one was, 0.38 of the time instead of 0.34 at temperature 1, 0.44 instead of 0.42 at 0.7 (180 and 126
positions of SmolLM2-135M's text).
Shapes: R requests, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, longest_draft
from outrider.drafters.candidates import CandidateTree, assumed_accuracy, best_tree
from outrider.drafters.drawn_tree import draw_trees
from outrider.drafters.heads import LastHidden, ServedHeads
from outrider.drafters.tree import Tree, TreeProposal
from outrider.drafters.tree_size import TreeSize


class StaticTreeDrafter:
    """A `TreeDrafter` (drafters/base.py) over Medusa's or Hydra's heads.

    Raises:
        ValueError: the tree is deeper than there are heads, or wider than the draft vocabulary.
    """

    def __init__(self, drafter: ServedHeads, tree: CandidateTree) -> None:
        vocab = drafter.config.draft_vocab_size
        if tree.depth > drafter.gamma or tree.width > vocab:
            raise ValueError(
                f"a candidate tree of depth {tree.depth} and width {tree.width} for a drafter of {drafter.gamma} heads "
                f"and {vocab} draft tokens: cut the tree, or train more heads."
            )
        self.drafter, self.config, self.tree = drafter, drafter.config, tree
        self.taps, self.gamma, self.nodes = drafter.taps, tree.depth, len(tree.paths)

    def new_session(self, capacity: int) -> LastHidden:
        return self.drafter.new_session(capacity)

    def extend(self, sessions: Sequence[LastHidden], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None) -> None:
        self.drafter.extend(sessions, tokens, taps_TLD)

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[TreeProposal]:
        """The same shape for every call, less what is too deep or too much for it."""
        found: dict[int, TreeProposal] = {}
        for sampling in (False, True):
            chosen = [r for r, call in enumerate(calls) if (call.params.temperature > 0) == sampling]
            if chosen:
                found |= zip(chosen, self._propose([calls[r] for r in chosen], sampling), strict=True)
        return [found[r] for r in range(len(calls))]

    def _propose(self, calls: Sequence[DraftCall], sampling: bool) -> list[TreeProposal]:
        depth = longest_draft(calls, self.gamma)
        tree, level = self.tree.cut(depth), self.drafter.levels(calls, depth)
        heads, device = self.drafter.heads, self.drafter.device
        if sampling:
            return draw_trees(tree, calls, level, heads, device)
        tokens_RN = tree.tokens(torch.tensor([call.anchor for call in calls], device=device), level, heads.draft_ids_Vd)
        return [_proposal(tree, row, call) for row, call in zip(tokens_RN.tolist(), calls, strict=True)]


def _proposal(tree: CandidateTree, tokens: list[int], call: DraftCall) -> TreeProposal:
    fitting = tree.within(call.limit, call.nodes)
    kept = CandidateTree(tuple(tree.paths[i] for i in fitting))
    return TreeProposal(Tree([tokens[i] for i in fitting], kept.parents))


def static_tree(drafter: ServedHeads, size: TreeSize) -> StaticTreeDrafter:
    """The best tree of so many nodes for the drafter's accuracies, or for assumed ones where nobody has measured them.

    Raises:
        ValueError: a depth or a width is asked for, or there are not that many paths.
    """
    if size.shaped:
        raise ValueError(
            f"tree {size}: the shape of this drafter's trees follows from how often each head's candidates are right "
            f"(outrider calibrate); ask for {size.nodes} nodes alone. depth and top_k are for trees that grow."
        )
    return StaticTreeDrafter(drafter, best_tree(drafter.accuracy or assumed_accuracy(drafter.gamma), size.nodes))
