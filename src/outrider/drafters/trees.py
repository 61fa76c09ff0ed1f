"""Candidate trees of fixed shape (Medusa): which ranks of which head are tried, fixed before anything is drafted.

    anchor -+- (0) -+- (0,0)         a node is a path of ranks, counted from 0: (1,0) is head 2's likeliest token
            |       +- (0,1)         after head 1's second likeliest
            +- (1) --- (1,0)
            +- (2)                   E[accepted] = sum over nodes of  prod_k a_k(rank_k)

a_k(i) says how often the rank-i token of head k is the target's. A product falls from a node to its first child and to
its next sibling; so taking the largest product again and again, among first children and next siblings of what is in
the tree, gives the best tree of every size (the search of Medusa, arXiv 2401.10774, section 2.3.3). The shape is known
before anything is drafted, so it is lossless whatever statistics it was chosen from.
Shapes: R requests, P paths, N nodes, k tokens known, Vd draft vocab.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, Drafter, Level, drawing_for, longest_draft
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, DraftRow, Siblings, TreeSize, conditional_confidences, draw_siblings
from outrider.sampling import warp

if TYPE_CHECKING:
    from outrider.drafters.cache import DraftSession
    from outrider.drafters.dflash import BlockDrafter


@dataclass(frozen=True)
class CandidateTree:
    """The shape of a tree as paths of ranks, each after its parent; the first are tried first and left out last.

    Raises:
        ValueError: no path, a path before its parent, twice the same, or a negative rank.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            if not path or path in known or path[:-1] not in known or path[-1] < 0:
                raise ValueError(
                    f"candidate path {path}: list it once, after its parent {path[:-1]}, with ranks from 0."
                )
            known.add(path)
        if not self.paths:
            raise ValueError("a candidate tree needs a path: (0,) is the first head's likeliest token.")

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def width(self) -> int:
        """Candidates that the widest node asks for."""
        return 1 + max(path[-1] for path in self.paths)

    @cached_property
    def parents(self) -> list[int]:
        """The parent's place in `paths`; -1 is the anchor."""
        place = {path: i for i, path in enumerate(self.paths)}
        return [place.get(path[:-1], -1) for path in self.paths]

    def cut(self, depth: int) -> CandidateTree:
        """The nodes down to `depth`, at least 1."""
        return CandidateTree(tuple(path for path in self.paths if len(path) <= depth))

    def within(self, limit: int | None, nodes: int | None) -> list[int]:
        """The first `nodes` nodes that are not deeper than `limit`; None: no such limit."""
        return [i for i, path in enumerate(self.paths) if limit is None or len(path) <= limit][:nodes]

    def tokens(self, anchors_R: Tensor, level: Level, draft_ids_Vd: Tensor | None) -> Tensor:
        """The tree's tokens [R, N] (target vocabulary), one pass of `level` per depth over the nodes with children."""
        tokens_RN = anchors_R.new_zeros(len(anchors_R), len(self.paths))
        inner, paths_RPk = [-1], anchors_R[:, None, None]
        for k in range(self.depth):
            nodes = [i for i, path in enumerate(self.paths) if len(path) == k + 1]
            ranks = [self.paths[i][-1] for i in nodes]
            rows = [inner.index(self.parents[i]) for i in nodes]
            top_RPm = level(k, paths_RPk).topk(1 + max(ranks), dim=-1).indices
            shared = top_RPm.shape[1] == 1  # heads that see no tokens: one row for all paths
            tokens_Rn = top_RPm[:, [0] * len(nodes) if shared else rows, ranks]
            tokens_RN[:, nodes] = tokens_Rn if draft_ids_Vd is None else draft_ids_Vd[tokens_Rn]
            row_of = dict(zip(nodes, rows, strict=True))
            inner = [i for i in nodes if i in self.parents]
            paths_RPk = torch.cat((paths_RPk[:, [row_of[i] for i in inner]], tokens_RN[:, inner, None]), dim=-1)
        return tokens_RN


def best_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> CandidateTree:
    """The tree of `nodes` nodes with the largest expected accepted length; its first n nodes are the best n.

    Args:
        accuracy: a_k(i) per head and rank, at most 1 and not rising with the rank.

    Raises:
        ValueError: the table is empty or has fewer paths than nodes.
    """

    def candidate(path: tuple[int, ...], prefix: float) -> None:
        k = len(path) - 1
        if k < len(accuracy) and path[-1] < len(accuracy[k]):
            # Ties in favour of the shallower and the likelier node, which costs nothing and is the same everywhere.
            heapq.heappush(waiting, (-prefix * accuracy[k][path[-1]], len(path), path, prefix))

    waiting: list[tuple[float, int, tuple[int, ...], float]] = []
    taken: list[tuple[int, ...]] = []
    candidate((0,), 1.0)
    while waiting and len(taken) < nodes:
        product, _, path, prefix = heapq.heappop(waiting)
        taken.append(path)
        candidate((*path[:-1], path[-1] + 1), prefix)
        candidate((*path, 0), -product)
    if not taken or len(taken) < nodes:
        raise ValueError(
            f"a tree of {nodes} nodes: {len(accuracy)} heads with {[len(a) for a in accuracy]} ranks give "
            f"{len(taken)} paths; use 1 node at least, and no more than there are."
        )
    return CandidateTree(tuple(taken))


