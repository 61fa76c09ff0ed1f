"""Checks of draft trees in real forwards against each path run alone, and a target that drafts trees for itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall
from outrider.drafters.draft import Draft, Siblings, draw_siblings
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span
from tests.toys.oracle import SelfDrafter

AUX_LAYERS = (-1, 1, 3)
TOLERANCE = 1e-5


def random_tree(nodes: int, vocab: int, seed: int = 0, deepest: int = 7) -> Draft:
    """Any shape, with duplicates among siblings now and then."""
    chooser = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(nodes):
        grown = Draft(tokens, parents)
        parent = chooser.choice([p for p in range(-1, node) if p < 0 or grown.depths[p] < deepest])
        brothers = grown.children(parent)
        twin = brothers and chooser.random() < 0.2
        tokens.append(tokens[brothers[0]] if twin else chooser.randrange(4, vocab))
        parents.append(parent)
    return Draft(tokens, parents)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Different tokens: attention over equal ones gives the same whatever it sees."""
    chooser = random.Random(seed)
    return [chooser.randrange(4, 97) for _ in range(length)]


def off(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def alone(target: Target, tokens: Sequence[int], rows: int) -> tuple[Tensor, Tensor]:
    """Logits and aux hidden states of the last rows of a chain, from an empty cache."""
    output = target.forward(torch.tensor([tokens]), target.new_cache(len(tokens)), AUX_LAYERS, logits=rows)
    assert output.logits_BTV is not None and output.aux_BTLD is not None
    return output.logits_BTV[0], output.aux_BTLD[0, -rows:]


def check_nodes(target: Target, past: int) -> None:
    """21 tokens and branches pass the toys' window of 16, by position and by slot at different nodes."""
    tree, prompt = random_tree(20, 97, seed=past), prompt_of(past)
    cache = target.new_cache(past + 40)
    target.forward(torch.tensor([prompt[:-1]]), cache, logits=0) if past > 1 else None
    rows = torch.tensor([[prompt[-1], *tree.tokens]])
    output = target.forward(rows, cache, AUX_LAYERS, logits=None, parents=tree.row_parents)
    assert output.logits_BTV is not None and output.aux_BTLD is not None and tree.row_parents is not None
    for row in range(21):
        logits, aux_layers = alone(target, [*prompt, *tree.tokens_before(row)], 1)
        assert off(output.logits_BTV[0, row], logits[0]) <= TOLERANCE
        assert off(output.aux_BTLD[0, row], aux_layers[0]) <= TOLERANCE
    # The deepest path stays; what comes after it sees what a recomputed cache would show.
    path = tree.path(max(range(20), key=lambda node: (tree.depths[node], node)))
    assert path != list(range(len(path)))
    cache.keep_path(past - 1, [0, *(node + 1 for node in path)])
    assert cache.length == past + len(path)
    more = [5, 6, 7]
    after = target.forward(torch.tensor([more]), cache, logits=None).logits_BTV
    assert after is not None
    expected, _ = alone(target, [*prompt, *(tree.tokens[i] for i in path), *more], 3)
    assert off(after[0], expected) <= TOLERANCE


def check_ragged_trees(target: Target) -> None:
    """Every row of every request as if it stood alone, before and after the paths were kept."""
    kv = PagedKV(target, 40, 4)
    for pool in chain.from_iterable(kv.pools):
        pool.fill_(torch.nan)  # a slot that is read before it is written shows
    prompts = [prompt_of(21, 1), prompt_of(6, 2), prompt_of(17, 3)]
    blocks = [[7, 2, 5, 1, 11, 3, 9, 0, 6, 8], list(range(12, 20)), list(range(20, 32))]
    drafts = [random_tree(14, 97, 4), Draft.chain([8, 9]), random_tree(9, 97, 5)]
    target.forward_ragged([Span(p[:-1], 0, b, 0) for p, b in zip(prompts, blocks, strict=True)], kv)
    spans = [
        Span([p[-1], *t.tokens], len(p) - 1, b, len(t.tokens) + 1, t.row_parents)
        for p, b, t in zip(prompts, blocks, drafts, strict=True)
    ]
    output = target.forward_ragged(spans, kv, AUX_LAYERS)
    assert output.logits_NV is not None and output.aux_TLD is not None
    row, paths = 0, []
    for prompt, draft in zip(prompts, drafts, strict=True):
        for own in range(len(draft.tokens) + 1):
            logits, aux_layers = alone(target, [*prompt, *draft.tokens_before(own)], 1)
            assert off(output.logits_NV[row], logits[0]) <= TOLERANCE
            assert off(output.aux_TLD[row], aux_layers[0]) <= TOLERANCE
            row += 1
        depths = draft.depths
        paths.append(draft.path(max(range(len(depths)), key=lambda node: (depths[node], node))))
    kept = [[0, *(node + 1 for node in path)] for path in paths]
    kv.keep_paths([(b, len(p) - 1, k) for p, b, k in zip(prompts, blocks, kept, strict=True)])
    after = target.forward_ragged(
        [Span([5, 6], len(p) - 1 + len(k), b, 2) for p, b, k in zip(prompts, blocks, kept, strict=True)], kv
    ).logits_NV
    assert after is not None
    for at, (prompt, draft, path) in enumerate(zip(prompts, drafts, paths, strict=True)):
        expected, _ = alone(target, [*prompt, *(draft.tokens[i] for i in path), 5, 6], 2)
        assert off(after[2 * at : 2 * at + 2], expected) <= TOLERANCE


class SelfTrees(SelfDrafter):
    """The target drafting trees for itself at another temperature; it checks the aux hidden states it is given against
    its own.
    """

    nodes = 9
    parents = (-1, -1, 0, 0, 1, 2, -1, 2, 5)

    def __init__(self, target: Target, replaced: bool = False) -> None:
        super().__init__(target, temperature=0.5, gamma=4)
        self.aux_layers, self.replaced = AUX_LAYERS, replaced
        self.drafts: dict[int, list[int]] = {}
        self.moved = 0  # accepted paths that were not the first nodes of their tree

    def extend(self, sessions: Sequence[list[int]], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        assert aux_TLD is not None
        for session, part in zip(sessions, tokens, strict=True):
            session.extend(part)
            self.moved += list(part[1:]) != self.drafts.pop(id(session), list(part[1:]))[: len(part) - 1]
            mine, aux_TLD = aux_TLD[: len(part)], aux_TLD[len(part) :]
            assert off(mine, alone(self.target, session, len(part))[1]) <= 1e-4, "aux hidden states of other rows"
        assert not len(aux_TLD)

    def _propose(self, call: DraftCall) -> Draft:
        assert call.limit is not None
        tree, drawn, place = Draft([], []), dict[int, Siblings](), {-1: -1}
        for parent in dict.fromkeys(self.parents):
            depth = 0 if parent < 0 else len(tree.path(place[parent])) if parent in place else call.limit
            wanted = [node for node, above in enumerate(self.parents) if above == parent]
            room = len(wanted) if call.nodes is None else min(len(wanted), call.nodes - len(tree.tokens))
            if depth >= call.limit or room <= 0:
                continue
            way = [tree.tokens[i] for i in tree.path(place[parent])]
            row_V = self.row((*call.session, call.anchor, *way))
            position = call.position + len(way)
            if self.replaced and call.noise is None:
                found = [call.source.choose(row_V) for _ in range(room)]
            else:
                found = draw_siblings(row_V, room, call.source, noise=call.noise, position=position)
            drawn[place[parent]] = Siblings(partial(Tensor.clone, row_V), self.replaced)
            for node, token in zip(wanted, found, strict=False):
                above = place[parent]
                place[node] = len(tree.tokens)
                tree = Draft([*tree.tokens, token], [*tree.parents, above])
        self.drafts[id(call.session)] = tree.tokens
        return Draft(tree.tokens, tree.parents, drawn)
