"""Static candidate trees: the greedy search is optimal, and nodes hold the tokens that their paths say."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from outrider.drafters.base import DrafterWeights
from outrider.drafters.hydra import Hydra, HydraConfig, HydraDrafter
from outrider.drafters.medusa import HeadsDrafter, HeadsModule, Medusa, MedusaDrafter
from outrider.drafters.trees import CandidateTree, assumed_accuracy, best_tree, expected_length, measured_accuracy
from tests.toys.heads import VOCAB, forced_call, last_row, toy_heads, toy_texts
from tests.toys.targets import randomise, toy_target

ACCURACY = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4, 0.35, 0.01]]


def every_tree(accuracy: list[list[float]], nodes: int) -> list[CandidateTree]:
    depths = range(1, len(accuracy) + 1)
    paths = [path for depth in depths for path in product(*(range(len(accuracy[k])) for k in range(depth)))]
    closed = [s for s in combinations(paths, nodes) if all(len(p) == 1 or p[:-1] in s for p in s)]
    return [CandidateTree(chosen) for chosen in closed]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_no_tree_of_that_size_is_better(nodes: int) -> None:
    best = max(expected_length(tree, ACCURACY) for tree in every_tree(ACCURACY, nodes))
    assert expected_length(best_tree(ACCURACY, nodes), ACCURACY) == pytest.approx(best)


def test_the_beginning_of_a_best_tree_is_the_best_smaller_tree() -> None:
    large = best_tree(assumed_accuracy(7), 60)
    for nodes in (1, 16, 59):
        assert large.paths[:nodes] == best_tree(assumed_accuracy(7), nodes).paths
    assert large.depth > best_tree(assumed_accuracy(7), 16).depth >= 2


def test_a_chain_is_best_where_only_first_ranks_count() -> None:
    assert best_tree([[0.5], [0.5], [0.5]], 3).paths == ((0,), (0, 0), (0, 0, 0))


def test_expected_length_by_hand() -> None:
    tree = CandidateTree(((0,), (1,), (0, 1)))
    assert expected_length(tree, ACCURACY) == pytest.approx(0.6 + 0.2 + 0.6 * 0.3)


@pytest.mark.parametrize("paths", [(), ((),), ((0,), (0,)), ((0, 0), (0,)), ((0,), (1, 0)), ((-1,),)])
def test_paths_that_are_no_tree_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="candidate"):
        CandidateTree(paths)


@pytest.mark.parametrize("nodes", [0, 100])
def test_sizes_without_a_tree_are_refused(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"a tree of {nodes} nodes"):
        best_tree([[0.5, 0.2]] * 2, nodes)


def test_accuracy_is_counted_where_it_is_known() -> None:
    ranks_NK = torch.tensor([[0, 3], [1, 0], [0, 0], [0, 2], [50, 2]])
    known_NK = torch.tensor([[True, True], [True, True], [True, False], [True, True], [True, True]])
    first, second = measured_accuracy(ranks_NK, known_NK, ranks=3)
    assert first == pytest.approx([0.6, 0.2, 0.0])
    assert second == pytest.approx([0.25, 0.0, 0.0])  # rank 2 came twice, rank 1 never: later ranks are no better


def drafters() -> list[tuple[HeadsModule, HeadsDrafter]]:
    target, medusa, hydra = toy_target(), Medusa(toy_heads()), Hydra(toy_heads(HydraConfig))
    randomise(medusa)
    randomise(hydra)
    ids = torch.arange(1, VOCAB, 2)
    reduced = Hydra(toy_heads(HydraConfig, draft_vocab_size=len(ids)))
    randomise(reduced, 1)
    return [
        (medusa, MedusaDrafter(DrafterWeights(medusa), target)),
        (hydra, HydraDrafter(DrafterWeights(hydra), target)),
        (reduced, HydraDrafter(DrafterWeights(reduced, draft_ids_Vd=ids), target)),
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nodes_hold_the_candidates_of_their_paths(which: int) -> None:
    """Each path on its own, teacher-forced through the chain, gives the distributions that the ranks refer to."""
    drafter = drafters()[which][1]
    tree = CandidateTree(((0,), (2,), (0, 1), (2, 0), (1,), (2, 0, 3), (0, 0), (2, 0, 0), (2, 1)))
    texts, sessions = toy_texts(2), [drafter.new_session(30) for _ in range(2)]
    drafter.extend(sessions, [[4, 5], [6]], torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(1)))
    calls = [forced_call(drafter, text, 2, session) for text, session in zip(texts, sessions, strict=True)]
    anchors_R = torch.tensor([call.anchor for call in calls])
    tokens_RN = tree.tokens(anchors_R, drafter.levels(calls, tree.depth), drafter.heads.draft_ids_Vd)
    for r, call in enumerate(calls):
        at = dict(zip(tree.paths, tokens_RN[r].tolist(), strict=True))
        for path in tree.paths:
            before = [at[path[:depth]] for depth in range(1, len(path))]
            row_V = last_row(drafter, call, before)
            assert int(row_V.argsort(descending=True)[path[-1]]) == at[path]


def test_a_cut_tree_keeps_its_upper_nodes() -> None:
    tree = CandidateTree(((0,), (0, 0), (1,), (0, 0, 0)))
    assert tree.cut(2).paths == ((0,), (0, 0), (1,))
    assert tree.cut(1).depth == 1 and tree.width == 2