def expected_length(tree: CandidateTree, accuracy: Sequence[Sequence[float]]) -> float:
    """Expected accepted drafts of a tree, if heads were right independently of each other."""
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for path in tree.paths:
        reach[path] = reach[path[:-1]] * accuracy[len(path) - 1][path[-1]]
    return sum(reach.values()) - 1.0


def assumed_accuracy(heads: int, ranks: int = 10, first: float = 0.5, depth: float = 0.8) -> list[list[float]]:
    """Assumed accuracies, for want of measured ones (outrider calibrate): a_k(i) = first depth^(k-1) / (i + 1)^2."""
    return [[first * depth**k / (i + 1) ** 2 for i in range(ranks)] for k in range(heads)]


def measured_accuracy(ranks_NK: Tensor, known_NK: Tensor, ranks: int = 10) -> list[list[float]]:
    """Accuracies a_k(i) from the ranks of the target's tokens among each head's candidates.

    Args:
        ranks_NK: rank of the true x_k in head k's distribution, from 0.
        known_NK: where there was one; a head that never had any is an error.
    """
    counts = [
        torch.bincount(r[known].clamp(max=ranks), minlength=ranks + 1)
        for r, known in zip(ranks_NK.T, known_NK.T, strict=True)
    ]
    assert all(count.sum() for count in counts), "a head without a single known token"
    shares = [(count[:ranks] / count.sum()).tolist() for count in counts]
    # Noise in the counts must not let a later rank look better than an earlier one: `best_tree` relies on the order.
    return [[min(row[: i + 1]) for i in range(ranks)] for row in shares]


# ----------------------------------------------------------------------------
# Trees of fixed shape for sampling, whose siblings are drawn without replacement.
#
#     shape  (0) (1) (0,0) (0,1) (1,0)         x_a, x_b ~ p_1 without replacement         one pass of heads per depth,
#     tree    a   b    c     d     e           x_c, x_d ~ p_2(. | x_a),  x_e ~ p_2(. | x_b)    all requests together
#
# A rank of the shape is a place in the order of drawing, which is the order of trial. The shape is settled before the
# first draw; nodes that the support is too small for are left out with all below them, which p alone decides. Warps and
# penalties are those of the request, so p_d is what was drawn from, and verification may use the exact rule for
# siblings without replacement (decoding/verification.py). A drawn first sibling is accepted with 1 - TV(p_t, p_d)
# instead of p_t of the likeliest token.
#
# Sources: SpecInfer, arXiv 2305.09781; without replacement: Jeon et al., arXiv 2402.14160.
# Shapes: R requests, P inner nodes of one depth, k tokens known, V target vocab, Vd draft vocab.
# ----------------------------------------------------------------------------


def draw_trees(
    shape: CandidateTree, calls: Sequence[DraftCall], level: Level, heads: ChainHeads, device: torch.device
) -> list[Draft]:
    """Draw a tree per call: the nodes of `shape` within the call's limits, as far as the support reaches."""
    drawings = [_Drawing(shape, call, heads) for call in calls]
    inner = [-1]
    for k in range(shape.depth):
        paths_RPk = torch.tensor([[drawing.path(node) for node in inner] for drawing in drawings], device=device)
        logits_RPVd = level(k, paths_RPk)
        shared = logits_RPVd.shape[1] == 1  # heads that see no tokens: one row for all paths
        for drawing, logits_PVd in zip(drawings, logits_RPVd, strict=True):
            for p, node in enumerate(inner):
                drawing.draw(node, logits_PVd[0 if shared else p])
        inner = [i for i, path in enumerate(shape.paths) if len(path) == k + 1 and i in shape.parents]
    return [drawing.result() for drawing in drawings]


class _Drawing:
    """One request's tree while it is drawn: tokens of its nodes, and rows that the children of a node were drawn
    from.
    """

    def __init__(self, shape: CandidateTree, call: DraftCall, heads: ChainHeads) -> None:
        self.shape, self.call, self.vocab_size, self.ids_Vd = shape, call, heads.vocab_size, heads.draft_ids_Vd
        wanted = shape.within(call.limit, call.nodes)
        self.children = {node: [i for i in wanted if shape.parents[i] == node] for node in (-1, *wanted)}
        self.tokens: dict[int, int] = {}
        self.rows: dict[int, Tensor] = {}

    def path(self, node: int) -> list[int]:
        """The anchor and the tokens down to `node`; 0 for a node that was not drawn, whose row nobody reads."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens.get(node, 0))
            node = self.shape.parents[node]
        return [self.call.anchor, *reversed(found)]

    def draw(self, node: int, logits_Vd: Tensor) -> None:
        """The children of `node`."""
        children = self.children.get(node, [])
        if not children or (node >= 0 and node not in self.tokens):
            return
        call, ids_Vd, before = self.call, self.ids_Vd, self.path(node)[1:]
        seen_V = call.seen.with_tokens(before)
        position = call.position + len(before)
        with drawing_for(call):
            logits_Vd = call.constrained(logits_Vd, ids_Vd, before)
            row_Vd = warp(logits_Vd, call.params, seen_V if seen_V is None or ids_Vd is None else seen_V[ids_Vd])
            found = draw_siblings(row_Vd, len(children), call.source, noise=call.noise, position=position, ids=ids_Vd)
        self.tokens |= zip(children, found if ids_Vd is None else ids_Vd[found].tolist(), strict=False)
        self.rows[node] = row_Vd

    def result(self) -> Draft:
        nodes = sorted(self.tokens)
        place = {-1: -1, **{node: i for i, node in enumerate(nodes)}}
        return Draft(
            [self.tokens[node] for node in nodes],
            [place[self.shape.parents[node]] for node in nodes],
            {
                place[node]: Siblings(DraftRow(row_Vd, self.ids_Vd, self.vocab_size))
                for node, row_Vd in self.rows.items()
            },
        )


# ----------------------------------------------------------------------------
# Trees of one block pass: row k gives p_k, the same for all paths, so the best tree is that of the likeliest products.
#
#     p_1 .. p_K  ->  the N paths with the largest  s(node) = p_1(x_1) ... p_k(x_k)     (best_tree, drafters/trees.py)
#
# Nodes are chosen, none is drawn, so it is lossless at any temperature, as EAGLE-2's trees are (drafters/eagle3.py);
# scores are those of temperature 1. A drafter whose later drafts depend on its earlier ones (DSpark's head, Domino's)
# has no such trees.
#
# Source: JetSpec, arXiv 2606.18394, which compares with the same tree of DFlash's blocks.
# Shapes: R requests, K draft positions, k candidates of a position.
# ----------------------------------------------------------------------------


def most_nodes(depth: int, top_k: int) -> int:
    """Nodes of a tree of `depth` levels in which every node but the last has `top_k` children."""
    return sum(top_k**level for level in range(1, depth + 1))


class BlockTreeDrafter(Drafter):
    """Serves a block drafter with trees: `nodes` draft tokens, among the `top_k` likeliest of each position."""

    top_k: int = 10

    def __init__(self, drafter: BlockDrafter, nodes: int, depth: int, top_k: int) -> None:
        self.drafter, self.config = drafter, drafter.config
        self.aux_layers, self.gamma, self.top_k = drafter.aux_layers, depth, top_k
        self.nodes: int = nodes

    @classmethod
    def of_size(cls, drafter: BlockDrafter, size: TreeSize) -> BlockTreeDrafter:
        """Trees of this size; see `DFlashDrafter.with_trees`."""
        depth = drafter.gamma if size.depth is None else size.depth
        top_k = min(cls.top_k if size.top_k is None else size.top_k, drafter.config.draft_vocab_size)
        if depth > drafter.gamma:
            raise ValueError(f"tree {size}: a block has {drafter.gamma} drafts one after another; ask for less depth.")
        if size.nodes > (most := most_nodes(depth, top_k)):
            raise ValueError(f"tree {size}: with depth {depth} and top_k {top_k} there are {most} nodes at most.")
        return cls(drafter, nodes=size.nodes, depth=depth, top_k=top_k)

    def new_session(self, capacity: int) -> DraftSession:
        return self.drafter.new_session(capacity)

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        self.drafter.extend(sessions, tokens, aux_TLD)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A tree per call, no deeper and no larger than it has use for; `min_confidence` is left to the policy."""
        depth, ids_Vd = longest_draft(calls, self.gamma), self.drafter.heads.draft_ids_Vd
        hidden_RKH = self.drafter.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        probs_NVd = self.drafter.head(hidden_RKH[:, :depth].flatten(0, 1)).softmax(-1)
        top_Nk, indices_Nk = probs_NVd.topk(self.top_k, dim=-1)
        tokens_Nk = indices_Nk if ids_Vd is None else ids_Vd[indices_Nk]
        shape = (len(calls), depth, self.top_k)
        found = zip(calls, top_Nk.view(shape).tolist(), tokens_Nk.view(shape).tolist(), strict=True)
        return [self._tree(call, probs_Kk, tokens_Kk) for call, probs_Kk, tokens_Kk in found]

    def _tree(self, call: DraftCall, probs_Kk: list[list[float]], tokens_Kk: list[list[int]]) -> Draft:
        depth = self.gamma if call.limit is None else min(call.limit, self.gamma)
        wanted = self.nodes if call.nodes is None else min(call.nodes, self.nodes)
        nodes = min(wanted, most_nodes(depth, self.top_k))
        if not nodes:
            return Draft.empty()
        tree = best_tree(probs_Kk[:depth], nodes)
        survivals: list[float] = []
        for path, parent in zip(tree.paths, tree.parents, strict=True):
            before = 1.0 if parent < 0 else survivals[parent]
            survivals.append(before * probs_Kk[len(path) - 1][path[-1]])
        return Draft(
            [tokens_Kk[len(path) - 1][path[-1]] for path in tree.paths],
            tree.parents,
            confidences=conditional_confidences(survivals),
        )
